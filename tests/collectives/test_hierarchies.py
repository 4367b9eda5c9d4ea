"""The four synthesis hierarchies of Table 1, and what the theorem that orders them holds for."""

from __future__ import annotations

import pytest

from shardplan.ir import Collective
from shardplan.mesh import Matrix
from shardplan.mesh.matrix import parse
from tests.collectives.hierarchies import Letter, Lowered, hierarchy, programs

LETTERS: tuple[Letter, ...] = ("a", "b", "c", "d")
# one reduced axis; up to 8 devices
SYSTEMS = [
    ("2 / 2", 1),
    ("2 1 / 1 2", 0),
    ("1 2 / 2 2", 0),
    ("1 2 / 2 2", 1),
    ("2 2 / 1 2", 0),
    ("1 1 2 / 1 2 1", 1),
    ("2 2 / 2 1", 0),
]


def test_table_1():
    one = parse("1 1 2 2 / 1 2 1 2")
    assert hierarchy(one, "a").sizes == (1, 2, 2, 4)
    assert hierarchy(one, "b").sizes == (1, 1, 1, 2, 2, 1, 2, 2)
    assert hierarchy(one, "c").sizes == (1, 1, 2, 2, 1, 2, 1, 2)
    assert hierarchy(one, "d", [1]).sizes == (1, 2, 1, 2)
    several = Matrix(((1, 2, 3), (4, 5, 6), (7, 8, 9)))
    assert hierarchy(several, "b").sizes == (1, 4, 7, 2, 5, 8, 3, 6, 9)
    assert hierarchy(several, "c").sizes == (1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert hierarchy(several, "d", [0, 2]).sizes == (1, 2, 3, 7, 8, 9)
    assert hierarchy(several, "d", [0, 2], collapse=True).sizes == (7, 16, 27)


def everywhere(matrix: Matrix, axis: int, program: Lowered) -> bool:
    """Whether every step happens in all reduction groups alike, not in some of them only."""
    (whole,) = {s for s in programs(matrix, hierarchy(matrix, "d", [axis]), [axis], 1) if s[0][0] == Collective.ALL_REDUCE}
    blocks = [set(g) for g in whole[0][1]]
    return all(len({sum(1 for g in among if set(g) <= block) for block in blocks}) == 1 for _, among in program)


@pytest.mark.parametrize(("text", "axis"), SYSTEMS)
def test_each_hierarchy_expresses_the_one_before(text: str, axis: int):
    matrix = parse(text)
    a, b, c, d = (programs(matrix, hierarchy(matrix, letter, [axis]), [axis], 4) for letter in LETTERS)
    assert a <= b <= c
    assert {p for p in c if everywhere(matrix, axis, p)} <= d
    assert d


def test_a_broadcast_in_one_reduction_group_alone_escapes_the_last_step_of_the_theorem():
    """Lemma B.6 argues about reductions: a Broadcast among masters that another one repeats for everybody is right as well."""
    matrix = parse("2 2 / 1 2")
    c, d = (programs(matrix, hierarchy(matrix, letter, [0]), [0], 3) for letter in LETTERS[2:])
    extra = c - d
    assert extra
    for program in extra:
        assert not everywhere(matrix, 0, program)
        assert [collective for collective, _ in program].count(Collective.BROADCAST) == 2


def test_collapsing_loses_nothing_for_one_axis():
    for text, axis in SYSTEMS:
        matrix = parse(text)
        whole, collapsed = (programs(matrix, hierarchy(matrix, "d", [axis], collapse=c), [axis], 4) for c in (False, True))
        assert collapsed == whole


def test_two_axes_in_row_order_cannot_say_what_two_levels_can():
    """Axis 0 on the inner level and axis 1 on the outer: rows put the inner level first, so its masters sit elsewhere."""
    matrix = parse("1 2 / 2 1")
    rows, levels = (programs(matrix, hierarchy(matrix, "d", [0, 1], collapse=c), [0, 1], 4) for c in (False, True))
    assert len(rows) == len(levels)
    assert rows != levels
