"""`plan`: a step and its arguments go in, a `Plan` comes out."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import PartitionSpec

from shardplan import _jax
from shardplan.clusters import ClusterLike, resolve_cluster
from shardplan.cost import compute
from shardplan.errors import MemoryLimitError, PinError, ShardplanError, nearest
from shardplan.ir import Factor, Program, spec_text
from shardplan.mesh import Cluster, factors
from shardplan.objects import trace_step
from shardplan.plans import Plan
from shardplan.positions import leaves_of, positions
from shardplan.search import anytime, memory
from shardplan.search.anytime import Observer
from shardplan.search.coarsen import FREE, coarsen
from shardplan.search.extract import Extractor
from shardplan.search.graph import Graph, flatten
from shardplan.search.pins import held_by_pins, pinned_domains, smallest_conflict
from shardplan.search.problem import Domain, Objective, Problem
from shardplan.search.solve import Outcome, Solution, in_seconds
from shardplan.search.solve import search as solve
from shardplan.search.variables import OneChoice, one_choice_of
from shardplan.sizes import parse_bytes

_log = logging.getLogger("shardplan")


def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    memory_limit: int | float | str | None = None,
    objective: str = "time",
    search: str = "auto",
    pins: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: Sequence[int] | int = (),
    seed: int = 0,
    time_budget_s: float | None = None,
    observer: Observer | None = None,
    replicate: Sequence[str] = (),
    one_choice: str = "timesteps",
) -> Plan:
    """Plans how ``step(*args)`` runs on a cluster.

    ``args`` are arrays or `jax.ShapeDtypeStruct` trees; nothing is allocated. ``cluster`` is a `Cluster`, a preset with its
    node count (``"dgx-h100:4"``), a TOML file, a shape (``"2x4"``, of H100s) or a `jax.sharding.Mesh`, whose axes and devices
    are kept: GPUs that a preset knows get its figures, all other devices those of H100s. ``memory_limit`` is in bytes or like
    ``"70GiB"``, by default the device's memory. ``pins`` maps globs of argument paths to the PartitionSpec that they must have,
    over the names of factors or levels. ``objective`` "bytes" is Tofu's: the fewest bytes on the wire where every op is cut and
    every tensor is split that can be (`shardplan.search.premise`); its plan is priced in seconds like any other.
    ``donate_argnums`` may be negative, as everywhere in Python. ``time_budget_s`` is for all of planning, tracing included:
    when it is over, the plan is the best so far, and ``plan.stopped`` says so. Tracing, coarsening and the tables of a first
    plan are never cut short, so a budget below what they take gives that first plan. An interrupt (Ctrl-C) during the search
    gives the best so far likewise, if there is a plan within the memory limit by then; else it is raised. ``observer`` is told
    what is being done and how far it is. ``replicate`` names primitives without a description that may run whole on every
    device. ``one_choice`` says what shares one choice of layouts and cuts though it could have several: "timesteps", the steps
    of an unrolled recurrence (from three on; as Tofu does); "layers", equal layers of an unrolled model too; or "none".
    ``seed`` is there for searches that draw; none does yet, so it changes nothing.

    Raises:
        MemoryLimitError: if no plan fits.
        PinError: for a pin that matches nothing, names no axis or does not divide.
        UndescribedPrimitiveError: for a primitive without a description.
    """
    del seed
    measure, deadline, shared = _check(objective, search, time_budget_s, one_choice)
    donated = positions(donate_argnums, len(args), "donate_argnums")
    loaded, user_mesh = resolve_cluster(cluster)
    limit = parse_bytes(memory_limit) if memory_limit is not None else loaded.device.memory_bytes
    began = time.perf_counter()
    (observer := observer or _silent)("tracing", 0.0)
    traced = trace_step(step, args, donated)
    traced_at = time.perf_counter()
    replicate = _known_primitives(replicate, traced.program)
    leaves = frozenset(leaves_of(traced.in_tree, donated))
    limits = _Limits(limit, leaves, _entries(pins or {}), deadline, observer, measure, shared)
    found = _found(*_searched(traced.program, replicate, loaded, limits))
    return Plan(
        **found,
        cluster=loaded,
        traced=traced,
        step=step,
        memory_limit=limit,
        objective=objective,
        trace_s=traced_at - began,
        search_s=time.perf_counter() - traced_at,
        donate_argnums=donated,
        replicate=replicate,
        pins=dict(pins or {}),
        time_budget_s=time_budget_s,
        user_mesh=user_mesh,
    )


def _found(problem: Problem, outcome: Outcome) -> dict[str, Any]:
    """What a plan takes from the search."""
    extractor = Extractor(problem)
    return {
        "factors": problem.factors,
        "extractor": extractor,
        "solution": outcome.best,
        "decisions": extractor.decide(outcome.best),
        "lower_bound_s": outcome.bound_s,
        "exact": outcome.exact,
        "stopped": outcome.stopped,
        "rivals": outcome.rivals,
    }


def _silent(_what: str, _part: float) -> None:
    """Nobody watches."""


def _check(
    objective: str, search: str, time_budget_s: float | None, one_choice: str
) -> tuple[Objective, float | None, OneChoice]:
    """(what to make least, when the time is over, what shares one choice), of options that can be."""
    if objective not in ("time", "bytes"):
        raise ShardplanError(f"objective={objective!r} is not there: use objective='time', or 'bytes' for Tofu's")
    if search != "auto":
        raise ShardplanError(f"search={search!r} is not there: use search='auto'")
    if time_budget_s is not None and not (isinstance(time_budget_s, int | float) and time_budget_s > 0):
        raise ShardplanError(
            f"time_budget_s={time_budget_s!r} leaves no time to plan: give a positive number of seconds, or None"
        )
    deadline = anytime.now_s() + time_budget_s if time_budget_s is not None else None
    try:
        shared = one_choice_of(one_choice)
    except ValueError as error:
        raise ShardplanError(str(error)) from None
    return "bytes" if objective == "bytes" else "time", deadline, shared


def _known_primitives(names: Sequence[str], program: Program) -> tuple[str, ...]:
    """The names, each of which is that of a primitive of this step or of the installed JAX."""
    names = (names,) if isinstance(names, str) else tuple(names)
    used = set(_primitives(program))
    for name in names:
        if name not in used and name not in _jax.primitives():
            raise ShardplanError(f"replicate names {name!r}, which is no primitive{nearest(name, sorted(used))}")
    return names


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
        odd = next((e for e in spec if not (e is None or isinstance(e, str | tuple))), None)
        if odd is not None:
            raise PinError(f"the pin {glob!r} = {spec} says {odd}: each entry is None, an axis or a tuple of axes")
    return {glob: tuple(spec) for glob, spec in pins.items()}


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a search is held to: bytes a device, donated leaves, pins as entries, the end of its time; and what it makes least."""

    memory: int
    donated: frozenset[int]
    pins: Mapping[str, tuple[Any, ...]]
    deadline: float | None
    observer: Observer
    objective: Objective
    one_choice: OneChoice


