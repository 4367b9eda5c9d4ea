"""The reasons why two plans differ, as far as their files say: memory limits, machines, searched factors, constants, prices."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from shardplan.ir import Factor
from shardplan.mesh import Cluster
from shardplan.plans.data import PlanData
from shardplan.report.diff_views import View
from shardplan.report.tables import NEAR, rate, seconds, size
from shardplan.sizes import axes_text

_PRICES = 3
"""The most collectives whose prices are compared."""
_LINE = re.compile(r"^  (the pin .*|runner-up .*|no other layout .*|P\(.*\) alone would save .*)$", re.M)
"""The line of an argument's explanation that says why it has its layout (`shardplan.report.explain`)."""

Pair = tuple[str, str, str]
"""(what, before, after)."""


def reasons(a: View, b: View) -> Iterator[Pair]:
    """The reasons why plans of one step differ, other than their options."""
    limits = [_limit(own, other) for own, other in ((a, b), (b, a))]
    if limits[0] != limits[1] and any(" binds" in text or "less than" in text for text in limits):
        yield "memory limit", limits[0], limits[1]
    yield from _machine(a.data.cluster, b.data.cluster)
    if isinstance(a.data, PlanData) and isinstance(b.data, PlanData) and a.data.factors != b.data.factors:
        yield "factors", _factors(a.data, b.data), _factors(b.data, a.data)
    old, new = a.asked.constants, b.asked.constants
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            yield f"constant {name}", old.get(name, "none"), new.get(name, "none")
    if a.data.cluster.fingerprint() != b.data.cluster.fingerprint() or old != new:
        yield from _prices(a, b)
    if a.data.stopped != b.data.stopped:
        yield "the search ended by", a.data.stopped or "itself", b.data.stopped or "itself"


def explained(view: View, path: str) -> str:
    """The reason that a plan's file gives for an argument's layout; empty where it gives none."""
    found = _LINE.search((view.data.explanations or {}).get(path, ""))
    return found[1] if found else ""


# -- memory ------------------------------------------------------------------------------------------------------------


def _limit(own: View, other: View) -> str:
    """A plan's memory limit, and whether it binds or excludes the other plan."""
    limit = min(part.plan.memory_limit for part in own.parts)
    plans = [part.plan for part in own.parts]
    free = [(plan.searched_s, plan.unlimited_s) for plan in plans if plan.unlimited_s is not None]
    slower = [f"{seconds(without_s)} -> {seconds(own_s)}" for own_s, without_s in free if own_s > without_s * (1 + NEAR)]
    if slower:
        return f"{size(limit)} binds: it makes the search's best {', '.join(slower)}"
    needed = max(part.plan.peak_bytes for part in other.parts)
    if needed > limit:
        return f"{size(limit)}, less than the {size(needed)} of the other plan"
    return f"{size(limit)} does not bind"


# -- the machine -------------------------------------------------------------------------------------------------------


def _machine(a: Cluster, b: Cluster) -> Iterator[Pair]:
    """The figures of links and devices that differ; levels are matched by name."""
    yield from _figures("device", asdict(a.device), asdict(b.device))
    levels = [{level.name: asdict(level) for level in cluster.levels} for cluster in (a, b)]
    for name in dict.fromkeys([*levels[0], *levels[1]]):
        if name in levels[0] and name in levels[1]:
            yield from _figures(f"links of {name}", levels[0][name], levels[1][name])
    names = [axes_text({level.name: level.size for level in cluster.levels}) for cluster in (a, b)]
    if names[0] != names[1]:
        yield "levels", names[0], names[1]


def _figures(what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Pair]:
    for name in old:
        if old[name] == new[name] or (what != "device" and name == "size"):
            continue
        if isinstance(old[name], Mapping) and isinstance(new[name], Mapping):
            keys = dict.fromkeys([*old[name], *new[name]])
            yield from _figures(f"{what} {name}", *({k: own[name].get(k) for k in keys} for own in (old, new)))
        else:
            yield f"{what}, {name}", _with_unit(name, old[name]), _with_unit(name, new[name])


def _with_unit(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("bytes_per_s"):
        return rate(value)
    if name.endswith("_bytes"):
        return size(value)
    return seconds(value) if name.endswith("_s") and "per_s" not in name else f"{value:.4g}"


def _factors(own: PlanData, other: PlanData) -> str:
    """The factors of a plan with their seconds, and the result of its search for the other plan's factors."""
    text = f"{_mesh(own.factors)} ({seconds(own.searched_s)})"
    tried = next((t for t in own.tried if t.factors == other.factors), None)
    if tried is None:
        return text
    found = f"at {seconds(tried.seconds)}" if tried.seconds is not None else f"left out: {tried.why}"
    return f"{text}, searched {_mesh(tried.factors)} too, {found}{'' if tried.fits else ', which does not fit'}"


def _mesh(factors: tuple[Factor, ...]) -> str:
    return axes_text({f.name: f.size for f in factors})


# -- prices ------------------------------------------------------------------------------------------------------------


def _prices(a: View, b: View) -> Iterator[Pair]:
    """Collectives of equal kind, size and devices whose prices differ, largest change first."""
    old, new = _priced(a), _priced(b)
    changed = [key for key in old if key in new and abs(new[key] - old[key]) > NEAR * max(old[key], new[key])]
    changed.sort(key=lambda key: (-abs(new[key] - old[key]), key))
    for key in changed[:_PRICES]:
        kind, axes, nbytes, _ = key
        yield f"price of {kind} of {size(nbytes)} over {axes}", seconds(old[key]), seconds(new[key])


def _priced(view: View) -> dict[tuple[str, str, float, int], float]:
    """The seconds of one collective, by kind, levels, bytes and the number of arrays that travel with it."""
    found: dict[tuple[str, str, float, int], float] = {}
    for part in view.parts:
        levels = {f.name: f"{part.plan.cluster.level_names[f.level]} {f.size}" for f in part.plan.factors}
        for c in part.plan.collectives:
            over = " x ".join(levels[axis] for axis in c.axes)
            found.setdefault((str(c.kind), over, c.bytes, len(c.along)), c.seconds)
    return found
