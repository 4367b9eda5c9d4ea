"""Plans and comparisons as text for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.collectives.dsl import shortened
from shardplan.ir import spec_text
from shardplan.plans.data import Baseline, PlanData, TriedPlacement
from shardplan.remat import Remat
from shardplan.report.parallelism import matrix_text
from shardplan.report.paths import grouped
from shardplan.report.peak_range import peak_range_text
from shardplan.report.tables import NEAR, rate, seconds, size, table
from shardplan.sizes import axes_text, counted

_STOPPED = {
    "time budget": "the time budget ended the search: this is the best plan until then, more time may find a better one",
    "interrupted": "the search was interrupted: this is the best plan until then, a whole search may find a better one",
}

_REST = 12
"""The most rows of collectives shown; the total counts all."""


def plan_text(plan: PlanData, *, title: str = "the step") -> str:
    """The whole plan: machine, mesh, times, memory, shardings, collectives, flags, baselines."""
    parts = [
        _head(plan, title),
        _section("Parallelism matrix (purpose by level)", matrix_text(plan)),
        _section("Arguments", specs_text(plan)),
        _section("Collectives of one step, per device", collectives_text(plan)),
        *([_section("XLA flags that the plan counts on, on GPUs", flags_text(plan))] if plan.xla_flags else []),
        _section("Baselines, in the same cost model", baselines_text(plan)),
        *([_section("Placements", placements_text(plan.placements_tried))] if plan.placements_tried else []),
    ]
    return "\n\n".join(parts)


def _head(plan: PlanData, title: str) -> str:
    return "\n".join(f"{name:<11} {text}" for name, text in plan_facts(plan, title))


def plan_facts(plan: PlanData, title: str) -> list[tuple[str, str]]:
    """The head of a plan's text, as (name, text); a text without a name continues the one before it."""
    cluster = plan.cluster
    devices = math.prod(level.size for level in cluster.levels)
    links = ", ".join(f"{level.name} {level.size} x {rate(level.bandwidth_bytes_per_s)} {level.kind}" for level in cluster.levels)
    mesh = axes_text(plan.axes)
    rows = [
        ("step", f"{title}: {counted(plan.operators, 'operator')}, {counted(len(plan.arguments), 'argument array')}"),
        *idle_facts(plan),
        ("cluster", f"{cluster.name}: {devices} x {cluster.device.name} ({links})"),
        ("mesh", mesh),
        ("step time", _step_time(plan)),
        ("", bound_text(plan)),
        ("memory", f"{size(plan.peak_bytes)} a device of {size(plan.memory_limit)} ({plan.peak_bytes / plan.memory_limit:.1%})"),
        ("", peak_range_text(plan)),
        *((("", f"memory limit {size(plan.memory_limit)}: {plan.memory_limit_origin}"),) if plan.memory_limit_origin else ()),
        *((("host memory", host_text(plan)),) if plan.host_s else ()),
        ("traffic", f"{size(plan.communication_bytes)} on the wire, per device and step"),
        *((("remat", remat_text(plan)),) if plan.remat != Remat() else ()),
        ("backend", f"{plan.backend}: {plan.backend_reason}"),
        ("planned in", f"{seconds(plan.search_s)}, after {seconds(plan.trace_s)} of tracing"),
    ]
    rows += [("note", _STOPPED[plan.stopped])] if plan.stopped else []
    rows += [("note", f"{n} of unknown trip count, priced as one iteration: {where}") for n, where in _unknown(plan)]
    rows += [("note", f"{what} whole on every device: {where}") for what, where in _whole(plan)]
    return rows + [("note", text) for text in (*plan.idle_axes.values(), *constants_text(plan))]


def idle_facts(plan: PlanData) -> list[tuple[str, str]]:
    """Whether devices repeat the work of others and, if the baselines are known, the least batch for which data parallelism
    over all devices would pay.

    The replicated step computes R seconds, data parallelism computes C and communicates for D, whatever the batch. N times the
    batch saves at most N (R - C) of compute, because ops that do not fill a device get no slower by more work. So data
    parallelism needs at least D / (R - C) times the batch.
    """
    copies = math.prod(plan.repeated.values())
    if copies == 1:
        return []
    said = "half of the devices repeat the other half's work" if copies == 2 else f"{copies} devices each do the same work"
    said += f" ({', '.join(f'{name}={count}' for name, count in plan.repeated.items())})"
    known = {b.name: b for b in plan.baselines or ()}
    if "replicated" in known and "data parallel" in known:
        whole, parallel = known["replicated"], known["data parallel"]
        saved_s = whole.compute_s - parallel.compute_s
        if whole.step_time_s < parallel.step_time_s and saved_s > 0:
            times = (parallel.step_time_s - parallel.compute_s) / saved_s
            said += f"; data parallelism needs at least about {times:.2g} times this batch"
    return [("idle", said)]


