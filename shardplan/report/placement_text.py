"""A placement as text for people: the step beside its baselines, and for each operator its devices, its cut and the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardplan.placement.configurations import Configuration, Strategy
from shardplan.placement.device_groups import Region
from shardplan.placement.operators import Operator
from shardplan.report.tables import device_ranges, seconds, table


def placement_text(
    step_time_s: float,
    baselines: Mapping[str, float],
    operators: Sequence[Operator],
    strategy: Strategy,
    gains: Sequence[float | None],
    *,
    regions: Sequence[Region] = (),
    plan_priced_s: float | None = None,
    speeds: Mapping[int, float] | None = None,
    title: str,
    origin: str,
    searched: str,
) -> str:
    """``gains`` [operators] are the extra seconds of a step if one operator alone runs data parallel (None: it already does).

    ``plan_priced_s`` is the planner's price for the step of the plan on all devices, if known. ``speeds`` has the speeds of the
    devices that run something, by number.
    """
    rows = [(name, seconds(s), f"{s / step_time_s:.2f}x" if step_time_s else "-") for name, s in baselines.items()]
    parts = [f"{title}: {seconds(step_time_s)} a step ({origin})\n{searched}"]
    parts.append("Beside\n\n" + table(("strategy", "step", "of this"), rows))
    if plan_priced_s is not None:
        parts.append(f"The planner prices the plan on all devices at {seconds(plan_priced_s)}.")
    if speeds and len(set(speeds.values())) > 1:
        parts.append(_unequal(speeds))
    if regions:
        areas = [(device_ranges(r.devices), str(len(r.operators)), seconds(r.seconds), _ends(r, operators)) for r in regions]
        parts.append("Regions\n\n" + table(("devices", "operators", "computes", "from and to"), areas))
    where = [
        (o.name, cut_text(o, c), device_ranges(c.devices), "data parallel" if gain is None else _why(gain), o.source)
        for o, c, gain in zip(operators, strategy, gains, strict=True)
    ]
    parts.append("Where operators run\n\n" + table(("operator", "cut", "devices", "data parallel instead", "source"), where))
    return "\n\n".join(parts)


def _unequal(speeds: Mapping[int, float]) -> str:
    """Says that devices of unequal speed have equal parts."""
    each = (f"{s:g}x on {device_ranges([d for d in speeds if speeds[d] == s])}" for s in sorted(set(speeds.values())))
    return f"The parts of an operator are equal, but devices are not: a slower device takes longer. Speeds: {', '.join(each)}."


def _ends(region: Region, operators: Sequence[Operator]) -> str:
    """The names of the first and the last operator of a region."""
    return ", ".join(dict.fromkeys(operators[i].name for i in (region.operators[0], region.operators[-1])))


def _why(gain: float) -> str:
    return ("+" if gain > 0 else "") + seconds(gain)


def cut_text(operator: Operator, chosen: Configuration) -> str:
    """The degrees of the loops that are cut, by kind and name: ``S i0/4, P i1/2``."""
    cut = [f"{x.kind} {x.name}/{k}" for x, k in zip(operator.loops, chosen.degrees, strict=True) if k > 1]
    return ", ".join(cut) or "whole"
