"""`shardplan.replan`: a new plan for another cluster, from an old one."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardplan.emit.backends import chosen
from shardplan.errors import MemoryLimitError, PinError, ReshardError
from shardplan.ir import Entry, Program
from shardplan.mesh import Cluster, factors
from shardplan.microbatches.accumulating import microbatched
from shardplan.offload import matching, offloaded
from shardplan.planning.host_memory import planned_in_host_memory
from shardplan.planning.planner import Made, planned
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import Wanted
from shardplan.plans.data import PlanData
from shardplan.plans.inherited import inherited, matched, step_time_s
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.anytime import Observer, best_of
from shardplan.search.problem.problem import Problem
from shardplan.search.strategy.pins import pinned_domains
from shardplan.shell.api import checked_observer, checked_options, pin_entries, warn_of
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.factor_options import FactorsLike, checked_axes, checked_factors
from shardplan.shell.made_plans import Asked, plan_data
from shardplan.shell.memory_default import memory_limit as read_limit
from shardplan.shell.offload_option import read_hosted
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placed_replanning import placed_again
from shardplan.shell.plan_of_step import Plan

_log = logging.getLogger("shardplan")


def replan(
    plan: Plan | PlacedPlan,
    cluster: ClusterLike,
    *,
    memory_limit: int | float | str | None = None,
    objective: str | None = None,
    pins: Mapping[str, PartitionSpec] | None = None,
    axes: Mapping[str, int] | None = None,
    factors: FactorsLike | None = None,
    time_budget_s: float | None = None,
    observer: Observer | None = None,
    one_choice: str = "auto",
    remat: str | None = None,
    backend: str | None = None,
    time_model: str | None = None,
    offload: str | Sequence[str] | None = None,
) -> Plan | Any:
    """A plan of the same step for another cluster, after a node was lost or added, or links or devices became slower.

    The search starts anew, and also from the layouts of ``plan`` where the factors of both clusters match
    (`shardplan.plans.inherited`). So the new plan's step is no slower than that of `shardplan.plan`, nor than with the old
    layouts, where these still fit in memory and keep to the pins. The step is not traced again; a plan from `shardplan.load`
    will do. `shardplan.reshard` moves a run's state to the new plan.

    A plan with groups of devices is placed anew as it was asked for: with ``placement="auto"``, with as many stages and
    microbatches, or on the given groups, if the cluster still has their devices. Its old layouts are not used. Where the stages
    no longer divide the devices, there are fewer of them, with a warning. The result is a `PlacedPlan`, or a `Plan` where that
    is faster or only one stage is left.

    Args:
        plan: The plan to replace.
        cluster: As for `shardplan.plan`, as are all options. Options that are not given come from the old plan: a memory limit
            that the user gave, pins that still apply, axes that still multiply to the number of devices (others are dropped
            with a warning), ``remat``, ``offload``, the backend and so on; only ``factors`` and ``one_choice`` do not. Donated
            arguments, replicated primitives and microbatches stay as they are.

    Raises:
        ReshardError: for a plan on given groups, if one of their devices is gone.
        MemoryLimitError: if no plan fits.
        PinError, ClusterError: as for `shardplan.plan`.
    """
    given: dict[str, Any] = {
        "memory_limit": memory_limit,
        "objective": objective,
        "pins": pins,
        "axes": axes,
        "factors": factors,
        "time_budget_s": time_budget_s,
        "observer": observer,
        "remat": remat,
        "backend": backend,
        "time_model": time_model,
        "offload": offload,
    }
    given = {name: value for name, value in given.items() if value is not None} | {"one_choice": one_choice}
    if isinstance(plan, PlacedPlan):
        return placed_again(plan, cluster, given)
    if not isinstance(plan, Plan):
        raise ReshardError(f"plan is a {type(plan).__name__}: give the plan that shardplan.plan or shardplan.load returned")
    return _replanned(plan, cluster, given, warm=False)


def warm_started(plan: Plan, mesh: Mesh | None) -> Plan:
    """A plan for the same cluster from the layouts of ``plan``, whose step was traced for other shapes. The search starts anew
    only where these layouts do not divide the new shapes, or no longer fit.
    """
    return _replanned(plan, plan.cluster if mesh is None else mesh, {}, warm=True)


def _own_options(data: PlanData) -> dict[str, Any]:
    """The options of a plan that hold on any cluster, and the defaults of the others."""
    return {
        "memory_limit": None if data.memory_limit_origin else data.memory_limit,
        "objective": data.objective,
        "time_budget_s": data.time_budget_s,
        "remat": "auto" if data.recompute else "none",
        "backend": data.backend,
        "time_model": data.time_model,
        "offload": "auto" if data.offload == ("auto",) else data.offload,
        **dict.fromkeys(("pins", "axes", "factors", "observer"), None),
        "one_choice": "auto",
    }


def _replanned(plan: Plan, cluster: ClusterLike, given: Mapping[str, Any], *, warm: bool) -> Plan:
    """`replan` with the options ``given``, or, if ``warm``, from the old layouts alone where these can be kept."""
    data, began = plan.data, time.perf_counter()
    options = {**_own_options(data), **given}
    time_budget_s, remat, pins, axes, split = (options[name] for name in ("time_budget_s", "remat", "pins", "axes", "factors"))
    (measure, timed), deadline, shared = checked_options(
        options["objective"], options["time_model"], time_budget_s, options["one_choice"], remat
    )
    observer, runner = checked_observer(options["observer"]), chosen(options["backend"])
    resolved, mesh = resolve_cluster(cluster)
    limit = read_limit(options["memory_limit"], resolved.device, os.environ)
    axes = _axes(plan, resolved) if axes is None and split is None and not measure.everything_split else axes
    fixed, sizes = checked_factors(split, resolved), checked_axes(axes, resolved, split, measure)
    entries = _pins(plan, resolved) if pins is None else pin_entries(pins)
    donated = frozenset(plan.donated_leaves)
    wanted = Wanted(
        limit.nbytes, donated, entries, deadline, observer, measure, fixed, mesh is None, sizes, timed, runner,
        best=best_of(observer), microbatched=data.microbatches.count > 1,
    )  # fmt: skip
    searcher, parts = Searcher(data.replicate, shared, resolved, wanted), data.microbatches
    hosted = read_hosted(options["offload"], resolved)
    asked = Asked(
        plan.step, plan.traced, searcher, limit, data.donate_argnums, time_budget_s, parts, hosted, remat == "auto", began, began
    )
    program = microbatched(plan.traced.program, data.microbatches, data.replicate)
    program = program if hosted == "auto" else offloaded(program, matching(program, hosted))
    made = _best(plan, program, asked, warm=warm)
    warn_of(made.session)
    return Plan(
        plan_data(asked, made), traced=plan.traced, program=made.planned.program, graph=made.session.graph, step=plan.step,
        user_mesh=mesh, session=made.session, run=made.run,
    )  # fmt: skip


def _best(plan: Plan, program: Program, asked: Asked, *, warm: bool) -> Made:
    """The fastest plan of a new search, of the old layouts, and of a search from those; if ``warm``, the first runs only where
    the others find none. The old layouts are of the old program, which must have in host memory and compute again no more than
    is asked for.

    Raises:
        MemoryLimitError: if none of them fits.
    """
    searcher, origin, data = asked.searcher, asked.limit.origin, plan.data
    wanted, fresh, refusal, auto = searcher.wanted, None, None, asked.hosted == "auto"
    kept = auto or (program.offloaded == data.offloaded and not data.hosted)
    kept = kept and (asked.recompute or not data.recompute or not data.remat.parts)
    free = kept and wanted.factors is None and not wanted.objective.everything_split
    if warm and free and (old := inherited(data, plan.program, searcher.cluster, wanted, None, search_again=True)):
        return min(old, key=step_time_s)
    try:
        search = planned_in_host_memory if auto else planned
        fresh = search(program, searcher, origin, recompute=asked.recompute)
    except MemoryLimitError as error:
        refusal = error
    old = inherited(data, plan.program, searcher.cluster, wanted, fresh) if free else []
    every = [*([fresh] if fresh is not None else []), *old]
    if not every:
        assert refusal is not None
        raise refusal
    return min(every, key=step_time_s)


def _axes(plan: Plan, cluster: Cluster) -> Mapping[str, int] | None:
    """The sizes of purposes that the old plan was given, if they multiply to the number of devices."""
    own: dict[str, int] = dict(plan.fixed_axes.items())
    if own and math.prod(own.values()) != cluster.size:
        sizes = ", ".join(f"{name}={n}" for name, n in own.items())
        _log.warning("axes %s of the old plan do not make %d devices: the search chooses; or give axes=", sizes, cluster.size)
        return None
    return own or None


def _pins(plan: Plan, cluster: Cluster) -> dict[str, Sequence[Entry]]:
    """The old plan's pins that hold on the cluster, over the matching factors or else over whole levels."""
    data = plan.data
    if not data.pins:
        return {}
    found = matched(data.cluster, data.factors, cluster)
    over = factors(cluster) if found is None else found.factors
    problem = Problem(plan.graph, coarsen(plan.graph, data.one_choice), cluster, over)
    kept: dict[str, Sequence[Entry]] = {}
    for glob, entries in data.pins.items():
        try:
            pinned_domains(problem, {glob: entries})
        except PinError as error:
            _log.warning("a pin of the old plan is dropped: %s", error)
            continue
        kept[glob] = entries
    return kept