def _searched(program: Program, replicate: Sequence[str], cluster: Cluster, limits: _Limits) -> tuple[Problem, Outcome]:
    """The best outcome over all factorings that are worth a try, with its problem; raises where it does not fit."""
    limits.observer("describing", 0.0)
    graph = flatten(program, replicate=replicate)
    for source in graph.unknown_trips:
        _log.warning("the while loop at %s has no known trip count: it is priced as one iteration", source)
    limits.observer("coarsening", 0.05)
    coarse = coarsen(graph, limits.one_choice)
    best: tuple[Problem, Outcome] | None = None
    problems = [Problem(graph, coarse, cluster, over, objective=limits.objective) for over in factor_choices(cluster, graph)]
    tried = _pinned(problems, limits.pins)
    for n, (problem, domains) in enumerate(tried):
        try:
            outcome = solve(
                problem,
                limit=limits.memory,
                donated=limits.donated,
                domains=domains,
                deadline=limits.deadline,
                observer=lambda what, part, n=n: limits.observer(what, 0.1 + 0.9 * (n + part) / len(tried)),
            )
        except KeyboardInterrupt:
            if best is None or not best[1].best.fits(limits.memory):
                raise
            best = best[0], replace(best[1], stopped="interrupted", exact=False)
            break
        if best is None or _better(outcome, best[1], limits.memory):
            best = (problem, outcome)
        if outcome.stopped:
            best = best[0], replace(best[1], stopped=outcome.stopped, exact=False)
            break
    assert best is not None
    problem, outcome = best
    if not outcome.best.fits(limits.memory):
        raise _too_small(problem, outcome.smallest or outcome.best, limits, stopped=bool(outcome.stopped))
    return best if limits.objective == "time" else in_seconds(*best, limits.donated)