def placements_text(tried: Sequence[TriedPlacement]) -> str:
    """The placements among which a plan was chosen."""
    rows = [
        [
            row.what,
            "-" if row.step_time_s is None else seconds(row.step_time_s),
            "-" if row.peak_bytes is None else size(row.peak_bytes),
            row.why_not or "this plan",
        ]
        for row in tried
    ]
    return table(["placement", "step", "memory", "why not"], rows, align="lrrl")


def constants_text(plan: PlanData) -> list[str]:
    """At most one remark: that the plan was made with other constants than today's."""
    changed = ", ".join(f"{name} {then} (now {now})" for name, (then, now) in plan.changed_constants.items())
    return [f"planned with other constants, so prices made again differ: {changed}"] if changed else []


def _unknown(plan: PlanData) -> list[tuple[str, str]]:
    """The while loops of unknown trip count, with their source lines."""
    found = plan.unknown_trips
    return (
        [("a while loop" if len(found) == 1 else f"{len(found)} while loops", ", ".join(dict.fromkeys(found)))] if found else []
    )


def _whole(plan: PlanData) -> list[tuple[str, str]]:
    """The primitives that run whole on every device, with their source lines as far as JAX knows them."""
    places: dict[str, list[str]] = {}
    for text in plan.whole_ops:
        primitive, _, place = text.partition(" at ")
        places.setdefault(primitive, []).append(place if place != "?" else "an unknown line")
    return [(f"{primitive} runs", ", ".join(found)) for primitive, found in places.items()]


def _step_time(plan: PlanData) -> str:
    """The step's seconds, their parts, and both bounds (nothing overlaps, one hides the other)."""
    bounds = f"{seconds(plan.serial_s)} one after the other, {seconds(plan.hidden_s)} perfectly hidden"
    return f"{spent_text(plan)}; {bounds}"


def spent_text(plan: PlanData) -> str:
    """The step's seconds and their parts."""
    spent = f"compute {seconds(plan.compute_s)}, communication {seconds(plan.communication_s)}"
    if plan.time_model == "overlap":
        slowed_s = plan.step_time_s - plan.compute_s - plan.exposed_s - plan.host_s
        beside = f"; the rest slows compute by {seconds(slowed_s)}" if slowed_s > NEAR * plan.step_time_s else ""
        spent += f" ({seconds(plan.exposed_s)} of it exposed{beside})"
    spent += f", copies from host memory and back {seconds(plan.host_s)}" if plan.host_s else ""
    return f"{seconds(plan.step_time_s)}: {spent}"


def host_text(plan: PlanData) -> str:
    """The arrays that lie in host memory between steps, the activations there, and what their copies cost a step."""
    count, rate_text = len(plan.offloaded), rate(plan.cluster.device.host_bytes_per_s or 0.0)
    what = [f"{count} array{'s' * (count > 1)}, {size(plan.host_bytes)} a device"] if count else []
    stacks = sum(value.loop is not None for value in plan.hosted)
    kept = len(plan.hosted) - stacks
    what += [f"{kept} activation{'s' * (kept > 1)}"] if kept else []
    what += [f"activations of {stacks} stack{'s' * (stacks > 1)}"] if stacks else []
    what = what or ["values that the step itself copies"]
    return (
        f"{' and '.join(what)}; copies there and back take {seconds(plan.host_s)} a step at {rate_text}, and nothing hides them"
    )


def remat_text(plan: PlanData) -> str:
    """The recomputation of the backward pass, and the best plan without it; all bytes are those of one device."""
    remat = plan.remat
    if not remat.parts:
        return f"nothing is computed again: {remat.note}"
    counts = [(remat.loops, "loop body", "loop bodies"), (remat.blocks, "block", "blocks")]
    what = " and ".join(f"{n} {one if n == 1 else plural}" for n, one, plural in counts if n)
    but = ", contractions excepted" if remat.policy == "light" else ""
    text = f"{what} computed again in the backward pass{but} ({remat.operators} operators): {size(plan.peak_bytes)} a device"
    without = remat.without
    if without is None:
        return text
    if not without.fits:
        return f"{text}; without, nothing fits (the smallest found {size(without.peak_bytes)} a device)"
    return f"{text}; without, {size(without.peak_bytes)} a device and {seconds(without.step_time_s)} a step"


