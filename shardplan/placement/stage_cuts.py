"""Chains cut into stages on consecutive groups of devices, by a dynamic program over the cut points.

As in PipeDream (Narayanan et al., SOSP 2019, section 3.1), the slowest stage with what it receives is as fast as can be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Group
from shardplan.placement.device_groups import GroupTimes

Floats = NDArray[np.float64]


def stage_cuts(work_s: Floats, received_s: Floats) -> tuple[int, ...]:
    """Where to cut units in a row into stages, none empty, so that the slowest takes least: the first unit of each stage.

    ``work_s`` [stages, units] are the seconds of a unit in a stage, ``received_s`` [stages, units] the seconds of receiving in a
    stage that begins with a unit. Among equal cuts, the one whose later stages have more units is taken.

    >>> stage_cuts(np.array([[1.0, 1, 1, 1, 4]] * 2), np.zeros((2, 5)))
    (0, 4)
    """
    stages, count = work_s.shape
    assert 1 <= stages <= count, "a stage has a unit"
    until = np.concatenate([np.zeros((stages, 1)), work_s.cumsum(axis=1)], axis=1)  # [stages, units + 1]
    best = until[0]
    cuts: list[NDArray[np.int64]] = []
    for k in range(1, stages):
        row, chosen = np.full(count + 1, np.inf), np.zeros(count + 1, np.int64)
        for end in range(k + 1, count + 1):
            slowest = np.maximum(best[k:end], until[k, end] - until[k, k:end] + received_s[k, k:end])
            chosen[end] = k + int(slowest.argmin())
            row[end] = slowest.min()
        best = row
        cuts.append(chosen)
    firsts, end = list[int](), count
    for chosen in reversed(cuts):
        end = int(chosen[end])
        firsts.append(end)
    return (0, *reversed(firsts))


def staged(times: GroupTimes, units: Sequence[Sequence[int]], groups: Sequence[Group]) -> tuple[Group, ...]:
    """The group of each operator if the units, in this order, are cut into a stage for each group."""
    graph, at = times.problem.graph, {i: n for n, unit in enumerate(units) for i in unit}
    work = np.array([[times.operators_s(unit, group) for unit in units] for group in groups])
    received = np.zeros(work.shape)
    onward = np.diagonal(times.edges_s(groups), 1, axis1=1, axis2=2)  # [tensors, stages - 1]
    for edge, seconds in zip(graph.edges, onward, strict=True):
        received[1:, at[edge.producer] + 1 : at[edge.consumer] + 1] += seconds[:, None]
    firsts = stage_cuts(work, received)
    stage_of = np.searchsorted(np.array(firsts), np.arange(len(units)), side="right") - 1
    return tuple(groups[int(stage_of[at[i]])] for i in range(len(graph.operators)))
