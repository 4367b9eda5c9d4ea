"""Where a sharding of all arguments loses time: to other layouts of its arguments, in collectives that a plan lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from shardplan.collectives.issued import PlannedCollective, StepCost
from shardplan.constants import CONSTANTS
from shardplan.ir import Collective, Layout, spec_text
from shardplan.planning.suspects import MOST, Suspect, suspects
from shardplan.search.problem.extract import Decisions, inside_s
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.session import Session


@dataclass(frozen=True, slots=True)
class Loss:
    """The gain from resharding a group of arguments: the step becomes ``seconds`` shorter, and sends ``bytes`` less, if only
    these change and the step is scored again.

    A group is a weight with its moments, in all equal layers, or several weights that gain only together. ``together`` has their
    new specs, by path. ``path`` is the first of them, ``given`` its spec, ``instead`` its new one. ``source`` is the line of the
    op that gains most. Gains do not add up.
    """

    path: str
    source: str
    seconds: float
    bytes: float
    given: str
    instead: str
    together: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A sharding of the arguments, with the layouts of all other values, and its cost."""

    session: Session
    run: StepCost


Pricer = Callable[[Mapping[int, Layout]], PricedStep]
"""Prices the step where the arguments of these numbers lie otherwise."""


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


def losses(session: Session, given: PricedStep, best_s: float, price: Pricer, names: Sequence[str]) -> tuple[Loss, ...]:
    """The losses of arguments, largest first, in a session whose pins hold all arguments; ``given`` is its price, ``best_s`` that
    with the best layouts inside. ``names`` are the names of the factors in specs.

    Gains are the search's, with the best layouts inside. But if the layouts that XLA infers cost more than all of these gains,
    steps are priced with the layouts that XLA infers from the new specs. These are tried: each suspect whose gain is at least 5%
    of the largest; the batch, split like the values that are made of it; and, if these explain less than half of what XLA costs,
    the suspect that gains most of all whose layout changes when all are free.
    """
    found, inferred_s = suspects(session), given.run.step_time_s - best_s
    start = PricedStep(session.at(found.start), session.extractor.decide(found.start))
    if inferred_s <= found.seconds:
        after = [session.at(suspect.solution) for suspect in found.alone]
        priced = [PricedStep(own, own.decisions) for own in after]
        rows = [_loss(start, start, own, suspect, names) for suspect, own in zip(found.alone, priced, strict=True)]
    else:
        most_s = max([found.seconds, *(suspect.seconds for suspect in found.alone)])
        count = sum(suspect.seconds >= (1 - MOST) * most_s for suspect in found.alone)
        some = [*found.alone[: max(1, count)], *([] if found.batch is None else [found.batch])]
        rows = [_loss(start, given, price(suspect.layouts), suspect, names) for suspect in some]
        if found.moved and 2 * max((loss.seconds for loss in rows), default=0.0) < inferred_s:
            rows += [_loss(start, given, own, suspect, names) for suspect, own in _heaviest(found.moved, given, price)]
    rows.sort(key=lambda loss: (-loss.seconds, len(loss.together), loss.path))
    least_s = CONSTANTS.least_gain * given.run.step_time_s
    larger = [[other.together.keys() for other in rows[:n]] for n in range(len(rows))]  # that gain as much
    return tuple(
        loss
        for loss, fewer in zip(rows, larger, strict=True)
        if loss.seconds > least_s and not any(p <= loss.together.keys() for p in fewer)
    )


def _heaviest(moved: Sequence[Suspect], given: PricedStep, price: Pricer) -> Iterator[tuple[Suspect, PricedStep]]:
    """Lets one suspect after the other move, and yields the one at which the step gains most, with its price (by bisection). If
    this one gains nothing alone, the suspects before it move too. Yields nothing if the step gains nothing when all move.
    """

    def moves(count: int) -> Suspect:
        layouts = {i: layout for suspect in moved[:count] for i, layout in suspect.layouts.items()}
        return replace(moved[count - 1], layouts=layouts)

    low, high = 0, len(moved)
    before_s, after = given.run.step_time_s, price(moves(high).layouts)
    if after.run.step_time_s >= before_s:
        return
    while high - low > 1:
        middle = (low + high) // 2
        at = price(moves(middle).layouts)
        if before_s - at.run.step_time_s >= at.run.step_time_s - after.run.step_time_s:
            high, after = middle, at
        else:
            low, before_s = middle, at.run.step_time_s
    alone = price(moved[low].layouts)
    yield (moved[low], alone) if alone.run.step_time_s < given.run.step_time_s else (moves(high), after)


