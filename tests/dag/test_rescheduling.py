"""What has run stays; the rest is a valid schedule on the devices that there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardplan.dag import Method, TaskSchedule, checked, planned, reschedule
from shardplan.errors import ScheduleError
from tests.dag.graphs import Tables, faults, overlaps, seconds_between, tables


def _stayed(old: TaskSchedule, new: TaskSchedule, at_s: float, gone: set[int]) -> list[int]:
    """The tasks that ran, or run on a device that stays; a fault if one moved."""
    kept = [
        i
        for i, d in enumerate(old.device)
        if old.finish_s[i] <= at_s or (old.start_s[i] < at_s < old.finish_s[i] and d not in gone)
    ]
    for i in kept:
        assert (new.device[i], new.start_s[i]) == (old.device[i], old.start_s[i])
    return kept


@settings(max_examples=120)
@given(tables(limited=False, max_devices=3), st.floats(0, 1.2), st.sampled_from(["fd-dps", "heft"]), st.data())
def test_what_has_run_stays_and_the_rest_is_valid(case: Tables, share: float, method: Method, data: st.DataObject) -> None:
    dag = checked(case.times, case.edges)
    old = planned(dag)
    at_s = share * old.makespan_s
    devices = dag.devices
    gone = data.draw(st.sets(st.integers(0, devices - 1), max_size=devices - 1))
    slower = [data.draw(st.sampled_from([0.5, 1.0, 3.0])) for _ in range(devices)]
    times = [[t * f for t, f in zip(row, slower, strict=True)] for row in case.times]
    new = reschedule(old, dag, at_s, times=times, leaves=gone, method=method)
    kept = set(_stayed(old, new, at_s, gone))
    assert overlaps(new) == []
    near = 1e-9 * max(1.0, new.makespan_s)
    for i in set(range(dag.tasks)) - kept:
        assert new.start_s[i] >= at_s
        assert new.device[i] not in gone
        assert new.finish_s[i] - new.start_s[i] == pytest.approx(times[i][new.device[i]])
    for i in kept:
        d, rest = new.device[i], max(0.0, old.finish_s[i] - at_s)
        assert new.finish_s[i] == pytest.approx(old.finish_s[i] - rest + rest * slower[d])
    for (i, j), transfer in case.edges.items():
        travel = seconds_between(transfer, new.device[i], new.device[j])
        if j not in kept:
            assert new.start_s[j] >= new.finish_s[i] + travel - near
            if i in kept and new.device[j] not in (old.device[i], old.device[j]):
                assert new.start_s[j] >= at_s + travel - near


@settings(max_examples=40)
@given(tables(limited=True))
def test_memory_holds_what_has_run_too(case: Tables) -> None:
    dag = checked(case.times, case.edges, memory=case.memory, sizes=case.sizes)
    old = planned(dag)
    new = reschedule(old, dag, old.makespan_s / 2)
    assert faults(new, *case) == []


@given(tables(limited=False))
def test_before_the_start_a_rescheduling_is_a_schedule(case: Tables) -> None:
    dag = checked(case.times, case.edges)
    old = planned(dag, "heft")
    assume(all(s > 0 for row in case.times for s in row))
    assert reschedule(old, dag, 0.0, method="heft").makespan_s <= old.makespan_s * (1 + 1e-9)


def test_a_device_that_joins_takes_work() -> None:
    dag = checked([[2.0]] * 6, {})
    old = planned(dag)
    assert old.makespan_s == 12.0
    new = reschedule(old, dag, 3.0, times=[[2.0, 2.0]] * 6)
    assert new.makespan_s == 8.0  # tasks end at 2 and 4; four tasks are left for two devices, one of them free at 3
    assert len(new.on(1)) == 2


def test_a_device_that_slows_down_finishes_what_it_runs_and_loses_the_rest() -> None:
    dag = checked([[4.0, 4.0]] * 4, {})
    old = planned(dag)
    new = reschedule(old, dag, 2.0, times=[[40.0, 4.0]] * 4)
    first = old.on(0)[0]
    assert new.finish_s[first] == 22.0  # half of it is left, at a tenth of the speed
    assert len(new.on(1)) == 3


def test_what_runs_on_a_device_that_leaves_starts_anew() -> None:
    dag = checked([[4.0, 4.0]] * 2, {})
    old = planned(dag)
    new = reschedule(old, dag, 1.0, leaves=[1])
    lost = old.on(1)[0]
    assert (new.device[lost], new.start_s[lost]) == (0, 4.0)


def test_a_result_leaves_for_a_new_device_when_it_is_known_at_the_earliest() -> None:
    """Task 1 was to run on device 1, which leaves: the result of task 0, ready at 2, leaves for device 2 at 4, not before."""
    dag = checked([[2.0, 20.0, 20.0], [90.0, 3.0, 3.0], [50.0, 5.0, 50.0]], {(0, 1): 3.0})
    old = TaskSchedule((0, 1, 1), (0.0, 5.0, 0.0), (2.0, 8.0, 5.0))
    new = reschedule(old, dag, 4.0, times=[[2.0, 20.0, 20.0], [90.0, 3.0, 3.0], [1.0, 5.0, 50.0]], leaves=[1])
    assert (new.device[1], new.start_s[1]) == (2, 7.0)
    stayed = reschedule(old, dag, 4.0)
    assert (stayed.device[1], stayed.start_s[1]) == (1, 5.0)


def test_the_rest_can_be_proven_shortest() -> None:
    dag = checked([[3.0, 3.0]] * 5, {(0, 4): 1.0})
    old = planned(dag, "heft")
    assert reschedule(old, dag, 3.5, leaves=[1], method="exact").makespan_s == pytest.approx(
        3.0 * (5 - sum(f <= 3.5 for f in old.finish_s)) + 3.0
    )


def test_a_rescheduling_without_a_change_is_no_longer() -> None:
    """FD-DPS finds a longer schedule of what is left here (19 s) than that of the whole."""
    times = [[4, 7], [7, 7], [4, 6], [3, 5], [2, 7], [2, 8]]
    edges = {(0, 1): 4, (0, 2): 3, (0, 3): 1, (0, 5): 1, (1, 5): 1, (2, 3): 3, (2, 4): 2, (3, 5): 1, (4, 5): 1}
    dag = checked(times, edges)
    before = planned(dag)
    assert reschedule(before, dag, 5.4).makespan_s == before.makespan_s == 18


def test_a_schedule_of_another_dag_is_refused() -> None:
    schedule = planned(checked([[2, 3], [4, 4], [4, 4]], {(0, 1): 1, (0, 2): 1}))
    with pytest.raises(ScheduleError, match="task 0 begins before task 1 ends, which it follows in dag"):
        reschedule(schedule, checked([[1, 1]] * 3, {(1, 0): 1}), 3)
    table: Any = [[1, 1]] * 3
    with pytest.raises(ScheduleError, match="not TaskSchedule and list: make the DAG with"):
        reschedule(schedule, table, 3)
    with pytest.raises(ScheduleError, match="planned takes a DAG, not list"):
        planned(table)


def test_one_number_of_memory_holds_for_a_device_that_joins() -> None:
    dag = checked([[1, 1]] * 3, {}, memory=2, sizes=[1, 1, 1])
    again = reschedule(planned(dag), dag, 0, times=[[1, 1, 1]] * 3)
    assert sorted(again.device) == [0, 1, 2]


def test_without_tasks_nothing_is_left_to_schedule() -> None:
    dag = checked(np.zeros((0, 2)), {})
    assert reschedule(planned(dag), dag, 1.0, leaves=[0]) == TaskSchedule((), (), ())
