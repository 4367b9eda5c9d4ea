"""Variables: the layouts that the search chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")

OneChoice = Literal["none", "timesteps", "layers"]
"""Which tensors share a layout although they could differ: none, the tensors of unrolled timesteps, or those of equal layers
too.
"""


def one_choice_of(value: object) -> OneChoice:
    """The value as a `OneChoice`.

    Raises:
        ValueError: for any other value.
    """
    known: tuple[OneChoice, ...] = ("none", "timesteps", "layers")
    for one in known:
        if value == one:
            return one
    raise ValueError(f"unsupported one_choice {value!r}: use 'none', 'timesteps' or 'layers'")


FREE = -1
"""Stands for no variable: the tensor is a scalar, or depends on no input and is made wherever it is read."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One layout to choose, for all of ``tensors`` (of one shape, up to dims of one element).

    ``of`` is the variable that a view copies, ``sibling`` the forward view of a backward one. A view of several tensors (those of
    unrolled timesteps) is as many copies. A ``deferred`` variable may stay a partial sum.
    """

    id: int
    shape: tuple[int, ...]
    tensors: tuple[int, ...]
    kind: Literal["stored", "view", "backward"] = "stored"
    of: int = FREE
    sibling: int = FREE
    deferred: bool = False


@dataclass(frozen=True, slots=True)
class Coarse:
    """The graph's variables: ``of[t]`` for the stored layout of tensor t, ``read[node, slot]`` where a use reads a view.

    ``joins`` are the nodes that need a table of their own. All others are inside one variable: they are elementwise, or only add
    or drop dims of one element. ``free`` are the tensors that depend on no input, ``zero`` those of them known to be zero.
    ``weights`` are inputs, or made from one input each; ``parameters`` are the weights that a non-elementwise op reads.
    Tensors of different ``kinds`` [tensors], if given, share no layout.
    """

    variables: tuple[Variable, ...]
    of: tuple[int, ...]
    read: dict[tuple[int, int], int]
    joins: tuple[int, ...]
    free: frozenset[int]
    weights: frozenset[int]
    parameters: frozenset[int]
    zero: frozenset[int] = frozenset()
    one_choice: OneChoice = "timesteps"
    kinds: Sequence[object] | None = None
    _derived: dict[object, Any] = field(default_factory=dict[object, Any], init=False, repr=False, compare=False)

    def once(self, what: object, derive: Callable[[], T]) -> T:
        """A value that depends only on these variables and ``what``: derived once, for the problems of all factorings."""
        if what not in self._derived:
            self._derived[what] = derive()
        return self._derived[what]


class Sets:
    """Union-find. The smallest member names the set. Members of different ``kinds``, if given, stay in different sets."""

    def __init__(self, n: int, kinds: Sequence[object] | None = None) -> None:
        self.parent = list(range(n))
        self.kinds = kinds

    def find(self, x: int) -> int:
        """The name of the set that contains ``x``."""
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def union(self, a: int, b: int) -> None:
        """Merges the sets of ``a`` and ``b``, if they are of one kind."""
        a, b = self.find(a), self.find(b)
        if a != b and (self.kinds is None or self.kinds[a] == self.kinds[b]):
            self.parent[max(a, b)] = min(a, b)
