"""Explains a plan with groups of devices: which layers each group runs and why, what groups send, and what waiting costs."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from shardplan.errors import ShardplanError
from shardplan.ir import Op, Program
from shardplan.plans.data import PlanData
from shardplan.plans.placed_data import PlacedData, conditions
from shardplan.regions.buffers import most_held
from shardplan.regions.loops import loop_of
from shardplan.regions.placed import PlacedStep
from shardplan.regions.tasks import PlacedTaskGraph
from shardplan.report.explain import explain_arguments, remarks, unknown
from shardplan.report.parallelism import matrix_text
from shardplan.report.paths import grouped
from shardplan.report.placed_text import idle_share, transfer_bytes
from shardplan.report.tables import device_ranges, seconds, size
from shardplan.search.session import Session
from shardplan.sizes import axes_text

_PATTERNS = 6
"""At most this many patterns of arguments are named for a group."""


def explained(plan: PlacedData, path: str | None = None) -> str:
    """The explanation in a plan's file of the whole plan, or of arguments whose path equals ``path`` or matches it as a glob.

    Raises:
        ShardplanError: if no argument matches.
    """
    return "\n\n".join([*explanations_of(plan, path).values(), *placed_remarks(plan)])


def explanations_of(plan: PlacedData | PlanData, path: str | None = None) -> dict[str, str]:
    """The explanations that `explained` shows, by path.

    Raises:
        ShardplanError: if no argument matches.
    """
    known = plan.explanations or {}
    if path is None:
        hits = [""]
    else:
        arrays: Mapping[str, str] = plan.array_of if isinstance(plan, PlacedData) else dict[str, str]()
        hits = [p for p in known if p and path in (p, arrays.get(p))]
        hits = hits or [p for p in known if p and fnmatch.fnmatchcase(p, path)]
    if not hits:
        raise ShardplanError(unknown(path or "", [p for p in known if p]))
    return {p: known[p] for p in hits}


def placed_remarks(plan: PlacedData | PlanData) -> list[str]:
    """The `remarks` of a plan, all of whose groups were planned with the same constants."""
    return remarks(conditions(plan))


def placed_explanations(plan: PlacedData, placed: PlacedStep, sessions: Sequence[Session]) -> dict[str, str]:
    """Every explanation by path, ``""`` for the whole plan. ``sessions`` are the searches behind the plans of the groups."""
    found = {"": _whole(plan, placed)}
    for n, (devices, own, session) in enumerate(zip(plan.devices, plan.groups, sessions, strict=True)):
        held = [path for path, group in plan.group_of.items() if group == n]
        where = f"held by group {n} (devices {device_ranges(devices)}), whose ops read or replace it"
        for path, text in explain_arguments(own, session, held).items():
            head, *rest = text.split("\n  ")
            found[path] = "\n  ".join([head, where, *rest])
    return {"": found[""]} | {path: found[path] for path in plan.group_of}


def _whole(plan: PlacedData, placed: PlacedStep) -> str:
    graph, dispatch = placed.graph, placed.dispatch
    step_s, idle = dispatch.step_time_s, idle_share(placed, plan.cluster.size)
    lines = [
        f"{seconds(step_s)} a step on {len(plan.groups)} groups of devices of {plan.cluster.name}: {_why(plan, placed)}.",
        f"Devices compute nothing for {seconds(step_s * idle)} of it on average ({idle:.0%}): the bubble. Without it a step "
        f"would take {seconds(step_s * (1 - idle))}.",
        f"{size(transfer_bytes(graph))} go from group to group in a step.",
    ]
    if plan.placements_tried:
        others = [row for row in plan.placements_tried if row.step_time_s is not None and row.why_not]
        best = min(others, key=lambda row: row.step_time_s or 0.0, default=None)
        if best is not None and best.step_time_s is not None:
            lines.append(f"The best of the {len(others)} others that were planned: {best.what}, {seconds(best.step_time_s)}.")
    ops = _ops_by_group(plan, placed.program)
    return "\n\n".join(["\n".join(lines), *(_group(plan, placed, n, ops.get(n, ())) for n in range(len(plan.groups)))])


def _why(plan: PlacedData, placed: PlacedStep) -> str:
    """The origin of the groups."""
    if plan.inner is None:
        return f"the groups are those of {plan.origin}"
    crossing = {t.key[0] for t in placed.graph.transfers if t.key[1] >= 0}
    nbytes = sum(placed.graph.tensors[t].nbytes for t in crossing)
    return (
        f"{plan.origin} of {plan.groups[0].microbatches.count} microbatches. The forward pass is cut where few bytes cross "
        f"({size(nbytes)} for each microbatch, both ways) and where stages take about as long; the backward pass follows the "
        "weights and values that it reads, and updates run where the weights lie"
    )


def _group(plan: PlacedData, placed: PlacedStep, n: int, ops: Sequence[Op]) -> str:
    """What a group runs and holds, how it is cut, how long it computes and waits, and what it sends."""
    graph, dispatch, own = placed.graph, placed.dispatch, plan.groups[n]
    busy_s, step_s = dispatch.busy_s(graph, n), dispatch.step_time_s
    mesh = axes_text(own.axes)
    wait = step_s - busy_s
    share = f" ({wait / step_s:.0%})" if step_s else ""
    lines = [f"group {n}, devices {device_ranges(plan.devices[n])}, as {mesh}"]
    lines += [f"runs {text}" for text in _sources(ops)]
    lines.append(f"holds {_held(plan, own, n)}; {size(most_held(graph, dispatch, n))} a device at most")
    lines.append(f"computes {seconds(busy_s)} and waits {seconds(wait)}{share} of a step")
    lines += _spent(graph, n)
    lines += _sent(graph, n)
    lines += matrix_text(own).splitlines()
    return "\n  ".join(lines)


def _held(plan: PlacedData, own: PlanData, n: int) -> str:
    """The arguments that a group holds, as patterns."""
    shapes = {a.path: (a.shape, a.dtype) for a in own.arguments}
    patterns = [g.pattern for g in grouped({p: shapes[p] for p, group in plan.group_of.items() if group == n})]
    more = f" and {len(patterns) - _PATTERNS} more" if len(patterns) > _PATTERNS else ""
    return (", ".join(patterns[:_PATTERNS]) or "no arguments") + more


def _sources(ops: Sequence[Op]) -> list[str]:
    """The source lines of the forward and of the backward pass, first to last."""
    found: list[str] = []
    for backward in (False, True):
        lines = [line for line in dict.fromkeys(str(op.source) for op in ops if op.backward == backward) if line != "?"]
        if lines:
            between = lines[0] if len(lines) == 1 else f"{lines[0]} to {lines[-1]}"
            found.append(f"the {'backward' if backward else 'forward'} pass of {between}")
    return found


def _spent(graph: PlacedTaskGraph, n: int) -> list[str]:
    """The three programs in which a group spends most time, with their runs and seconds."""
    times = [0] * len(graph.pieces)
    for task in graph.tasks:
        times[task.piece] += 1
    own = [(piece.seconds * times[k], times[k], piece) for k, piece in enumerate(graph.pieces) if piece.group == n]
    own.sort(key=lambda row: (-row[0], row[2].name))
    return [f"{piece.name}: {count} x {seconds(piece.seconds)}" for total, count, piece in own[:3] if total > 0]


def _sent(graph: PlacedTaskGraph, n: int) -> list[str]:
    """The bytes that a group sends to each other group."""
    sent: dict[int, int] = {}
    for t in graph.transfers:
        if t.source == n:
            sent[t.target] = sent.get(t.target, 0) + graph.tensors[t.key[0]].nbytes
    return [f"sends {size(nbytes)} to group {target}" for target, nbytes in sorted(sent.items())]


def _ops_by_group(plan: PlacedData, program: Program) -> Mapping[int, Sequence[Op]]:
    """The ops of each group in program order; for a pipeline, those of one microbatch without the sums over microbatches."""
    of = plan.outer if plan.inner is None else plan.inner_groups
    ops, totals = program.ops, set[int]()
    if plan.inner is not None:
        loop = loop_of(program)
        body, carries = loop.bodies[0], int(loop.params["num_carry"])
        ops, totals = body.ops, {t for t in body.outputs[:carries] if isinstance(t, int)}
    found: dict[int, list[Op]] = {}
    for op in ops:
        if op.id in of and totals.isdisjoint(op.outputs):
            found.setdefault(of[op.id], []).append(op)
    return found
