"""A plan for the ops of each group of a placed step, together, on the group's devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardplan.mesh import Cluster
from shardplan.mesh.groups import group_cluster
from shardplan.planning.fallback import Fallback
from shardplan.planning.planner import Made, planned
from shardplan.planning.searcher import Searcher
from shardplan.regions.assignment import Group
from shardplan.regions.group_programs import Part
from shardplan.search.inference import anytime


def group_plans(
    groups: Sequence[Group], parts: Sequence[Part], cluster: Cluster, searcher: Searcher, donated: frozenset[int], origin: str
) -> tuple[Made, ...]:
    """The plan of each group's program. ``donated`` are the tensors of the step's arguments that it may reuse.

    After an interrupt, the groups that are left get their first plans.

    Raises:
        MemoryLimitError: if the ops of a group fit its devices in no layout.
    """
    found: list[Made] = []
    for group, part in zip(groups, parts, strict=True):
        leaves = frozenset(n for n, t in enumerate(part.inputs) if t in donated)
        wanted = replace(searcher.wanted, donated=leaves)
        if found and found[-1].stopped == "interrupted":
            wanted = replace(wanted, deadline=anytime.now_s())
        here = replace(searcher, cluster=group_cluster(cluster, group), wanted=wanted, fallback=Fallback())
        found.append(planned(part.program, here, origin, recompute=False))
    return tuple(found)
