"""A sharding that the user wrote as text: its price beside the plan's, and where it loses."""

from __future__ import annotations

from shardplan.plans.score import Score
from shardplan.report.paths import grouped
from shardplan.report.tables import seconds, size, table

_ROWS = 12
"""The most rows of a table of losses or collectives; JSON has all."""


def score_text(score: Score, *, title: str) -> str:
    """The whole score."""
    mesh = ", ".join(f"{name}={n}" for name, n in score.axes.items())
    lines = [f"Your sharding of {title} over {mesh}", "", _verdict(score), _remarks(score), "", _figures(score)]
    if score.measured is not None:
        lines += ["", "Bytes by kind of collective, a device and step:", "", _kinds(score)]
    return "\n".join([*lines, "", _losses(score), "", _unasked(score)])


def _verdict(score: Score) -> str:
    mine, plan = seconds(score.step_time_s), seconds(score.plan_s)
    if score.step_time_s <= score.plan_s:
        return f"A step takes {mine}, no more than under the plan ({plan})."
    return f"A step takes {mine}, {score.step_time_s / score.plan_s:.2f} times as long as under the plan ({plan})."


def _remarks(score: Score) -> str:
    """What does not fit, what is replicated, and how the rest of the step is priced."""
    lines = (
        []
        if score.fits
        else [f"It does not fit: a device has {size(score.memory_limit)}, and this needs {size(score.peak_bytes)}."]
    )
    if score.replicated:
        patterns = [g.pattern for g in grouped(dict.fromkeys(score.replicated))]
        named = ", ".join(patterns[:3])
        count = len(score.replicated)
        some = f"{count} arguments without a spec lie" if count > 1 else "One argument without a spec lies"
        lines.append(f"{some} whole on every device: {named}{', ...' if len(patterns) > 3 else ''}.")
    return "\n".join(
        [*lines, "The arguments lie as you say; all else is as good as it can be with them, so XLA may do worse (--measure)."]
    )


def _figures(score: Score) -> str:
    rows: list[list[object]] = [
        ["yours", seconds(score.step_time_s), size(score.communication_bytes), size(score.peak_bytes)],
        ["the plan", seconds(score.plan_s), size(score.plan_communication_bytes), size(score.plan_peak_bytes)],
    ]
    if score.measured is not None:
        rows.append(
            ["yours, as XLA compiles it", None, size(score.measured.communication_bytes), size(score.measured.peak_bytes)]
        )
    return table(["", "step", "sent", "peak memory"], rows)


def _kinds(score: Score) -> str:
    assert score.measured is not None
    rows = [[kind, size(row["predicted"]), size(row["measured"])] for kind, row in score.measured.collectives.items()]
    return table(["kind", "predicted", "measured"], rows)


def _losses(score: Score) -> str:
    if not score.losses:
        return "No argument alone would gain by another layout."
    attributes = {
        loss.path: (loss.given, loss.instead, seconds(loss.seconds), size(loss.bytes), loss.source, len(loss.together))
        for loss in score.losses
    }
    rows = [[_with_others(g.pattern, attributes[g.paths[0]][-1]), *attributes[g.paths[0]][:-1]] for g in grouped(attributes)]
    more = f"\n... and {len(rows) - _ROWS} more rows (--json has all)" if len(rows) > _ROWS else ""
    heading = "What a step gains if only this argument is sharded differently (gains do not add up):\n\n"
    return heading + table(["argument", "yours", "instead", "gains", "sends less", "most of it at"], rows[:_ROWS]) + more


def _with_others(pattern: str, count: int) -> str:
    return pattern if count == 1 else f"{pattern} (and {count - 1} that share{'s' if count == 2 else ''} its layout)"


def _unasked(score: Score) -> str:
    if not score.unasked:
        return "It issues no collective that the plan does not have."
    rows = [[row.kind.value, size(row.bytes), seconds(row.seconds), row.tensor, row.source] for row in score.unasked]
    more = f"\n... and {len(rows) - _ROWS} more rows (--json has all)" if len(rows) > _ROWS else ""
    heading = "Collectives that the plan does not have, or has fewer of:\n\n"
    return heading + table(["kind", "bytes", "seconds", "moves", "at"], rows[:_ROWS]) + more
