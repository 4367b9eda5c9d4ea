"""The part of an array that one process has to give."""

from __future__ import annotations

from shardplan.plans.local_parts import own_shape


def _rows(*rows: tuple[int, int]) -> list[tuple[slice, slice]]:
    return [(slice(first, end), slice(None)) for first, end in rows]


def test_devices_with_rows_side_by_side_hold_them_together() -> None:
    assert own_shape(_rows((0, 2), (2, 4)), (8, 3)) == (4, 3)


def test_copies_count_once() -> None:
    assert own_shape(_rows((4, 8), (4, 8)), (8, 3)) == (4, 3)
    assert own_shape([(slice(None), slice(None))] * 4, (8, 3)) == (8, 3)


def test_both_dims_are_joined() -> None:
    corners = [(slice(i, i + 2), slice(j, j + 1)) for i in (0, 2) for j in (0, 1)]
    assert own_shape(corners, (8, 3)) == (4, 2)


def test_a_diagonal_is_no_block() -> None:
    assert own_shape([(slice(0, 2), slice(0, 1)), (slice(2, 4), slice(1, 2))], (8, 3)) is None


def test_a_number_without_dims_is_whole() -> None:
    assert own_shape([()], ()) == ()
