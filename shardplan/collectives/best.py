"""The best program for a reduction, without listing all programs: best-first search over contexts, with a bound.

A* over the contexts of `shardplan.collectives.synthesis`: the time so far plus a lower bound on the time left. While no device
under some child of a level has a complete chunk, all bytes must still enter through that child's link, in every reduction that
shares the link. This bound never exceeds the true time left, so the first program taken from the queue at the goal is the best
of any length.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..constants import CONSTANTS
from ..cost.network import Algorithm, Network
from ..ir import Collective
from .dsl import Instruction, Reduction, groups, instructions
from .envelope import envelope
from .ranking import Entries, check_bytes, entries, held_after, shape_of, step_lines
from .states import Context, Goal
from .synthesis import Order, Walks, shared_walks

# lower bound on the total, ticket that breaks ties, seconds spent, context, part of the data that each device holds, steps
Node = tuple[float, int, float, Context, tuple[float, ...], tuple[Instruction, ...]]


def best_reduction(network: Network, over: Sequence[int], nbytes: float) -> tuple[float, Reduction]:
    """The seconds of the best emitted all-reduce program over these factors, and the program.

    Programs have at most five steps over up to three levels, and any length over more. The best is never slower than
    ``network.seconds(Collective.ALL_REDUCE, over, nbytes)``, the program of one AllReduce.
    """
    check_bytes(nbytes)
    if len(entries(network, over)) <= CONSTANTS.deepest_graph:
        return envelope(network, over).best(nbytes)
    key = ("best_reduction", frozenset(over), nbytes)
    if key not in network.memo:
        network.memo[key] = search(network, over, nbytes, algorithm="emitted")
    return network.memo[key]


def search(
    network: Network,
    over: Sequence[int],
    nbytes: float,
    *,
    algorithm: Algorithm = "auto",
    goal: Goal = Collective.ALL_REDUCE,
    order: Order | None = None,
) -> tuple[float, Reduction]:
    """The seconds of the best program of any length for a hierarchy of any depth, and the program; ties go to the shorter."""
    check_bytes(nbytes)
    levels = entries(network, over)
    shape = shape_of(network, levels)
    walks = shared_walks((2,) * len(levels), goal, order)
    prices: dict[tuple[Instruction, float], float] = {}
    nudge = CONSTANTS.step_nudge * float(network.seconds(goal, over, nbytes, algorithm=algorithm))
    bounds = _bounds(network, levels, nbytes, walks.shape, algorithm) if goal != Collective.ALL_GATHER else []
    ticket = itertools.count()
    part = 1.0 / math.prod(shape) if goal == Collective.ALL_GATHER else 1.0
    best: dict[Context, float] = {walks.start: 0.0}
    queue: list[Node] = [(0.0, next(ticket), 0.0, walks.start, (part,) * walks.space.k, ())]
    while queue:
        _, _, spent, context, held, path = heapq.heappop(queue)
        if context == walks.end:
            return spent, Reduction(tuple(path), len(levels))
        if spent + len(path) * nudge > best[context]:
            continue
        for step, after in walks.successors(context):
            low, high = step.span(len(levels))
            members = float(math.prod(shape[low:high]))
            among = groups(walks.shape, step)
            moved = max(held[g[0]] for g in among) * (members if step.collective == Collective.ALL_GATHER else 1.0)
            if (step, moved) not in prices:
                rows = step_lines(network, levels, step, algorithm)
                prices[step, moved] = float(np.min(rows[:, 0] + rows[:, 1] * moved * nbytes))
            total = spent + prices[step, moved]
            nudged = total + (len(path) + 1) * nudge
            if nudged >= best.get(after, math.inf):
                continue
            best[after] = nudged
            parts = list(held)
            for group in among:
                for device, share in zip(group, held_after(step.collective, [held[d] for d in group], members), strict=True):
                    parts[device] = share
            bound = max((seconds for seconds, children in bounds if _nothing_complete(walks, after, children)), default=0.0)
            heapq.heappush(queue, (nudged + bound, next(ticket), total, after, tuple(parts), (*path, step)))
    raise AssertionError("one collective over everything reaches every goal")


def _bounds(
    network: Network, levels: Entries, nbytes: float, twos: tuple[int, ...], algorithm: Algorithm
) -> list[tuple[float, list[range]]]:
    """For each level with a bound: the least seconds for all bytes to enter one of its children, and each child's devices."""
    result: list[tuple[float, list[range]]] = []
    for index, (tier, links) in enumerate(zip(network.cluster.levels, network.topology.tiers, strict=True)):
        crossed = [e for e, entry in enumerate(levels) if network.factors[entry[0]].level <= index]
        if not crossed or links.up is None or tier.kind == "ring":
            continue
        inside = math.prod(network.factors[i].size for entry in levels for i in entry if network.factors[i].level > index)
        sharing = math.prod(network.cluster.shape[index + 1 :]) // inside
        speed = tier.bandwidth_bytes_per_s * max(tier.ring_efficiency, tier.tree_efficiency)
        below = math.prod(twos[crossed[-1] + 1 :])
        # a step across the level pays latency too; take the least, as Reduce and Broadcast pay half of an all-reduce's
        crossing = [m for m in instructions(len(levels)) if m.span(len(levels))[0] <= crossed[-1] < m.span(len(levels))[1]]
        latency = min(float(step_lines(network, levels, m, algorithm)[:, 0].min()) for m in crossing)
        result.append((latency + nbytes * sharing / speed, [range(i, i + below) for i in range(0, math.prod(twos), below)]))
    return result


def _nothing_complete(walks: Walks, context: Context, children: list[range]) -> bool:
    """Whether some child has no device with a complete chunk."""
    return any(all(not _complete(walks, context[d]) for d in devices) for devices in children)


def _complete(walks: Walks, state: int) -> bool:
    """Whether some chunk is complete: its row of the state matrix is all ones."""
    k = walks.space.k
    row = (1 << k) - 1
    return any((state >> (r * k)) & row == row for r in range(k))
