"""What each op moves once XLA has fused it: kernels are counted by what they read, write and launch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from models import gpt
from shardplan.constants import CONSTANTS
from shardplan.frontend.trace import trace
from shardplan.graph import Graph, Node, flatten
from shardplan.graph.kernel_traffic import with_traffic
from shardplan.graph.nodes import Traffic
from tests.models.test_factories import TINY, each_tiny, factory

ROWS = jax.ShapeDtypeStruct((64, 256), jnp.float32)
WEIGHT = jax.ShapeDtypeStruct((256, 256), jnp.float32)
SIZE = 64 * 256 * 4


def flat(step: Callable[..., Any], *args: Any) -> Graph:
    return flatten(trace(step, *args).program)


def traffic_of(node: Node) -> Traffic:
    assert node.costed.traffic is not None
    return node.costed.traffic


def moved(graph: Graph) -> tuple[float, float, float]:
    """Bytes read, bytes written, and launches of one step."""
    read = written = launches = 0.0
    for node in graph.nodes:
        traffic = traffic_of(node)
        read += node.weight * sum(graph.tensors[t].nbytes * n for t, n in zip(node.inputs, traffic.reads, strict=True) if t >= 0)
        written += node.weight * sum(graph.tensors[t].nbytes * n for t, n in zip(node.outputs, traffic.writes, strict=True))
        launches += node.weight * traffic.launches
    return read, written, launches


def test_a_chain_of_elementwise_ops_is_one_kernel() -> None:
    assert moved(flat(lambda x: jnp.exp(jnp.tanh(x) * 2 + 1), ROWS)) == (SIZE, SIZE, 1)


def test_a_value_with_two_readers_is_computed_in_both_where_that_reads_no_more() -> None:
    """The products need both results stored; tanh(x) is not stored between them."""

    def step(x: Any, w: Any) -> Any:
        y = jnp.tanh(x)
        return (y + 1) @ w, (y * 2) @ w

    read, written, launches = moved(flat(step, ROWS, WEIGHT))
    products = 2 * (SIZE + 4 * 256 * 256), 2 * SIZE
    # both elementwise kernels run over the same elements and read x: they are one
    assert (read - products[0], written - products[1], launches) == (SIZE, 2 * SIZE, 3)


def test_a_softmax_is_one_kernel_that_reads_and_writes_once() -> None:
    read, written, launches = moved(flat(lambda x: jax.nn.softmax(x), ROWS))
    assert read == SIZE
    assert SIZE <= written <= SIZE + 2 * 64 * 4
    assert launches == 1


def test_a_reduction_along_columns_does_not_join_one_along_rows() -> None:
    read, _, launches = moved(flat(lambda x: (x.sum(0), x.sum(1)), ROWS))
    assert (read, launches) == (2 * SIZE, 2)
    read, _, launches = moved(flat(lambda x: (x.sum(0), (x * x).sum(0)), ROWS))
    assert (read, launches) == (SIZE, 1)


def test_a_long_row_is_reduced_in_two_and_in_a_kernel_of_its_own() -> None:
    """A softmax over rows too long for a kernel reads them for the maximum, for the sum, and for the result."""
    short, long = (jax.ShapeDtypeStruct((4, n), jnp.float32) for n in (CONSTANTS.longest_row, CONSTANTS.longest_row + 1))
    nbytes = 16 * CONSTANTS.longest_row
    assert moved(flat(lambda x: jax.nn.softmax(x), short))[0::2] == (nbytes, 1)
    read, _, launches = moved(flat(lambda x: jax.nn.softmax(x), long))
    assert 3 * nbytes < read < 3.01 * nbytes
    assert launches == 2 + 2 + 1


@pytest.mark.parametrize(
    ("shape", "axes", "launches"),
    [
        ((CONSTANTS.longest_column, 8), 0, 1),
        ((CONSTANTS.longest_column + 1, 8), 0, 2),
        ((8, CONSTANTS.longest_row), 1, 1),
        ((8, CONSTANTS.longest_row + 1), 1, 2),
        ((128, CONSTANTS.longest_row // 128), None, 1),
        ((129, CONSTANTS.longest_row // 128), None, 2),
    ],
)
def test_a_long_sum_takes_two_kernels(shape: tuple[int, ...], axes: int | None, launches: int) -> None:
    assert moved(flat(lambda x: jnp.sum(x, axes), jax.ShapeDtypeStruct(shape, jnp.float32)))[2] == launches


def test_a_softmax_that_keeps_its_sums_reads_twice() -> None:
    """A kernel of rows has one result: what the backward pass needs of the sums is reduced by another."""

    def kept(x: Any) -> Any:
        total = jnp.exp(x).sum(-1, keepdims=True)
        return jnp.exp(x) / total, total

    read, written, launches = moved(flat(kept, ROWS))
    assert (read, written, launches) == (2 * SIZE, SIZE + 64 * 4, 2)


def test_a_layer_norm_reads_twice_and_a_root_mean_square_norm_once() -> None:
    """The two sums of a layer norm do not depend on each other."""

    def layer_norm(x: Any) -> Any:
        mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
        return (x - mean) * lax.rsqrt(square - mean * mean)

    assert moved(flat(layer_norm, ROWS)) == (2 * SIZE, SIZE, 2)
    assert moved(flat(lambda x: x * lax.rsqrt((x * x).mean(-1, keepdims=True)), ROWS)) == (SIZE, SIZE, 1)


def test_sums_along_columns_are_complete_before_they_are_read() -> None:
    """Batch normalisation: one kernel for the sums, one for what they scale, although both read x."""

    def normalised(x: Any) -> Any:
        mean, square = x.mean(0), (x * x).mean(0)
        return (x - mean) * lax.rsqrt(square - mean * mean)

    read, written, launches = moved(flat(normalised, ROWS))
    assert (read, written, launches) == (2 * SIZE + 2 * 256 * 4, SIZE + 2 * 256 * 4, 2)


def test_a_mask_of_an_iota_is_computed_where_it_is_read() -> None:
    def step(x: Any, w: Any, labels: Any) -> Any:
        mask = labels[:, None] == lax.broadcasted_iota(jnp.int32, (64, 256), 1)
        return jnp.where(mask, x, 0.0) @ w, jnp.where(mask, 1.0, x) @ w.T

    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    read, written, _ = moved(flat(step, ROWS, WEIGHT, labels))
    assert (read, written) == (SIZE + 64 * 4 + 2 * (SIZE + 4 * 256 * 256), 4 * SIZE)


def test_what_only_adds_or_drops_dims_of_size_1_is_no_kernel() -> None:
    rows = jax.ShapeDtypeStruct((64, 1, 256), jnp.float32)
    for resized in (
        lambda x: jnp.sum(x, 1),
        lambda x: jnp.transpose(x, (1, 0, 2)),
        lambda x: lax.broadcast_in_dim(x, (64, 1, 256, 1), (0, 1, 2)),
    ):
        read, _, launches = moved(flat(lambda x, resized=resized: jnp.tanh(resized(jnp.exp(x))), rows))
        assert (read, launches) == (SIZE, 1)


def test_products_read_stored_values() -> None:
    product = SIZE + 4 * 256 * 256
    assert moved(flat(lambda x, w: x @ w, ROWS, WEIGHT)) == (product, SIZE, 1)
    assert moved(flat(lambda x, w: jnp.tanh(x) @ w, ROWS, WEIGHT)) == (product + SIZE, 2 * SIZE, 2)
    assert moved(flat(lambda x, w: jnp.tanh(x @ w), ROWS, WEIGHT)) == (product + SIZE, 2 * SIZE, 2)


def test_a_product_widens_its_operands_and_narrows_its_result() -> None:
    """As XLA's gemm fusions do; what widens a result or narrows an operand is a kernel of its own."""
    narrow = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    weights = 4 * 256 * 256
    assert moved(flat(lambda x, w: x.astype(jnp.float32) @ w, narrow, WEIGHT)) == (SIZE / 2 + weights, SIZE, 1)
    assert moved(flat(lambda x, w: (x @ w).astype(jnp.bfloat16), ROWS, WEIGHT)) == (SIZE + weights, SIZE / 2, 1)
    assert moved(flat(lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), ROWS, WEIGHT))[2] == 3

    def read_twice(x: Any, w: Any) -> Any:
        wide = x.astype(jnp.float32)
        return wide @ w, jnp.tanh(wide)

    assert moved(flat(read_twice, narrow, WEIGHT))[2] == 2


