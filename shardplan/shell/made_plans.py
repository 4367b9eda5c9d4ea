"""Builds the data of a plan from its request and the result of planning."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardplan import _jax
from shardplan.constants import CONSTANTS
from shardplan.emit.backends import REASONS
from shardplan.frontend.trace import Traced
from shardplan.ir import Microbatches
from shardplan.planning.planner import Made
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import step_time_s
from shardplan.plans.data import PlanData
from shardplan.plans.summary import decided
from shardplan.shell.memory_default import MemoryLimit
from shardplan.shell.offload_option import Hosted


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a plan: the traced step, and the conditions of the search.

    ``hosted`` are the arguments that stay in host memory; ``recompute`` stands for ``remat="auto"``. ``began_s`` and
    ``traced_s`` are instants of `time.perf_counter`.
    """

    step: Callable[..., Any]
    traced: Traced
    searcher: Searcher
    limit: MemoryLimit
    donate_argnums: tuple[int, ...]
    time_budget_s: float | None
    microbatches: Microbatches
    hosted: Hosted
    recompute: bool
    began_s: float
    traced_s: float


def plan_data(asked: Asked, made: Made) -> PlanData:
    """The data of a new plan; the bound, the baselines and the explanations are added later."""
    (problem, outcome), wanted = made.planned.found, asked.searcher.wanted
    data = PlanData(
        **decided(made.session, made.run, step_time_s(made.planned.found), outcome.purposes),
        cluster=problem.cluster,
        argument_names=_jax.argument_names(asked.step, len(asked.traced.in_tree.children())),
        operators=asked.traced.program.count_ops(),
        memory_limit=wanted.memory,
        memory_limit_origin=asked.limit.origin,
        objective=wanted.objective.name,
        exact=outcome.exact and not made.stopped,
        unlimited_s=step_time_s((problem, replace(outcome, best=outcome.free))) if outcome.exact else None,
        stopped=made.stopped,
        microbatches=asked.microbatches,
        remat=made.planned.remat,
        hosted=made.planned.hosted,
        offload=("auto",) if asked.hosted == "auto" else asked.hosted,
        recompute=asked.recompute,
        one_choice=problem.coarse.one_choice,
        donate_argnums=asked.donate_argnums,
        replicate=tuple(asked.searcher.replicate),
        pins={glob: tuple(entries) for glob, entries in wanted.pins.items()},
        time_budget_s=asked.time_budget_s,
        unknown_trips=problem.graph.unknown_trips,
        whole_ops=problem.graph.whole,
        tried=outcome.tried,
        fixed_axes=dict(wanted.axes or {}),
        trace_s=asked.traced_s - asked.began_s,
        search_s=time.perf_counter() - asked.traced_s,
        backend=wanted.backend,
        backend_reason=REASONS[wanted.backend],
        constants=CONSTANTS.literals,
    )
    return replace(data, exact=data.exact and not data.replaced)