def _loss(start: PricedStep, before: PricedStep, after: PricedStep, suspect: Suspect, names: Sequence[str]) -> Loss:
    """The loss of a suspect of the search that begins at ``start``: what the step gains by its layouts."""
    session, graph = start.session, start.session.graph
    spent, left = _by_source(before), _by_source(after)
    instead = {graph.input_paths[i]: spec_text(layout.entries(tuple(names))) for i, layout in suspect.layouts.items()}
    path, first = next(iter(instead)), graph.inputs[next(iter(suspect.layouts))]
    state = session.solution.states[session.problem.coarse.of[first]]
    given = session.problem.resharder.layout(graph.tensors[first].shape, state)
    return Loss(
        path=path,
        source=max(spent, key=lambda source: (spent[source] - left.get(source, 0.0), source)),
        seconds=before.run.step_time_s - after.run.step_time_s,
        bytes=before.run.communication_bytes - after.run.communication_bytes,
        given=spec_text(given.entries(tuple(names))),
        instead=instead[path],
        together=instead,
    )


def _by_source(priced: PricedStep) -> dict[str, float]:
    """The seconds of collectives and of compute by source line."""
    session, decisions = priced.session, priced.session.decisions
    result: dict[str, float] = {}
    for source, seconds in (*_sent_s(decisions), *_computed_s(session.problem, session.solution, decisions)):
        result[source] = result.get(source, 0.0) + seconds
    return result


def _computed_s(problem: Problem, solution: Solution, decisions: Decisions) -> Iterator[tuple[str, float]]:
    joins = frozenset(problem.coarse.joins)
    nodes = [n for n in problem.graph.nodes if n.id not in joins and n.outputs]
    inside = {problem.coarse.of[n.outputs[0]]: str(n.op.source) for n in reversed(nodes)}  # a line for each variable's ops
    for summand in problem.summands:
        match summand.kind:
            case "op":
                yield str(problem.graph.nodes[summand.at].op.source), decisions.uses[summand.at].compute_s * summand.weight
            case "interior":
                yield inside[summand.at], inside_s(problem, summand, solution.states)
            case "link" | "view" | "host":  # they are sent, not computed
                pass
            case _:
                assert_never(summand.kind)


def _sent_s(decisions: Decisions) -> Iterator[tuple[str, float]]:
    for issued in decisions.issued:
        yield str(issued.source), issued.seconds * issued.times


def unasked(mine: Iterable[PlannedCollective], plan: Iterable[PlannedCollective]) -> tuple[Unasked, ...]:
    """The collectives that are not in the plan, by kind and source line, slowest first."""
    own, planned = _by_place(mine), _by_place(plan)
    result: list[Unasked] = []
    for (kind, source), collectives in own.items():
        same = planned.get((kind, source), [])
        more = sum(c.wire_bytes * c.times for c in collectives) - sum(c.wire_bytes * c.times for c in same)
        if more > CONSTANTS.rounding_bytes:
            seconds = sum(c.seconds * c.times for c in collectives) - sum(c.seconds * c.times for c in same)
            result.append(Unasked(kind, more, source, max(collectives, key=lambda c: c.wire_bytes * c.times).arrays, seconds))
    return tuple(sorted(result, key=lambda row: (-row.seconds, row.kind, row.source)))


def _by_place(collectives: Iterable[PlannedCollective]) -> dict[tuple[Collective, str], Sequence[PlannedCollective]]:
    result: dict[tuple[Collective, str], list[PlannedCollective]] = {}
    for c in collectives:
        result.setdefault((c.kind, c.source), []).append(c)
    return dict(result)
