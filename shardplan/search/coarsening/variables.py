"""Variables: the layouts that there are to choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

OneChoice = Literal["none", "timesteps", "layers"]
"""What shares one layout though it could have several: nothing, the steps of an unrolled recurrence, or equal layers too."""


def one_choice_of(value: object) -> OneChoice:
    """The value as what it must be.

    Raises:
        ValueError: for any other.
    """
    known: tuple[OneChoice, ...] = ("none", "timesteps", "layers")
    for one in known:
        if value == one:
            return one
    raise ValueError(f"unsupported one_choice {value!r}: use 'none', 'timesteps' or 'layers'")


FREE = -1
"""In place of a variable: a scalar, or a value that depends on no input and is made anew wherever it is read."""


@dataclass(frozen=True, slots=True)
class Variable:
    """One layout to choose, for all of ``tensors`` (of one shape); ``of`` is the variable that a view is a copy of.

    A view of several tensors (those of unrolled timesteps) is as many copies. A ``deferred`` one may stay a partial sum.
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

    ``joins`` are the nodes that need a table of their own; all others are inside one variable: elementwise, or they only put dims
    of one element in or leave them out. ``free`` are the tensors that depend on no input, ``zero`` those of them known to be
    zero; ``weights`` those made from inputs alone, op by op.
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


class Sets:
    """Union-find; the smallest member names the set."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, x: int) -> int:
        """The name of the set that ``x`` is in."""
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def union(self, a: int, b: int) -> None:
        """Makes the sets of ``a`` and ``b`` one."""
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)
