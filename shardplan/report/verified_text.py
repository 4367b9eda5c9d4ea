"""Verifications as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.report.tables import size, table


def _one_for_one(found: Mapping[str, Any]) -> list[str]:
    """Whether the compiled program has the planned collectives and no others."""
    rows, left = found.get("one_for_one"), found.get("unmatched", ())
    if rows is None:
        return []
    if not left:
        lost = sum(row["folded"] for row in found.get("folded", ()))
        but = f"; XLA left out {lost} of them as equal to others or not needed" if lost else ""
        return [f"  one for one: {len(rows)} collectives as planned, none beside them{but}"]
    first = [
        f"    {row['kind']} of {size(row['bytes'])} over {row['groups'] or 'pairs'}: planned {row['planned']}, "
        f"compiled {row['compiled']} ({row['source'] or row['scope'] or 'by XLA'})"
        for row in left[:5]
    ]
    return [f"  NOT one for one: {len(left)} of {len(rows)} differ", *first]


def verified_text(found: Mapping[str, Any]) -> str:
    """A verification; ``found`` is its `Verified.json`."""
    worst, reference = found["worst"], found["reference"]
    lines = [
        f"{_verdict(found)} to the {'step op by op' if reference else 'single-device step'} after each of {found['steps']} steps",
        *([f"  {reference['text']}"] if reference else []),
        _largest_error(found["largest"]),
        f"  closest to its tolerance: {worst['path']} in step {worst['step']}: "
        f"{worst['error']:.3g} of {worst['tolerance']:.3g} allowed",
    ]
    if found["unequal"]:
        lines.append(f"  beyond it: {_some(found['unequal'])}")
    count = len(found["moved"])
    moved = (
        f"{count} array{'s come' if count > 1 else ' comes'} back in another sharding"
        if count
        else "state comes back where it was"
    )
    lines.append(f"  {_compiled_again(found)}; {moved}")
    if found["recompiles"] and found["retyped"]:
        lines.append(
            f"  compiled again because of {_some(found['retyped'])}: Python numbers, and arrays made of them, are weakly typed, "
            "until they meet others; give them a dtype, jnp.asarray(x, dtype)"
        )
    lines += _notes(found)
    rows = [
        [
            kind,
            f"{b['predicted_count']:g}",
            f"{b['measured_count']:g}",
            size(b["predicted"]),
            size(b["measured"]),
            ratio(b["measured"], b["predicted"]),
        ]
        for kind, b in sorted(found["collectives"].items())
    ]
    rows.append(["on the wire", "", "", *_pair(found["predicted_bytes"], found["measured_bytes"])])
    rows.append(["(as compiled)", "", "", *_pair(found["predicted_bytes"], found["raw_measured_bytes"])])
    rows.append(["peak memory", "", "", *_pair(found["predicted_peak_bytes"], found["measured_peak_bytes"])])
    lines += _one_for_one(found)
    heads = ["per device and step", "planned", "compiled", "predicted", "measured", "ratio"]
    return "\n".join(lines) + "\n\n" + table(heads, rows, align="lrrrrr")


def _largest_error(largest: Mapping[str, Any]) -> str:
    """The largest error, beside the change that rounding alone causes in that array."""
    if not largest["error"]:
        return "  no number differs"
    if not largest["inexact"]:
        return f"  largest error: in {largest['path']}, in step {largest['step']}, which is exact and must be the same"
    return (
        f"  largest error: {largest['error']:.2g} of the largest number in {largest['path']}, in step {largest['step']}\n"
        f"    on one device, inputs moved by one unit in the last place change that array by {largest['noise']:.2g}; allowed "
        f"are ten times as much, plus 1e-06{_undetermined(largest['noise'])}"
    )


def _undetermined(noise: float) -> str:
    """A remark on an array that is mostly rounding, such as a gradient that is zero on paper."""
    return "" if noise < 0.1 else "\n    the step does not determine that array: it is rounding for the most part"


def _verdict(found: Mapping[str, Any]) -> str:
    if found["equal"]:
        return "equal" if found["numbers"] else "equal (every array is empty)"
    return "NOT EQUAL" if found["compared"] else "NOT COMPARED (no number is finite)"


def _notes(found: Mapping[str, Any]) -> list[str]:
    """Notes on what a verification does not prove."""
    notes = [f"  note: {uncut_text(found['devices'])}"] if found["uncut"] else []
    if found["zeros"]:
        count = len(found["zeros"])
        were = "arguments were" if count > 1 else "argument was"
        notes.append(
            f"  note: {count} integer {were} only shapes, so all zero ({_some(found['zeros'])}): "
            "faults that move integers show with real arrays (concrete=True)"
        )
    kernels = [name for name in found["stand_ins"] if name.startswith("pallas_call:")]
    formulas = [name for name in found["stand_ins"] if name not in kernels]
    if formulas:
        notes.append(
            f"  note: these devices cannot run {_some(formulas)}; their formulas were computed instead: "
            "cuts and collectives are proven, the kernels are not"
        )
    if kernels:
        notes.append(
            f"  note: these devices cannot run {_some(kernels)}; Pallas's interpreter ran the kernels' programs instead: "
            "cuts and collectives are proven, the compiled kernels are not"
        )
    return notes


def uncut_text(devices: int) -> str:
    """What the verification of a plan that cuts no array proves, and how to verify one that does."""
    return (
        "the plan cuts no array, so every device ran the whole step, and the comparison proves little: give "
        f'--axes data={devices} (axes={{"data": {devices}}} in Python) or a larger batch to verify a sharded step'
    )


def _compiled_again(found: Mapping[str, Any]) -> str:
    """How often the step compiled after its first run, with the plan and without it."""
    count, single = found["recompiles"], found["single_recompiles"]
    without = "" if not (count and single) else ", as without a plan" if count == single else f", {single} without a plan"
    return f"{count} compilation{'' if count == 1 else 's'} after the first step{without}"


def _some(paths: Sequence[str]) -> str:
    """The first four paths, and the number of the others."""
    return ", ".join(paths[:4]) + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")


def _pair(predicted: float, measured: float) -> list[str]:
    return [size(predicted), size(measured), ratio(measured, predicted)]


def ratio(measured: float, predicted: float) -> str:
    """A ratio like ``1.03``; a dash if only the prediction is zero, 1.00 if both are zero."""
    return f"{measured / predicted:.2f}" if predicted else "-" if measured else "1.00"
