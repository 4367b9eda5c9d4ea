"""The paper's formulas on graphs small enough to work out by hand."""

from __future__ import annotations

import pytest

from shardplan.dag import checked
from shardplan.dag.fd_dps import dynamic_path, fd_dps, find_slot, means_of, sort_node
from shardplan.dag.memory import Room
from shardplan.dag.schedules import Orders

# 0 -> 1 -> 3 takes 2 + 1 + 5 + 2 + 1 = 11, and 0 -> 2 -> 3 takes 2 + 1 + 3 + 1 + 1 = 8
DIAMOND = checked([[2, 2], [5, 5], [3, 3], [1, 1]], {(0, 1): 1, (0, 2): 1, (1, 3): 2, (2, 3): 1})


def test_est_lst_and_critical_nodes_before_anything_is_scheduled() -> None:
    """Formulas 6, 7, 8 and 10."""
    path = dynamic_path(Orders(DIAMOND), means_of(DIAMOND))
    assert path.est_s == [0, 3, 3, 10]
    assert path.lst_s == [0, 3, 6, 10]
    assert path.length_s == 11
    assert [path.is_critical(i) for i in range(4)] == [True, True, False, True]


def test_an_edge_within_a_device_costs_nothing_and_shortens_the_path() -> None:
    orders = Orders(DIAMOND)
    orders.insert(0, 0, 0)
    orders.insert(1, 0, 1)
    path = dynamic_path(orders, means_of(DIAMOND))
    assert path.est_s == [0, 2, 3, 9]
    assert path.length_s == 10
    assert path.lst_s == [0, 2, 5, 9]


def test_sort_node_takes_critical_nodes_first_then_the_least_slack() -> None:
    orders = Orders(DIAMOND)
    orders.insert(0, 0, 0)
    path = dynamic_path(orders, means_of(DIAMOND))
    assert sort_node([1, 2], path) == 1
    assert sort_node([2], path) == 2


def test_find_slot_prefers_the_device_of_a_parent() -> None:
    orders = Orders(DIAMOND)
    orders.insert(0, 1, 0)
    path = dynamic_path(orders, means_of(DIAMOND))
    assert find_slot(1, orders, path, Room(DIAMOND)) == (1, 1)


def test_find_slot_inserts_where_a_later_task_can_wait() -> None:
    """Formula 11: task 3 starts at 6 on device 0 and may wait until 9, so that 2 fits before it."""
    dag = checked([[1, 1], [9, 9], [2, 2], [1, 1], [1, 1]], {(0, 1): 0, (0, 3): 5, (1, 4): 0, (3, 4): 0, (0, 2): 0, (2, 4): 0})
    orders = Orders(dag)
    for task, device in ((0, 1), (1, 1), (3, 0)):
        orders.insert(task, device, len(orders.sequences[device]))
    path = dynamic_path(orders, means_of(dag))
    assert (path.est_s[3], path.lst_s[3]) == (6, 9)
    assert find_slot(2, orders, path, Room(dag)) == (0, 0)


def test_find_slot_looks_to_the_most_urgent_child() -> None:
    """Formula 12: device 1 is slower for the entry, and faster for it and its child together."""
    dag = checked([[2, 3], [9, 4], [50, 50]], {(0, 1): 1})  # the third task leaves the others slack
    orders = Orders(dag)
    assert find_slot(0, orders, dynamic_path(orders, means_of(dag)), Room(dag)) == (1, 0)


def test_find_slot_falls_back_on_the_device_with_the_lowest_priority() -> None:
    """Three independent tasks that all take the whole path: none fits beside another, and idle devices come first."""
    dag = checked([[3, 3]] * 3, {})
    orders = fd_dps(dag, Room(dag))
    assert sorted(map(len, orders.sequences)) == [1, 2]


def test_devices_without_room_are_left_out_first() -> None:
    dag = checked([[2, 2], [5, 5]], {(0, 1): 1}, memory=[3, 3], sizes=[2, 2])
    orders = Orders(dag)
    room = Room(dag)
    orders.insert(0, 1, 0)
    room.take(0, 1)
    assert find_slot(1, orders, dynamic_path(orders, means_of(dag)), room) == (0, 0)


@pytest.mark.parametrize("arrival", [3.0, 9.0])
def test_devices_that_inputs_reach_too_late_are_left_out(arrival: float) -> None:
    """The communication filter: the parent's device could have finished the task at 7."""
    from shardplan.dag.fd_dps import _reachable

    dag = checked([[2, 2], [5, 1]], {(0, 1): 1})
    assert _reachable(dag, 1, [0, 1], [2.0, arrival]) == ([0, 1] if arrival == 3.0 else [0])