def test_a_reshape_between_a_product_and_its_cast_changes_nothing() -> None:
    narrow = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    weights = 256 * 256 * 4

    def cast(x: Any, w: Any, before: Any) -> Any:
        made = jnp.dot(x, w, preferred_element_type=jnp.float32).reshape(64, 16, 16)
        return (made, made.astype(jnp.bfloat16)) if before else made.astype(jnp.bfloat16)

    assert moved(flat(lambda x, w: x.astype(jnp.float32).reshape(32, 2, 256) @ w, narrow, WEIGHT)) == (
        SIZE / 2 + weights,
        SIZE,
        1,
    )
    assert moved(flat(lambda x, w: cast(x, w, before=False), ROWS, WEIGHT)) == (SIZE + weights, SIZE / 2, 1)
    assert moved(flat(lambda x, w: cast(x, w, before=True), ROWS, WEIGHT))[2] == 2  # the step returns the reshaped product too


def test_a_reshape_moves_nothing_and_a_transpose_is_a_kernel() -> None:
    assert moved(flat(lambda x: jnp.exp(x.reshape(-1)).reshape(32, 512), ROWS)) == (SIZE, SIZE, 1)
    assert moved(flat(lambda x: jnp.exp(x).T, ROWS)) == (SIZE, SIZE, 1)
    assert moved(flat(lambda x: jnp.exp(x.T), ROWS)) == (2 * SIZE, 2 * SIZE, 2)