def bound_text(plan: PlanData) -> str:
    """How far the plan may be from the optimum."""
    if plan.bound_s is None or plan.bound_s <= 0:
        return "no lower bound is known"
    pins = " with these pins" if plan.pins else ""
    pins += {"layers": " with one choice for equal layers", "none": "", "timesteps": ""}[plan.one_choice]
    pins += " with what is computed again" if plan.remat.parts else ""
    pins += ", as the search prices collectives" if plan.backend == "explicit" else ""
    return f"{_bound_text(plan, pins)}{_REPLACED if plan.replaced else ''}"


_REPLACED = "; a baseline was chosen: as scheduled it is faster than what the search found"


def _bound_text(plan: PlanData, pins: str) -> str:
    unlimited_s = plan.unlimited_s
    if not plan.replaced and unlimited_s is not None and plan.searched_s <= unlimited_s * (1 + NEAR):
        end = "as scheduled, another layout may be faster" if plan.backend == "explicit" else "no layout of this mesh is faster"
        return f"the optimum of the cost model{pins}: {end}"
    bound_s = plan.bound_s or 0.0
    if bound_s > plan.step_time_s * (1 + NEAR):
        above = max(plan.searched_s / bound_s - 1, 0.0)
        bound = f"lower bound {seconds(bound_s)}, more than the scheduled step: as scheduled, another layout may be faster"
        text = f"at most {above:.1%} above the optimum{pins} ({bound})"
    else:
        text = f"at most {plan.gap or 0.0:.1%} above the optimum{pins} (lower bound {seconds(bound_s)})"
    if unlimited_s is None or plan.replaced:
        return text
    return f"{text}; without the memory limit {seconds(unlimited_s)}"


def specs_text(plan: PlanData) -> str:
    """The PartitionSpec of every argument; equal arrays with equal specs share a row."""
    shapes = argument_shapes(plan)
    texts = {path: spec_text(entries) for path, entries in plan.entries.items()}
    rows: list[list[str]] = []
    for group in grouped({p: (texts[p], shapes[p]) for p in texts}):
        first = group.paths[0]
        shape, dtype, nbytes = shapes[first]
        local = len(group.paths) * nbytes / _ways(plan, first)
        rows.append([group.pattern, f"{dtype}[{','.join(map(str, shape))}]", texts[first], size(local)])
    return table(["path", "array", "spec", "a device"], rows, align="lllr")


def argument_shapes(plan: PlanData) -> dict[str, tuple[tuple[int, ...], str, int]]:
    """Shape, dtype and bytes of each argument, by path."""
    return {a.path: (a.shape, a.dtype, a.nbytes) for a in plan.arguments}


def _ways(plan: PlanData, path: str) -> int:
    axes = plan.axes
    entries = [e for e in plan.entries[path] if e is not None]
    return math.prod(axes[a] for e in entries for a in ((e,) if isinstance(e, str) else e))


# -- collectives and baselines -----------------------------------------------------------------------------------------


def collective_rows(plan: PlanData) -> list[dict[str, Any]]:
    """The plan's collectives by kind, axes and program, dearest first; each row names its dearest tensor."""
    found: dict[tuple[str, tuple[str, ...], str], dict[str, Any]] = {}
    for c in plan.collectives:
        row = found.setdefault(
            (c.kind, c.axes, c.program),
            {
                "kind": c.kind,
                "axes": list(c.axes),
                "program": c.program,
                "times": 0.0,
                "wire_bytes": 0.0,
                "seconds": 0.0,
                "largest": "",
                "source": "",
                "_most": -1.0,
            },
        )
        row["times"] += c.times
        row["wire_bytes"] += c.wire_bytes * c.times
        row["seconds"] += c.seconds * c.times
        if c.seconds * c.times > row["_most"]:
            row["_most"], row["largest"], row["source"] = c.seconds * c.times, c.arrays, c.source
    rows = sorted(found.values(), key=lambda r: (-r["seconds"], r["kind"], r["axes"], r["program"]))
    return [{k: v for k, v in row.items() if k != "_most"} for row in rows]


def collectives_text(plan: PlanData) -> str:
    """A table of `collective_rows`."""
    rows = collective_rows(plan)
    if not rows:
        return "none: every device works on its own"
    shown = [
        [_way(r), " x ".join(r["axes"]), f"{r['times']:g}", size(r["wire_bytes"]), seconds(r["seconds"]), _dearest(r)]
        for r in rows[:_REST]
    ]
    total = ["total", "", f"{sum(r['times'] for r in rows):g}", size(plan.communication_bytes), seconds(plan.communication_s), ""]
    return table(["collective", "over", "times", "on the wire", "time", "the dearest"], [*shown, total], align="llrrrl")


