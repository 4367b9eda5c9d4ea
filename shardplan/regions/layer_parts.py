"""Arguments and results whose layers lie in several stages: a loop over layers reads the weights of all layers from one array.

Stage n holds the n-th part of such an array along its dim 0. Programs see the parts; the step's caller sees one array.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.ir import Entry

STAGE = "stage"
"""The mesh axis that cuts the dim of layers."""


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Which arguments and results of the program in parts belong to each argument and result of the step.

    ``inputs[i]`` are the numbers of the arguments that hold argument i: ``count`` parts, or one if it is not cut. ``outputs``
    is the same for results. The forward pass has ``loops`` loops over layers, one after the other.
    """

    count: int
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    loops: int

    @property
    def arrays(self) -> dict[int, int]:
        """The argument of the step to which each part belongs, by the number of the part."""
        return {part: i for i, own in enumerate(self.inputs) if len(own) > 1 for part in own}

    @property
    def homes(self) -> dict[int, int]:
        """The stage that holds each part, by its number."""
        return {part: stage for own in self.inputs if len(own) > 1 for stage, part in enumerate(own)}

    def parts_of(self, inputs: Sequence[int]) -> tuple[int, ...]:
        """The numbers of the parts of these arguments."""
        return tuple(part for i in inputs for part in self.inputs[i])


def whole_entries(part: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries of the PartitionSpec of an array, given the entries of its parts in each stage.

    >>> whole_entries((None, "gpu")), whole_entries((("node", "gpu"),)), whole_entries(())
    (('stage', 'gpu'), (('stage', 'node', 'gpu'),), ('stage',))
    """
    first, *rest = part or (None,)
    own = () if first is None else (first,) if isinstance(first, str) else first
    return (STAGE, *own) if own else STAGE, *rest


def scope_of(part: int, loop: int | None = None) -> str:
    """The named scope of a loop over the layers of a part: the ``loop``-th of the forward pass, or its counterpart in the
    backward pass. Without ``loop``, the scope of another op that runs for each part.
    """
    return f"shardplan_stage_{part}_" + ("part" if loop is None else f"loop_{loop}")


def part_in(scope: str) -> int | None:
    """The part of the layers for which an op runs, by its scope; None for other ops.

    >>> part_in("loss/" + scope_of(2, 1)), part_in(scope_of(1)), part_in("layers")
    (2, 1, None)
    """
    found = _PART.search(scope)
    return int(found[1]) if found else None


def loop_in(scope: str) -> int | None:
    """The number of a loop over layers, by its scope; None for other ops.

    >>> loop_in("loss/" + scope_of(2, 1)), loop_in(scope_of(1))
    (1, None)
    """
    found = _PART.search(scope)
    return int(found[2]) if found and found[2] else None


_PART = re.compile(r"\bshardplan_stage_(\d+)_(?:part|loop_(\d+))\b")
