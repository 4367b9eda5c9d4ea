"""The values that a device holds where its memory peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardplan.search.memory.lifetimes import Kind
from shardplan.search.memory.liveness import Liveness, local_part, profile
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Problem


@dataclass(frozen=True, slots=True)
class Held:
    """The ``nbytes`` of a tensor of the flat graph on one device, or of the buffers in which the op at the peak works
    (``tensor`` is -1).
    """

    tensor: int
    kind: Kind | Literal["working"]
    nbytes: float


def held_at_peak(
    problem: Problem, live: Liveness, states: Sequence[int], keep: frozenset[int], limits: Limits | None
) -> tuple[int, list[Held]]:
    """(the point of the step at which memory peaks, all that a device holds there, the largest first).

    The bytes add up to the peak of `profile`. ``keep`` are the backward views that reuse the forward copy.
    """
    point = int(profile(problem, live, states, keep, limits).argmax())
    lifetimes = live.lifetimes
    alive = [x for x in (*lifetimes.stored, *lifetimes.conditional) if point in x and x.holds(problem, states, keep)]
    held = [
        Held(x.tensor, x.kind, x.nbytes * (1.0 if x.variable < 0 else local_part(problem, x.variable, states[x.variable])))
        for x in alive
    ]
    nodes, nbytes = live.buffers.held(states, limits)
    held.append(Held(-1, "working", float(nbytes[nodes == point].sum())))
    return point, sorted((h for h in held if h.nbytes > 0), key=lambda h: (-h.nbytes, h.tensor, h.kind))
