"""The arguments by which a sharding loses, in the search's prices: groups of arguments whose layouts change if they are free."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardplan.constants import CONSTANTS
from shardplan.graph.nodes import Graph
from shardplan.graph.updates import updated
from shardplan.ir import Layout
from shardplan.search.baselines.batch_dims import follow
from shardplan.search.baselines.samples import data_inputs
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.problem import Domain, Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.session import Session
from shardplan.search.strategy.pins import pinned_domains
from shardplan.search.strategy.polish import polish

MOST = 0.95
"""The part of what can be gained that is named; the rest is in arguments that gain next to nothing."""


@dataclass(frozen=True, slots=True)
class Suspect:
    """Arguments that are freed together. ``layouts`` has the new layout of each that changes, by number: weights and the batch
    first, then moments. ``solution`` is the best one with them, and ``seconds`` what it gains.
    """

    layouts: Mapping[int, Layout]
    solution: Solution
    seconds: float


@dataclass(frozen=True, slots=True)
class Suspects:
    """The groups that gain ``alone``, or together, largest first; and ``moved``: every group whose layout changes when all are
    free, with that layout, ordered by its gain alone.

    ``batch`` is the batch split along its examples as most of what is made of it, by bytes; None where it has this layout. Search
    gains nothing by it, since it may split what it reads; a partitioner splits inside what is split outside. ``start`` is the
    solution with none free, ``seconds`` what it gains if all are.
    """

    alone: tuple[Suspect, ...]
    moved: tuple[Suspect, ...]
    batch: Suspect | None
    start: Solution
    seconds: float


def suspects(session: Session) -> Suspects:
    """The suspects of a session whose pins hold all arguments.

    A weight, its moments, and those of equal layers with the same layouts are one group, and so is the batch. Each group is freed
    alone. Then all are free, and hold again one after the other as long as that costs next to nothing: groups of those left that
    gain less alone than they cost the others are coordinated, and one suspect. A layout that does not fit into memory is no gain
    if the session's own solution fits.
    """
    search = _Search.of(session)
    groups = _groups(session.problem, search.held)
    freed = {group: search.freed([group]) for group in groups}
    order = sorted(groups, key=lambda group: freed[group].seconds)
    every = search.freed(groups)
    moved = [group for group in order if any(every.states[v] != search.start.states[v] for v in group.variables)]
    kept, costs = search.fewest(moved, every)
    joined = [group for group in kept if search.gain_s(freed[group]) < MOST * costs[group]]
    found = [max(_alone(search, group, freed[group]), key=lambda suspect: suspect.seconds) for group in order]
    found += [search.suspect(joined, search.freed(joined))] if len(joined) > 1 else []
    alone = sorted((suspect for suspect in found if suspect.seconds > 0), key=lambda suspect: -suspect.seconds)
    others = tuple(search.suspect([group], every) for group in moved)
    return Suspects(
        tuple(alone), others, search.batch(), search.start, search.base_s - session.extractor.decide(every).step_time_s
    )


def _alone(search: _Search, group: _Group, freed: Solution) -> Iterator[Suspect]:
    """A group as a suspect, and without its moments: the search prices what hides behind compute at one rate."""
    yield search.suspect([group], freed)
    heads = group.without_moments
    if heads is not None:
        yield search.suspect([heads], search.freed([heads]))


@dataclass(frozen=True, slots=True)
class _Group:
    """Arguments that are freed together, by number, ``variables`` theirs; None ``without_moments`` where there are none."""

    arguments: tuple[int, ...]
    variables: frozenset[int]
    without_moments: _Group | None = None


def _groups(problem: Problem, held: Sequence[Domain]) -> list[_Group]:
    """The groups of all arguments that have a layout."""
    graph, of = problem.graph, problem.coarse.of
    owner, (batch, dims) = updated(graph), _batch(graph)
    members: dict[int, list[int]] = {}
    for i, t in enumerate(graph.inputs):
        if of[t] != FREE:
            members.setdefault(owner.get(t, i), []).append(i)
    equal: dict[Hashable, list[int]] = {}
    for head, own in members.items():
        lie = tuple((graph.tensors[graph.inputs[i]].shape, held[of[graph.inputs[i]]]) for i in own)
        key = (re.sub(r"\d+", "", graph.input_paths[head]), lie)
        equal.setdefault(("batch", _examples(graph, dims, head)) if head in batch else key, []).append(head)

    def group(arguments: Sequence[int], heads: _Group | None) -> _Group:
        variables = frozenset(of[graph.inputs[i]] for i in arguments)
        return _Group(tuple(arguments), variables, None if heads is None or heads.variables == variables else heads)

    def whole(heads: Sequence[int]) -> _Group:
        moments = sorted(i for head in heads for i in members[head] if i not in heads)
        return group([*heads, *moments], group(heads, None))

    return [whole([head for head in heads if head in members[head]]) for heads in equal.values()]


def _batch(graph: Graph) -> tuple[list[int], tuple[int | None, ...]]:
    """(the arguments with examples along a dim, by number; that dim of each tensor)."""
    data = data_inputs(graph)
    dims = follow(graph, data).batch
    return [i for i, t in enumerate(graph.inputs) if t in data and dims[t] is not None], dims


def _examples(graph: Graph, dims: Sequence[int | None], argument: int) -> int:
    """How many examples an argument of `_batch` has."""
    t = graph.inputs[argument]
    dim = dims[t]
    assert dim is not None
    return graph.tensors[t].shape[dim]


@dataclass(frozen=True, slots=True)
class _Search:
    """The problem of a session, solved with some arguments free; ``start`` is that with none, ``fits`` whether it does, and
    ``base_s`` its step.
    """

    session: Session
    solver: Solver
    held: Sequence[Domain]
    free: Sequence[Domain]
    start: Solution
    fits: bool
    base_s: float

    @classmethod
    def of(cls, session: Session) -> _Search:
        problem = session.problem
        held, free = pinned_domains(problem, session.pins), pinned_domains(problem, {})
        solver = Solver(problem, memory.liveness(problem, session.donated))
        start = polish(solver, held, session.solution)
        return cls(
            session, solver, held, free, start, start.fits(session.memory_limit), session.extractor.decide(start).step_time_s
        )

    def freed(self, groups: Sequence[_Group], either: Solution | None = None) -> Solution:
        """The best solution with these groups free, or in their own layouts or those of ``either``."""
        opened = {v for group in groups for v in group.variables}
        free = self.free if either is None else [tuple(sorted({*d, s})) for d, s in zip(self.held, either.states, strict=True)]
        found = polish(self.solver, [free[v] if v in opened else own for v, own in enumerate(self.held)], self.start)
        return self.start if self.fits and not found.fits(self.session.memory_limit) else found

    def gain_s(self, solution: Solution) -> float:
        """What a solution gains; 0 for next to nothing."""
        gained_s = self.start.seconds - solution.seconds
        return gained_s if gained_s > CONSTANTS.least_gain * self.start.seconds else 0.0

    def fewest(self, moved: Sequence[_Group], every: Solution) -> tuple[list[_Group], dict[_Group, float]]:
        """(those of the groups that have to move to ``every`` for `MOST` of its gain, what each of them costs if it alone holds).

        The groups that gain most alone, which come first, are kept if they can be.
        """
        wanted_s, kept = MOST * self.gain_s(every), list(moved)
        for group in reversed(moved):
            fewer = [other for other in kept if other is not group]
            if self.gain_s(self.freed(fewer, every)) >= wanted_s:
                kept = fewer
        together_s = self.gain_s(self.freed(kept, every))
        others = {group: [other for other in kept if other is not group] for group in kept}
        return kept, {group: together_s - self.gain_s(self.freed(own, every)) for group, own in others.items()}

    def suspect(self, groups: Sequence[_Group], at: Solution) -> Suspect:
        """The groups as a suspect that moves to a solution."""
        graph, problem = self.session.graph, self.session.problem
        layouts: dict[int, Layout] = {}
        for i in (i for group in groups for i in group.arguments):
            t = graph.inputs[i]
            v = problem.coarse.of[t]
            if at.states[v] != self.start.states[v]:
                layouts[i] = problem.resharder.layout(graph.tensors[t].shape, at.states[v])
        return Suspect(layouts, at, self.base_s - self.session.extractor.decide(at).step_time_s if layouts else 0.0)

    def batch(self) -> Suspect | None:
        """The batch split along its examples as most bytes of what is made of it; None where it has this layout.

        Arrays with as many examples as those bytes are the batch, or, where a step reshapes it to microbatches, with a multiple:
        a weight that the step does not give back has another number of rows.
        """
        graph, decided = self.session.graph, self.session.extractor.decide(self.start).layouts
        arguments, dims = _batch(graph)
        votes: Counter[tuple[tuple[int, ...], int]] = Counter()
        for tensor, layout, dim in zip(graph.tensors, decided, dims, strict=True):
            if layout is not None and dim is not None:
                votes[layout.dims[dim], tensor.shape[dim]] += tensor.nbytes
        over, count = max((vote for vote in votes if vote[1]), key=lambda vote: votes[vote], default=((), 1))
        counts = {i: _examples(graph, dims, i) for i in arguments}
        own = [i for i in arguments if counts[i] == count] or [i for i in arguments if counts[i] % count == 0]
        ways, layouts = math.prod(self.session.problem.sizes[f] for f in over), dict[int, Layout]()
        for i in own:
            t = graph.inputs[i]
            layout = Layout(tuple(over if d == dims[t] else () for d in range(len(graph.tensors[t].shape))))
            if counts[i] % ways == 0 and layout != decided[t]:
                layouts[i] = layout
        return Suspect(layouts, self.start, 0.0) if layouts else None
