"""A placed step is cut into segments that can run one after the other, and whose programs hold every op of the step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

import shardplan
from models import gpt, mlp, two_tower
from shardplan.frontend.nnx_state import trace_step
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.regions.assignment import free_ops, on_devices
from shardplan.regions.group_programs import StepSplit, split
from shardplan.regions.placed import PlacedStep
from shardplan.regions.tasks import Task, Transfer
from tests.placed import RandomGroups

CLUSTER = Cluster.load("2x4")
MODELS = {"mlp": mlp, "gpt": gpt, "two_tower": two_tower}


@cache
def traced(name: str) -> Program:
    step, args = MODELS[name].train_step()
    return trace_step(step, args, (0,)).program


def cut(name: str, seed: int) -> StepSplit:
    return split(RandomGroups(seed).assignment_of(traced(name), CLUSTER))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_each_op_that_depends_on_an_input_is_in_one_segment_of_its_group(name: str, seed: int) -> None:
    found = cut(name, seed)
    counts = Counter(i for s in found.segments for i in s.ops)
    assert set(counts.values()) == {1}
    assert set(counts) == {op.id for op in traced(name).ops} - free_ops(traced(name))
    assert all(found.assignment.of[i] == s.group for s in found.segments for i in s.ops)


@cache
def placed(name: str, seed: int) -> PlacedStep:
    step, args = MODELS[name].train_step()
    return shardplan.plan(step, *args, cluster=CLUSTER, placement=RandomGroups(seed), donate_argnums=(0,)).placed


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mlp", "two_tower"])
def test_what_is_issued_reads_only_what_was_issued_before_and_is_not_let_go(name: str, seed: int) -> None:
    step = placed(name, seed)
    held = set(step.graph.inputs)
    for issue in step.dispatch.issues:
        match issue.what:
            case Task(number, _, reads, makes):
                group = step.graph.pieces[number].group
                assert all((group, key) in held for key in reads)
                held |= {(group, key) for key in makes}
            case Transfer(key, source, target, _):
                assert (source, key) in held
                held.add((target, key))
        held -= set(issue.last)
    assert all((own.group, own.key) in held for own in step.graph.results if own is not None)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["mlp", "two_tower"])
def test_tasks_start_after_what_they_read_and_never_share_a_device(name: str, seed: int) -> None:
    step = placed(name, seed)
    runs = [(i.what, i.start_s, i.end_s) for i in step.dispatch.issues if isinstance(i.what, Task)]
    group_of = [piece.group for piece in step.graph.pieces]
    ends = {(group_of[task.piece], key): end_s for task, _, end_s in runs for key in task.makes}
    for task, start_s, _ in runs:
        assert all(start_s >= ends.get((group_of[task.piece], key), 0.0) - 1e-15 for key in task.reads)
    for d in range(CLUSTER.size):
        own = sorted((start, end) for task, start, end in runs if d in step.graph.groups[group_of[task.piece]].devices)
        assert all(before[1] <= after[0] + 1e-15 for before, after in pairwise(own))


def test_an_op_that_only_the_backward_pass_of_its_group_reads_runs_there() -> None:
    """The first group waits for the second between its passes; what only its backward pass reads is made after the wait."""
    program = traced("mlp")
    forward = [op for op in program.ops if not op.backward]
    last = {op.id for op in forward[len(forward) // 2 :]}
    found = split(on_devices(program, {op.id: (4, 5, 6, 7) if op.id in last else (0, 1, 2, 3) for op in program.ops}))
    read: dict[int, set[int]] = {}
    level = {i: s.level for s in found.segments for i in s.ops}
    for op in program.ops:
        for t in op.tensors:
            read.setdefault(t, set()).add(op.id)
    for op in forward:
        readers = {i for t in op.outputs for i in read.get(t, ())}
        own = {i for i in readers if i in found.assignment.of and found.assignment.of[i] == found.assignment.of.get(op.id)}
        if readers and own == readers and op.id in level and program.returned.isdisjoint(op.outputs):
            assert level[op.id] == min(level[i] for i in readers)


def test_the_transfers_of_a_tensor_are_one_for_each_group_that_reads_it() -> None:
    for seed in range(6):
        found = cut("two_tower", seed)
        assert max(Counter((t.tensor, t.target) for t in found.transfers).values(), default=1) == 1
        assert all(t.source != t.target for t in found.transfers)
