"""The language reads Tofu's own examples, and refuses what it cannot analyse with the expression in hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardplan import tdl
from shardplan.errors import DescriptionError
from shardplan.ir import Partial, Replicated, Split


@tdl.op
def conv1d(data: Any, filters: Any) -> Any:
    return lambda b, co, x: tdl.Sum(lambda ci, dx: data[b, ci, x + dx] * filters[ci, co, dx])


@tdl.op
def batch_cholesky(mat: Any) -> Any:
    return lambda b, i, j: tdl.Opaque()(mat[b, :, :])[i, j]


def read(function: Callable[..., Any], *operands: tuple[int, ...], result: tuple[int, ...]) -> tdl.Description:
    return tdl.op(function)(tdl.Call("example", operands, (result,), {}))


def test_conv1d_is_cut_along_every_loop_but_the_window() -> None:
    description = conv1d(tdl.Call("conv1d", ((4, 6, 8), (6, 2, 1)), ((4, 2, 8),), {}))
    found = {description.loops[s.loop].name: (s.operands, s.results[0]) for s in tdl.cuts(description, 2)}
    assert found == {
        "b": ((Split(0), Replicated()), Split(0)),
        "co": ((Replicated(), Split(1)), Split(1)),
        "x": ((Split(2), Replicated()), Split(2)),
        "ci": ((Split(1), Split(0)), Partial("sum")),
    }


def test_a_window_needs_a_halo() -> None:
    def shifted(x: Any) -> Any:
        return lambda i: tdl.Max(lambda d: x[i + d - 1], extents=(3,))

    (strategy,) = tdl.cuts(read(shifted, (12,), result=(12,)), 3)
    assert strategy.operands == (Split(0, (1, 1)),)
    assert strategy.has_halo


def test_an_opaque_function_is_cut_along_its_batch_alone() -> None:
    description = batch_cholesky(tdl.Call("cholesky", ((4, 6, 6),), ((4, 6, 6),), {}))
    assert [description.loops[s.loop].name for s in tdl.cuts(description, 2)] == ["b"]


def test_a_diagonal_cannot_be_cut() -> None:
    assert tdl.cuts(read(lambda x: lambda i: x[i, i], (4, 4), result=(4,)), 2) == ()


def test_a_drifting_window_cannot_be_cut() -> None:
    assert tdl.cuts(read(lambda x: lambda i: x[2 * i], (12,), result=(4,)), 2) == ()


def test_a_reduction_under_a_nonlinear_function_cannot_be_cut() -> None:
    description = read(lambda x: lambda i: tdl.apply("exp", tdl.Sum(lambda k: x[i, k])), (4, 6), result=(4,))
    assert [description.loops[s.loop].name for s in tdl.cuts(description, 2)] == ["i"]


def test_what_is_added_to_a_sum_that_is_cut_is_partial_too() -> None:
    description = read(lambda x, b: lambda i: tdl.Sum(lambda k: x[i, k]) + b[i], (3, 6), (3,), result=(3,))
    (strategy,) = tdl.cuts(description, 2)
    assert strategy.operands == (Split(1), Partial("sum"))


@pytest.mark.parametrize(
    ("function", "sets"),
    [
        (lambda x, y: lambda i: x[i] * y[i], ((0,), (1,))),
        (lambda x, y: lambda i: x[i] + y[i], ((0, 1),)),
        (lambda x, y: lambda i: x[i] / y[i], ((0,),)),
        (lambda x, y: lambda i: x[i] * y[i] + x[i], ((0,),)),
        (lambda x, y: lambda i: x[i] * x[i] + y[i], ()),
        (lambda x, y: lambda i: tdl.where(y[i], x[i]), ((0,),)),
        (lambda x, y: lambda i: x[i] + 1, ()),
        (lambda x, y: lambda i: tdl.apply("f", x[i]) * y[i], ((1,),)),
    ],
)
def test_partial_sums_pass_through_what_is_linear(function: Callable[..., Any], sets: tuple[tuple[int, ...], ...]) -> None:
    assert tdl.linear_sets(read(function, (4,), (4,), result=(4,))) == sets


def test_a_literal_zero_is_no_term() -> None:
    call = tdl.Call("add", ((4,), ()), ((4,),), {}, ("float32", "float32"), ("float32",), (None, 0.0))
    description = tdl.describe(call)
    assert description is not None
    assert tdl.linear_sets(description) == ((0,),)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: lambda i, j: x[i * j, 0], "a product of two indices is not affine"),
        (lambda x: lambda i, j: x[i], "operand 0 has rank 2, 1 indices given"),
        (lambda x: lambda i, j: x[i, j, 0], "operand 0 has rank 2, 3 indices given"),
        (lambda x: lambda i: x[i, 0], "has a result of rank 2"),
        (lambda x: lambda i, j: tdl.Sum(lambda: x[i, j]), "a reducer needs an index"),
        (lambda x: lambda i, j: tdl.Sum(lambda k: x[i, 2 * k + j]), "the extent of k cannot be read off"),
        (lambda x: lambda i, j: "x", "built from operand elements and numbers"),
        (lambda x: lambda i, j: x["i", j], "an index is a loop, an integer, ':' or another tensor's element"),
        (lambda x: (lambda i, j: x[i, j],) * 2, "has 1 results, but its description returns 2"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(function: Callable[..., Any], says: str) -> None:
    with pytest.raises(DescriptionError, match=says):
        read(function, (4, 6), result=(4, 6))


def test_loops_of_one_name_are_one_loop() -> None:
    description = tdl.describe(tdl.Call("sort", ((4, 6), (4, 6)), ((4, 6), (4, 6)), {"dimension": 1}))
    assert description is not None
    assert [v.name for v in description.loops] == ["i0", "i1"]
    (strategy,) = tdl.cuts(description, 2)
    assert strategy.results == (Split(0), Split(0))


def test_a_loop_of_two_extents_is_refused() -> None:
    with pytest.raises(DescriptionError, match="index i has extent 4 and 6"):
        tdl.op(lambda x: (lambda i: x[i],) * 2)(tdl.Call("two", ((4,),), ((4,), (6,)), {}))
