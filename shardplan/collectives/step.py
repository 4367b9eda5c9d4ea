"""One collective of a resharding program, and what a bundle of collectives is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardplan.collectives.states import Goal
from shardplan.ir import Collective, Layout

StepKind = Literal[
    Collective.ALL_GATHER,
    Collective.ALL_REDUCE,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.PERMUTE,
    Collective.SHIFT,
    Collective.SLICE,
]
"""The collectives of reshardings, and shifts, which bring halos. Matches on them end with ``assert_never``."""

BUNDLED: tuple[Goal, ...] = (Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.REDUCE_SCATTER)
"""The collectives that may travel together, as one flat buffer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One collective of a resharding program; ``nbytes`` are counted as in `Network.lines`, 0 for a slice.

    ``over`` are its factors. A permute has them twice, in their order before and after (`Network.lines`). A shift brings a
    halo.

    ``program`` is the text of the reduction program that performs the collective, over the cluster's level names; empty where
    the collective itself runs.
    """

    kind: StepKind
    over: tuple[int, ...]
    nbytes: float
    before: Layout
    after: Layout
    seconds: float
    program: str = ""

    @property
    def factors(self) -> tuple[int, ...]:
        """The factors that it runs over, each once."""
        return tuple(sorted(set(self.over)))


def block_parts(kind: Collective, members: int) -> tuple[float, float]:
    """A device's blocks before and after a collective, as parts of the bytes that it is priced by (`Step.nbytes`)."""
    return (1 / members if kind == Collective.ALL_GATHER else 1.0), (1 / members if kind == Collective.REDUCE_SCATTER else 1.0)
