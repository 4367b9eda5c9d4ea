"""The cuts that sharding plans live on are offered: Megatron, FSDP, sequence, vocabulary, expert and spatial."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from shardplan import tdl
from shardplan.ir import Partial, Replicated, Split
from shardplan.tdl.proof.case import traced
from shardplan.tdl.strategies import _regions, _regions_alone

R = Replicated()


def strategies(primitive: str, function: Callable[..., Any], *shapes: Any, ways: int = 2) -> set[tuple[Any, ...]]:
    """(operands..., result) of each legal cut of the first such primitive of a function."""
    operands = [jnp.zeros(s) if isinstance(s, tuple) else s for s in shapes]
    description = tdl.describe(traced(primitive, function, *operands).call)
    assert description is not None
    return {(*s.operands, *s.results) for s in tdl.cuts(description, ways)}


IDS = jnp.zeros((4, 8), jnp.int32)


def test_a_matrix_product_is_cut_by_rows_columns_and_sum() -> None:
    assert strategies("dot_general", lambda x, w: x @ w, (4, 6), (6, 8)) == {
        (Split(0), R, Split(0)),
        (R, Split(1), Split(1)),
        (Split(1), Split(0), Partial("sum")),
    }


def test_the_vocabulary_is_split_forward_and_backward() -> None:
    forward = strategies("gather", lambda t, i: t[i], (64, 16), IDS)
    assert (Split(0), R, Partial("sum")) in forward
    assert (Split(1), R, Split(2)) in forward
    backward = strategies("scatter-add", jax.grad(lambda t, i: t[i].sum()), (64, 16), IDS)
    assert (Split(0), R, R, Split(0)) in backward
    assert (Partial("sum"), Split(0), Split(0), Partial("sum")) in backward


def test_the_loss_s_lookup_is_split_along_the_vocabulary() -> None:
    found = strategies("gather", lambda x, i: jnp.take_along_axis(x, i[..., None], -1), (4, 8, 64), IDS)
    assert (Split(2), R, Partial("sum")) in found
    assert (Split(1), Split(1), Split(1)) in found


def test_heads_and_sequence_of_attention_are_cut() -> None:
    found = strategies("dot_general", lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (2, 8, 4, 6), (2, 8, 4, 6))
    assert (Split(2), Split(2), Split(1)) in found
    assert (Split(1), R, Split(2)) in found or (R, Split(1), Split(2)) in found


def test_a_reshape_into_heads_is_cut_along_them() -> None:
    assert strategies("reshape", lambda x: x.reshape(2, 8, 4, 6), (2, 8, 24), ways=4) == {
        (Split(1), Split(1)),
        (Split(2), Split(2)),
    }


@pytest.mark.parametrize("shapes", [((4, 6), (4, 6)), ((4, 6), (1, 6)), ((4, 6), ()), ((2, 1, 8), (2, 5, 8))], ids=str)
def test_elementwise_ops_are_cut_as_the_analysis_of_intervals_says(shapes: tuple[tuple[int, ...], ...]) -> None:
    result = tuple(max(n) for n in itertools.zip_longest(*shapes, fillvalue=1)) if all(shapes) else shapes[0]
    description = tdl.describe(tdl.Call("mul", shapes, (result,), {}, ("float32",) * 2, ("float32",)))
    assert description is not None
    assert description.elementwise
    legal = 0
    for loop, ways in itertools.product(range(len(result)), (2, 3, 4, 8)):
        if result[loop] % ways == 0:
            assert _regions_alone(description, loop) == _regions(description, loop, ways)
            legal += tdl.cut(description, loop, ways) is not None
    assert legal


IN_STEP = {
    # an image of one row: batch, row, column, channels made and read, and the kernel's rows and columns
    "conv_general_dilated": (
        lambda x, k: _conv(x, k),
        ((12, 1, 24, 12), (3, 3, 12, 12)),
        (True, False, False, True, True, False, False),
    ),
    "dot_general": (lambda x, w: x @ w, ((12, 24), (24, 16)), (True, True, True)),
    "mul": (lambda x, y: x * y, ((12, 24), (1, 24)), (True, True)),
    "reduce_sum": (lambda x: x.sum(axis=1), ((12, 24),), (True, True)),
    "reshape": (lambda x: x.reshape(12, 24), ((12, 4, 6),), (True, False)),
    "rev": (lambda x: x[:, ::-1], ((12, 24),), (True, False)),
    "slice": (lambda x: x[:, ::2], ((12, 24),), (True, False)),
}


@pytest.mark.parametrize("primitive", IN_STEP)
def test_loops_in_step_are_cut_alike_whatever_the_ways(primitive: str) -> None:
    function, shapes, expected = IN_STEP[primitive]
    description = tdl.describe(traced(primitive, function, *[jnp.zeros(s) for s in shapes]).call)
    assert description is not None
    regions = [tdl.in_step(description, loop) for loop in range(len(expected))]
    assert tuple(found is not None for found in regions) == expected
    for loop, alike in enumerate(regions):
        if alike is None:
            continue
        found = [tdl.cut(description, loop, ways, pad=True) for ways in (2, 3, 5, 7, 12)]
        assert found == [tdl.cut_in_step(description, loop, ways, alike) for ways in (2, 3, 5, 7, 12)]
        assert len({(s.operands, s.results) for s in found if s is not None}) == 1
        assert None not in found


def test_what_is_read_whole_too_is_not_padded_in_whichever_order_it_is_read() -> None:
    made = tdl.describe(traced("neg", lambda x: -x, jnp.zeros(6)).call)
    assert made is not None
    own, whole = (0, (tdl.Affine(((0, 1),)),)), (0, (tdl.Affine(((1, 1),)),))
    for accesses in ((own, whole), (whole, own)):
        both = dataclasses.replace(made, accesses=accesses, elementwise=False)
        assert tdl.cut(both, 0, 4, pad=True) is None
        assert tdl.in_step(both, 0) is None
    assert tdl.cut(made, 0, 4, pad=True) is not None


@pytest.mark.parametrize(("size", "legal"), [(2, False), (4, True), (1, False)])
def test_a_single_window_is_not_cut(size: int, legal: bool) -> None:
    """Which of its elements the source goes to depends on where it lies: a block of it would take it for a window of its own."""
    params = {"window_dimensions": (1, 1), "window_strides": (1, 2), "padding": ((0, 0), (0, 0))}
    call = tdl.Call(
        "select_and_scatter", ((4, size), (4, -(-size // 2)), ()), ((4, size),), params, ("float32",) * 3, ("float32",)
    )
    description = tdl.describe(call)
    assert description is not None
    assert tdl.cut(description, 0, 2) is not None
    assert (tdl.cut(description, 1, 2) is not None) == legal


def test_experts_are_cut() -> None:
    found = strategies("dot_general", lambda x, w: jnp.einsum("ecm,emh->ech", x, w), (4, 6, 8), (4, 8, 2))
    assert (Split(0), Split(0), Split(0)) in found


def test_dropout_is_cut_without_its_key() -> None:
    assert strategies("random_bits", lambda k: jax.random.bits(k, (4, 8)), jax.random.key(0)) == {(R, Split(0)), (R, Split(1))}


def _conv(x: Any, k: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@pytest.mark.parametrize("stride", [1, 2])
def test_images_are_cut_in_space_forward_and_backward(stride: int) -> None:
    x, k = jnp.zeros((2, 12, 12, 4)), jnp.zeros((3, 3, 4, 6))
    halo = (1, 1) if stride == 1 else (0, 1)
    assert (Split(1, halo), R, Split(1)) in strategies("conv_general_dilated", lambda x, k: _conv(x, k, stride), x, k)
    y = _conv(x, k, stride)
    inputs = strategies("conv_general_dilated", jax.linear_transpose(lambda x: _conv(x, k, stride), x), y)
    assert any(isinstance(p[0], Split) and p[0].dim == 1 and p[2] == Split(1) for p in inputs)
    kernels = strategies("conv_general_dilated", jax.linear_transpose(lambda k: _conv(x, k, stride), k), y)
    assert any(isinstance(p[0], Split) and p[0].dim == 1 and p[2] == Partial("sum") for p in kernels)
    assert (Split(0), Split(0), Partial("sum")) in kernels


def test_pooling_is_cut_in_space_forward_and_backward() -> None:
    def pool(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    x = jnp.zeros((2, 12, 12, 4))
    assert (Split(1, (0, 1)), Split(1)) in strategies("reduce_window_max", pool, x)
    back = strategies("select_and_scatter_add", jax.grad(lambda x: pool(x).sum()), x)
    assert (Split(1, (1, 0)), Split(1, (2, 1)), Split(1)) in back


def test_a_partial_sum_does_not_cross_a_narrowing_conversion() -> None:
    def sets(old: Any, new: Any) -> tuple[tuple[int, ...], ...]:
        description = tdl.describe(traced("convert_element_type", lambda x: x.astype(new), jnp.zeros(4, old)).call)
        assert description is not None
        return tdl.linear_sets(description)

    assert sets(jnp.bfloat16, jnp.float32) == ((0,),)
    assert sets(jnp.float32, jnp.bfloat16) == ()


def test_a_cut_may_be_cut_again() -> None:
    """A reshape that merges dims is cut 4 ways as 2 by 2, though its first dim has only 2 elements."""
    call = traced("reshape", lambda x: x.reshape(12), jnp.zeros((2, 6))).call
    description = tdl.describe(call)
    assert description is not None
    assert tdl.cuts(description, 6) == ()
    (first,) = tdl.cuts(description, 2)
    left = tdl.describe(tdl.shrink(call, first))
    assert left is not None
    (second,) = tdl.cuts(left, 3)
    assert (first.operands, second.operands) == ((Split(0),), (Split(1),))
