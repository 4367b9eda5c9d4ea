"""The description language's coverage, and one primitive's description, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.report.tables import table

_WIDTH = 100


def coverage_text(counts: Mapping[str, Any]) -> str:
    """The counts of `shardplan.tdl.coverage`: primitives by kind, and the names that need attention."""
    kinds = [[kind, str(count)] for kind, count in sorted(counts["kinds"].items(), key=lambda k: (-k[1], k[0]))]
    lines = [f"{counts['primitives']} primitives in the installed JAX", "", table(["kind", "count"], kinds), ""]
    if counts["examples"]:
        lines.append(
            f"{counts['verified']} descriptions and {counts['opaque_verified']} batch cuts proven: {counts['cuts']} cuts run, "
            f"each description on at least {counts['examples']} drawn cases"
        )
        lines += _list("without a proof", counts["unverified"])
    lines += _list("undescribed", counts["undescribed"])
    lines += _differences(counts["differences"])
    lines += [f"FAULT {name}: {fault}" for name, fault in sorted(counts["faults"].items())]
    return "\n".join(lines)


def _differences(found: Mapping[str, Any]) -> list[str]:
    """The primitives that differ from those of the tested release of JAX."""
    release = found["release"]
    changed = [f"{name} ({' '.join(params)})" for name, params in sorted(found["changed"].items())]
    lines = _list(f"new since JAX {release}", found["new"]) + _list(f"gone since JAX {release}", found["gone"])
    lines += _list(f"other parameters than in JAX {release}", changed)
    return lines or [f"no primitive is new, gone or changed against JAX {release}, on which every description is proven"]


def _list(title: str, names: Sequence[str]) -> list[str]:
    return textwrap.wrap(f"{title}: {', '.join(names)}", _WIDTH, subsequent_indent="  ") if names else []


def primitive_text(facts: Mapping[str, Any]) -> str:
    """One primitive: its kind and, if it is described, its description and the strategies that follow."""
    lines = [f"{facts['primitive']}: {facts['kind']}" + (f" ({facts['reason']})" if facts["reason"] else "")]
    if facts.get("register"):
        lines += ["", "for example:"] + [f"  {text}".rstrip() for text in facts["register"]]
    if "description" not in facts:
        return "\n".join(lines)
    shapes = ", ".join(f"x{i} {shape}" for i, shape in enumerate(facts["operands"]))
    lines += ["", f"for example with {shapes or 'no operands'}:"]
    lines += [f"  {text}" for text in facts["description"]]
    lines += ["", table(["loop", "extent", "kind"], [[v["name"], str(v["extent"]), v["kind"]] for v in facts["loops"]])]
    if facts["strategies"]:
        lines += ["", "cut two ways:"] + [f"  {s}" for s in facts["strategies"]]
    if facts["linear_in"]:
        lines += [
            "",
            "linear in " + "; ".join(" with ".join(members) for members in facts["linear_in"]) + ": a partial sum passes through",
        ]
    return "\n".join(lines)
