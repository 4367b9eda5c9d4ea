"""Every method's schedules are valid, and stand in the order that their definitions ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardplan
from shardplan.dag import Method, TaskSchedule, checked, planned
from shardplan.dag.critical import shorten
from shardplan.dag.exact import exact
from shardplan.dag.fd_dps import fd_dps
from shardplan.dag.graph import best_tails
from shardplan.dag.lookahead import lookahead
from shardplan.dag.memory import Room
from shardplan.dag.methods import built
from shardplan.dag.schedules import Orders
from tests.dag.graphs import Tables, faults, tables

HEURISTICS: tuple[Method, ...] = ("fd-dps", "heft")


@settings(max_examples=150)
@given(tables(), st.sampled_from(HEURISTICS))
def test_every_schedule_is_valid(case: Tables, method: Method) -> None:
    assert faults(shardplan.schedule_dag(case.times, case.edges, method, case.memory, case.sizes), *case) == []


@settings(max_examples=100)
@given(tables(max_tasks=20, limited=False))
def test_the_papers_own_rules_give_valid_schedules_too(case: Tables) -> None:
    dag = checked(case.times, case.edges)
    for build in (fd_dps, lookahead):
        assert faults(build(dag, Room(dag)).schedule(), *case) == []


@settings(max_examples=60)
@given(tables(limited=True))
def test_memory_that_tasks_barely_fit_in_is_kept(case: Tables) -> None:
    dag = checked(case.times, case.edges, memory=case.memory, sizes=case.sizes)
    for method in HEURISTICS:
        assert faults(planned(dag, method), *case) == []
    assert faults(built(dag, fd_dps).schedule(), *case) == []


@settings(max_examples=80)
@given(tables())
def test_shortening_never_lengthens_and_says_the_makespan(case: Tables) -> None:
    dag = checked(case.times, case.edges, memory=case.memory, sizes=case.sizes)
    orders, room = built(dag, fd_dps), Room(dag)
    for i, d in enumerate(orders.device):
        room.take(i, d)
    before = orders.schedule().makespan_s
    said = shorten(orders, room)
    schedule = orders.schedule()
    assert schedule.makespan_s == pytest.approx(said)
    assert said <= before * (1 + 1e-9)
    assert faults(schedule, *case) == []
    assert planned(dag).makespan_s <= said * (1 + 1e-9)


@settings(max_examples=40)
@given(tables(max_tasks=6, max_devices=3))
def test_no_schedule_is_shorter_than_the_proven_one(case: Tables) -> None:
    dag = checked(case.times, case.edges, memory=case.memory, sizes=case.sizes)
    best = planned(dag, "exact")
    assert faults(best, *case) == []
    assert best.makespan_s >= max(min(np.add(t, tail)) for t, tail in zip(dag.times_s, best_tails(dag), strict=True)) - 1e-9
    for method in HEURISTICS:
        assert planned(dag, method).makespan_s >= best.makespan_s * (1 - 1e-6)


@settings(max_examples=25)
@given(tables(max_tasks=4, max_devices=2, limited=False))
def test_the_proven_schedule_is_the_best_of_all_lists(case: Tables) -> None:
    """A shortest schedule is among those that place tasks in some order, each at the end of some device."""
    dag = checked(case.times, case.edges)
    serial = Orders(dag)
    for i in dag.order:
        serial.insert(i, 0, len(serial.sequences[0]))
    # a long schedule to start from, so that the program has to find the shortest
    assert exact(dag, serial.schedule()).makespan_s == pytest.approx(_shortest(dag, [], {}, {}), rel=1e-5)


def _shortest(dag, placed, device, finish) -> float:
    if len(placed) == dag.tasks:
        return max(finish.values())
    lengths = []
    for i in range(dag.tasks):
        if i in device or any(p not in device for p, _ in dag.parents[i]):
            continue
        for d in range(dag.devices):
            at = max((finish[j] for j in placed if device[j] == d), default=0.0)
            for p, t in dag.parents[i]:
                travel = 0.0 if device[p] == d else t[device[p]][d] if isinstance(t, tuple) else t
                at = max(at, finish[p] + travel)
            lengths.append(_shortest(dag, [*placed, i], {**device, i: d}, {**finish, i: at + dag.times_s[i][d]}))
    return min(lengths)


def test_heft_schedules_its_papers_worked_example() -> None:
    """Topcuoglu et al. (2002), figure 2: ten tasks, three processors; HEFT's schedule takes 80, figure 3a."""
    times = [[14, 16, 9], [13, 19, 18], [11, 13, 19], [13, 8, 17], [12, 13, 10], [13, 16, 9], [7, 15, 11], [5, 11, 14]]
    times += [[18, 12, 20], [21, 7, 16]]
    edges = {(0, 1): 18, (0, 2): 12, (0, 3): 9, (0, 4): 11, (0, 5): 14, (1, 7): 19, (1, 8): 16, (2, 6): 23, (3, 7): 27}
    edges |= {(3, 8): 23, (4, 8): 13, (5, 7): 15, (6, 9): 17, (7, 9): 11, (8, 9): 13}
    heft = shardplan.schedule_dag(times, edges, "heft")
    assert heft.device == (2, 0, 2, 1, 2, 1, 2, 0, 1, 1)
    assert heft.start_s == (0, 27, 9, 18, 28, 26, 38, 57, 56, 73)
    assert heft.makespan_s == 80
    ours = shardplan.schedule_dag(times, edges)
    assert faults(ours, times, edges) == []
    assert shardplan.schedule_dag(times, edges, "exact").makespan_s <= ours.makespan_s <= 80


def test_independent_tasks_spread_and_a_chain_with_dear_edges_stays() -> None:
    for method in get_args(Method):
        spread = shardplan.schedule_dag([[1.0, 1.0]] * 4, {}, method)
        assert spread.makespan_s == 2.0
        chain = shardplan.schedule_dag([[1.0, 1.0]] * 4, {(i, i + 1): 5.0 for i in range(3)}, method)
        assert (chain.makespan_s, len(set(chain.device))) == (4.0, 1)


def test_the_faults_of_broken_schedules_are_seen() -> None:
    case = Tables([[1.0, 1.0]] * 3, {(0, 1): 2.0}, [2.0, 2.0], [1.0, 1.0, 1.0])
    good = shardplan.schedule_dag(*case[:2], "fd-dps", *case[2:])
    assert faults(good, *case) == []
    broken = {
        "runs from": replace(good, start_s=(0.5, *good.start_s[1:])),
        "starts before": TaskSchedule((0, 1, 1), (0.0, 2.0, 0.0), (1.0, 3.0, 1.0)),
        "at once": TaskSchedule((0, 0, 1), (0.0, 0.5, 0.0), (1.0, 1.5, 1.0)),
        "holds more": TaskSchedule((0, 0, 0), (0.0, 1.0, 2.0), (1.0, 2.0, 3.0)),
    }
    for word, schedule in broken.items():
        assert any(word in fault for fault in faults(schedule, *case)), word


def test_an_empty_dag_has_an_empty_schedule() -> None:
    for method in get_args(Method):
        assert shardplan.schedule_dag(np.zeros((0, 2)), {}, method) == TaskSchedule((), (), ())