def flags_text(plan: PlanData) -> str:
    """The flags in the form that the environment's XLA_FLAGS takes."""
    return "\n".join(f"--{name}={value}" for name, value in plan.xla_flags.items())


def _way(row: Mapping[str, Any]) -> str:
    return f"{row['kind']} as {shortened(row['program'])}" if row["program"] else str(row["kind"])


def _dearest(row: Mapping[str, Any]) -> str:
    where = str(row["source"]).rsplit("/", 1)[-1]
    name = str(row["largest"])
    return f"{name}, {where}" if not name.startswith("value ") else where


def baselines_text(plan: PlanData) -> str:
    """The plan and every baseline, fastest first."""
    rows = [("this plan", plan.step_time_s, plan.communication_bytes, plan.peak_bytes, True)]
    rows += [(b.name, b.step_time_s, b.communication_bytes, b.peak_bytes, b.fits) for b in plan.baselines or ()]
    rows[1:] = sorted(rows[1:], key=lambda r: (not r[4], r[1]))
    best = plan.step_time_s
    cells = [
        [name, seconds(t), f"{t / best:.2f}x" if best else "-", size(wire), size(peak), "yes" if fits else "no"]
        for name, t, wire, peak, fits in rows
    ]
    shown = table(["plan", "step time", "ratio", "on the wire", "memory", "fits"], cells, align="lrrrrl")
    reasons: dict[str, list[str]] = {}
    for name, reason in plan.left_out:
        reasons.setdefault(reason, []).append(name)
    missing = (f"not possible: {', '.join(names)} ({reason})" for reason, names in reasons.items())
    free = ["these keep no pins, and may be faster for that"] if plan.pins else []
    if any(fits and f"{t / best:.2f}" < "1.00" for _, t, _, _, fits in rows[1:] if 0 < t < best):
        free.append(f"a ratio below 1: that baseline is predicted to be faster than this plan{_restricted(plan)}")
    free += ["these may leave whole what the objective splits, and send less for that"] if plan.objective == "bytes" else []
    return "\n".join([shown, *missing, *free])


def _restricted(plan: PlanData) -> str:
    """The restrictions of a plan that its baselines do not have."""
    what = ["pins"] * bool(plan.pins) + ["axes="] * bool(plan.fixed_axes) + ["a search that ended early"] * bool(plan.stopped)
    return (
        f", which {' and '.join(what)} restrict{'s' if what in (['axes='], ['a search that ended early']) else ''}"
        if what
        else ""
    )


def best_baseline(plan: PlanData) -> Baseline | None:
    """The fastest baseline that fits."""
    return min((b for b in plan.baselines or () if b.fits), key=lambda b: b.step_time_s, default=None)


# -- comparison --------------------------------------------------------------------------------------------------------


def comparison_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The plan and its baselines side by side, with the measurements of their compiled programs if there are any."""
    measured = any(r.get("measured_bytes") is not None for r in rows)
    timed = any(r.get("measured_step_s") is not None for r in rows)
    first = rows[0]["step_time_s"]
    heads = ["plan", "step time", "ratio", "on the wire", "memory", "fits"]
    heads += ["measured wire", "measured memory"] * measured + ["measured step", "spread"] * timed
    cells: list[list[str]] = []
    for r in rows:
        row = [r["name"], seconds(r["step_time_s"]), f"{r['step_time_s'] / first:.2f}x" if first else "-"]
        row += [size(r["communication_bytes"]), size(r["peak_bytes"]), "yes" if r["fits"] else "no"]
        if measured:
            row += (
                [size(r["measured_bytes"]), size(r["measured_peak_bytes"])] if r.get("measured_bytes") is not None else ["-", "-"]
            )
        if timed:
            ran = r.get("measured_step_s") is not None
            row += [seconds(r["measured_step_s"]), f"{r['measured_spread']:.0%}"] if ran else ["-", "-"]
        cells.append(row)
    return table(heads, cells, align="lrrrrl" + "rr" * measured + "rr" * timed)


def measured_order(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """How well the predicted step times order the measured ones, as lines of text; none where fewer than two plans ran."""
    from scipy.stats import kendalltau  # takes a second to load

    ran = [r for r in rows if r.get("measured_step_s") is not None]
    if len(ran) < 2:
        return []
    tau = float(kendalltau([r["step_time_s"] for r in ran], [r["measured_step_s"] for r in ran]).statistic)
    said = "all predictions are equal" if math.isnan(tau) else f"Kendall's tau {tau:.2f}"
    return [f"Predicted against measured order of {len(ran)} plans: {said} (1 is the same order, 0 none, -1 the opposite)."]


def _section(title: str, body: str) -> str:
    return f"{title}\n\n" + "\n".join("  " + line for line in body.splitlines())
