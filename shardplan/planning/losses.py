"""Where a sharding of all arguments loses time: to other layouts of single arguments, in collectives that a plan lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from shardplan.collectives.issued import PlannedCollective
from shardplan.constants import CONSTANTS
from shardplan.ir import Collective, spec_text
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Decisions, inside_s
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.session import Session
from shardplan.search.strategy.pins import pinned_domains
from shardplan.search.strategy.polish import polish


@dataclass(frozen=True, slots=True)
class Loss:
    """What one argument's layout costs: the step is ``seconds`` shorter, and sends ``bytes`` less, if this argument alone takes
    its best layout (``instead``) and all other values that are not arguments follow.

    ``given`` is its spec. ``source`` is the line of the op that gains most. ``together`` are the arguments that share the layout
    (``path`` is the first), as the moments of one weight do: they are freed together. Seconds are in the search's prices, in
    which each reader has its own collective. Losses of several arguments do not add up.
    """

    path: str
    source: str
    seconds: float
    bytes: float
    given: str
    instead: str
    together: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unasked:
    """Collectives of one kind at one source line that a plan does not have, or the part of them beyond the plan's.

    ``bytes`` are on the wire of a device in a step, ``seconds`` those of the collectives alone, ``tensor`` the first that moves.
    """

    kind: Collective
    bytes: float
    source: str
    tensor: str
    seconds: float


def losses(session: Session, names: Sequence[str]) -> tuple[Loss, ...]:
    """The losses of arguments, largest first, in a session whose pins hold all arguments. Arguments that lose nothing are left
    out. ``names`` are the names of the factors in specs. A layout that does not fit into memory is no gain if the session's own
    solution fits.
    """
    problem, graph = session.problem, session.graph
    sharing: dict[int, list[int]] = {}
    for i, t in enumerate(graph.inputs):
        if problem.coarse.of[t] != FREE:
            sharing.setdefault(problem.coarse.of[t], []).append(i)
    held, free = pinned_domains(problem, session.pins), pinned_domains(problem, {})
    solver = Solver(problem, memory.liveness(problem, session.donated))
    best = polish(solver, held, session.solution)
    base, fits = session.extractor.decide(best), best.fits(session.memory_limit)
    spending = _Spent.of(problem)
    spent = spending.by_source(best, base)
    result: list[Loss] = []
    for v, arguments in sharing.items():
        freed = polish(solver, [free[u] if u == v else own for u, own in enumerate(held)], best)
        other = session.extractor.decide(freed)
        gained_s = base.step_time_s - other.step_time_s
        if gained_s <= CONSTANTS.least_gain * base.step_time_s or (fits and not freed.fits(session.memory_limit)):
            continue
        left = spending.by_source(freed, other)
        t = graph.inputs[arguments[0]]
        layouts = [layout for layout in (base.layouts[t], other.layouts[t]) if layout is not None]
        given, instead = (spec_text(layout.entries(tuple(names))) for layout in layouts)
        dearest = max(spent, key=lambda source: (spent[source] - left.get(source, 0.0), source))
        paths = tuple(graph.input_paths[i] for i in arguments)
        fewer = base.communication_bytes - other.communication_bytes
        result.append(Loss(paths[0], dearest, gained_s, fewer, given, instead, paths))
    return tuple(sorted(result, key=lambda loss: (-loss.seconds, loss.path)))


@dataclass(frozen=True, slots=True)
class _Spent:
    """The seconds of a problem's solutions by source line; ``inside`` has a line for the elementwise ops of each variable."""

    problem: Problem
    inside: Mapping[int, str]

    @classmethod
    def of(cls, problem: Problem) -> _Spent:
        """For a problem."""
        joins = frozenset(problem.coarse.joins)
        nodes = [n for n in problem.graph.nodes if n.id not in joins and n.outputs]
        return cls(problem, {problem.coarse.of[n.outputs[0]]: str(n.op.source) for n in reversed(nodes)})

    def by_source(self, solution: Solution, decisions: Decisions) -> dict[str, float]:
        """The seconds of collectives and of compute."""
        result: dict[str, float] = {}
        for source, seconds in (*_sent_s(decisions), *self._computed_s(solution, decisions)):
            result[source] = result.get(source, 0.0) + seconds
        return result

    def _computed_s(self, solution: Solution, decisions: Decisions) -> Iterator[tuple[str, float]]:
        problem = self.problem
        for summand in problem.summands:
            match summand.kind:
                case "op":
                    yield str(problem.graph.nodes[summand.at].op.source), decisions.uses[summand.at].compute_s * summand.weight
                case "interior":
                    yield self.inside[summand.at], inside_s(problem, summand, solution.states)
                case "link" | "view" | "host":  # they are sent, not computed
                    pass
                case _:
                    assert_never(summand.kind)


def _sent_s(decisions: Decisions) -> Iterator[tuple[str, float]]:
    for issued in decisions.issued:
        yield str(issued.source), issued.seconds * issued.times


def unasked(mine: Iterable[PlannedCollective], plan: Iterable[PlannedCollective]) -> tuple[Unasked, ...]:
    """The collectives that are not in the plan, by kind and source line, most bytes first."""
    own, planned = _by_place(mine), _by_place(plan)
    result: list[Unasked] = []
    for (kind, source), collectives in own.items():
        same = planned.get((kind, source), [])
        more = sum(c.wire_bytes * c.times for c in collectives) - sum(c.wire_bytes * c.times for c in same)
        if more > CONSTANTS.rounding_bytes:
            seconds = sum(c.seconds * c.times for c in collectives) - sum(c.seconds * c.times for c in same)
            result.append(Unasked(kind, more, source, max(collectives, key=lambda c: c.wire_bytes * c.times).tensor, seconds))
    return tuple(sorted(result, key=lambda row: (-row.bytes, row.kind, row.source)))


def _by_place(collectives: Iterable[PlannedCollective]) -> dict[tuple[Collective, str], Sequence[PlannedCollective]]:
    result: dict[tuple[Collective, str], list[PlannedCollective]] = {}
    for c in collectives:
        result.setdefault((c.kind, c.source), []).append(c)
    return dict(result)
