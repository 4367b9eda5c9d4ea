"""`shardplan.plan`: takes a step and its arguments, returns a `Plan`."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh, PartitionSpec

from shardplan import _jax
from shardplan.cost import OVERLAP, TIME, Objective, objective_of
from shardplan.cost.compute import product_dtype, rated
from shardplan.emit.backends import chosen
from shardplan.errors import (
    PinError,
    ShardplanError,
    TraceError,
    UncompiledPrimitiveError,
    nearest,
)
from shardplan.frontend.argnums import leaves_of, positions
from shardplan.frontend.given_shardings import spec_entries
from shardplan.frontend.keywords import as_positional
from shardplan.frontend.nnx_state import abstract, apart, trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph
from shardplan.ir import Program
from shardplan.mesh import Device
from shardplan.mesh.groups import group_cluster
from shardplan.microbatches.accumulating import checked_microbatches, microbatched
from shardplan.offload import matching, offloaded
from shardplan.planning.host_memory import planned_in_host_memory
from shardplan.planning.planner import planned
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import Wanted
from shardplan.search.coarsening.variables import OneChoice, one_choice_of
from shardplan.search.inference import anytime
from shardplan.search.inference.anytime import Observer, best_of
from shardplan.search.session import Session
from shardplan.search.strategy.unused_axes import idle
from shardplan.shell.axis_causes import naming_microbatches
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.factor_options import FactorsLike, checked_axes, checked_factors, chunks_in, stages_in
from shardplan.shell.made_plans import Asked, plan_data
from shardplan.shell.memory_default import memory_limit as read_limit
from shardplan.shell.offload_option import read_hosted
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placement_search import best_microbatches, best_placement
from shardplan.shell.placements import PlacementLike, on_groups, refuse_with_groups, stage_groups
from shardplan.shell.plan_of_step import Plan
from shardplan.tdl.xla_quirks import uncompiled

_log = logging.getLogger("shardplan")


@overload
def plan(step: Callable[..., Any], *args: Any, placement: Literal["one"] = "one", **options: Any) -> Plan: ...


@overload
def plan(step: Callable[..., Any], *args: Any, placement: Literal["auto"], **options: Any) -> Plan | PlacedPlan: ...


@overload
def plan(step: Callable[..., Any], *args: Any, placement: PlacementLike, **options: Any) -> PlacedPlan: ...


def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    memory_limit: int | float | str | None = None,
    objective: str = "time",
    pins: Mapping[str, PartitionSpec] | None = None,
    axes: Mapping[str, int] | None = None,
    factors: FactorsLike | None = None,
    donate_argnums: Sequence[int] | int = (),
    time_budget_s: float | None = None,
    observer: Observer | None = None,
    replicate: Sequence[str] = (),
    one_choice: str = "auto",
    remat: str = "none",
    offload: str | Sequence[str] = "none",
    backend: str = "auto",
    time_model: str = "overlap",
    kwargs: Mapping[str, Any] | None = None,
    placement: PlacementLike = "one",
    microbatches: int = 1,
    batch_argnums: Sequence[int] | int | None = None,
    traced: Traced | None = None,
) -> Plan | PlacedPlan:
    """Plans how ``step(*args)`` runs on a cluster.

    An interrupt (Ctrl-C) of the search returns the best plan so far if that one fits; otherwise it is raised.

    Args:
        step: The function to plan.
        args: Its arguments: trees of arrays or `jax.ShapeDtypeStruct`. Nothing is allocated.
        cluster: A `Cluster`, a preset with its node count (``"dgx-h100:4"``), a TOML file, a shape (``"2x4"``, of H100s), or a
            `jax.sharding.Mesh`, whose axes and devices are kept. In a mesh, GPUs that a preset knows get its figures; other
            devices get those of H100s.
        memory_limit: Bytes per device, as a number or as text (``"70GiB"``); by default, or with "auto", the part of the
            device's memory that JAX's allocator owns (`shardplan.shell.memory_default`).
        objective: "time", or Tofu's "bytes": the fewest bytes on the wire where all ops and tensors that can be cut are cut
            (`shardplan.search.baselines.tofu_premise`). That plan is priced in seconds too.
        pins: The PartitionSpecs that arguments must have, by glob of their paths; specs name factors or levels.
        axes: The sizes of purposes, ``{"data": 16, "tensor": 4}``: the plan is the best over all parallelism matrices with
            these rows. Purposes are data, fsdp, tensor, sequence, expert and replica (`shardplan.search.strategy.purposes`).
            With "stage", the step runs as a pipeline of that many stages, and the result is a `PlacedPlan`. Without
            ``microbatches``, the planner chooses their number. A stage is one chunk of the layers, or two where that is faster;
            "chunk" fixes the number of chunks.
        factors: The factors of each level, by level name: ``{"gpu": (2, 2, 2)}``, or ``{"gpu": 8}`` to keep the level whole.
            Levels that are not named stay whole. By default the search decides, and ``plan.provenance`` says what it tried. The
            axes of a `jax.sharding.Mesh` stay whole unless no dim divides by them.
        donate_argnums: Arguments whose buffers the step may reuse; negative numbers count from the end.
        time_budget_s: Seconds for all of planning, tracing included. Then the best plan so far is returned, and
            ``plan.stopped`` says so. A first plan is always made.
        observer: Called with the current activity and the fraction done. Its method ``best``, if it has one, is called with the
            seconds of the best plan so far and a lower bound over the layouts of its mesh.
        replicate: Primitives without a description that may run whole on every device.
        one_choice: Which repeated parts of the step share one layout: "timesteps" (three or more steps of an unrolled
            recurrence), "layers" (equal layers of an unrolled model too) or "none". With "auto", equal layers share one if the
            step has many and the memory limit then costs no time; ``plan.one_choice`` says which was used.
        remat: "auto" lets the plan recompute activations in the backward pass (bodies of scans and blocks of straight-line
            code, `shardplan.remat`) where the memory limit costs time, or where nothing fits otherwise. Planning takes longer;
            ``plan.remat`` says what is recomputed. "none" leaves the step as it is. `jax.checkpoint` is kept either way.
        offload: The arguments that stay in host memory (``memory_kind="pinned_host"``) between steps: "none", or globs of the
            paths of arguments that only the update reads and that the step returns, such as an optimizer's moments. The step
            fetches each array where it updates it and sends its new value back; the seconds of both are the plan's ``host_s``,
            and nothing overlaps them. The device's ``host_bytes_per_s`` prices them. With "auto", as few of these arguments
            stay there as the memory limit allows, and none where the step fits without; ``plan.offloaded`` has their leaf
            numbers. Where that is not enough, activations stay there between the passes (`shardplan.offload`), and light ops
            are computed again; ``plan.hosted`` lists them.
        backend: What runs the plan unless `Plan.jit` is told otherwise: "explicit" (each device its own program, which sends
            what was planned; "auto" is the same) or "specs" (XLA's partitioner follows the PartitionSpecs).
        time_model: How seconds add up: "overlap" (communication hides behind compute as far as the program and XLA's flags,
            ``plan.xla_flags``, allow: `shardplan.cost.overlap`) or "sum" (nothing overlaps).
        kwargs: The arguments that the step takes by name alone. ``plan.in_specs`` and ``plan.put`` have them after all others,
            in the order of their names; the jitted step takes them by name.
        placement: Where ops run. "one": every op on all devices. "auto": the same, unless a pipeline or branches on groups of
            devices are faster by more than the model's error, or only they fit; ``plan.placements_tried`` lists them, and
            ``microbatches``, if given, holds for all. A `shardplan.place` result, or the file that it was saved to: each op
            runs on its devices there, and the ops of each group of devices are planned together. A plan on groups is a
            `PlacedPlan`.
        microbatches: The number of parts into which the batch is cut. They run one after the other, each through all ops that
            depend on the batch; sums over the batch (gradients, the loss) are added up. Results are unchanged. A step that does
            not fit whole may fit in parts.
        batch_argnums: The arguments that are the batch; by default the arrays that are not state and whose first dim is the
            most frequent one.
        traced: ``plan.traced`` of an earlier plan of this step, for the same arguments and ``donate_argnums``: the step is not
            traced again.

    Raises:
        MemoryLimitError: if no plan fits.
        TraceError: if the step cannot be traced, or if ``traced`` is of other arguments.
        PinError: for a pin that matches nothing, names no axis, does not divide, or splits an array without elements.
        UndescribedPrimitiveError: for a primitive without a description.
        OffloadError: for a glob of ``offload`` that matches nothing, or an argument that cannot stay in host memory.
        MicrobatchError: for a step that needs several microbatches at once (batch norm, a loss over all pairs), with the source
            line, or a batch that does not divide.
        UncompiledPrimitiveError: for a primitive that XLA compiles for one device only, on a cluster of several.
        ClusterError: for an invalid cluster, ``factors`` or ``axes``, for factors over which a value has too many layouts, for an
            axis that the step cannot use for its purpose, or for a cluster on which the step takes 1,000 s or more.
    """
    (measure, timed), deadline, shared = checked_options(objective, time_model, time_budget_s, one_choice, remat)
    observer, runner, began = checked_observer(observer), chosen(backend), time.perf_counter()
    donated, (step, args) = positions(donate_argnums, len(args), "donate_argnums"), as_positional(step, args, kwargs)
    resolved, mesh = resolve_cluster(cluster)
    limit = read_limit(memory_limit, resolved.device, os.environ)
    each, (stages, axes) = chunks_in(axes), stages_in(axes)
    inside = resolved if stages == 1 else group_cluster(resolved, stage_groups(resolved, stages)[0])
    fixed, sizes = checked_factors(factors, inside), checked_axes(axes, inside, factors, measure)
    traced, traced_at = _traced(step, args, donated, traced, observer), time.perf_counter()
    replicate, entries = _checked_primitives(replicate, traced.program, resolved.size), pin_entries(pins or {})
    own, best = frozenset(leaves_of(traced.in_tree, donated)), best_of(observer)
    wanted = Wanted(limit.nbytes, own, entries, deadline, observer, measure, fixed, mesh is None, sizes, timed, runner, best=best)
    searcher = Searcher(replicate, shared, resolved, wanted)
    parts, hosted = checked_microbatches(traced, microbatches, batch_argnums), read_hosted(offload, resolved)
    asked = Asked(step, traced, searcher, limit, donated, time_budget_s, parts, hosted, remat == "auto", began, traced_at)
    on_all_devices = partial(_on_all_devices, mesh=mesh)
    if stages == 1 and placement == "one":
        return on_all_devices(asked)
    alone = {"pins": pins, "remat": remat != "none", "offload": hosted, "objective": objective != "time"}
    refuse_with_groups({**alone, "mesh": mesh is not None})
    if stages == 1 and placement == "auto":
        refuse_with_groups({"backend": runner != "explicit", "axes": axes, "factors": factors})
        return best_placement(asked, on_all_devices, batch_argnums)
    if stages > 1 and placement == "one" and parts.count == 1:
        return best_microbatches(asked, stages, each, batch_argnums)
    return on_groups(asked, stages, each, placement)


def _on_all_devices(asked: Asked, *, mesh: Mesh | None) -> Plan:
    """The plan of a step with every op on all devices.

    Raises:
        MemoryLimitError: if no plan fits.
        OffloadError: for an argument that cannot stay in host memory.
        MicrobatchError: for a step that cannot be cut into the microbatches asked for.
    """
    program, hosted = asked.traced.program, asked.hosted
    program = microbatched(program, asked.microbatches, asked.searcher.replicate)
    ways = planned_in_host_memory if hosted == "auto" else planned
    program = offloaded(program, () if hosted == "auto" else matching(program, hosted))
    wanted = replace(asked.searcher.wanted, microbatched=asked.microbatches.count > 1)
    with naming_microbatches(asked.traced.program, asked.microbatches):
        made = ways(program, replace(asked.searcher, wanted=wanted), asked.limit.origin, recompute=asked.recompute)
    warn_of(made.session)
    return Plan(
        plan_data(asked, made), traced=asked.traced, program=made.planned.program, graph=made.session.graph, step=asked.step,
        user_mesh=mesh, session=made.session, run=made.run,
    )  # fmt: skip


def _traced(
    step: Callable[..., Any], args: Sequence[Any], donated: tuple[int, ...], known: Traced | None, observer: Observer
) -> Traced:
    """The traced step: ``known``, once checked, or a new trace."""
    if known is None:
        observer("tracing", 0.0)
        return trace_step(step, args, donated)
    leaves, tree = jax.tree.flatten(apart(tuple(args)))
    if tree != known.in_tree or tuple(map(abstract, leaves)) != known.in_shapes:
        raise TraceError("traced= is of other arguments: give plan.traced of a plan for these, or leave traced out")
    return known


def warn_of(session: Session) -> None:
    """Warns as `warn_of_graph` does, and of factors that divide no dim of any argument."""
    warn_of_graph(session.graph, session.problem.cluster.device)
    for unused in idle(session.problem, session.decisions):
        if unused.advice:
            _log.warning("%s", unused.text)


def warn_of_graph(graph: Graph, device: Device) -> None:
    """Warns of loops without a known trip count, and of dtypes of products for which the device has no peak."""
    for source in dict.fromkeys(graph.unknown_trips):
        _log.warning("the while loop at %s has no known trip count: it is priced as one iteration", source)
    products = [node.signature for node in graph.nodes if node.signature.multiplies]
    for dtype in sorted({product_dtype(s.call, contracts=s.contracts) for s in products}):
        if (used := rated(device, dtype)) != dtype:
            _log.warning(
                "device %r has no peak for %s: its products are priced at that of %s; "
                "give flops_per_s.%s in the cluster's [device]",
                device.name,
                dtype,
                used,
                dtype,
            )


def checked_observer(observer: Observer | None) -> Observer:
    """The observer, checked; by default one that does nothing."""
    if observer is not None and not callable(observer):
        raise ShardplanError(f"observer={observer!r} is not callable: give a function of (what, part), or None")
    return observer or anytime.silent


def checked_options(
    objective: str, time_model: str, time_budget_s: float | None, one_choice: str, remat: str
) -> tuple[tuple[Objective, Objective], float | None, OneChoice | None]:
    """Checks these options; returns ((objective, the one that prices seconds), deadline, ``one_choice``: None for "auto")."""
    if time_model not in ("overlap", "sum"):
        raise ShardplanError(f"unsupported time_model {time_model!r}: use 'overlap', or 'sum' where nothing overlaps")
    timed = OVERLAP if time_model == "overlap" else TIME
    if remat not in ("none", "auto"):
        raise ShardplanError(f"unsupported remat {remat!r}: use 'none', or 'auto' to recompute activations")
    number = isinstance(time_budget_s, int | float) and not isinstance(time_budget_s, bool)
    if time_budget_s is not None and not (number and 0 < time_budget_s <= sys.float_info.max):
        raise ShardplanError(f"unsupported time_budget_s={time_budget_s!r}: give a positive number of seconds, or None")
    deadline = anytime.now_s() + time_budget_s if time_budget_s is not None else None
    try:
        measure = objective_of(objective)
    except ValueError as error:
        raise ShardplanError(str(error)) from None
    try:
        shared = None if one_choice == "auto" else one_choice_of(one_choice)
    except ValueError as error:
        raise ShardplanError(f"{error}, or 'auto'") from None
    return (timed if measure is TIME else measure, timed), deadline, shared


def _checked_primitives(names: Sequence[str], program: Program, devices: int) -> tuple[str, ...]:
    """The names in ``replicate``, checked: each is a primitive of this step or of JAX.

    Refuses a step that XLA cannot compile for the cluster's number of devices.
    """
    if devices > 1:
        _check_compiled(program)
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ShardplanError(f"replicate={names!r}: give names of primitives, or () for none")
    names = (names,) if isinstance(names, str) else tuple(names)
    used = {op.primitive for op in program.every_op()}
    for name in names:
        if name not in used and name not in _jax.primitives():
            raise ShardplanError(f"replicate names {name!r}, which is not a primitive{nearest(name, sorted(used))}")
    return names


def _check_compiled(program: Program) -> None:
    """Refuses a program with an op that XLA compiles for one device only."""
    for op in program.every_op():
        remedy = uncompiled(op.primitive)
        if remedy is not None:
            raise UncompiledPrimitiveError(op.primitive, str(op.source), remedy)


def pin_entries(pins: Mapping[str, PartitionSpec]) -> dict[str, tuple[Any, ...]]:
    """Pins as tuples of entries, as the search reads them; refuses invalid ones."""
    if not isinstance(pins, Mapping):
        raise PinError(f"pins={pins!r} is not a mapping: give a dict from globs of argument paths to jax.sharding.PartitionSpec")
    for glob in pins:
        if not isinstance(glob, str):
            raise PinError(f"the pin {glob!r} is not a glob of argument paths: write it as a string, for example 'params/*'")
    return {glob: spec_entries(f"the pin {glob!r}", spec) for glob, spec in pins.items()}
