"""A calibration as text: the fitted figures, how well they predict the measurements, and what was not measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardplan.mesh.profile import Profile
from shardplan.report.tables import rate, seconds, table


def calibration_text(profile: Profile, *, measured: int, cached: int) -> str:
    """The figures of a profile and its evidence; ``measured`` and ``cached`` count measurements."""
    evidence = profile.evidence
    spread = evidence["spread"]
    told = [
        f"{measured} kernels and collectives measured, {cached} known from the cache",
        f"repeats spread by {spread['median']:.0%} (median of the distance between quartiles over the median of "
        f"{spread['repeats']}; largest {spread['worst']:.0%}, {spread['worst_name']}; bound {spread['bound']:.0%})",
    ]
    kept = [f"Not measured: {one}." for one in evidence["kept"]]
    return "\n".join([_figures(profile), "", _fit_table(evidence), "", *told, *kept])


def _figures(profile: Profile) -> str:
    cluster = profile.cluster
    device = cluster.device
    rows = [("device", f"{device.name} ({profile.device_kind}), {cluster.size} at work at once")]
    rows += [
        (f"products of {dtype}", f"{peak * device.flops_efficiency / 1e9:,.1f} Gflop/s")
        for dtype, peak in device.flops_per_s.items()
    ]
    rows += [
        ("fused attention", f"{device.attention_efficiency / device.flops_efficiency:.2f} of the rate of products"),
        ("memory", rate(device.memory_bytes_per_s * device.memory_efficiency)),
        ("launch of a kernel", seconds(device.launch_s)),
        ("launch of a collective", seconds(device.instruction_s)),
        ("contention", f"{device.contention:.2f}"),
    ]
    for level in cluster.levels:
        if level.name in profile.measured:
            link = f"{level.kind} of {level.size}, {rate(level.bandwidth_bytes_per_s)}, {seconds(level.latency_s)} a message"
            rows.append((f"link of {level.name}", link))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _fit_table(evidence: Mapping[str, Any]) -> str:
    rows = [
        (one["family"], one["samples"], f"{one['median']:.0%}", f"{one['worst']:+.0%}", one["worst_name"])
        for one in evidence["fit"]
    ]
    head = ("predicted over measured", "kernels", "median error", "worst", "of")
    return table(head, rows, "lrrrl")


def calibration_json(profile: Profile, *, measured: int, cached: int, file: str | None) -> dict[str, Any]:
    """The profile's own JSON, with the counts of measurements and the file that has it."""
    return {**profile.to_dict(), "measured": measured, "cached": cached, "file": file}
