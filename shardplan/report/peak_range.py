"""The likely peak memory of a compiled program, beside the plan's prediction."""

from __future__ import annotations

import math

from shardplan.plans.data import PlanData
from shardplan.report.tables import size

OF_PREDICTED = (0.71, 1.18)
"""The 10th and 90th percentiles of compiled over predicted peaks of 27 plans for H100s (docs/accuracy.md, "On H100s, ahead of
time").
"""


def likely_peak(plan: PlanData) -> tuple[int, int]:
    """(least, most) bytes: eight of ten compiled programs peaked in this range of their predictions. No program holds less than
    its arguments, whose size is exact.
    """
    low, high = (plan.peak_bytes * ratio for ratio in OF_PREDICTED)
    return max(math.floor(low), plan.argument_bytes("device")), math.ceil(high)


def peak_range_text(plan: PlanData) -> str:
    """The range with its cause; if it ends above the memory limit, also the limit that leaves room for it."""
    least, most = likely_peak(plan)
    text = f"compiled, {size(least)} to {size(most)} are likely: the compiler fuses and orders ops in its own way"
    if most <= plan.memory_limit:
        return text
    return f"{text}; a memory limit of {size(plan.memory_limit / OF_PREDICTED[1])} leaves room for that"
