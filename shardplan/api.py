"""The public functions: `plan` a step, `load` a plan, `parallelize` a step in place."""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, PartitionSpec

from shardplan.cost import compute
from shardplan.errors import ClusterError, MemoryLimitError, PinError, PlanFileError, ShardplanError, nearest
from shardplan.ir import Factor, Layout
from shardplan.mesh import Cluster, factors
from shardplan.plans import FORMAT, Baseline, Plan, fingerprint, layout_from_json
from shardplan.search import memory
from shardplan.search.coarsen import FREE, coarsen
from shardplan.search.extract import Extractor
from shardplan.search.graph import Graph, flatten
from shardplan.search.problem import Domain, Problem
from shardplan.search.solve import Observer, Outcome, Solution, Solver, search
from shardplan.trace import Traced, trace

_log = logging.getLogger("shardplan")

ClusterLike = Cluster | Mesh | str | PathLike[str]


def plan(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    memory_limit: int | str | None = None,
    objective: str = "time",
    search: str = "auto",
    pins: Mapping[str, PartitionSpec] | None = None,
    donate_argnums: Sequence[int] | int = (),
    seed: int = 0,
    time_budget_s: float | None = None,
    observer: Observer | None = None,
    replicate: Sequence[str] = (),
) -> Plan:
    """Plans how ``step(*args)`` runs on a cluster.

    ``args`` are arrays or `jax.ShapeDtypeStruct` trees; nothing is allocated. ``cluster`` is a `Cluster`, a preset with its
    node count
    (``"dgx-h100:4"``), a TOML file, a shape (``"2x4"``) or a `jax.sharding.Mesh`. ``memory_limit`` is in bytes or like
    ``"70GiB"``, by
    default the device's memory. ``pins`` maps globs of argument paths to the PartitionSpec that they must have, over factor
    names.
    ``replicate`` names primitives without a description that may run whole on every device.

    Raises:
        MemoryLimitError: if no plan fits.
        PinError: for a pin that matches nothing, names no axis or does not divide.
        UndescribedPrimitiveError: for a primitive without a description.
    """
    if objective != "time":
        raise ShardplanError(f"objective={objective!r} is not there yet: use objective='time'")
    if search not in ("auto",):
        raise ShardplanError(f"search={search!r} is not there: use search='auto'")
    if time_budget_s is not None and not time_budget_s > 0:
        raise ShardplanError(f"time_budget_s={time_budget_s} leaves no time to plan: give a positive number of seconds, or None")
    del seed  # nothing is drawn yet: the search is exact or a fixpoint
    donated_args = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    loaded, user_mesh = resolve_cluster(cluster)
    began = time.perf_counter()
    traced = trace(step, *args, donate_argnums=donated_args)
    traced_at = time.perf_counter()
    limit = parse_bytes(memory_limit) if memory_limit is not None else loaded.device.memory_bytes
    graph = flatten(traced.program, replicate=replicate)
    coarse = coarsen(graph)
    donated = donated_leaves(args, donated_args)
    deadline = time.monotonic() + time_budget_s if time_budget_s is not None else None
    best: tuple[Problem, Outcome] | None = None
    for over in factor_choices(loaded, graph):
        problem = Problem(graph, coarse, loaded, over)
        domains = pinned_domains(problem, pins or {})
        outcome = _search(problem, limit=limit, donated=donated, domains=domains, deadline=deadline, observer=observer or _silent)
        if best is None or _better(outcome, best[1], limit):
            best = (problem, outcome)
    assert best is not None
    problem, outcome = best
    if not outcome.best.fits(limit):
        smallest = outcome.smallest or outcome.best
        raise MemoryLimitError(limit, smallest.peak_bytes, detail=_largest(problem, smallest))
    made = _make(traced, problem, outcome.best, outcome, limit, loaded, donated_args, step, user_mesh)
    ended = time.perf_counter()
    known = {**made.static, "pins": dict(pins or {}), "baselines": outcome.baselines}
    return replace(made, trace_s=traced_at - began, search_s=ended - traced_at, static=known)


_search = search


def _silent(_what: str, _part: float) -> None:
    return None


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


