"""The interval that the analysis names is exactly what enumeration finds."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.errors import DescriptionError
from shardplan.tdl.index import (
    Affine,
    Data,
    Exact,
    FloorDiv,
    Full,
    IndexExpr,
    Interval,
    Loop,
    Mod,
    Multiple,
    Plus,
    interval,
    loops_of,
    show,
)

LOOPS = 3


def value(expr: IndexExpr, at: tuple[int, ...]) -> int:
    """The index at these loops."""
    match expr:
        case Affine(terms, const):
            return sum(c * at[v] for v, c in terms) + const
        case FloorDiv(inner, by):
            return value(inner, at) // by
        case Mod(inner, by):
            return value(inner, at) % by
        case Multiple(inner, by):
            return value(inner, at) * by
        case Plus(left, right):
            return value(left, at) + value(right, at)
        case _:
            raise AssertionError(expr)


@st.composite
def affines(draw: st.DrawFn) -> Affine:
    terms = tuple((v, c) for v in range(LOOPS) if (c := draw(st.integers(-3, 6))))
    return Affine(terms, draw(st.integers(-4, 4)))


def expressions() -> st.SearchStrategy[IndexExpr]:
    return st.recursive(
        affines(),
        lambda inner: st.one_of(
            st.builds(FloorDiv, inner, st.integers(2, 6)),
            st.builds(Mod, inner, st.integers(2, 12)),
            st.builds(Multiple, inner, st.integers(-3, 3)),
            st.builds(Plus, inner, inner),
        ),
        max_leaves=3,
    )


EXTENTS = st.tuples(*[st.sampled_from((1, 2, 3, 4, 6, 12))] * LOOPS)


def swept(expr: IndexExpr, extents: tuple[int, ...], cut: int, ways: int, worker: int) -> tuple[int, int]:
    """The least and the largest index that a worker reads, by enumeration."""
    block = extents[cut] // ways
    ranges = [range(worker * block, (worker + 1) * block) if v == cut else range(n) for v, n in enumerate(extents)]
    seen = [value(expr, at) for at in product(*ranges)]
    return min(seen), max(seen)


@given(affines(), EXTENTS, st.integers(0, LOOPS - 1), st.sampled_from((2, 3)))
def test_the_interval_of_an_affine_index_is_exact(expr: Affine, extents: tuple[int, ...], cut: int, ways: int) -> None:
    if extents[cut] % ways:
        return
    at = interval(expr, dict(enumerate(extents)), cut, ways)
    assert at is not None
    for worker in range(ways):
        assert swept(expr, extents, cut, ways, worker) == (at.step * worker + at.lo, at.step * worker + at.hi)


@given(expressions(), EXTENTS, st.integers(0, LOOPS - 1), st.sampled_from((2, 3)))
def test_no_index_leaves_its_interval(expr: IndexExpr, extents: tuple[int, ...], cut: int, ways: int) -> None:
    if extents[cut] % ways:
        return
    at = interval(expr, dict(enumerate(extents)), cut, ways)
    if at is None:
        return
    for worker in range(ways):
        low, high = swept(expr, extents, cut, ways, worker)
        assert at.step * worker + at.lo <= low
        assert high <= at.step * worker + at.hi


@given(affines(), st.integers(2, 6), EXTENTS, st.integers(0, LOOPS - 1))
def test_the_interval_of_a_quotient_is_exact(inner: Affine, by: int, extents: tuple[int, ...], cut: int) -> None:
    """``//`` is monotone, so nothing is lost where a single step fits all workers."""
    if extents[cut] % 2:
        return
    at = interval(FloorDiv(inner, by), dict(enumerate(extents)), cut, 2)
    if at is None:
        return
    for worker in range(2):
        assert swept(FloorDiv(inner, by), extents, cut, 2, worker) == (at.step * worker + at.lo, at.step * worker + at.hi)


@given(affines(), st.integers(2, 4), EXTENTS, st.integers(0, LOOPS - 1))
def test_the_interval_of_an_exact_quotient_holds_all_that_divides(
    inner: Affine, by: int, extents: tuple[int, ...], cut: int
) -> None:
    at = interval(Exact(inner, by), dict(enumerate(extents)), cut, 2)
    if extents[cut] % 2 or at is None:
        return
    half = extents[cut] // 2
    for worker in range(2):
        ranges = [range(worker * half, (worker + 1) * half) if v == cut else range(n) for v, n in enumerate(extents)]
        seen = [i // by for i in (value(inner, here) for here in product(*ranges)) if i % by == 0]
        assert all(at.step * worker + at.lo <= i <= at.step * worker + at.hi for i in seen)


def test_the_paper_s_shift_reads_two_further() -> None:
    i = Loop(Affine(((0, 1),)))
    assert interval((i + 2).expr, {0: 10}, 0, 2) == Interval(5, 2, 6)  # [2, 6] and [7, 11]


def test_a_full_or_data_dependent_index_is_read_whole() -> None:
    assert interval(Full(), {0: 4}, 0, 2) == interval(Data(), {0: 4}, 0, 2) == Interval(0, 0, 0)


def test_arithmetic_folds_what_is_affine_again() -> None:
    i, j = Loop(Affine(((0, 1),))), Loop(Affine(((1, 1),)))
    assert ((6 * i + 12) // 3).expr == Affine(((0, 2),), 4)
    assert ((6 * i + 7) % 3).expr == Affine((), 1)
    assert (i - i).expr == Affine()
    assert (3 - i + j).expr == Affine(((0, -1), (1, 1)), 3)
    assert show((2 * (i // 3) + j).expr, {0: "i", 1: "j"}) == "2*((i) // 3) + j"
    assert loops_of((i // 3 + j).expr) == {0, 1}


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda i, j: i * j, "a product of two indices is not affine"),
        (lambda i, j: i // j, "divided only by a positive constant"),
        (lambda i, j: i % 0, "divided only by a positive constant"),
        (lambda i, j: i + 0.5, "built from loops and integers"),
    ],
)
def test_an_index_that_cannot_be_analysed_is_shown(build: object, says: str) -> None:
    i, j = Loop(Affine(((0, 1),))), Loop(Affine(((1, 1),)))
    with pytest.raises(DescriptionError, match=says) as caught:
        build(i, j)  # type: ignore[operator]
    assert "i0" in str(caught.value) or "0.5" in str(caught.value)
