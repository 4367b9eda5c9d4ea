"""Each mistake is one line that says what is wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

import shardplan
from shardplan.dag import checked, planned, reschedule

TWO: dict[str, Any] = {"times": [[1, 2], [3, 4]], "edges": {(0, 1): 1}}
NAN, INF = float("nan"), float("inf")

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"edges": {(0, 1): 1, (1, 0): 1}}, "cycle of 2 tasks: 0 -> 1 -> 0: remove"),
    ({"edges": {(1, 1): 1}}, "cycle of 1 task: 1 -> 1: remove"),
    ({"edges": {(0, 2): 1}}, r"edge \(0, 2\) names task 2: the 2 tasks are 0 to 1"),
    ({"edges": {(-1, 1): 1}}, "names task -1"),
    ({"edges": {"ab": 1}}, "edge 'ab' is no pair of tasks"),
    ({"edges": {(0, 1, 2): 1}}, "is no pair of tasks"),
    ({"edges": [(0, 1)]}, "edges is of type list: give a dict"),
    ({"edges": {(0, 1): INF}}, r"edge \(0, 1\) is inf: give seconds that are finite"),
    ({"edges": {(0, 1): [[0, -1], [1, 0]]}}, r"edge \(0, 1\)\[0\]\[1\] is -1: give seconds"),
    ({"edges": {(0, 1): [1, 2, 3]}}, r"shape \(3,\): give one number, or 2 x 2"),
    ({"times": [[1, INF], [3, 4]]}, r"times\[0\]\[1\] is inf: give seconds that are finite"),
    ({"times": [[1, 2], [-3, 4]]}, r"times\[1\]\[0\] is -3: give"),
    ({"times": [[1, 2], [NAN, 4]]}, r"times\[1\]\[0\] is nan: give"),
    ({"times": [1, 2]}, r"times has the shape \(2,\): give \[tasks\]\[devices\]"),
    ({"times": [[1, 2], [3]]}, "times is no table of numbers: rows may differ in length"),
    ({"times": [[], []]}, r"shape \(2, 0\)"),
    ({"times": [[1e308, 1e308], [1e308, 1]]}, "the seconds of times and edges add up to more than a float holds"),
    ({"times": [[10**400, 1], [1, 1]]}, "times is no table of numbers"),
    ({"memory": 4e-7, "sizes": [3e-7] * 3, "times": [[1, 1]] * 3, "edges": {}}, "3 tasks cannot be packed"),
    ({"method": "magic"}, "unknown method 'magic': use 'fd-dps', 'heft' or 'exact'"),
    ({"memory": [1, 2]}, "memory is given without sizes"),
    ({"memory": [1, 2, 3], "sizes": [1, 1]}, r"memory has the shape \(3,\): give 2 numbers, one for each device"),
    ({"memory": 5, "sizes": [1]}, r"sizes has the shape \(1,\): give 2 numbers, one for each task"),
    ({"memory": [5, -1], "sizes": [1, 1]}, r"memory\[1\] is -1: give a number that is not negative"),
    ({"memory": [5, 5], "sizes": [1, INF]}, r"sizes\[1\] is inf: give"),
    ({"memory": [5, 4], "sizes": [1, 6]}, "task 1 holds 6 and fits on no device: the largest, device 0, has 5"),
    (
        {"memory": [5, 1], "sizes": [2, 3]},
        "device 1 has a memory of 1 and is too small for any task: the smallest, task 0, holds 2",
    ),
    ({"memory": [4, 2], "sizes": [3, 4]}, "device 1 has a memory of 2 and is too small"),
    ({"memory": [4, 4], "sizes": [3, 3], "times": [[1, 1]] * 3, "edges": {}}, "sizes has the shape"),
    ({"memory": 4, "sizes": [3, 3, 3], "times": [[1, 1]] * 3}, "3 tasks cannot be packed into the memory of the 2 devices"),
    ({"times": [[1, 1]] * 13, "method": "exact"}, "'exact' takes up to 12 tasks, and there are 13: use method 'fd-dps'"),
]


@pytest.mark.parametrize(("change", "line"), MISTAKES)
def test_a_mistake_is_one_clear_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(shardplan.ScheduleError, match=line) as error:
        shardplan.schedule_dag(**{**TWO, **change})
    assert "\n" not in str(error.value)
    assert isinstance(error.value, shardplan.ShardplanError)


def test_a_cycle_names_its_tasks_alone() -> None:
    edges = {(0, 1): 1, (1, 2): 1, (2, 3): 1, (3, 1): 1, (3, 4): 1}
    with pytest.raises(shardplan.ScheduleError, match="1 -> 2 -> 3 -> 1") as error:
        shardplan.schedule_dag([[1.0]] * 5, edges)
    assert error.value.tasks == (1, 2, 3)


def test_a_proof_that_lacks_time_says_so() -> None:
    from shardplan.dag.exact import exact

    edges = {(i, i + 4): 3.0 + i for i in range(8)}
    dag = checked([[2.0 + i % 5, 1.0 + i % 3, 3.0] for i in range(12)], edges)
    with pytest.raises(shardplan.ScheduleError, match="proven within 1e-06 s: allow more time"):
        exact(dag, planned(dag, "heft"), time_limit_s=1e-6)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"at_s": -1.0}, "at_s is -1.0: give the seconds"),
        ({"at_s": NAN}, "at_s is nan"),
        ({"at_s": "soon"}, "at_s is 'soon': give the seconds"),
        ({"leaves": 1}, "leaves is 1: give a list of devices"),
        ({"leaves": [0, "a"]}, "device 'a' cannot leave"),
        ({"leaves": [2]}, "device 2 cannot leave: the devices are 0 to 1"),
        ({"leaves": [0, 1]}, "all 2 devices leave: keep one"),
        ({"times": [[1], [2]]}, "keep a row for each task"),
        ({"edges": {}}, "edges must name the edges of the schedule"),
        ({"times": [[1, NAN], [2, 2]]}, r"times\[0\]\[1\] is nan"),
        ({"leaves": [1], "at_s": 0.0}, "cannot be packed"),
    ],
)
def test_a_rescheduling_that_cannot_be_is_one_clear_line(change: dict[str, Any], line: str) -> None:
    dag = checked(**TWO, memory=[2, 2], sizes=[2, 2])
    with pytest.raises(shardplan.ScheduleError, match=line):
        reschedule(planned(dag), dag, **{"at_s": 0.5, **change})


@pytest.mark.parametrize("times", [[[1, 2]], [[1, 2]] * 3, [[9, 9, 1]] * 2])
def test_a_schedule_of_another_dag_is_not_continued(times: list[list[float]]) -> None:
    with pytest.raises(shardplan.ScheduleError, match="give the DAG that was scheduled"):
        reschedule(planned(checked(times, {})), checked(**TWO), 0.5)


def test_a_packing_that_is_hard_to_find_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardplan.dag.memory.NODES", 1)
    sizes = [1.0 + (i * 0.6180339887) % 2 for i in range(40)]
    with pytest.raises(shardplan.ScheduleError, match="40 tasks were not packed into the memory of the 4 devices in 1 nodes"):
        shardplan.schedule_dag([[1.0] * 4] * 40, {}, memory=sum(sizes) / 4 * (1 + 1e-6), sizes=sizes)