def test_a_product_takes_and_gives_its_operands_swapped() -> None:
    product = SIZE + 4 * 256 * 256, SIZE
    assert moved(flat(lambda x, w: (x @ w).T, ROWS, WEIGHT)) == (*product, 1)
    assert moved(flat(lambda x, w: x @ w.T, ROWS, WEIGHT)) == (*product, 1)
    heads = jax.ShapeDtypeStruct((8, 64, 256), jnp.float32)
    assert moved(flat(lambda x, w: (x @ w).transpose(1, 0, 2), heads, WEIGHT))[2] == 2


def test_a_filter_is_copied_unless_a_kernel_makes_it() -> None:
    image, kernel = jax.ShapeDtypeStruct((8, 16, 16, 32), jnp.float32), jax.ShapeDtypeStruct((3, 3, 32, 64), jnp.float32)

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, w, y = (4 * n for n in (8 * 16 * 16 * 32, 3 * 3 * 32 * 64, 8 * 16 * 16 * 64))
    assert moved(flat(run, image, kernel)) == (x + 3 * w, y, 2)
    assert moved(flat(lambda x, w: run(x, jnp.tanh(w)), image, kernel)) == (x + 2 * w, w + y, 2)
    gradient = moved(
        flat(
            lambda x, w, g: jax.vjp(partial(run, x), w)[1](g)[0],
            image,
            kernel,
            jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.float32),
        )
    )
    assert gradient == (x + y, 3 * w, 2)


