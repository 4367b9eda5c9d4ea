"""The score of a user's sharding as text: its price beside the plan's, and its losses."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.planning.losses import Loss
from shardplan.plans.score import MeasuredSharding, Score
from shardplan.report.paths import grouped
from shardplan.report.tables import NEAR, seconds, size, table

_ROWS = 12
"""The most rows of a table of losses or collectives; JSON has all."""
_SHARE = 0.95
"""The part of a table's sum that single rows show; one row has the rest."""


def score_text(score: Score, *, title: str) -> str:
    """The whole score."""
    mesh = ", ".join(f"{name}={n}" for name, n in score.axes.items() if n > 1)
    lines = [f"Your sharding of {title} over {mesh or 'one device'}", "", _verdict(score), _remarks(score), "", _figures(score)]
    if score.measured is not None:
        lines += ["", "Bytes by kind of collective, a device and step:", "", _kinds(score.measured)]
        lines += ["", _replicated(score.measured), "", _added(score.measured)]
    return "\n".join([*lines, "", _losses(score), "", _unasked(score)])


def _verdict(score: Score) -> str:
    mine, plan = seconds(score.step_time_s), seconds(score.plan_s)
    if score.step_time_s < score.plan_s * (1 - NEAR):
        return f"A step takes {mine}, {1 - score.step_time_s / score.plan_s:.1%} less than under the plan ({plan}) as scheduled."
    if score.step_time_s <= score.plan_s:
        return f"A step takes {mine}, no more than under the plan ({plan})."
    if not score.plan_s:
        return f"A step takes {mine}, and under the plan no time."
    return f"A step takes {mine}, {score.step_time_s / score.plan_s:.2f} times as long as under the plan ({plan})."


def _remarks(score: Score) -> str:
    """Whether it fits, which arguments are replicated, and the layouts assumed for other values."""
    lines = (
        []
        if score.fits
        else [f"It does not fit: a device has {size(score.memory_limit)}, and this needs {size(score.peak_bytes)}."]
    )
    if score.replicated:
        patterns = [g.pattern for g in grouped(dict.fromkeys(score.replicated))]
        named = ", ".join(patterns[:3])
        count = len(score.replicated)
        some = f"{count} arguments without a spec are" if count > 1 else "One argument without a spec is"
        lines.append(f"{some} replicated: {named}{', ...' if len(patterns) > 3 else ''}.")
    if score.constraints == "ignore":
        lines.append("The step's own sharding constraints are left out.")
    return "\n".join([*lines, f"Arguments have your shardings; {_inside(score)}."])


def _inside(score: Score) -> str:
    """What the layouts of all values but the arguments are."""
    if not score.inferred:
        return "all other layouts are the best ones with them, so XLA may do worse"
    if score.inferred_share == 1:
        return "XLA's partitioner infers all other layouts"
    percent = min(99.9, math.floor(1000 * score.inferred_share) / 10)
    part = f"XLA's partitioner infers the layouts of other values, {percent:g}% of their bytes"
    return f"{part}; the rest have the best layouts, so XLA may do worse"


def _figures(score: Score) -> str:
    rows: list[list[object]] = [
        ["yours", seconds(score.step_time_s), size(score.communication_bytes), size(score.peak_bytes)],
        ["the plan", seconds(score.plan_s), size(score.plan_communication_bytes), size(score.plan_peak_bytes)],
    ]
    if score.best_s < score.step_time_s:
        best: list[object] = [
            "yours, with the best layouts inside",
            seconds(score.best_s),
            size(score.best_communication_bytes),
            None,
        ]
        rows.insert(1, best)
    if score.measured is not None:
        sent, peak = score.measured.communication_bytes, score.measured.peak_bytes
        rows.insert(1, ["yours, as XLA compiles it", None, size(sent), size(peak)])
    return table(["", "step", "sent", "peak memory"], rows)


def _kinds(measured: MeasuredSharding) -> str:
    rows = [[kind, size(row["predicted"]), size(row["measured"])] for kind, row in measured.collectives.items()]
    return table(["kind", "predicted", "measured"], rows)


def _replicated(measured: MeasuredSharding) -> str:
    if not measured.replicated:
        return "XLA gathers no value whole only to cut it again."
    rows = [
        [row.tensor, row.before or None, row.after or None, size(row.bytes), "yes" if row.involuntary else "no", row.source]
        for row in measured.replicated
    ]
    heading = "Values that XLA gathers whole on every device, and then cuts in another way:\n\n"
    columns = ["value", "from", "to", "bytes", "XLA's last resort", "at"]
    return heading + table(columns, rows[:_ROWS]) + _left(rows)


def _added(measured: MeasuredSharding) -> str:
    least = (1 - _SHARE) / _ROWS * measured.communication_bytes
    found = [row for row in measured.added if row.bytes > least]
    if not found:
        return "XLA adds no collective that counts to those that were predicted."
    rows = [[row.kind.value, size(row.bytes), row.tensor, row.source] for row in found]
    heading = "Collectives that XLA adds to those that were predicted:\n\n"
    return heading + table(["kind", "bytes", "moves", "at"], rows[:_ROWS]) + _left(rows)


def _left(rows: Sequence[object]) -> str:
    return f"\n... and {len(rows) - _ROWS} more rows (--json has all)" if len(rows) > _ROWS else ""


def _shown(amounts: Sequence[float]) -> int:
    """How many rows, largest first, make up `_SHARE` of a sum: at most `_ROWS`, and all if one alone would be left."""
    total = sum(amounts)
    enough = next((n for n in range(len(amounts)) if sum(amounts[:n]) >= _SHARE * total), len(amounts))
    shown = min(enough, _ROWS)
    return len(amounts) if shown == len(amounts) - 1 else shown


def _losses(score: Score) -> str:
    if not score.losses:
        return "No argument would gain by another layout."
    rows: list[list[object]] = [
        [_named(loss), loss.given, loss.instead, seconds(loss.seconds), size(loss.bytes), loss.source] for loss in score.losses
    ]
    shown = _shown([loss.seconds for loss in score.losses])
    if rest := score.losses[shown:]:
        most = seconds(max(loss.seconds for loss in rest)), size(max(loss.bytes for loss in rest))
        rows[shown:] = [[f"{len(rest)} others, each at most", None, None, *most, None]]
    heading = "What a step gains if only these arguments are sharded differently (gains do not add up):\n\n"
    return heading + table(["arguments", "yours", "instead", "gains", "sends less", "largest part at"], rows)


def _named(loss: Loss) -> str:
    """The arguments of a loss: the first ones, and how many others change with them."""
    first = grouped(loss.together)[0]
    others = len(loss.together) - len(first.paths)
    return f"{first.pattern} (with {others} other{'s' if others > 1 else ''})" if others else first.pattern


def _unasked(score: Score) -> str:
    if not score.unasked:
        return "It issues no collective that the plan does not have."
    rows: list[list[object]] = [
        [row.kind.value, size(row.bytes), seconds(row.seconds), row.tensor, row.source] for row in score.unasked
    ]
    shown = _shown([row.seconds for row in score.unasked])
    if rest := score.unasked[shown:]:
        left = size(sum(row.bytes for row in rest)), seconds(sum(row.seconds for row in rest))
        rows[shown:] = [[f"{len(rest)} others", *left, None, None]]
    heading = "Collectives that the plan does not have, or has fewer of:\n\n"
    return heading + table(["kind", "bytes", "seconds", "moves", "at"], rows)
