"""The graph of operators: what is placed, and the tensors between operators (FlexFlow, sections 3 and 4).

An operator is a forward op with what XLA fuses into it, the ops of the backward pass that differentiate it, and the update of its
weights. Its *loops* are those that may be cut, each marked S, A or P as in FlexFlow's Table 2. The *labels* of a tensor give for
each of its dims the loop of the operator that splits it, or -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardplan.graph.nodes import Signature
from shardplan.ir import Where

Kind = Literal["S", "A", "P"]
"""A loop over samples, over attributes of a sample, or one whose cut splits parameters."""

FORWARD, BACKWARD, UPDATE = range(3)
PHASES = ("forward", "backward", "update")

Labels = tuple[int, ...]
"""For each dim of a tensor, the loop of an operator that splits it (-1: none)."""


@dataclass(frozen=True, slots=True)
class OperatorLoop:
    """A loop that may be cut into any number of parts that divides ``extent``."""

    name: str
    extent: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class OpWork:
    """One op of an operator, run ``times`` a step.

    ``operands`` and ``results`` have the labels of its tensors. ``cut`` pairs its own loops with the operator's. Its arithmetic
    is divided by the degrees of the operator's loops ``divides``. ``exchanged`` are the bytes of a result that is a partial
    reduction over the loops ``reduces`` of the operator, and is reduced among the parts at once.
    """

    signature: Signature
    times: float
    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    cut: tuple[tuple[int, int], ...] = ()
    divides: tuple[int, ...] = ()
    reduces: tuple[int, ...] = ()
    exchanged: float = 0.0


@dataclass(frozen=True, slots=True)
class Anchor:
    """The first op of an operator, by its place in the step. ``cut`` pairs its loops with the operator's.

    ``convolves``: it is a convolution.
    """

    where: Where
    op: int
    cut: tuple[tuple[int, int], ...] = ()
    convolves: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """``works[phase]`` are its ops of the forward pass, the backward pass and the update. ``source`` is the user's line.

    ``contracts``: it has matrix products or convolutions in the forward pass. ``saved`` are the tensors that it makes in the
    forward pass and the backward pass reads: labels and bytes.
    """

    name: str
    source: str
    loops: tuple[OperatorLoop, ...]
    works: tuple[tuple[OpWork, ...], tuple[OpWork, ...], tuple[OpWork, ...]]
    contracts: bool = False
    anchor: Anchor | None = None
    saved: tuple[tuple[Labels, int], ...] = ()

    def loop_of(self, kind: Kind) -> int | None:
        """Its first loop of a kind."""
        return next((n for n, loop in enumerate(self.loops) if loop.kind == kind), None)


@dataclass(frozen=True, slots=True)
class Edge:
    """A tensor that ``consumer`` reads of ``producer``; ``gradient``: its gradient goes back the same way.

    ``produced`` labels its dims by the loops of the producer, ``read`` by those of the consumer.
    """

    producer: int
    consumer: int
    shape: tuple[int, ...]
    itemsize: int
    produced: Labels
    read: Labels
    gradient: bool


@dataclass(frozen=True, slots=True)
class Weight:
    """An argument: the operators that read it, with the labels of its dims by their loops. The first one updates a trained one.

    ``state_bytes`` are the bytes of the optimizer's state for it.
    """

    path: str
    shape: tuple[int, ...]
    itemsize: int
    users: tuple[int, ...]
    labels: tuple[Labels, ...]
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """Operators in an order in which each comes after those that it reads.

    ``arguments`` are those without gradients that operators read: data, and weights that are not trained. ``owners`` pairs ops of
    the step, by id, with the operators that they belong to; an op with bodies belongs to the operator of the first op in them.
    """

    operators: tuple[Operator, ...]
    edges: tuple[Edge, ...]
    weights: tuple[Weight, ...]
    arguments: tuple[Weight, ...] = ()
    owners: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert all(e.producer < e.consumer for e in self.edges), "operators come after what they read"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operators, each used once."""
        return tuple(o.name for o in self.operators)
