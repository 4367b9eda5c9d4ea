"""What a compiled program is likely to hold at its peak, beside what the plan predicts."""

from __future__ import annotations

import math

from shardplan.plans.data import PlanData
from shardplan.report.tables import size

OF_PREDICTED = (0.71, 1.18)
"""The first and the last tenth of compiled over predicted peaks of 27 plans for H100s (docs/accuracy.md, "On H100s, ahead of
time").
"""


def likely_peak(plan: PlanData) -> tuple[int, int]:
    """(least, most) bytes: eight of ten compiled programs were in this range of their predictions. The arguments alone are known
    exactly, and a program holds no less.
    """
    low, high = (plan.peak_bytes * ratio for ratio in OF_PREDICTED)
    return max(math.floor(low), plan.argument_bytes("device")), math.ceil(high)


def peak_range_text(plan: PlanData) -> str:
    """The range with its cause; where its end is above the memory limit, the limit that leaves room for it."""
    least, most = likely_peak(plan)
    text = f"compiled, {size(least)} to {size(most)} are likely: the compiler fuses and orders ops in its own way"
    if most <= plan.memory_limit:
        return text
    return f"{text}; a memory limit of {size(plan.memory_limit / OF_PREDICTED[1])} leaves room for that"
