"""A plan's parallelism in the words of MaxText's configuration (`base.yml`): the sizes of its mesh axes, in and between nodes.

MaxText has a mesh axis for each purpose; ``ici_*`` sizes multiply to the devices of a node (a slice, in its words), ``dcn_*``
sizes to the nodes. Everything follows from the plan's matrix and its purposes (`shardplan.search.strategy.purposes`). The plan
does not know which dims of its weights a model names ``mlp`` or ``heads``: comments list such weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from shardplan.ir import spec_text
from shardplan.plans.data import PlanData
from shardplan.report.paths import grouped
from shardplan.report.rules_file import flow, one_line
from shardplan.sizes import axes_text

AXES = ("data", "fsdp", "sequence", "tensor", "expert")
"""The purposes with a MaxText mesh axis of the same name, in MaxText's order."""

_NODES = ("node", "host")
"""The names of levels that join nodes: these and all above them are between nodes. Without one, all levels but the last are."""

_LOGICAL = {"activation_batch": ("data", "fsdp"), "activation_length": ("sequence",), "exp": ("expert",)}
"""MaxText's names of dims, each with the purposes that cut it in any model."""


def maxtext_file(plan: PlanData) -> str:
    """The text of the file."""
    sizes = _sizes(plan)
    used = [axis for axis in AXES if math.prod(sizes[axis]) > 1]
    rules = {name: [axis for axis in axes if axis in used] for name, axes in _LOGICAL.items()}
    lines = [
        f"# For MaxText, from a plan on {one_line(plan.cluster.name)}: {axes_text(plan.axes)}.",
        *(f"# {text}." for text in replicas(plan)),
        "# mesh_axes are the axes that the plan uses. MaxText's others have size 1: keep those of your version's base.yml.",
        f"mesh_axes: {flow(used)}",
        *(f"ici_{axis}_parallelism: {sizes[axis][1]}" for axis in AXES),
        *(f"dcn_{axis}_parallelism: {sizes[axis][0]}" for axis in AXES),
        "# The rules that hold for any model; they come before those of base.yml for the same names.",
        "logical_axis_rules:" if any(rules.values()) else "logical_axis_rules: []",
        *(f"- {flow([name, axes])}" for name, axes in rules.items() if axes),
        *(f"# not said: {text}" for text in _not_said(plan)),
    ]
    return "\n".join(lines) + "\n"


def replicas(plan: PlanData) -> tuple[str, ...]:
    """Sentences on purposes for which MaxText has no axis: with these, the sizes make fewer devices than the cluster has."""
    return tuple(
        f"{between * inside} devices do the same work (purpose {purpose}), for which MaxText has no axis: these sizes do not "
        "make all devices"
        for purpose, (between, inside) in _sizes(plan).items()
        if purpose not in AXES and between * inside > 1
    )


def _sizes(plan: PlanData) -> dict[str, tuple[int, int]]:
    """The devices of each purpose, between nodes and inside one."""
    rows, between = plan.matrix, between_nodes(plan.cluster.level_names)
    found: dict[str, tuple[int, int]] = dict.fromkeys(AXES, (1, 1))
    for purpose, row in zip(rows["axes"], rows["factors"], strict=True):
        found[purpose] = math.prod(row[:between]), math.prod(row[between:])
    return found


def between_nodes(levels: Sequence[str]) -> int:
    """The number of levels between nodes; ``levels`` are their names, slowest first."""
    return next((n + 1 for n, name in enumerate(levels) if name in _NODES), len(levels) - 1)


def _not_said(plan: PlanData) -> Iterator[str]:
    """Sentences on the parts of the plan that the file cannot express."""
    for factor, shares in zip(plan.factors, plan.purposes, strict=True):
        if len(shares) > 1:
            parts = ", ".join(f"{purpose} {part:.0%}" for purpose, part in shares)
            yield f"the plan's axis {factor.name} serves several purposes ({parts} of its compute); the first is its axis here"
    if _order(plan) != sorted(_order(plan)):
        yield "the plan has its axes in another order within a level, so that other devices are neighbours"
    specs = {path: spec_text(entries) for path, entries in plan.entries.items() if entries}
    if specs:
        leads = ", ".join(f"{f.name} is {shares[0][0]}" for f, shares in zip(plan.factors, plan.purposes, strict=True))
        yield f"which dims of which arrays the plan splits, over its own axes ({leads}):"
    for group in grouped(specs):
        yield f"  {flow(group.pattern)} {specs[group.paths[0]]}"


def _order(plan: PlanData) -> list[tuple[int, int]]:
    """The place of each factor's purpose in MaxText's order, level by level, slowest factor first."""
    shares = sorted(zip(plan.factors, plan.purposes, strict=True), key=lambda row: (row[0].level, -row[0].stride))
    return [(f.level, AXES.index(own[0][0])) for f, own in shares if own[0][0] in AXES]