def _make(
    traced: Traced,
    problem: Problem,
    solution: Solution,
    outcome: Outcome | None,
    limit: int,
    cluster: Cluster,
    donated: tuple[int, ...],
    step: Callable[..., Any],
    user_mesh: Mesh | None,
) -> Plan:
    extractor = Extractor(problem)
    decisions = extractor.decide(solution)
    scored: list[Baseline] = []
    for s in outcome.baselines if outcome else ():
        scored.append(Baseline(s.name, s.seconds, extractor.decide(s).communication_bytes, s.peak_bytes, s.fits(limit)))
    leaves = jax.tree.leaves(traced.out_shapes)
    assert len(leaves) == len(traced.program.outputs)
    return Plan(
        cluster=cluster,
        factors=problem.factors,
        traced=traced,
        extractor=extractor,
        solution=solution,
        decisions=decisions,
        step_time_s=solution.seconds,
        compute_s=decisions.compute_s,
        communication_s=decisions.communication_s,
        communication_bytes=decisions.communication_bytes,
        peak_bytes=solution.peak_bytes,
        lower_bound_s=outcome.bound_s if outcome else 0.0,
        exact=outcome.exact if outcome else False,
        memory_limit=limit,
        objective="time",
        baselines=tuple(scored),
        trace_s=0.0,
        search_s=0.0,
        donate_argnums=donated,
        static={"step": step},
        user_mesh=user_mesh,
        alternatives=outcome.baselines if outcome else (),
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


# -- arguments ---------------------------------------------------------------------------------------------------------


def resolve_cluster(cluster: ClusterLike) -> tuple[Cluster, Mesh | None]:
    """The cluster that the user means; a Mesh keeps its axis names and devices (as Auto axes)."""
    if not isinstance(cluster, Mesh):
        return Cluster.load(cluster), None
    shape = tuple(int(n) for n in cluster.devices.shape)
    like = Cluster.load("x".join(map(str, shape)))
    levels = tuple(replace(level, name=name) for level, name in zip(like.levels, cluster.axis_names, strict=True))
    auto = Mesh(cluster.devices, cluster.axis_names, axis_types=(AxisType.Auto,) * len(shape))
    return replace(like, name="mesh", levels=levels), auto


def parse_bytes(text: int | str) -> int:
    """``"70GiB"``, ``"80GB"``, ``"512 MiB"`` or a number of bytes."""
    if isinstance(text, int):
        value = text
    else:
        units = {
            "": 1,
            "B": 1,
            "KB": 10**3,
            "MB": 10**6,
            "GB": 10**9,
            "TB": 10**12,
            "KIB": 2**10,
            "MIB": 2**20,
            "GIB": 2**30,
            "TIB": 2**40,
        }
        digits = text.strip().rstrip("BKMGTIbkmgti ")
        unit = text.strip()[len(digits) :].strip().upper()
        try:
            value = int(float(digits) * units[unit])
        except (ValueError, KeyError, OverflowError):
            raise ShardplanError(
                f"memory limit {text!r} is not a size: write bytes, or a number with KiB, MiB, GiB, KB, MB or GB"
            ) from None
    if value <= 0:
        raise ShardplanError(f"memory limit {text!r} is not positive")
    return value


def donated_leaves(args: Sequence[Any], donate_argnums: Sequence[int]) -> frozenset[int]:
    """Positions, among all leaves of the arguments, of those that are donated."""
    found: set[int] = set()
    at = 0
    for i, arg in enumerate(args):
        n = len(jax.tree.leaves(arg))
        if i in donate_argnums:
            found.update(range(at, at + n))
        at += n
    return frozenset(found)


def pinned_domains(problem: Problem, pins: Mapping[str, PartitionSpec]) -> tuple[Domain, ...]:
    """The problem's domains with the pins in them."""
    domains = list(problem.domains)
    graph = problem.graph
    names = {f.name: i for i, f in enumerate(problem.factors)}
    for pattern, spec in pins.items():
        hits = [i for i, p in enumerate(graph.input_paths) if fnmatch.fnmatchcase(p, pattern)]
        if not hits:
            raise PinError(f"the pin {pattern!r} matches no argument{nearest(pattern, graph.input_paths)}")
        for i in hits:
            t = graph.inputs[i]
            shape, path = graph.tensors[t].shape, graph.input_paths[i]
            layout = _pin_layout(problem, names, pattern, spec, path, shape)
            v = problem.coarse.of[t]
            if v == FREE:
                if any(layout.dims):
                    raise PinError(f"the pin {pattern!r} splits {path}, a scalar")
                continue
            space = problem.resharder.space(len(shape))
            state = space.of(layout)
            for d, (n, parts) in enumerate(zip(shape, space.splits[state], strict=False)):
                if n % int(parts):
                    up = -(-n // int(parts)) * int(parts)
                    raise PinError(
                        f"the pin {pattern!r} = {spec} cuts dim {d} of {path} {shape} {parts} ways, "
                        f"which does not divide {n}; {up} would"
                    )
            if state not in domains[v]:
                raise PinError(
                    f"the pin {pattern!r} = {spec} on {path} contradicts another pin on an array that shares its layout"
                )
            domains[v] = (state,)
    return tuple(domains)


def _pin_layout(
    problem: Problem, names: Mapping[str, int], pattern: str, spec: PartitionSpec, path: str, shape: tuple[int, ...]
) -> Layout:
    if len(spec) > len(shape):
        raise PinError(f"the pin {pattern!r} = {spec} has {len(spec)} entries, {path} has rank {len(shape)}")
    dims: list[tuple[int, ...]] = []
    for entry in (*spec, *[None] * (len(shape) - len(spec))):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for axis in axes:
            if axis not in names:
                raise PinError(
                    f"the pin {pattern!r} = {spec} names the axis {axis!r}; "
                    f"the plan's axes are {', '.join(names)}{nearest(axis, list(names))}"
                )
        dims.append(tuple(names[a] for a in axes))
    flat = [f for d in dims for f in d]
    if len(set(flat)) != len(flat):
        raise PinError(f"the pin {pattern!r} = {spec} uses an axis twice")
    return Layout(tuple(dims))


# -- files -------------------------------------------------------------------------------------------------------------


def load(file: str | PathLike[str], step: Callable[..., Any], *args: Any) -> Plan:
    """Reads a saved plan for this step and these shapes.

    Raises:
        PlanFileError: if the file is no plan, or was made for another model, other shapes or another version.
    """
    content = read_plan_file(file)
    try:
        cluster = Cluster.from_toml(content["cluster"], source=f"{file}: cluster")
        over = tuple(Factor(str(n), int(s), int(level), int(stride)) for n, s, level, stride in content["factors"])
        layouts = [layout_from_json(e) for e in content["variables"]]
        donated = tuple(int(i) for i in content["donate_argnums"])
        stated = str(content["fingerprint"])
    except ClusterError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise PlanFileError(f"{file}: not a plan: {type(error).__name__} at {error}") from error
    traced = trace(step, *args, donate_argnums=donated)
    if fingerprint(traced) != stated:
        raise PlanFileError(f"{file}: the plan was made for another model or other shapes; plan this step anew")
    graph = flatten(traced.program)
    problem = Problem(graph, coarsen(graph), cluster, over)
    variables = problem.coarse.variables
    if len(layouts) != len(variables) or any(len(a.dims) != len(v.shape) for a, v in zip(layouts, variables, strict=True)):
        raise PlanFileError(
            f"{file}: the plan does not fit this step: {len(layouts)} layouts for {len(variables)} variables; plan it anew"
        )
    try:
        states = tuple(problem.resharder.space(len(v.shape)).of(a) for a, v in zip(layouts, variables, strict=True))
    except (KeyError, IndexError) as error:
        raise PlanFileError(f"{file}: a layout in the plan is not possible: {error}") from error
    for v, s, d in zip(variables, states, problem.domains, strict=True):
        if s not in d:
            raise PlanFileError(f"{file}: a layout of a value of shape {v.shape} does not divide; plan this step anew")
    solver = Solver(problem, memory.liveness(problem, donated_leaves(args, donated)))
    keep = frozenset(int(v) for v in content["keep"])
    again = {v: float("inf") for v in problem.backward_views if v not in keep}
    solution = solver.rate("plan", states, again, bool(content["regather"]))
    made = _make(traced, problem, solution, None, int(content["memory_limit"]), cluster, donated, step, None)
    scored = tuple(Baseline(**b) for b in content["baselines"])
    return replace(
        made,
        baselines=scored,
        lower_bound_s=float(content["lower_bound_s"]),
        exact=bool(content["exact"]),
        trace_s=float(content["trace_s"]),
        search_s=float(content["search_s"]),
    )


def read_plan_file(file: str | PathLike[str]) -> dict[str, Any]:
    """The JSON of a plan file, its format checked."""
    path = Path(file)
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanFileError(f"{path}: not a plan file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PlanFileError(f"{path}: plan format {found!r}, this version reads format {FORMAT}; plan the step anew")
    return content