def test_the_backward_pass_of_a_pointwise_convolution_takes_its_filter_as_it_lies() -> None:
    """Its input features are the output's: without a window, they are the first dim, and there is nothing to reverse."""
    image, kernel = jax.ShapeDtypeStruct((8, 16, 16, 32), jnp.float32), jax.ShapeDtypeStruct((1, 1, 32, 64), jnp.float32)

    def run(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def backward(x: Any, w: Any, g: Any) -> Any:
        return jax.vjp(lambda x: run(x, w), x)[1](g)[0]

    x, w, y = (4 * n for n in (8 * 16 * 16 * 32, 32 * 64, 8 * 16 * 16 * 64))
    assert moved(flat(run, image, kernel)) == (x + 3 * w, y, 2)
    assert moved(flat(backward, image, kernel, jax.ShapeDtypeStruct((8, 16, 16, 64), jnp.float32))) == (y + w, x, 1)


def test_each_iteration_of_a_scan_counts_itself() -> None:
    def step(x: Any, length: int) -> Any:
        return lax.scan(lambda c, _: (jnp.tanh(c), None), x, length=length)[0]

    assert [moved(flat(partial(step, length=n), ROWS))[2] for n in (4, 8)] == [2 * 4, 2 * 8]


def test_slices_and_updates_move_their_own_bytes() -> None:
    row = SIZE // 64
    assert moved(flat(lambda x: lax.dynamic_slice(x, (3, 0), (1, 256)) * 2, ROWS))[:2] == (row, row)
    read, written, _ = moved(
        flat(lambda x, r: lax.dynamic_update_slice(x, jnp.tanh(r), (3, 0)), ROWS, jax.ShapeDtypeStruct((1, 256), jnp.float32))
    )
    assert (read, written) == (row, row)


def test_a_scatter_that_adds_reads_what_it_adds_to() -> None:
    rows = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    at = jax.ShapeDtypeStruct((8, 1), jnp.int32)
    row = SIZE // 64

    def step(x: Any, i: Any, r: Any, how: str) -> Any:
        return getattr(x.at[i[:, 0]], how)(r, mode="promise_in_bounds")

    added, stored = (moved(flat(partial(step, how=how), ROWS, at, rows)) for how in ("add", "set"))
    assert added[1] == stored[1] == 8 * row
    assert added[0] - stored[0] == 8 * row


def test_what_lies_between_two_kernels_keeps_them_apart() -> None:
    """tanh(x) is read before and after the product that makes the other operand: the two readers are no kernel."""

    def step(x: Any, w: Any) -> Any:
        y = jnp.tanh(x)
        return y * (y @ w)

    _, _, launches = moved(flat(step, ROWS, WEIGHT))
    assert launches == 3


def test_a_scan_fills_its_stack_and_copies_what_it_also_reads() -> None:
    xs = jax.ShapeDtypeStruct((8, 64, 256), jnp.float32)

    def apart(xs: Any) -> Any:
        return lax.scan(lambda c, x: (c, jnp.tanh(x)), 0.0, xs)[1]

    def read(xs: Any) -> Any:
        def body(c: Any, x: Any) -> Any:
            y = jnp.tanh(x)
            return c + y.sum(), y

        return lax.scan(body, 0.0, xs)

    assert moved(flat(apart, xs))[:2] == (8 * SIZE, 2 * 8 * SIZE)
    assert moved(flat(read, xs))[1] >= 3 * 8 * SIZE


def test_a_product_is_copied_to_its_stack() -> None:
    """A library call writes no slice of a buffer: the stack takes a kernel that reads the product and writes the slice."""
    xs = jax.ShapeDtypeStruct((8, 64, 256), jnp.float32)

    def step(w: Any, xs: Any, front: Any) -> Any:
        return lax.scan(lambda c, x: (c, front(x @ w)), 0.0, xs)[1]

    product, tanh = (moved(flat(partial(step, front=f), WEIGHT, xs)) for f in (lambda y: y, jnp.tanh))
    assert product[1] == 8 * (SIZE + 3 * SIZE)  # with the zeros, and the copy as twice its bytes
    assert tanh[1:] == (8 * (SIZE + 2 * SIZE), product[2])


def test_a_loop_copies_the_bytes_that_a_product_reads_and_writes() -> None:
    """Bfloat16 slices of a stack that a product widens, and a product that it narrows to a stack."""
    xs, half = jax.ShapeDtypeStruct((8, 64, 256), jnp.float32), 8 * SIZE / 2

    def narrowing(w: Any, xs: Any) -> Any:
        return lax.scan(lambda c, x: (c, (x @ w).astype(jnp.bfloat16)), 0.0, xs)[1]

    def widening(x: Any, weights: Any) -> Any:
        return lax.scan(lambda c, w: (c @ w.astype(jnp.float32), None), x, weights)[0]

    assert moved(flat(narrowing, WEIGHT, xs))[1] == half + 3 * half  # as it is made; zeros, and the copy as twice its bytes
    weights = jax.ShapeDtypeStruct((8, 256, 256), jnp.bfloat16)
    assert moved(flat(widening, ROWS, weights))[0] == 8 * SIZE + 3 * 8 * 256 * 256 * 2


def test_an_optimizer_reads_and_writes_its_state_once() -> None:
    """Adam: gradient, weight and two moments in, weight and two moments out."""

    def step(w: Any, m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        return w - 0.1 * m / (jnp.sqrt(v) + 1e-8), m, v

    n = 4 * 256 * 256
    assert moved(flat(step, WEIGHT, WEIGHT, WEIGHT, WEIGHT)) == (4 * n, 3 * n, 1)


def test_values_that_enter_a_checkpointed_backward_pass_are_stored() -> None:
    """sin(x) is computed where it is read; behind the barrier of the backward pass it is a stored value."""

    def block(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x * 2) @ w)

    def loss(w: Any, x: Any, run: Any) -> Any:
        return run(w, jnp.sin(x)).sum()

    plain, kept = (flat(jax.grad(partial(loss, run=b)), WEIGHT, ROWS) for b in (block, jax.checkpoint(block)))
    assert moved(kept)[1] - moved(plain)[1] == 2 * SIZE


@pytest.mark.parametrize("name", each_tiny())
def test_every_stored_value_is_written_before_it_is_read(name: str) -> None:
    """A value that a kernel reads is an input, comes from outside of its body, or is written."""
    step, args = factory(name)(**TINY[name])
    graph = flat(step, *args)
    made = {t: (node, i) for node in graph.nodes for i, t in enumerate(node.outputs)}
    buffer = list(range(len(graph.tensors)))
    for node in graph.nodes:
        renames = node.signature.part == "none" or (node.signature.swaps and traffic_of(node).empty)
        if renames and len(node.outputs) == 1 and node.inputs[0] >= 0:
            buffer[node.outputs[0]] = buffer[node.inputs[0]]
    for node in graph.nodes:
        for t, n in zip(node.inputs, traffic_of(node).reads, strict=True):
            if t >= 0 and n and buffer[t] in made:
                maker, slot = made[buffer[t]]
                assert traffic_of(maker).writes[slot], (node.op, maker.op)


@pytest.mark.slow
def test_equal_layers_share_signatures() -> None:
    step, args = gpt.train_step(**{**TINY["gpt"], "layers": 6})
    graph = flat(step, *args)
    assert len({node.costed.id for node in graph.nodes}) < 0.5 * len(graph.nodes)
    assert {node.costed.call.primitive for node in graph.nodes} == {node.signature.call.primitive for node in graph.nodes}


def by_scope(step: Callable[..., Any], *args: Any) -> Graph:
    """The graph of a library that runs each scope of a step as a call of its own."""
    return with_traffic(flat(step, *args), call_of=lambda node: node.op.scope.split("(")[-1].rstrip(")"))


def test_ops_of_two_calls_never_share_a_kernel() -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("first"):
            y = jnp.exp(x) + 1
        with jax.named_scope("second"):
            return jnp.tanh(y) * 2

    assert moved(flat(step, ROWS)) == (SIZE, SIZE, 1)
    assert moved(by_scope(step, ROWS)) == (2 * SIZE, 2 * SIZE, 2)


def test_two_calls_that_read_one_value_read_it_twice() -> None:
    def step(x: Any) -> Any:
        with jax.named_scope("first"):
            y = jnp.exp(x)
        with jax.named_scope("second"):
            return y, jnp.tanh(x)

    assert moved(flat(step, ROWS)) == (SIZE, 2 * SIZE, 1)
    assert moved(by_scope(step, ROWS)) == (2 * SIZE, 2 * SIZE, 2)


def test_a_call_adds_its_bias_with_its_product_and_another_call_does_not() -> None:
    bias = jax.ShapeDtypeStruct((256,), jnp.float32)

    def step(inside: bool, x: Any, w: Any, b: Any) -> Any:
        with jax.named_scope("linear"):
            y = x @ w + b if inside else x @ w
        with jax.named_scope("after"):
            return y if inside else y + b

    read, written, launches = moved(by_scope(partial(step, True), ROWS, WEIGHT, bias))
    apart = moved(by_scope(partial(step, False), ROWS, WEIGHT, bias))
    assert (written, launches) == (SIZE, 1)
    assert apart == (read + SIZE + 4 * 256, written + SIZE, launches + 1)


def test_slices_and_broadcasts_are_views_of_a_library() -> None:
    """Each product reads its half of x, and the sum reads one row, however often it broadcasts it."""

    def step(x: Any, w: Any) -> Any:
        with jax.named_scope("slices"):
            a, b = jnp.unstack(x.reshape(64, 2, 128), axis=1)
        with jax.named_scope("products"):
            c, d = a @ w, b @ w
        with jax.named_scope("row"):
            row = jnp.broadcast_to(w[0], (64, 128))
        with jax.named_scope("sums"):
            return c + row, d

    half, weight = 64 * 128 * 4, 128 * 128 * 4
    read, written, launches = moved(by_scope(step, ROWS, jax.ShapeDtypeStruct((128, 128), jnp.float32)))
    assert launches == 3
    assert (read, written) == (2 * (half + weight) + half + 128 * 4, 3 * half)


def test_what_a_view_shows_is_stored_before_it_is_read() -> None:
    def step(x: Any, w: Any) -> Any:
        with jax.named_scope("make"):
            y = jnp.tanh(x)
        with jax.named_scope("view"):
            _, b = jnp.unstack(y.reshape(64, 2, 128), axis=1)
        with jax.named_scope("product"):
            return b @ w

    half, weight = 64 * 128 * 4, 128 * 128 * 4
    graph = by_scope(step, ROWS, jax.ShapeDtypeStruct((128, 128), jnp.float32))
    assert moved(graph) == (SIZE + half + weight, SIZE + half, 2)


def test_a_gradient_computes_its_calls_values_again() -> None:
    """A call keeps its operands for its gradient, not what it computes from them."""

    def loss(x: Any) -> Any:
        with jax.named_scope("call"):
            y = jnp.exp(jnp.tanh(x))
        with jax.named_scope("sum"):
            return jnp.sum(y * y)

    graph = with_traffic(flat(jax.grad(loss), ROWS), call_of=lambda node: "call" if "call" in node.op.scope else "sum")
    stored = [n.op.primitive for n in graph.nodes if "call" in n.op.scope and any(traffic_of(n).writes) and n.outputs]
    assert "tanh" not in stored
