"""Parallelism matrices: all of them, only them, and devices laid as they say."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.cost import Network
from shardplan.errors import ClusterError
from shardplan.mesh import Cluster, Matrix, matrices
from shardplan.mesh.factoring import coordinates, read_order
from shardplan.mesh.matrix import parse


def brute_force(shape: tuple[int, ...], axes: tuple[int, ...]) -> set[Matrix]:
    """Every table of divisors that satisfies equations 1 and 2."""
    rows = [[r for r in itertools.product(*(range(1, h + 1) for h in shape)) if math.prod(r) == p] for p in axes]
    tables = (Matrix(rows) for rows in itertools.product(*rows))
    return {m for m in tables if m.shape == shape}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.lists(st.integers(1, 6), min_size=0, max_size=2))
def test_matrices_are_those_of_a_brute_force(shape: list[int], heads: list[int]):
    rest = math.prod(shape)
    axes: list[int] = []
    for wish in heads:
        axes.append(math.gcd(wish, rest))
        rest //= axes[-1]
    axes.append(rest)
    found = list(matrices(shape, axes))
    assert len(set(found)) == len(found)
    assert set(found) == brute_force(tuple(shape), tuple(axes))


@pytest.mark.parametrize(
    ("shape", "axes", "count"),
    [((2, 16), (8, 4), 2), ((4, 16), (4, 16), 3), ((4, 16), (16, 2, 2), 4), ((4, 16), (8, 2, 4), 5), ((4, 16), (64,), 1)],
)
def test_the_numbers_of_matrices_in_the_papers_tables(shape: tuple[int, ...], axes: tuple[int, ...], count: int):
    found = list(matrices(shape, axes))
    assert len(found) == count
    assert {m.axes for m in found} == {axes}


def test_matrices_come_lazily():
    huge = matrices((64,) * 6, (2,) * 36)
    first = next(huge)
    assert first.shape == (64,) * 6


def test_figure_2():
    assert {"1 2 2 1 / 1 1 1 4", "1 2 1 2 / 1 1 2 2", "1 1 2 2 / 1 2 1 2"} <= {str(m) for m in matrices((1, 2, 2, 4), (4, 4))}


def test_devices_are_laid_as_the_matrix_says():
    cluster = Cluster.load("2x4")
    order = cluster.device_order(parse("1 2 / 2 2"))
    assert order.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert cluster.device_order({"axes": ["a", "b"], "factors": [[1, 2], [2, 2]]}).tolist() == order.tolist()
    # figure 2d: each server holds half of the shards of each batch
    order = Cluster.load("1x2x2x4").device_order(parse("1 1 2 2 / 1 2 1 2"))
    assert order[0].tolist() == [0, 1, 8, 9]


@given(st.sampled_from([(2, 8), (2, 2, 2), (4, 4), (2, 2, 4), (3, 6), (12,)]), st.data())
def test_factors_and_order_agree_and_can_be_read_back(shape: tuple[int, ...], data: st.DataObject):
    cluster = Cluster.load("x".join(map(str, shape)))
    size = cluster.size
    first = data.draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0]))
    matrix = data.draw(st.sampled_from(list(matrices(shape, (first, size // first)))))
    factors, axes = matrix.factors(cluster)
    Network(cluster, factors)  # checks that they cover
    at, order = coordinates(cluster, factors), cluster.device_order(matrix)
    for axis, group in enumerate(axes):
        mine = np.zeros(size, np.int64)
        for f in group:
            mine = mine * factors[f].size + at[:, f]
        assert np.array_equal(mine[order.ravel()].reshape(order.shape), np.indices(order.shape)[axis])
    read, groups = read_order(cluster, order)
    assert groups == axes
    assert [(f.level, f.size, f.stride) for f in read] == [(f.level, f.size, f.stride) for f in factors]


def test_an_order_that_follows_no_levels_is_refused():
    cluster = Cluster.load("2x4")
    with pytest.raises(ClusterError, match=r"does not lay its axes on the levels of '2x4' \(2x4\): build it as Mesh\("):
        read_order(cluster, np.array([[0, 1, 2, 3], [4, 5, 7, 6]]))
    with pytest.raises(ClusterError, match="does not lay"):
        read_order(cluster, np.array([[0, 1], [2, 3]]))
    with pytest.raises(ClusterError, match="does not lay"):
        read_order(cluster, np.array([1, 0, 3, 2, 5, 4, 7, 6]))


def test_what_breaks_an_equation_is_refused_with_both_products():
    cluster = Cluster.load("4x16")
    with pytest.raises(
        ClusterError, match=r"column 'node' of the matrix 2 4 / 4 4 breaks equation 1: 2 \* 4 = 8, the level has 4"
    ):
        parse("2 4 / 4 4").check(cluster)
    with pytest.raises(ClusterError, match=r"row 1 of the matrix 1 4 / 4 4 breaks equation 2: 4 \* 4 = 16, the axis has 8"):
        parse("1 4 / 4 4").check(cluster, (4, 8))
    with pytest.raises(ClusterError, match=r"row 0 of the matrix 1 4 1 / 4 4 1 has 3 entries, '4x16' has 2 levels \(node, gpu\)"):
        parse("1 4 1 / 4 4 1").check(cluster)
    with pytest.raises(ClusterError, match="has 2 rows for 1 axes"):
        parse("1 4 / 4 4").check(cluster, (64,))
    with pytest.raises(ClusterError, match=r"the axes 4 \* 8 make 32 devices, the levels 4 \* 16 make 64"):
        next(matrices((4, 16), (4, 8)))
    for text in ("", "1 a", "1 2 / 3", "0 4", "1 / "):
        with pytest.raises(ClusterError, match="matrix"):
            parse(text)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0, 4), (4, 4)), "row 0 of a parallelism matrix holds 0: write rows of whole numbers above 0"),
        (((1, 4), (4.0, 4)), "row 1 of a parallelism matrix holds 4.0"),
        (((1, 4), (True, 4)), "row 1 of a parallelism matrix holds True"),
        (((1, 4), (4,)), "has rows of 2, 1 entries"),
        (((), ()), "has rows of 0, 0 entries"),
        ((), "has no rows"),
    ],
)
def test_what_is_no_matrix_is_never_made(rows: tuple[tuple[int, ...], ...], message: str):
    with pytest.raises(ClusterError, match=message):
        Matrix(rows)


def test_no_axes_or_no_levels_have_no_matrices():
    for shape, axes in (((1,), ()), ((), (1,)), ((), ())):
        with pytest.raises(ClusterError, match=f"no parallelism matrix has {len(axes)} axes on {len(shape)} levels"):
            next(matrices(shape, axes))
