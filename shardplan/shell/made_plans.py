"""The data of a plan, from what was asked for and what planning made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardplan import _jax
from shardplan.constants import CONSTANTS
from shardplan.frontend.trace import Traced
from shardplan.ir import Microbatches
from shardplan.planning.planner import Made
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import step_time_s
from shardplan.plans.data import PlanData
from shardplan.plans.summary import decided
from shardplan.shell.memory_default import MemoryLimit


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan is asked for: the traced step, the conditions of the search, and the fields of `PlanData` that say who runs it.

    ``began_s`` and ``traced_s`` are instants of `time.perf_counter`.
    """

    step: Callable[..., Any]
    traced: Traced
    searcher: Searcher
    limit: MemoryLimit
    donate_argnums: tuple[int, ...]
    time_budget_s: float | None
    runs: Mapping[str, Any]
    microbatches: Microbatches
    began_s: float
    traced_s: float


def plan_data(asked: Asked, made: Made) -> PlanData:
    """Everything that a plan says at first; the bound, the baselines and the explanations come later."""
    return PlanData(
        **(decided(made.session, made.run, made.planned.found[1].purposes) | _search_fields(asked, made) | dict(asked.runs)),
        operators=asked.traced.program.count_ops(),
        argument_names=_jax.argument_names(asked.step, len(asked.traced.in_tree.children())),
        donate_argnums=asked.donate_argnums,
        microbatches=asked.microbatches,
        time_budget_s=asked.time_budget_s,
        trace_s=asked.traced_s - asked.began_s,
        search_s=time.perf_counter() - asked.traced_s,
    )


def _search_fields(asked: Asked, made: Made) -> dict[str, Any]:
    """The fields of `PlanData` that record the conditions of the search and how it ended."""
    (problem, outcome), wanted = made.planned.found, asked.searcher.wanted
    return {
        "stopped": made.stopped,
        "exact": outcome.exact and not made.stopped,
        "one_choice": problem.coarse.one_choice,
        "replicate": tuple(asked.searcher.replicate),
        "cluster": problem.cluster,
        "searched_s": step_time_s(made.planned.found),
        "memory_limit": wanted.memory,
        "memory_limit_origin": asked.limit.origin,
        "objective": wanted.objective.name,
        "pins": {glob: tuple(entries) for glob, entries in wanted.pins.items()},
        "unlimited_s": step_time_s((problem, replace(outcome, best=outcome.free))) if outcome.exact else None,
        "tried": outcome.tried,
        "fixed_axes": dict(wanted.axes or {}),
        "remat": made.planned.remat,
        "unknown_trips": problem.graph.unknown_trips,
        "whole_ops": problem.graph.whole,
        "constants": CONSTANTS.literals,
    }
