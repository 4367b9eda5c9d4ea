"""Plans as files: what is written, and what is refused when it is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from shardplan.errors import ClusterError, DeviceError, PlanFileError
from shardplan.frontend.argnums import leaves_of
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import flatten
from shardplan.ir import Factor, Layout, Program, spec_text
from shardplan.mesh import Cluster
from shardplan.mesh.factoring import check_cover
from shardplan.plans.fingerprint import arguments, different_arguments, fingerprint
from shardplan.plans.plan import FORMAT, Baseline, Plan, auto
from shardplan.remat import Part, Policy, Remat, Without, rematerialised
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.coarsening import coarsen
from shardplan.search.coarsening.variables import OneChoice, one_choice_of
from shardplan.search.inference.anytime import Stopped
from shardplan.search.inference.bound import Known
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.strategies import Cuts
from shardplan.search.strategy.pins import for_pins


@dataclass(frozen=True, slots=True)
class PlanFile:
    """What a plan file holds: layouts by variable, what they were chosen under, and the figures that are not worked out again.

    Seconds are of one step, bytes of one device; ``arguments`` says of each path what array it was.
    """

    name: str
    fingerprint: str
    arguments: Mapping[str, str]
    operators: int
    cluster: Cluster
    factors: tuple[Factor, ...]
    layouts: tuple[Layout, ...]
    keep: frozenset[int]
    regather: bool
    limits: Limits | None
    memory_limit: int
    objective: str
    donate_argnums: tuple[int, ...]
    replicate: tuple[str, ...]
    pins: Mapping[str, PartitionSpec]
    baselines: tuple[Baseline, ...]
    lower_bound_s: float
    unlimited_s: float | None
    exact: bool
    trace_s: float
    search_s: float
    explain: Mapping[str, str]
    stopped: Stopped
    one_choice: OneChoice
    remat: Remat

    def plan(self, step: Callable[..., Any], traced: Traced, mesh: Mesh | None = None) -> Plan:
        """The plan, for a step traced with the file's ``donate_argnums``; on the user's own mesh, if one is given.

        Raises:
            PlanFileError: if the step is not the one that was planned, or the layouts do not fit it.
            DeviceError: if the mesh has other axes.
        """
        self._check(traced)
        program = self._program(traced)
        problem = self._problem(program)
        states = self._states(problem)
        live = memory.liveness(problem, frozenset(leaves_of(traced.in_tree, self.donate_argnums)))
        self._check_choices(problem)
        again = problem.regathered(self.keep)
        solution = Solver(problem, live).rate("plan", states, again, self.regather, self.limits)
        extractor = Extractor(problem)
        return Plan(
            cluster=self.cluster,
            factors=self.factors,
            traced=traced,
            program=program,
            remat=self.remat,
            extractor=extractor,
            solution=solution,
            decisions=extractor.decide(solution),
            step=step,
            memory_limit=self.memory_limit,
            objective=self.objective,
            bound=Known(self.lower_bound_s, self.unlimited_s),
            exact=self.exact,
            stopped=self.stopped,
            rivals=Rivals(Solver(problem, live)),
            scored=self.baselines,
            trace_s=self.trace_s,
            search_s=self.search_s,
            donate_argnums=self.donate_argnums,
            replicate=self.replicate,
            pins=self.pins,
            user_mesh=self._mesh(mesh),
        )

    def _check(self, traced: Traced) -> None:
        if fingerprint(traced) == self.fingerprint:
            return
        said = different_arguments(dict(self.arguments), arguments(traced))
        found = traced.program.count_ops()
        counts = f"{self.operators} operators then, {found} now" if found != self.operators else f"its {found} operators differ"
        raise PlanFileError(
            f"{self.name}: the plan was made for another model or other shapes: "
            f"{said or f'the arguments agree, the program does not ({counts})'}; plan this step anew"
        )

    def _program(self, traced: Traced) -> Program:
        """What the plan is for: the step, with what is computed again."""
        try:
            return rematerialised(traced.program, self.remat.parts)
        except (KeyError, IndexError, ValueError, StopIteration) as error:
            raise PlanFileError(f"{self.name}: what it computes again is not in this step; plan this step anew") from error

    def _problem(self, program: Program) -> Problem:
        graph = flatten(program, replicate=self.replicate)
        problem = Problem(graph, coarsen(graph, self.one_choice), self.cluster, self.factors)
        problem = for_pins(problem, {glob: tuple(spec) for glob, spec in self.pins.items()})
        own, wanted = [len(a.dims) for a in self.layouts], [len(v.shape) for v in problem.coarse.variables]
        if own != wanted:
            odd = next((i for i, (a, b) in enumerate(zip(own, wanted, strict=False)) if a != b), None)
            where = f", the first of another rank is number {odd}" if odd is not None else ""
            raise PlanFileError(
                f"{self.name}: the plan does not fit this step: {len(own)} layouts for {len(wanted)} variables{where}; "
                "plan this step anew"
            )
        return problem

    def _states(self, problem: Problem) -> tuple[int, ...]:
        found: list[int] = []
        named = {problem.coarse.of[t]: path for t, path in zip(problem.graph.inputs, problem.graph.input_paths, strict=True)}
        for v, (layout, variable) in enumerate(zip(self.layouts, problem.coarse.variables, strict=True)):
            spec = spec_text(layout.entries([f.name for f in self.factors]))
            what = f"the layout {spec} of {named.get(v, 'a value')} of shape {variable.shape}"
            try:
                found.append(problem.resharder.state(variable.shape, layout))
            except (KeyError, IndexError) as error:
                raise PlanFileError(f"{self.name}: {what} is not possible; plan this step anew") from error
            if found[-1] not in problem.domains[v]:
                raise PlanFileError(f"{self.name}: {what} does not divide it; plan this step anew")
        return tuple(found)

    def _check_choices(self, problem: Problem) -> None:
        """Refuses forward copies and limits that name what this step does not have."""
        count = len(self.factors)

        def need(holds: bool, what: str) -> None:
            if not holds:
                raise PlanFileError(f"{self.name}: {what}; plan this step anew")

        for v in sorted(self.keep - set(problem.backward_views)):
            need(False, f"keep names variable {v}, which is no copy for the backward pass")
        if self.limits is None:
            return
        grouped = [f for group in self.limits.groups for f in group]
        apart = len(set(grouped)) == len(grouped) and set(grouped) <= set(range(count)) and all(self.limits.groups)
        need(apart, f"the groups {list(map(list, self.limits.groups))} of limits do not part the {count} factors")
        joins = frozenset(problem.coarse.joins)
        for n, cuts in self.limits.cuts.items():
            need(n in joins, f"limits name op {n}, which has no cut of its own in this step")
            need(len(cuts) == count, f"limits give op {n} loops for {len(cuts)} factors, the plan has {count}")
            description = problem.graph.nodes[n].signature.description
            loops = {-1, *range(len(description.loops) if description is not None else 0)}
            odd = sorted(frozenset[int]().union(*cuts) - loops)
            need(not odd, f"limits let op {n} cut loop {odd[:1]}, of loops {sorted(loops)} (-1: none)")

    def _mesh(self, mesh: Mesh | None) -> Mesh | None:
        if mesh is None:
            return None
        own, given = {f.name: f.size for f in self.factors}, {str(n): int(k) for n, k in mesh.shape.items() if k > 1}
        if own != given:
            raise DeviceError(f"{self.name}: the plan is for the mesh axes {own}, the mesh given has {given}")
        return auto(mesh)


def load(file: str | PathLike[str], step: Callable[..., Any], *args: Any, mesh: Mesh | None = None) -> Plan:
    """Reads a saved plan for this step and these shapes. A plan that was made on your own `Mesh` takes it again: ``mesh=``.

    Raises:
        PlanFileError: if the file is no plan, or was made for another model, other shapes or another version.
    """
    content = read_plan_file(file)
    return content.plan(step, trace_step(step, args, content.donate_argnums), mesh)


def read_plan_file(file: str | PathLike[str]) -> PlanFile:
    """A plan file, each of its fields checked.

    Raises:
        PlanFileError: if it cannot be read, is no plan, or lacks something.
        ClusterError: if the cluster in it makes no sense.
    """
    path = Path(file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanFileError(f"{path}: not a plan file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PlanFileError(f"{path}: plan format {found!r}, this version reads format {FORMAT}; plan the step anew")
    try:
        return _parsed(str(path), content)
    except ClusterError:
        raise
    except KeyError as error:
        raise PlanFileError(f"{path}: not a whole plan: {error} is missing; plan the step anew") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise PlanFileError(f"{path}: not a plan: {type(error).__name__}: {error}") from error


def _parsed(name: str, content: dict[str, Any]) -> PlanFile:
    cluster = Cluster.from_toml(content["cluster"], source=f"{name}: cluster")
    if content["cluster_fingerprint"] != cluster.fingerprint():
        raise ValueError(f"cluster_fingerprint={content['cluster_fingerprint']!r} is not that of the cluster in it")
    over = tuple(Factor(str(n), int(s), int(level), int(stride)) for n, s, level, stride in content["factors"])
    check_cover(cluster, over)
    return PlanFile(
        name=name,
        fingerprint=str(content["fingerprint"]),
        arguments={str(path): str(what) for path, what in content["arguments"].items()},
        operators=int(content["operators"]),
        cluster=cluster,
        factors=over,
        layouts=tuple(_layout(e) for e in content["variables"]),
        keep=frozenset(int(v) for v in content["keep"]),
        regather=_truth(content, "regather"),
        limits=_limits(content["limits"]),
        memory_limit=int(content["memory_limit"]),
        objective=_objective(content["objective"]),
        donate_argnums=_positions(content["donate_argnums"]),
        replicate=_names(content["replicate"]),
        pins={str(glob): _spec(entries) for glob, entries in content["pins"].items()},
        baselines=tuple(Baseline(**b) for b in content["baselines"]),
        lower_bound_s=float(content["lower_bound_s"]),
        unlimited_s=None if content["unlimited_s"] is None else float(content["unlimited_s"]),
        exact=_truth(content, "exact"),
        trace_s=float(content["trace_s"]),
        search_s=float(content["search_s"]),
        explain={str(path): str(text) for path, text in content["explain"].items()},
        stopped=_stopped(content["stopped"]),
        one_choice=one_choice_of(content["one_choice"]),
        remat=_remat(content["remat"], content["remat_parts"]),
    )


def _truth(content: Mapping[str, Any], key: str) -> bool:
    if not isinstance(content[key], bool):
        raise ValueError(f"{key}={content[key]!r} is neither true nor false")
    return content[key]


def _objective(text: Any) -> str:
    if text not in ("time", "bytes"):
        raise ValueError(f"objective={text!r}")
    return text


def _positions(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"donate_argnums={numbers!r}")
    return tuple(numbers)


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"replicate={names!r}")
    return tuple(names)


def _remat(said: Any, parts: Any) -> Remat:
    without = None if said["without"] is None else Without(**said["without"])
    return Remat(tuple(_part(p) for p in parts), _policy(said["policy"]), without, str(said["note"]))


def _part(row: Any) -> Part:
    where = tuple((int(op), int(body)) for op, body in row["where"])
    loop = None if row["loop"] is None else (int(row["loop"][0]), int(row["loop"][1]))
    return Part(where, tuple(int(op) for op in row["ops"]), loop, int(row["saved_bytes"]))


def _policy(text: Any) -> Policy:
    match text:
        case "all" | "light":
            return text
        case _:
            raise ValueError(f"policy={text!r}")


def _stopped(text: Any) -> Stopped:
    match text:
        case "" | "time budget" | "interrupted":
            return text
        case _:
            raise ValueError(f"stopped={text!r}")


def _layout(entry: Any) -> Layout:
    dims, partial = entry
    return Layout(tuple(tuple(int(f) for f in d) for d in dims), tuple(int(f) for f in partial))


def _limits(entry: Any) -> Limits | None:
    if entry is None:
        return None
    cuts: dict[int, Cuts] = {}
    for row in entry["cuts"]:
        loops = tuple(frozenset(int(v) for v in may) for may in row["loops"])
        for n in map(int, row["nodes"]):
            if n in cuts:
                raise ValueError(f"limits say twice how op {n} may be cut")
            cuts[n] = loops
    return Limits(cuts, tuple(tuple(int(f) for f in group) for group in entry["groups"]))


def _spec(entries: Any) -> PartitionSpec:
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))
