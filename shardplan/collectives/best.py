"""The best program for a reduction, without listing all of them: best-first search over contexts, with a bound.

A* over the same contexts as `shardplan.collectives.synthesis`: the time so far plus a bound on the rest. The bound: as long as
no device under a child of a level has any chunk complete, all bytes still have to enter through that child's link, in every
reduction that shares it. It never exceeds the true rest, so the first program that reaches the goal is the best of all, of any
length.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from ..cost.network import Algorithm, Network
from .dsl import Instruction, Reduction, groups, instructions
from .envelope import DEEPEST_GRAPH, envelope
from .ranking import Entries, check_bytes, entries, held_after, shape_of, step_lines
from .states import Context, Goal
from .synthesis import Order, Walks, shared_walks

# bound on the whole, a ticket against ties, spent, context, parts held, steps
Node = tuple[float, int, float, Context, tuple[float, ...], tuple[Instruction, ...]]
_NUDGE = 1e-11  # of one collective over everything, for each step: more than sums of floats differ by, less than anyone measures


def best_reduction(network: Network, over: Sequence[int], nbytes: float) -> tuple[float, Reduction]:
    """The seconds of the best all-reduce program over these factors as it is emitted, and the program.

    Of at most five steps over up to three levels, of any length over more. Never slower than
    ``network.seconds("all_reduce", over, nbytes)``, which is the program of one AllReduce.
    """
    check_bytes(nbytes)
    if len(entries(network, over)) <= DEEPEST_GRAPH:
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
    goal: Goal = "all_reduce",
    order: Order | None = None,
) -> tuple[float, Reduction]:
    """The best program of any length for a hierarchy of any depth: seconds and program; the shorter of equals."""
    check_bytes(nbytes)
    levels = entries(network, over)
    shape = shape_of(network, levels)
    walks = shared_walks((2,) * len(levels), goal, order)
    prices: dict[tuple[Instruction, float], float] = {}
    nudge = _NUDGE * float(network.seconds(goal, over, nbytes, algorithm=algorithm))
    bounds = _bounds(network, levels, nbytes, walks.shape, algorithm) if goal != "all_gather" else []
    ticket = itertools.count()
    part = 1.0 / math.prod(shape) if goal == "all_gather" else 1.0
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
            moved = max(held[g[0]] for g in among) * (members if step.collective == "AllGather" else 1.0)
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
            rest = max((seconds for seconds, under in bounds if _nothing_complete(walks, after, under)), default=0.0)
            heapq.heappush(queue, (nudged + rest, next(ticket), total, after, tuple(parts), (*path, step)))
    raise AssertionError("every goal is reached by one collective over everything")


def _bounds(
    network: Network, levels: Entries, nbytes: float, two: tuple[int, ...], algorithm: Algorithm
) -> list[tuple[float, list[range]]]:
    """For each level: the seconds for all bytes to enter a child of it, and the devices under its children."""
    result: list[tuple[float, list[range]]] = []
    for index, (tier, links) in enumerate(zip(network.cluster.levels, network.topology.tiers, strict=True)):
        crossed = [e for e, entry in enumerate(levels) if network.factors[entry[0]].level <= index]
        if not crossed or links.up is None or tier.kind == "ring":
            continue
        inside = math.prod(network.factors[i].size for entry in levels for i in entry if network.factors[i].level > index)
        sharing = math.prod(network.cluster.shape[index + 1 :]) // inside
        speed = tier.bandwidth_bytes_per_s * max(tier.ring_efficiency, tier.tree_efficiency)
        below = math.prod(two[crossed[-1] + 1 :])
        # a step that crosses the level has its latency too; Reduce and Broadcast are half of an all-reduce
        crossing = [m for m in instructions(len(levels)) if m.span(len(levels))[0] <= crossed[-1] < m.span(len(levels))[1]]
        latency = min(float(step_lines(network, levels, m, algorithm)[:, 0].min()) for m in crossing)
        result.append((latency + nbytes * sharing / speed, [range(i, i + below) for i in range(0, math.prod(two), below)]))
    return result


def _nothing_complete(walks: Walks, context: Context, under: list[range]) -> bool:
    """Whether under some child no chunk is complete yet."""
    return any(all(not _complete(walks, context[d]) for d in devices) for devices in under)


def _complete(walks: Walks, state: int) -> bool:
    """Whether a state has any chunk from everybody: a row of ones survives shifting and masking by every column."""
    k = walks.space.k
    row = (1 << k) - 1
    return any((state >> (r * k)) & row == row for r in range(k))
