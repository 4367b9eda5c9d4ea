"""A timeline as text for people."""

from __future__ import annotations

from shardplan.report.tables import seconds, size, table
from shardplan.simulate.figures import Simulated, timeline_json, top_exposed

_WHY = {
    "compute_not_run_s": "compute that is priced, but runs once for equal ops, or in a branch that is not taken",
    "communication_not_run_s": "collectives that are priced, but not simulated",
    "contention_s": "compute and communication that slow each other",
    "overlap_s": "streams that run at once",
    "time_model_s": "what the plan's time model adds up otherwise",
}


def timeline_text(shown: Simulated, *, title: str = "the step") -> str:
    """The simulated and the priced step, why they differ, the streams, and the collectives that are exposed longest."""
    figures, priced = timeline_json(shown), shown.priced
    how = "compute and communication overlap" if shown.overlap else "one task after the other"
    slow = shown.contention
    contention = f", contention {slow.compute:g} of compute and {slow.communication:g} of communication" if shown.overlap else ""
    path = figures["critical_path"]
    lines = [
        f"{title}: {seconds(shown.step_time_s)} simulated ({how}{contention}), {seconds(priced.step_time_s)} priced",
        f"{figures['tasks']:,} tasks"
        + (f"; all {priced.devices} devices run alike, so one is simulated" if priced.devices > 1 else ""),
        f"memory {size(shown.peak_bytes)} at most, {size(priced.peak_bytes)} predicted",
        f"communication {seconds(shown.communication_s)}, of which {seconds(shown.exposed_s)} exposed",
        f"critical path: {path['tasks']:,} tasks, {seconds(path['compute_s'])} compute and "
        f"{seconds(path['communication_s'])} communication",
    ]
    if priced.backend != "explicit":
        lines.append(f"the plan runs under {priced.backend}, which sends other collectives: this is the explicit program")
    streams = [(s["name"], seconds(s["busy_s"]), _share(s["busy_s"], shown.step_time_s)) for s in figures["streams"]]
    parts = ["\n".join(lines), "Streams\n\n" + table(("stream", "busy", "of the step"), streams)]
    why = [(_WHY[k], ("+" if v > 0 else "") + seconds(v)) for k, v in figures["difference"].items() if abs(v) > 1e-12]
    if why:
        parts.append("From the priced to the simulated step\n\n" + table(("because of", "time"), why))
    rows = [
        (x.name, ", ".join(x.axes), size(x.nbytes), times, seconds(exposed_s), x.source)
        for x, exposed_s, times in top_exposed(shown)
    ]
    if rows:
        headers = ("collective", "axes", "bytes", "times", "exposed", "source")
        parts.append("Exposed longest\n\n" + table(headers, rows))
    return "\n\n".join(parts)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else "-"
