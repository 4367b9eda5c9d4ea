"""`plan`: a step and its arguments go in, a `Plan` comes out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.cost import Objective, objective_of
from shardplan.errors import (
    ClusterError,
    MemoryLimitError,
    PinError,
    ShardplanError,
    UncompiledPrimitiveError,
    nearest,
    size_text,
)
from shardplan.frontend.argnums import leaves_of, positions
from shardplan.frontend.nnx_state import trace_step
from shardplan.ir import Program, spec_text
from shardplan.plans.data import PlanData
from shardplan.plans.summary import decided
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.coarsening.variables import OneChoice, one_choice_of
from shardplan.search.inference import anytime
from shardplan.search.inference.anytime import Observer
from shardplan.search.inference.garbage import uncollected
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.tables import LONGEST_S
from shardplan.search.session import Session
from shardplan.search.strategy.factoring_search import Wanted
from shardplan.search.strategy.pins import held_by_pins, pinned_domains, smallest_conflict
from shardplan.search.strategy.remat_search import Planned, Searcher
from shardplan.search.strategy.solve import in_seconds
from shardplan.search.strategy.unused_axes import idle
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.planned import Plan
from shardplan.sizes import parse_bytes
from shardplan.tdl.xla_quirks import uncompiled

_log = logging.getLogger("shardplan")


def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    memory_limit: int | float | str | None = None,
    objective: str = "time",
    pins: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: Sequence[int] | int = (),
    time_budget_s: float | None = None,
    observer: Observer | None = None,
    replicate: Sequence[str] = (),
    one_choice: str = "timesteps",
    remat: str = "none",
) -> Plan:
    """Plans how ``step(*args)`` runs on a cluster.

    ``args`` are arrays or `jax.ShapeDtypeStruct` trees; nothing is allocated. ``cluster`` is a `Cluster`, a preset with its
    node count (``"dgx-h100:4"``), a TOML file, a shape (``"2x4"``, of H100s) or a `jax.sharding.Mesh`, whose axes and devices
    are kept: GPUs that a preset knows get its figures, other devices those of H100s. ``memory_limit`` is in bytes or like
    ``"70GiB"``, by default the device's memory. ``pins`` maps globs of argument paths to the PartitionSpec that they must have,
    over the names of factors or levels. ``objective`` "bytes" is Tofu's: the fewest bytes on the wire where all is cut and split
    that can be (`shardplan.search.baselines.tofu_premise`); its plan is priced in seconds too. ``donate_argnums`` may be
    negative. ``time_budget_s`` is for all of planning, tracing included: when it is over, the plan is the best so far, and
    ``plan.stopped`` says so; a first plan, with its tables, is made in any case. An interrupt (Ctrl-C) of the search gives the
    best so far likewise, if one fits by then; else it is raised. ``observer`` is told how far it is. ``replicate`` names
    primitives without a description that may run whole everywhere. ``one_choice`` says what shares one choice though it could
    have several: "timesteps", three steps and more of an unrolled recurrence; "layers", equal layers of an unrolled model too;
    or "none". ``remat`` "auto" lets the plan compute activations again in the backward pass where the memory limit costs time,
    or where nothing fits without: bodies of scans, and blocks of straight-line code (`shardplan.remat`); ``plan.remat`` says
    what. It takes longer. "none" leaves the step as it is; what is under `jax.checkpoint` stays so.

    Raises:
        MemoryLimitError: if no plan fits.
        PinError: for a pin that matches nothing, names no axis, does not divide, or splits what has no elements.
        UndescribedPrimitiveError: for a primitive without a description.
        UncompiledPrimitiveError: for one that XLA compiles for a single device alone, on several.
        ClusterError: for a cluster that cannot be, or on which the step takes 1,000 s or more.
    """
    measure, deadline, shared = _check(objective, time_budget_s, one_choice, remat)
    observer = _told(observer)
    donated = positions(donate_argnums, len(args), "donate_argnums")
    loaded, user_mesh = resolve_cluster(cluster)
    limit = parse_bytes(memory_limit) if memory_limit is not None else loaded.device.memory_bytes
    began = time.perf_counter()
    observer("tracing", 0.0)
    traced = trace_step(step, args, donated)
    traced_at = time.perf_counter()
    replicate = _checked_primitives(replicate, traced.program, loaded.size)
    wanted = Wanted(limit, frozenset(leaves_of(traced.in_tree, donated)), _entries(pins or {}), deadline, observer, measure)
    with uncollected():
        planned = _searched(traced.program, Searcher(replicate, shared, loaded, wanted), again=remat == "auto")
    session = _session(planned, wanted, replicate)
    data = PlanData(
        **decided(session),
        **_chosen(planned, wanted),
        operators=traced.program.count_ops(),
        one_choice=shared,
        donate_argnums=donated,
        replicate=replicate,
        time_budget_s=time_budget_s,
        trace_s=traced_at - began,
        search_s=time.perf_counter() - traced_at,
    )
    return Plan(
        data, traced=traced, program=planned.program, graph=session.graph, step=step, user_mesh=user_mesh, session=session
    )


def _session(planned: Planned, wanted: Wanted, replicate: tuple[str, ...]) -> Session:
    """The search, for what asks it again. Warns of factors that fit no dim."""
    problem, outcome = planned.found
    session = Session(
        program=planned.program,
        problem=problem,
        solution=outcome.best,
        rivals=outcome.rivals,
        bound=outcome.bound,
        extractor=Extractor(problem),
        donated=wanted.donated,
        pins=wanted.pins,
        memory_limit=wanted.memory,
        objective=wanted.objective,
        replicate=replicate,
    )
    for unused in idle(problem, session.decisions):
        if unused.advice:
            _log.warning("%s", unused.text)
    return session


def _chosen(planned: Planned, wanted: Wanted) -> dict[str, Any]:
    """The fields of `PlanData` that say under what the search was made, and how it ended."""
    problem, outcome = planned.found
    return {
        "cluster": problem.cluster,
        "memory_limit": wanted.memory,
        "objective": wanted.objective.name,
        "pins": {glob: tuple(entries) for glob, entries in wanted.pins.items()},
        "exact": outcome.exact,
        "unlimited_s": outcome.bound.unlimited_s,
        "stopped": outcome.stopped,
        "remat": planned.remat,
        "unknown_trips": problem.graph.unknown_trips,
    }


def _told(observer: Observer | None) -> Observer:
    """Who is told what is being done; nobody by default."""
    if observer is not None and not callable(observer):
        raise ShardplanError(f"observer={observer!r} cannot be called: give a function of (what, part), or None")
    return observer or _silent


def _silent(_what: str, _part: float) -> None:
    """Nobody watches."""


def _check(objective: str, time_budget_s: float | None, one_choice: str, remat: str) -> tuple[Objective, float | None, OneChoice]:
    """(what to make least, when the time is over, what shares one choice), of options that can be."""
    if remat not in ("none", "auto"):
        raise ShardplanError(f"unsupported remat {remat!r}: use 'none', or 'auto' to compute activations again")
    number = isinstance(time_budget_s, int | float) and not isinstance(time_budget_s, bool)
    if time_budget_s is not None and not (number and time_budget_s > 0):
        raise ShardplanError(
            f"time_budget_s={time_budget_s!r} leaves no time to plan: give a positive number of seconds, or None"
        )
    deadline = anytime.now_s() + time_budget_s if time_budget_s is not None else None
    try:
        measure, shared = objective_of(objective), one_choice_of(one_choice)
    except ValueError as error:
        raise ShardplanError(str(error)) from None
    return measure, deadline, shared


def _checked_primitives(names: Sequence[str], program: Program, devices: int) -> tuple[str, ...]:
    """The names, each of a primitive of this step or of JAX; refuses a step that XLA compiles for one device alone."""
    if devices > 1:
        _check_compiled(program)
    if not isinstance(names, Iterable) or not all(isinstance(name, str) for name in names):
        raise ShardplanError(f"replicate={names!r}: give names of primitives, or () for none")
    names = (names,) if isinstance(names, str) else tuple(names)
    used = set(_primitives(program))
    for name in names:
        if name not in used and name not in _jax.primitives():
            raise ShardplanError(f"replicate names {name!r}, which is no primitive{nearest(name, sorted(used))}")
    return names


def _check_compiled(program: Program) -> None:
    """Passes where XLA compiles every op of a program for several devices."""
    for op in program.ops:
        remedy = uncompiled(op.primitive)
        if remedy is not None:
            raise UncompiledPrimitiveError(op.primitive, str(op.source), remedy)
        for body in op.bodies:
            _check_compiled(body)


def _primitives(program: Program) -> Iterator[str]:
    for op in program.ops:
        yield op.primitive
        for body in op.bodies:
            yield from _primitives(body)


def _entries(pins: Mapping[str, PartitionSpec]) -> dict[str, tuple[Any, ...]]:
    """Pins as the search reads them."""
    if not isinstance(pins, Mapping):
        raise PinError(f"pins={pins!r}: give a dict from globs of argument paths to jax.sharding.PartitionSpec")
    for glob, spec in pins.items():
        if not isinstance(glob, str):
            raise PinError(f"the pin {glob!r} is no glob of argument paths: write it as text, for example 'params/*'")
        if not isinstance(spec, PartitionSpec):
            raise PinError(f"the pin {glob!r} is {spec!r}: give a jax.sharding.PartitionSpec over the plan's axes")
        if spec.unreduced or spec.reduced:
            raise PinError(f"the pin {glob!r} = {spec} says what is reduced: an argument is whole, give axes alone")
        odd = [e for e in spec if not (e is None or all(isinstance(a, str) for a in (e if isinstance(e, tuple) else (e,))))]
        if odd:
            raise PinError(f"the pin {glob!r} = {spec} says {odd[0]}: each entry is None, an axis or a tuple of axes")
    return {glob: tuple(spec) for glob, spec in pins.items()}


def _searched(program: Program, searcher: Searcher, *, again: bool) -> Planned:
    """The best outcome over all factorings, and over what may be computed ``again``, in seconds; raises where none fits."""
    wanted = searcher.wanted
    wanted.observer("describing", 0.0)
    later = replace(wanted, observer=lambda what, part: wanted.observer(what, 0.05 + 0.95 * part))
    searcher = replace(searcher, wanted=later)
    planned = searcher.auto(program) if again else searcher.plain(program)
    problem, outcome = planned.found
    for source in problem.graph.unknown_trips:
        _log.warning("the while loop at %s has no known trip count: it is priced as one iteration", source)
    if not outcome.best.fits(wanted.memory):
        raise _too_small(problem, outcome.smallest or outcome.best, wanted, stopped=bool(outcome.stopped), again=again)
    if outcome.best.seconds >= LONGEST_S:
        raise _endless(problem)
    return replace(planned, found=in_seconds(problem, outcome, wanted.donated))


def _endless(problem: Problem) -> ShardplanError:
    """The error for a step that takes longer than tables can tell in every layout that was tried."""
    if problem.objective.everything_split:
        return ShardplanError("no layout splits the step as objective='bytes' asks, or it sends a petabyte: use objective='time'")
    return ClusterError(
        f"on {problem.cluster.name or 'this cluster'} the step takes {LONGEST_S:,.0f} s or more in every layout, and such times "
        "are not told apart: look at the units of the cluster's figures (bytes and flops per second), or plan a smaller step"
    )


def _too_small(problem: Problem, smallest: Solution, wanted: Wanted, *, stopped: bool, again: bool) -> MemoryLimitError:
    """The error for a step that fits in no way, with the smallest there is and the pins that keep it from being smaller."""
    live = memory.liveness(problem, wanted.donated)

    def may_fit(some: Sequence[str]) -> bool:
        domains = pinned_domains(problem, {glob: wanted.pins[glob] for glob in some})
        return memory.floor_bytes(problem, live, domains) <= wanted.memory

    guilty = smallest_conflict(tuple(wanted.pins), may_fit) if may_fit(()) else ()
    held = sorted(held_by_pins(problem, wanted.pins).items(), key=lambda row: (-row[1], row[0]))
    return MemoryLimitError(
        wanted.memory,
        smallest.peak_bytes,
        detail=_largest(problem, smallest),
        together=bool(guilty),
        unfinished=stopped,
        rematerialised=again,
        pins={f"{glob!r} = {spec_text(wanted.pins[glob])}": int(nbytes) for glob, nbytes in held if not guilty or glob in guilty},
    )


def _largest(problem: Problem, solution: Solution) -> str:
    """What takes the memory of a solution: its three largest arguments."""
    graph = problem.graph
    rows: list[tuple[float, str]] = []
    for t, path in zip(graph.inputs, graph.input_paths, strict=True):
        v = problem.coarse.of[t]
        part = 1.0 if v == FREE else memory.local_bytes(problem, v, solution.states[v])
        rows.append((graph.tensors[t].nbytes * part, path))
    held = sum(n for n, _ in rows)
    top = ", ".join(f"{p} {size_text(n)}" for n, p in sorted(rows, reverse=True)[:3])
    return f"of it arguments {size_text(held)}, the largest {top}"
