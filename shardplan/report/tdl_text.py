"""The description language's coverage, and one primitive's description, as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.report.tables import table

_WIDTH = 100


def coverage_text(found: Mapping[str, Any]) -> str:
    """What `shardplan.tdl.coverage` counts: kinds of primitives, and the names that deserve one."""
    kinds = [[kind, str(count)] for kind, count in sorted(found["kinds"].items(), key=lambda k: (-k[1], k[0]))]
    lines = [f"{found['primitives']} primitives in the installed JAX", "", table(["kind", "count"], kinds), ""]
    if found["examples"]:
        lines.append(
            f"{found['verified']} descriptions and {found['opaque_verified']} batch cuts proven: {found['cuts']} cuts run, "
            f"each description on at least {found['examples']} drawn cases"
        )
        lines += _list("without a proof", found["unverified"])
    lines += _list("undescribed", found["undescribed"])
    lines += [f"FAULT {name}: {fault}" for name, fault in sorted(found["faults"].items())]
    return "\n".join(lines)


def _list(title: str, names: Sequence[str]) -> list[str]:
    return textwrap.wrap(f"{title}: {', '.join(names)}", _WIDTH, subsequent_indent="  ") if names else []


def primitive_text(made: Mapping[str, Any]) -> str:
    """One primitive: its kind and, where it has one, its description with the strategies that follow."""
    lines = [f"{made['primitive']}: {made['kind']}" + (f" ({made['reason']})" if made["reason"] else "")]
    if made.get("register"):
        lines += ["", "for example:"] + [f"  {text}".rstrip() for text in made["register"]]
    if "description" not in made:
        return "\n".join(lines)
    shapes = ", ".join(f"x{i} {shape}" for i, shape in enumerate(made["operands"]))
    lines += ["", f"for example with {shapes or 'no operands'}:"]
    lines += [f"  {text}" for text in made["description"]]
    lines += ["", table(["loop", "extent", "kind"], [[v["name"], str(v["extent"]), v["kind"]] for v in made["loops"]])]
    if made["strategies"]:
        lines += ["", "cut two ways:"] + [f"  {s}" for s in made["strategies"]]
    if made["linear_in"]:
        lines += [
            "",
            "linear in " + "; ".join(" with ".join(members) for members in made["linear_in"]) + ": a partial sum passes through",
        ]
    return "\n".join(lines)
