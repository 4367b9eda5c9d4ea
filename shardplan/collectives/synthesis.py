"""All programs of a hierarchy in increasing size (P2, section 3.5).

Programs are walks from the initial to the final context. Walks share contexts, so each context is expanded once. Whether a
program is correct does not depend on the sizes of the levels, only on which are larger than one: a level of any size behaves
like one of size two, with its first member and one other. So walks are enumerated with every level at two and hold for all sizes
(a test compares with the enumeration on the true sizes; `replay` checks any single program on any size).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter

from ..ir import Collective
from .dsl import Instruction, Master, Reduction, Shape, groups, instructions
from .states import Context, Goal, P2Collective, State, StateSpace

Order = tuple[int, ...]
Groups = tuple[tuple[int, ...], ...]
_Pattern = tuple[tuple[tuple[int, ...], Callable[[Context], Context]], ...]
"""Groups of devices, each with a function that takes their states from a context."""
_Moves = Sequence[tuple[_Pattern, tuple[Instruction, ...]]]
"""Patterns with the instructions that run over them."""


def synthesize(
    depth: int, max_size: int = 5, goal: Goal = Collective.ALL_REDUCE, order: Order | None = None
) -> tuple[Reduction, ...]:
    """Every program of at most ``max_size`` steps for ``depth`` levels, shortest first, for levels of any sizes.

    ``order`` lists the levels, major first, that number the chunks at the scattered end of a reduce-scatter or all-gather goal:
    (1, 0) gives device (c0, c1) chunk (c1, c0), the layout P(('l1', 'l0')). The default is the order of the hierarchy.

    >>> [p.short for p in synthesize(1)]
    ['AllReduce', 'ReduceScatter-AllGather', 'Reduce-Broadcast']
    >>> len(synthesize(2)), [p.short for p in synthesize(2, goal=Collective.REDUCE_SCATTER, order=(1, 0))][0]
    (93, 'ReduceScatter-ReduceScatter')
    """
    return _synthesize((2,) * depth, max_size, goal, order)


@lru_cache(maxsize=256)
def _synthesize(shape: Shape, max_size: int, goal: Goal, order: Order | None) -> tuple[Reduction, ...]:
    """`synthesize` on exactly this shape."""
    walks = Walks(shape, goal, order)
    return tuple(Reduction(steps, len(shape)) for size in range(1, max_size + 1) for steps in walks.of_size(size))


def _pattern(among: Groups) -> _Pattern:
    found: list[tuple[tuple[int, ...], Callable[[Context], Context]]] = [(group, itemgetter(*group)) for group in among]
    return tuple(found)


def _stride(shape: Shape, step: Instruction) -> int:
    """The stride between devices that take part: 1, or for masters only, the size of a group of the slice."""
    _, high = step.span(len(shape))
    return math.prod(shape[high:]) if isinstance(step.form, Master) else 1


def _union(context: Context) -> State:
    """The contributions that at least one of these devices holds."""
    known = 0
    for state in context:
        known |= state
    return known


class _Ends:
    """A quick test of whether one step over a pattern may lead to the end; most contexts fail it for every pattern."""

    def __init__(self, end: Context, among: Groups) -> None:
        inside = {d for group in among for d in group}
        self._outside = [(d, state) for d, state in enumerate(end) if d not in inside]
        # sums and gathers add up to one member's end state, scatters to those of all; a broadcast keeps the first member's state
        self._groups = [
            (members, (end[group[0]], sum(end[d] for d in group)), end[group[0]]) for group, members in _pattern(among)
        ]

    def near(self, context: Context) -> bool:
        """Whether one step may lead from this context to the end."""
        for members, wholes, first in self._groups:
            states = members(context)
            if states[0] != first and sum(states) not in wholes:
                return False
        return all(context[d] == state for d, state in self._outside)


class Walks:
    """The graph of contexts of a shape, built as it is walked. Walks that meet in a context share it."""

    def __init__(self, shape: Shape, goal: Goal = Collective.ALL_REDUCE, order: Order | None = None) -> None:
        self.shape = shape
        self.space = StateSpace(math.prod(shape))
        chunks = chunk_order(shape, order)
        self.start = self.space.initial(goal, chunks)
        self.end = self.space.target(goal, chunks)
        # each instruction, and its groups on this shape
        found = ((step, groups(shape, step)) for step in instructions(len(shape)))
        patterns: dict[Groups, _Pattern] = {}
        rows = ((patterns.setdefault(among, _pattern(among)), step) for step, among in found if among)
        self._moves: _Moves = [(among, tuple(s for _, s in same)) for among, same in itertools.groupby(rows, itemgetter(0))]
        self._stride = [_stride(shape, steps[0]) for _, steps in self._moves]
        self._next: dict[Context, tuple[tuple[Instruction, Context], ...]] = {}
        self._walks: dict[tuple[Context, int], tuple[tuple[Instruction, ...], ...]] = {}
        # no program ends with a Reduce, which leaves members empty; a scatter ends only programs with a scattered goal
        last = {
            Collective.ALL_REDUCE: (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST),
            Collective.ALL_GATHER: (Collective.ALL_GATHER, Collective.BROADCAST),
        }
        ending = last.get(goal, (Collective.REDUCE_SCATTER, Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.BROADCAST))
        steps = ((among, tuple(s for s in steps if s.collective in ending)) for among, steps in self._moves)
        self._last = [(among, steps, _Ends(self.end, tuple(group for group, _ in among))) for among, steps in steps]

    def of_size(self, size: int) -> Iterator[tuple[Instruction, ...]]:
        """The walks of exactly this many steps."""
        return iter(self._from(self.start, size))

    def closing(self, context: Context) -> Iterator[tuple[Instruction, Context]]:
        """The steps that lead from a context to the end, each with the end."""
        return ((walk[0], self.end) for walk in self._from(context, 1))

    def successors(self, context: Context) -> tuple[tuple[Instruction, Context], ...]:
        """Every step that a context allows, and the context after it."""
        known = self._next.get(context)
        if known is None:
            known = self._next[context] = tuple(self._expand(context, self._moves))
        return known

    def promising(self, context: Context) -> Iterator[tuple[Instruction, Context]]:
        """`successors` without some that cannot reach the end of an all-reduce or all-gather over up to three levels.

        Masters may reduce or gather only where each contribution that any device holds is also held by some master. Otherwise
        contributions that only other devices hold can no longer be added. (A test expands all hierarchies of up to three levels.)
        """
        everything = _union(context)

        def allowed(steps: tuple[Instruction, ...], stride: int) -> tuple[Instruction, ...]:
            if stride == 1 or _union(context[::stride]) == everything:
                return steps
            return tuple([step for step in steps if step.collective == Collective.BROADCAST])

        moves = [(among, allowed(steps, stride)) for (among, steps), stride in zip(self._moves, self._stride, strict=True)]
        return self._expand(context, moves)

    def _expand(self, context: Context, moves: _Moves) -> Iterator[tuple[Instruction, Context]]:
        for among, steps in moves:
            found = self._outcomes(context, among)
            for step in steps if found else ():
                if step.collective in found:
                    yield step, found[step.collective]

    def _outcomes(self, context: Context, among: _Pattern) -> Mapping[P2Collective, Context]:
        """The context after each collective that all these groups allow: `advance` for all collectives at once."""
        per_group: list[Mapping[P2Collective, Context]] = []
        valid: list[P2Collective] = []
        for _, members in among:
            outcomes = self.space.outcomes(members(context))
            valid = [c for c in valid if c in outcomes] if per_group else list(outcomes)
            if not valid:
                return {}
            per_group.append(outcomes)
        found: dict[P2Collective, Context] = {}
        for collective in valid:
            states = list(context)
            for (group, _), outcomes in zip(among, per_group, strict=True):
                for device, state in zip(group, outcomes[collective], strict=True):
                    states[device] = state
            found[collective] = tuple(states)
        return found

    def _from(self, context: Context, size: int) -> tuple[tuple[Instruction, ...], ...]:
        if context == self.end:
            return ((),) if size == 0 else ()
        if size == 0:
            return ()
        key = (context, size)
        if key not in self._walks:
            self._walks[key] = tuple(self._one_step(context) if size == 1 else self._more_steps(context, size))
        return self._walks[key]

    def _one_step(self, context: Context) -> Iterator[tuple[Instruction, ...]]:
        if context in self._next:
            return ((step,) for step, after in self._next[context] if after == self.end)
        moves = [(among, steps) for among, steps, ends in self._last if ends.near(context)]
        return ((step,) for step, after in self._expand(context, moves) if after == self.end)

    def _more_steps(self, context: Context, size: int) -> Iterator[tuple[Instruction, ...]]:
        for step, after in self.successors(context):
            for tail in self._from(after, size - 1):
                yield (step, *tail)


@lru_cache(maxsize=16)
def shared_walks(shape: Shape, goal: Goal = Collective.ALL_REDUCE, order: Order | None = None) -> Walks:
    """One graph of contexts for all searches of a shape, so that each context is expanded once."""
    return Walks(shape, goal, order)


def chunk_order(shape: Shape, order: Order | None) -> Order:
    """The chunk of each device, where the levels of ``order``, major first, number the chunks."""
    if order is None:
        return tuple(range(math.prod(shape)))
    result: list[int] = []
    for at in itertools.product(*(range(n) for n in shape)):
        chunk = 0
        for level in order:
            chunk = chunk * shape[level] + at[level]
        result.append(chunk)
    return tuple(result)
