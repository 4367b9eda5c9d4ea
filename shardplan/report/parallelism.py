"""The parallelism of a plan in words: what each part of the mesh is for, and which factorings were tried."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.ir import Factor
from shardplan.plans.data import PlanData
from shardplan.report.tables import NEAR, seconds, table
from shardplan.search.problem.solution import Tried

_SMALL = 0.005
"""A purpose with a smaller part of a factor's seconds is not named."""


def matrix_text(plan: PlanData) -> str:
    """The parallelism matrix, each row in words, factors of mixed purpose, and the factorings that were tried."""
    matrix = plan.matrix
    rows = [[axis, *map(str, row)] for axis, row in zip(matrix["axes"], matrix["factors"], strict=True)]
    parts = [table(["axis", *matrix["levels"]], rows), purposes_text(plan), *_mixed(plan)]
    return "\n".join(part for part in (*parts, tried_text(plan)) if part)


def purposes_text(plan: PlanData) -> str:
    """Each purpose with its size as a product of levels: ``data 16 = 4 nodes x 4 GPUs, tensor 2 = 2 GPUs``."""
    matrix = plan.matrix
    texts: list[str] = []
    for axis, row in zip(matrix["axes"], matrix["factors"], strict=True):
        parts = [f"{n} {_several(level)}" for n, level in zip(row, matrix["levels"], strict=True) if n > 1]
        texts.append(f"{axis} {math.prod(row)} = {' x '.join(parts)}")
    return ", ".join(texts)


def _several(level: str) -> str:
    """The plural of a level's name: ``nodes``, ``GPUs``."""
    return f"{level.upper() if level in ('gpu', 'tpu', 'cpu') else level}s"


def _mixed(plan: PlanData) -> list[str]:
    """A line for each factor that ops use for several purposes."""
    lines: list[str] = []
    for factor, shares in zip(plan.factors, plan.purposes, strict=True):
        others = [f"{purpose} in {part:.0%}" for purpose, part in shares if part >= _SMALL]
        if len(others) > 1:
            lines.append(f"{factor.name}={factor.size}: {', '.join(others)} of its products' seconds")
    return lines


def tried_text(plan: PlanData) -> str:
    """The factorings that the search priced, fastest first; empty if there was only one."""
    searched = sorted((t for t in plan.tried if t.seconds is not None), key=lambda t: t.seconds or 0.0)
    if len(searched) < 2:
        return ""
    left = len(plan.tried) - len(searched)
    when = ", before scheduling" if plan.backend == "explicit" else ""
    text = f"searched{when}: {'; '.join(map(_tried, searched))}" + (f"; {left} left out" if left else "")
    return text + _why(plan, searched)


def _why(plan: PlanData, searched: Sequence[Tried]) -> str:
    """Why the plan has its factoring although the search priced another that fits lower; empty if it did not."""
    own = next((t.seconds or 0.0 for t in searched if t.factors == plan.factors), 0.0)
    if not any(t.fits and (t.seconds or 0.0) < own * (1 - NEAR) for t in searched):
        return ""
    if plan.stopped:
        return f"; {factors_text(plan.factors)} is the plan: the search was stopped before all were scheduled"
    return (
        f"; {factors_text(plan.factors)} is the plan although another price is lower: prices take for granted that "
        "all moves that may travel together do, and of the most promising ones, scheduled, it has the shortest step"
    )


def _tried(one: Tried) -> str:
    fits = "" if one.fits else ", too large"
    return f"{factors_text(one.factors)} {seconds(one.seconds or 0.0)}{fits}"


def factors_text(factors: Sequence[Factor]) -> str:
    """The sizes of a factoring's factors: ``2 x 4``, those of one level in parentheses where it has several."""
    levels: dict[int, list[str]] = {}
    for f in factors:
        levels.setdefault(f.level, []).append(str(f.size))
    parts = [" x ".join(own) for own in levels.values()]
    return " x ".join(f"({part})" if " " in part and len(parts) > 1 else part for part in parts)
