"""All programs, only right ones, and the same for all sizes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import get_args

import networkx as nx
import pytest

from shardplan.collectives import Reduction, ReductionError, replay, synthesize
from shardplan.collectives.dsl import Refusal, advance, groups, instructions
from shardplan.collectives.states import COLLECTIVES, Clash, Goal, StateSpace
from shardplan.collectives.synthesis import Walks, _synthesize, chunk_order
from shardplan.ir import Collective


def unpruned(shape: tuple[int, ...], size: int, goal: Goal = Collective.ALL_REDUCE) -> set[Reduction]:
    """Every sequence of instructions tried one by one, nothing shared and nothing cut off."""
    space = StateSpace(math.prod(shape))
    result: set[Reduction] = set()
    moves = [m for m in instructions(len(shape)) if groups(shape, m)]
    for length in range(1, size + 1):
        for steps in itertools.product(moves, repeat=length):
            context = space.initial(goal)
            for step in steps:
                after = advance(space, step.collective, groups(shape, step), context)
                if isinstance(after, Refusal):
                    break
                context = after
            else:
                if context == space.target(goal):
                    result.add(Reduction(steps, len(shape)))
    return result


@pytest.mark.parametrize(("shape", "size"), [((4,), 3), ((2, 2), 3), ((3, 2), 3), ((2, 2, 2), 2)])
def test_pruning_loses_no_program(shape: tuple[int, ...], size: int):
    assert set(_synthesize(shape, size, Collective.ALL_REDUCE, None)) == unpruned(shape, size)


@pytest.mark.slow
def test_pruning_loses_no_long_program():
    assert set(_synthesize((2, 2), 4, Collective.ALL_REDUCE, None)) == unpruned((2, 2), 4)
    for goal in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        assert set(_synthesize((2, 2), 4, goal, None)) == unpruned((2, 2), 4, goal)


@pytest.mark.parametrize("goal", get_args(Goal))
@pytest.mark.parametrize("shape", [(2, 2), (3, 2), (2, 2, 2)], ids=str)
def test_what_is_seen_at_a_glance_leaves_nothing_out(shape: tuple[int, ...], goal: Goal):
    """Neither a collective that is right for a group, nor a step that ends a program."""
    walks = Walks(shape, goal)
    every = {g for m in instructions(len(shape)) for g in groups(shape, m)}
    layer, contexts, ended = [walks.start], {walks.start: None}, 0
    for _ in range(3):
        layer = [after for context in layer for _, after in walks.successors(context) if after not in contexts]
        contexts.update(dict.fromkeys(layer))
    for context in contexts:
        for group in every:
            states = tuple(context[d] for d in group)
            right = {c: walks.space.apply(c, states) for c in COLLECTIVES}
            told = {c: after for c, after in right.items() if not isinstance(after, Clash) and after != states}
            assert walks.space.outcomes(states) == told
        fresh = Walks(shape, goal)  # has no successors to look the last step up in
        closing = {step for step, _ in fresh.closing(context)}
        assert closing == {step for step, after in walks.successors(context) if after == walks.end} or context == walks.end
        ended += len(closing)
    assert ended


@pytest.mark.parametrize("goal", [Collective.ALL_REDUCE, Collective.ALL_GATHER])
@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 2), (2, 3), (2, 2, 2)], ids=str)
def test_what_is_promising_is_all_that_leads_to_the_end(shape: tuple[int, ...], goal: Goal):
    """All contexts there are, after however many steps: the proof of what `Walks.promising` says."""
    walks = Walks(shape, goal)
    graph = nx.DiGraph()
    layer = [walks.start]
    while layer:
        steps = [(context, after) for context in layer for _, after in walks.successors(context)]
        layer = [after for after in dict.fromkeys(after for _, after in steps) if after not in graph and after != walks.start]
        graph.add_edges_from(steps)
    leading = {walks.end} | nx.ancestors(graph, walks.end)
    left_out = 0
    for context in leading - {walks.end}:
        every, promising = set(walks.successors(context)), set(walks.promising(context))
        assert promising <= every
        assert not [after for _, after in every - promising if after in leading]
        left_out += len(every - promising)
    assert left_out or len(shape) == 1  # of one level all are masters


def test_counts_by_depth_and_size():
    assert [len(synthesize(depth)) for depth in (0, 1, 2, 3)] == [0, 3, 93, 1635]
    sizes = [len(p.steps) for p in synthesize(2)]
    assert [sizes.count(n) for n in range(1, 6)] == [1, 4, 24, 42, 22]
    assert sizes == sorted(sizes)
    assert len(synthesize(2, 8)) == 93  # no longer program says anything new


@pytest.mark.parametrize("shape", [(2,), (7,), (2, 3), (3, 3), (2, 8), (4, 4), (6, 2)])
def test_the_sizes_of_the_levels_do_not_matter(shape: tuple[int, ...]):
    assert set(_synthesize(shape, 5, Collective.ALL_REDUCE, None)) == set(synthesize(len(shape)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 3), (2, 3, 2), (3, 2, 2), (2, 2, 4), (3, 3, 3), (2, 16), (8, 8)])
def test_the_sizes_of_larger_levels_do_not_matter_either(shape: tuple[int, ...]):
    assert set(_synthesize(shape, 5, Collective.ALL_REDUCE, None)) == set(synthesize(len(shape)))


def test_every_program_reaches_its_target_state():
    target = StateSpace(12).target()
    for program in synthesize(3, 4):
        assert replay(program, (2, 3, 2))[-1] == target


def test_a_program_less_one_step_or_with_one_step_changed_is_refused():
    """Unless what results is a program too: not every step is needed, two may do for one another."""
    right = set(synthesize(2))
    for program in right:
        for i, step in enumerate(program.steps):
            before, behind = program.steps[:i], program.steps[i + 1 :]
            others = [replace(step, collective=other) for other in COLLECTIVES]
            changed = [Reduction(before + behind, 2)] + [Reduction((*before, other, *behind), 2) for other in others]
            for wrong in set(changed) - right:
                with pytest.raises(ReductionError):
                    replay(wrong, (2, 2))


def test_a_sharded_goal_needs_no_gather():
    flat, nested = synthesize(2, goal=Collective.REDUCE_SCATTER)
    assert (flat.short, nested.short) == ("ReduceScatter", "ReduceScatter-ReduceScatter")
    (inner_first,) = synthesize(2, goal=Collective.REDUCE_SCATTER, order=(1, 0))
    assert inner_first.text(("n", "g")) == "(n, InsideGroup, ReduceScatter) (n, Parallel(root), ReduceScatter)"
    for shape in ((2, 2), (3, 2), (2, 4)):
        replay(inner_first, shape, Collective.REDUCE_SCATTER, chunk_order(shape, (1, 0)))
        with pytest.raises(ReductionError, match="ends short of its goal, reduce-scatter"):
            replay(inner_first, shape, Collective.REDUCE_SCATTER)


def test_gathers_start_from_shards():
    for program in synthesize(2, goal=Collective.ALL_GATHER):
        assert Collective.REDUCE not in {step.collective for step in program.steps}
        replay(program, (3, 2), Collective.ALL_GATHER)
    assert synthesize(2, goal=Collective.ALL_GATHER)[0].short == "AllGather"
