"""The collectives of a step as they are priced, their instructions, and what the step costs with them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardplan.collectives.step import Step
from shardplan.cost.overlap import step_s
from shardplan.ir import Collective

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Send:
    """One collective instruction of a schedule.

    ``kind`` is one of HLO's, ``groups`` the devices of each group, or (from, to) pairs of a permute. ``nbytes`` is the operand's
    of a device, ``wire_bytes`` what the device sends in the ring convention, each ``times`` a training step. ``scope`` is the
    named scope that the instruction stands in. ``known`` is false in a loop of unknown trip count, which is taken as one.
    """

    scope: str
    kind: Collective
    groups: Groups
    nbytes: int
    wire_bytes: float
    times: float
    tensor: int
    line: str
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """One collective as it is priced, run ``times`` a step.

    ``step`` holds its bytes, its program, and the seconds that it takes alone. ``seconds`` are those of one execution with the
    copies beside it, into one buffer or another order of dims (``copied_s``, which the search does not tell apart). In the
    search, they are its part of a full bundle. ``hideable_s`` of them can hide behind compute. ``wire_bytes`` are what a device
    sends in one execution, in the ring convention.

    ``tensor`` is the tensor that it moves, ``source`` the user's source line ("loop" for a loop's boundary), ``along`` the
    tensors of all others in the same bundle, ``pool`` the moves that it can travel with. ``sends`` are its instructions; the
    search has none yet. ``again``: the backward pass moves the tensor again, behind a barrier, though the forward pass has
    moved it.
    """

    step: Step
    seconds: float
    times: float
    wire_bytes: float
    tensor: int
    source: str
    hideable_s: float = 0.0
    copied_s: float = 0.0
    along: tuple[tuple[int, str], ...] = ()
    pool: str = ""
    sends: tuple[Send, ...] = ()
    again: bool = False


@dataclass(frozen=True, slots=True)
class PlannedCollective:
    """One collective of a plan, run ``times`` a step, with names in place of numbers: what its file has.

    ``bytes`` is the size of its operand on one device (of its result for an all-gather), ``wire_bytes`` what one device sends in
    the ring convention, ``seconds`` the time in the network model. All three are for one execution. ``source`` is the user's
    line. ``program`` is the reduction program that takes ``seconds``, in P2's notation over the cluster's levels; it is empty if
    that is the collective itself. ``hideable_s`` is the part of its seconds that can hide behind compute. ``along`` names the
    other arrays that travel with ``tensor``, like it, or their source lines.
    """

    kind: Collective
    bytes: float
    wire_bytes: float
    axes: tuple[str, ...]
    times: float
    seconds: float
    tensor: str
    source: str
    program: str = ""
    hideable_s: float = 0.0
    along: tuple[str, ...] = ()

    @property
    def arrays(self) -> str:
        """The array that it moves, and how many others.

        >>> cost = {"bytes": 8, "wire_bytes": 14, "times": 1, "seconds": 1e-5}
        >>> both = PlannedCollective(Collective.ALL_GATHER, axes=("gpu",), tensor="update of w", source="", along=("b",), **cost)
        >>> both.arrays, both.paths
        ('update of w and 1 more', ('w', 'b'))
        """
        return self.tensor + (f" and {len(self.along)} more" if self.along else "")

    @property
    def paths(self) -> tuple[str, ...]:
        """What it moves by the paths of arguments and results: a gradient or an update by that of its argument. A value between
        ops has no path but its source line.
        """
        return tuple(re.sub(r"^(gradient of|update of|result) ", "", name) for name in (self.tensor, *self.along))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """The cost of one step on one device: seconds of compute, and the collectives ``issued`` with their prices.

    ``contention`` is the device's, as in `shardplan.cost.overlap.step_s`. ``host_s`` are the seconds of copies from host memory
    and back, beside which nothing runs.
    """

    issued: tuple[Issued, ...]
    compute_s: float
    contention: float
    host_s: float

    @property
    def communication_s(self) -> float:
        """Seconds of all collectives."""
        return sum(i.seconds * i.times for i in self.issued)

    @property
    def hideable_s(self) -> float:
        """Seconds of communication that can hide behind compute."""
        return sum(i.hideable_s * i.times for i in self.issued)

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that cannot hide behind compute."""
        return self.communication_s - self.hideable_s

    @property
    def step_time_s(self) -> float:
        """Seconds of the step."""
        return self.host_s + step_s(self.compute_s, self.exposed_s, self.hideable_s, self.contention)

    @property
    def serial_s(self) -> float:
        """Seconds of the step if nothing hides."""
        return self.compute_s + self.communication_s + self.host_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that the device sends, in the ring convention."""
        return sum(i.wire_bytes * i.times for i in self.issued)