def _pinned(problems: Sequence[Problem], pins: Mapping[str, tuple[Any, ...]]) -> list[tuple[Problem, tuple[Domain, ...]]]:
    """The factorings that the pins can hold on, each with its domains: a part of a level is an axis of one of them alone.

    Raises:
        PinError: where there is none: what is wrong with the pins on the levels themselves.
    """
    found: list[tuple[Problem, tuple[Domain, ...]]] = []
    refusals: list[PinError] = []
    for problem in problems:
        try:
            found.append((problem, pinned_domains(problem, pins)))
        except PinError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    return found


def _better(a: Outcome, b: Outcome, limit: int) -> bool:
    """A plan that fits before one that does not, then the faster (the smaller, where neither fits)."""
    if a.best.fits(limit) != b.best.fits(limit):
        return a.best.fits(limit)
    return a.best.seconds < b.best.seconds if a.best.fits(limit) else a.best.peak_bytes < b.best.peak_bytes


def factor_choices(cluster: Cluster, graph: Graph) -> tuple[tuple[Factor, ...], ...]:
    """The factorings to try: levels whole, and, where a level divides no loop of ops that do much of the work, that level split.

    It is split at the largest part of it that divides a loop of most of them.
    """
    whole = factors(cluster)
    splits: dict[str, tuple[int, ...]] = {}
    weights: dict[int, float] = {}
    for node in graph.nodes:
        weights[node.signature.id] = weights.get(node.signature.id, 0.0) + node.weight
    work: dict[int, list[tuple[float, int]]] = {}
    for signature in {node.signature.id: node.signature for node in graph.nodes}.values():
        description = signature.description
        if description is not None and compute.is_contraction(description):
            flop = compute.flops(description) * weights[signature.id]
            loops = [(flop, info.extent) for info in description.loops if not info.whole]
            if loops:
                work[signature.id] = loops
    for level in cluster.levels:
        stuck: dict[int, float] = {}
        for loops in work.values():
            best = max(math.gcd(extent, level.size) for _, extent in loops)
            if best < level.size:
                stuck[best] = stuck.get(best, 0.0) + loops[0][0]
        total = sum(loops[0][0] for loops in work.values())
        if stuck and sum(stuck.values()) > 0.02 * total:
            part = max(stuck, key=lambda g: (stuck[g], g))
            if part > 1:
                splits[level.name] = (part, level.size // part)
    return (whole, factors(cluster, splits)) if splits else (whole,)


def _too_small(problem: Problem, smallest: Solution, limits: _Limits, *, stopped: bool) -> MemoryLimitError:
    """The error for a step that fits in no way, with the smallest there is and the pins that keep it from being smaller."""
    live = memory.liveness(problem, limits.donated)

    def may_fit(some: Sequence[str]) -> bool:
        domains = pinned_domains(problem, {glob: limits.pins[glob] for glob in some})
        return memory.floor_bytes(problem, live, domains) <= limits.memory

    guilty = smallest_conflict(tuple(limits.pins), may_fit) if may_fit(()) else ()
    held = sorted(held_by_pins(problem, limits.pins).items(), key=lambda row: (-row[1], row[0]))
    return MemoryLimitError(
        limits.memory,
        smallest.peak_bytes,
        detail=_largest(problem, smallest),
        together=bool(guilty),
        unfinished=stopped,
        pins={f"{glob!r} = {spec_text(limits.pins[glob])}": int(nbytes) for glob, nbytes in held if not guilty or glob in guilty},
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
    top = ", ".join(f"{p} {n / 2**20:.2f} MiB" for n, p in sorted(rows, reverse=True)[:3])
    return f"of it arguments {held / 2**20:.2f} MiB, the largest {top}"
