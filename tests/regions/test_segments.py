"""A placed step is cut into segments that can run one after the other, and whose programs hold every op of the step."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise

import pytest

from models import gpt, mlp, two_tower
from shardplan.frontend.nnx_state import trace_step
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.placement.device_topology import machine_of
from shardplan.regions.assignment import free_ops, on_devices
from shardplan.regions.dispatch import Run, Send, dispatched
from shardplan.regions.group_programs import Split, split
from tests.placed import RandomGroups

CLUSTER = Cluster.load("2x4")
MODELS = {"mlp": mlp, "gpt": gpt, "two_tower": two_tower}


@cache
def traced(name: str) -> Program:
    step, args = MODELS[name].train_step()
    return trace_step(step, args, (0,)).program


def cut(name: str, seed: int) -> Split:
    return split(RandomGroups(seed).assignment_of(traced(name), CLUSTER))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_each_op_that_depends_on_an_input_is_in_one_segment_of_its_group(name: str, seed: int) -> None:
    found = cut(name, seed)
    counts = Counter(i for s in found.segments for i in s.ops)
    assert set(counts.values()) == {1}
    assert set(counts) == {op.id for op in traced(name).ops} - free_ops(traced(name))
    assert all(found.assignment.of[i] == s.group for s in found.segments for i in s.ops)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_what_is_issued_reads_only_what_was_issued_before_and_is_not_let_go(name: str, seed: int) -> None:
    found = cut(name, seed)
    assignment = found.assignment
    held = {(assignment.home[t], t) for t in assignment.program.inputs}
    for issue in dispatched(found, [1e-3] * len(found.segments), machine_of(CLUSTER)).issues:
        match issue:
            case Run():
                group, boundary = found.segments[issue.segment].group, found.boundaries[issue.segment]
                assert all((group, t) in held for t in boundary.reads)
                held |= {(group, t) for t in boundary.makes}
            case Send():
                assert (issue.transfer.source, issue.transfer.tensor) in held
                held.add((issue.transfer.target, issue.transfer.tensor))
        held -= set(issue.last)
    assert all(at in held for at in found.results if at is not None)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODELS)
def test_segments_of_a_group_start_after_what_they_read_and_never_run_at_once(name: str, seed: int) -> None:
    found = cut(name, seed)
    issues = dispatched(found, [1e-3] * len(found.segments), machine_of(CLUSTER)).issues
    runs = [i for i in issues if isinstance(i, Run)]
    ends = {t: r.end_s for r in runs for t in found.boundaries[r.segment].makes}
    for run in runs:
        assert all(run.start_s >= ends[t] - 1e-12 for t in found.boundaries[run.segment].reads if t in ends)
    devices = found.assignment.groups
    for d in range(CLUSTER.size):
        own = sorted((r.start_s, r.end_s) for r in runs if d in devices[found.segments[r.segment].group])
        assert all(before[1] <= after[0] + 1e-12 for before, after in pairwise(own))


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
