"""Copies beside collectives: what a device moves in its own memory so that a collective finds its blocks one behind another.

XLA's collectives take the dim that they split or join as the first in memory, and leave it so.
"""

from __future__ import annotations

import math
from typing import assert_never

import numpy as np

from shardplan.collectives.step import Step, block_parts
from shardplan.cost import Network, compute
from shardplan.graph.readers import images, read_as_slices
from shardplan.ir import Collective, Layout
from shardplan.schedule.changes import DimChange
from shardplan.schedule.instructions import Bundle, Move
from shardplan.schedule.planned import PlannedProgram


class Copies:
    """Seconds of the copies beside the collectives of one program, with their launches."""

    def __init__(self, planned: PlannedProgram) -> None:
        network = planned.programs.resharder.network
        assert isinstance(network, Network)
        self.device, self.planned = network.cluster.device, planned
        self.images, self.sliced = images(planned.graph), read_as_slices(planned.graph)

    def packing_s(self, bundle: Bundle) -> float:
        """One kernel packs a bundle's blocks into one buffer before its collective; after it, each is unpacked by its own, unless
        all its readers can read it as a slice of the buffer.

        One side of a gather or a reduce-scatter is smaller than its ``nbytes``.
        """
        before, after = block_parts(bundle.step.kind, self.ways(bundle.step.over))
        nbytes = [step.nbytes for step in bundle.steps]
        unpacked = [n for n, move in zip(nbytes, bundle.moves, strict=True) if move.tensor not in self.sliced]
        return self.copying_s(1 + len(unpacked), before * sum(nbytes) + after * sum(unpacked))

    def ordering_s(self, move: Move, step: Step) -> float:
        """A block is copied into another order if other dims precede the dim that is split or joined.

        A gather or a reduce-scatter copies the smaller of its two blocks: elementwise ops and matrix products take the larger
        one in any order. Convolutions do not, so their operands are copied too. An all-to-all may copy both its operand and its
        result.
        """
        change = DimChange.of(step)
        match step.kind:
            case Collective.ALL_GATHER if self.lies_behind(move, step.after, change.shorter):
                image = move.tensor in self.images
                return self.copying_s(1 + image, step.nbytes * (1.0 / self.ways(change.lost) + image))
            case Collective.REDUCE_SCATTER if self.lies_behind(move, step.before, change.longer):
                return self.copying_s(1, step.nbytes / self.ways(change.gained))
            case Collective.ALL_TO_ALL:
                split = self.lies_behind(move, step.before, change.longer)
                joined = self.lies_behind(move, step.after, change.shorter)
                return self.copying_s(split + joined, step.nbytes * (split + joined))
            case Collective.ALL_GATHER | Collective.REDUCE_SCATTER:
                return 0.0  # the dim is the first
            case Collective.ALL_REDUCE | Collective.PERMUTE | Collective.SHIFT | Collective.SLICE:
                return 0.0  # the exchange neither splits nor joins a dim
            case _:
                assert_never(step.kind)

    def lies_behind(self, move: Move, layout: Layout, dim: int) -> bool:
        """Whether a device's block has several elements in the dims before this one; never for the buffer."""
        if dim >= len(move.shape):
            return False
        before = zip(move.shape[:dim], layout.dims[:dim], strict=True)
        return any(-(-n // self.ways(factors)) > 1 for n, factors in before)

    def copying_s(self, kernels: int, nbytes: float) -> float:
        """The seconds in which some kernels together read and write these bytes."""
        return kernels * self.device.launch_s + float(compute.moving_s(self.device, np.array(2.0 * nbytes)))

    def ways(self, factors: tuple[int, ...]) -> int:
        """How many devices there are along some factors."""
        return math.prod(self.planned.sizes[f] for f in factors)
