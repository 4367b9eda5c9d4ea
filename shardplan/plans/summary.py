"""Makes a plan as plain data from a search, and rebuilds the search from such a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardplan.collectives.issued import PlannedCollective
from shardplan.cost import TIME, objective_of
from shardplan.errors import PlanFileError
from shardplan.graph import Graph, flatten
from shardplan.graph.updates import value_names
from shardplan.ir import Backend, Choices, Program
from shardplan.planning.scheduled import Scheduled, scheduled
from shardplan.plans.data import Argument, Baseline, PlanData
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.session import Session
from shardplan.search.strategy.pins import for_pins
from shardplan.search.strategy.purposes import Purpose, led_by, purposes
from shardplan.search.strategy.unused_axes import idle


def decided(session: Session, run: Scheduled | None, searched_s: float, axes: Sequence[Purpose] = ()) -> dict[str, Any]:
    """The fields of `PlanData` that follow from the solution of a session, which has this least price in the search's tables.
    ``axes`` are the purposes that the user has fixed for the factors, if any.

    Where the explicit backend runs it (``run``), its collectives are those of its schedule, which makes equal ones once and pads
    blocks; otherwise those that the search priced.
    """
    problem, solution, decisions = session.problem, session.solution, session.decisions
    graph = problem.graph
    layouts = decisions.layouts
    tensors = [graph.tensors[t] for t in graph.inputs]
    return {
        "name": solution.name,
        "factors": problem.factors,
        "arguments": tuple(
            Argument(path, x.shape, x.dtype, x.nbytes, layouts[t], "pinned_host" if i in graph.offloaded else "device")
            for i, (path, t, x) in enumerate(zip(graph.input_paths, graph.inputs, tensors, strict=True))
        ),
        "result_paths": session.program.output_paths,
        "result_layouts": tuple(layouts[t] if t >= 0 else None for t in graph.outputs),
        "choices": session.extractor.choices(decisions),
        "collectives": collectives_of(session, run),
        "step_time_s": decisions.step_time_s if run is None else run.step_time_s,
        "searched_s": searched_s,
        "time_model": "overlap" if problem.objective.overlaps else "sum",
        "weights": problem.objective.weights,
        "company": problem.company,
        "compute_s": decisions.compute_s,
        "host_s": decisions.host_s,
        "peak_bytes": solution.peak_bytes,
        "limited": solution.limits is not None,
        "regather": solution.regather,
        "idle_axes": {unused.name: unused.text for unused in idle(problem, decisions)},
        "purposes": led_by(axes, purposes(problem, decisions)),
    }


def collectives_of(
    session: Session, run: Scheduled | None, unnamed: Mapping[int, str] | None = None
) -> tuple[PlannedCollective, ...]:
    """Every collective of one step, in the order of the program, with the names of its tensors (`value_names`); those without one
    are numbered (``value 83``), or are what ``unnamed`` says.

    They are the collectives of the schedule (``run``), or, without one, those that the search priced.
    """
    graph, decisions, factors = session.graph, session.decisions, session.problem.factors
    names = value_names(graph, session.program.output_paths)
    all_names = {**(unnamed or {}), **names}
    return tuple(
        PlannedCollective(
            i.step.kind.hlo,
            i.step.nbytes,
            i.wire_bytes,
            tuple(factors[f].name for f in i.step.factors),
            i.times,
            i.seconds,
            all_names.get(i.tensor, f"value {i.tensor}"),
            str(i.source),
            i.step.program,
            i.hideable_s,
            tuple(names.get(tensor, str(line)) for tensor, line in i.along),
        )
        for i in (decisions if run is None else run).issued
    )


def baselines(session: Session, backend: Backend) -> dict[str, Any]:
    """The fields of `PlanData` about baselines, priced as the plan is; solves those that are not solved yet."""
    found = tuple(_baseline(session.at(s), backend) for s in session.rivals.solutions)
    return {"baselines": found, "left_out": tuple((row.name, row.reason) for row in session.rivals.left_out)}


def _baseline(session: Session, backend: Backend) -> Baseline:
    solution, decisions = session.solution, session.decisions
    seconds, wire_bytes = decisions.step_time_s, decisions.communication_bytes
    if backend == "explicit":
        run = scheduled(session)
        seconds, wire_bytes = run.step_time_s, run.communication_bytes
    fits = solution.fits(session.memory_limit)
    return Baseline(solution.name, seconds, decisions.compute_s, wire_bytes, solution.peak_bytes, fits)


# -- back to a search --------------------------------------------------------------------------------------------------


def session_of(data: PlanData, program: Program, donated: frozenset[int]) -> Session:
    """Rebuilds the search behind a plan.

    Raises:
        PlanFileError: if this version of shardplan groups the tensors of the step differently.
    """
    graph = flatten(program, replicate=data.replicate, backend=data.backend)
    pins = dict(data.pins)
    overlaps = data.time_model == "overlap"
    timed, objective = replace(TIME, overlaps=overlaps, weights=data.weights), objective_of(data.objective)
    coarse = coarsen(graph, data.one_choice)
    problem = Problem(graph, coarse, data.cluster, data.factors, objective=timed, company=data.company)
    problem = for_pins(problem, pins)
    live = memory.liveness(problem, donated)
    solver = Solver(problem, live)
    solution = _solution(data, problem, solver)
    return Session(
        program=program,
        problem=problem,
        solution=solution,
        rivals=Rivals(Solver(problem, live)),
        bound=None,
        extractor=Extractor.of(problem),
        donated=donated,
        pins=pins,
        memory_limit=data.memory_limit,
        objective=timed if objective is TIME else objective,
        replicate=data.replicate,
    )


def _solution(data: PlanData, problem: Problem, solver: Solver) -> Solution:
    states, keep = states_of(data.choices, problem)
    return solver.rate(data.name, states, problem.regathered(keep), data.regather, limits_of(data, problem.graph))


def states_of(choices: Choices, problem: Problem) -> tuple[tuple[int, ...], frozenset[int]]:
    """The states of a problem's variables under these choices, and the backward views that reuse the forward copy.

    Raises:
        PlanFileError: if values that share a variable have several layouts.
        KeyError: for a layout that the problem does not know.
    """
    graph = problem.graph
    layouts = {t: at for where, body in choices.bodies.items() for t, at in zip(graph.bodies[where], body.layouts, strict=True)}
    numbers = _copies(choices, problem)
    states: list[int] = []
    keep: set[int] = set()
    for variable in problem.coarse.variables:
        if variable.kind == "stored":
            ends = [(graph.tensors[t].shape, layouts[t]) for t in variable.tensors]
        else:
            copies = [choices.copies[n] for n in sorted(numbers[variable.id])]
            ends = [(variable.shape, copy.layout) for copy in copies]
            keep |= {variable.id} if any(copy.source is not None for copy in copies) else set()
        found = {problem.resharder.state(shape, layout) for shape, layout in ends if layout is not None}
        if len(found) != 1:
            raise PlanFileError(
                f"the plan was made by another version of shardplan, which chose separate layouts for {len(ends)} values of "
                f"shape {list(variable.shape)} that share one in this version: plan the step again to have it explained"
            )
        states += found
    return tuple(states), frozenset(keep)


def _copies(choices: Choices, problem: Problem) -> dict[int, set[int]]:
    """For each view variable, the numbers of the copies that its readers read."""
    found: dict[int, set[int]] = {v.id: set() for v in problem.coarse.variables if v.kind != "stored"}
    for (n, slot), v in problem.coarse.read.items():
        node = problem.graph.nodes[n]
        number = choices.bodies[node.where].reads.get((node.op.id, slot))
        if number is not None:
            found[v].add(number)
    return found


def limits_of(data: PlanData, graph: Graph) -> Limits | None:
    """Limits that cut each op as the plan cuts it; None for a plan whose layouts alone say that."""
    if not data.limited:
        return None
    choices = data.choices
    cuts = {n.id: use for n in graph.nodes if (use := choices.use(n.where, n.op.id)) is not None}
    return Limits({n: tuple(frozenset({loop}) for loop in use.loops) for n, use in cuts.items()})
