"""Kernels of fused attention: what may be cut, that each cut is right, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.gpu.attention import BlockSizes, mha

from shardplan import _jax
from shardplan.cost.compute import flops
from shardplan.errors import UndescribedPrimitiveError
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.nodes import Node
from shardplan.ir import Partial, Replicated, Split
from shardplan.tdl import cuts
from shardplan.tdl.proof import Drawn, cudnn_reference, prove
from shardplan.tdl.proof.case import traced
from shardplan.tdl.strategies import Strategy
from shardplan.tdl.verify import verify

PALLAS = ("pallas_call:mha_forward", "pallas_call:mha_preprocess_backward", "pallas_call:mha_backward")
CUDNN = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
BATCH, QUERIES, HEADS, HEAD = 4, 64, 8, 16


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels(attend: Callable[..., Any], *operands: Any) -> list[Node]:
    """The ops of a gradient that are attention kernels, in order."""

    def loss(*operands: Any) -> Any:
        return attend(*operands).astype(jnp.float32).sum()

    floats = tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    program = trace(jax.grad(loss, floats), *operands).program
    return [n for n in flatten(program).nodes if n.op.primitive in (*PALLAS, *CUDNN)]


def cuts_of(node: Node, ways: int = 2) -> dict[str, Strategy]:
    """By the name of the loop."""
    description = node.signature.description
    assert description is not None
    return {description.loops[s.loop].name: s for s in cuts(description, ways)}


def dims(strategy: Strategy) -> tuple[list[Any], list[Any]]:
    """The dims of operands and results that are split; "sum" for a partial result, None for a whole tensor."""
    words = {Split: lambda p: p.dim, Partial: lambda p: p.reducer, Replicated: lambda p: None}
    return tuple([words[type(p)](p) for p in own] for own in (strategy.operands, strategy.results))  # type: ignore[return-value]


def pallas(causal: bool, segments: Any = None, block: int = 16) -> Callable[..., Any]:
    blocks = BlockSizes(*[block] * 6)
    return lambda q, k, v: mha(q, k, v, segments, 0.25, causal, blocks, "triton", None, 2, None, True)


def cudnn(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, *rest: jax.nn.dot_product_attention(q, k, v, *rest, implementation="cudnn", **options)


Q = shaped(BATCH, QUERIES, HEADS, HEAD)


# -- what may be cut ----------------------------------------------------------------------------------------------------


def test_a_pallas_kernel_is_cut_along_batch_and_heads_and_without_a_mask_along_queries() -> None:
    forward, _, backward = kernels(pallas(causal=False), Q, Q, Q)
    assert sorted(map(dims, cuts_of(forward).values()), key=str) == [
        ([0, 0, 0], [0, 0]),
        ([1, None, None], [1, 2]),
        ([2, 2, 2], [2, 1]),
    ]
    assert [dims(s) for s in cuts_of(backward).values()] == [([0] * 7, [0] * 3), ([2, 2, 2, 2, 2, 1, 1], [2] * 3)]


SEGMENTS = np.zeros((BATCH, QUERIES), np.int32)


@pytest.mark.parametrize("kernel", [pallas(causal=True), pallas(causal=False, segments=SEGMENTS)])
def test_queries_that_know_their_place_stay_together(kernel: Callable[..., Any]) -> None:
    forward = kernels(kernel, Q, Q, Q)[0]
    assert [dims(s)[1] for s in cuts_of(forward).values()] == [[0, 0], [2, 1]]


def test_a_block_of_queries_is_not_cut() -> None:
    forward = kernels(pallas(causal=False, block=32), Q, Q, Q)[0]
    assert [dims(s)[1] for s in cuts_of(forward, 2).values()] == [[0, 0], [1, 2], [2, 1]]
    assert [dims(s)[1] for s in cuts_of(forward, 4).values()] == [[0, 0], [2, 1]]


def test_another_kernel_of_the_same_name_is_not_taken_for_jaxs() -> None:
    def mha_forward(x: Any, y: Any) -> None:
        y[...] = 2 * x[...]

    def step(x: Any) -> Any:
        return pl.pallas_call(mha_forward, out_shape=x, interpret=True, name="mha_forward")(x)

    with pytest.raises(UndescribedPrimitiveError, match=r"(?s)register.'pallas_call:mha_forward'.*replicate=") as error:
        flatten(trace(step, jnp.ones((4, 4))).program)
    assert error.value.primitive == "pallas_call:mha_forward"


BATCH_CUT = ([0, 0, 0], [0, 0, 0])
QUERIES_CUT = ([1, None, None], [1, "sum", "sum"])


@pytest.mark.parametrize(
    ("key_heads", "bias", "expected"),
    [
        (8, None, {"b": BATCH_CUT, "t": QUERIES_CUT, "n": ([2, 2, 2], [2, 2, 2])}),
        (4, None, {"b": BATCH_CUT, "t": QUERIES_CUT, "n": ([2, 2, 2], [2, 2, 2])}),
        (1, None, {"b": BATCH_CUT, "t": QUERIES_CUT, "n": ([2, None, None], [2, "sum", "sum"])}),
        (
            4,
            (1, HEADS),
            {
                "b": ([0, 0, 0, None], [0, 0, 0, "sum"]),
                "t": ([1, None, None, 2], [1, "sum", "sum", 2]),
                "n": ([2, 2, 2, 1], [2, 2, 2, 1]),
            },
        ),
        (
            4,
            (BATCH, 1),
            {
                "b": ([0, 0, 0, 0], [0, 0, 0, 0]),
                "t": ([1, None, None, 2], [1, "sum", "sum", 2]),
                "n": ([2, 2, 2, None], [2, 2, 2, "sum"]),
            },
        ),
    ],
)
def test_one_cut_splits_a_gradient_and_makes_those_of_what_is_shared_partial(
    key_heads: int, bias: tuple[int, int] | None, expected: dict[str, Any]
) -> None:
    key = shaped(BATCH, QUERIES, key_heads, HEAD)
    given = [] if bias is None else [shaped(*bias, QUERIES, QUERIES)]
    backward = kernels(cudnn(), Q, key, key, *given)[1]
    found = {name: dims(s) for name, s in cuts_of(backward).items()}
    assert {name: (reads[: 3 + len(given)], gives) for name, (reads, gives) in found.items()} == expected


def test_groups_of_heads_are_not_cut() -> None:
    key = shaped(BATCH, QUERIES, 2, HEAD)
    assert ["n" in cuts_of(node, 4) for node in kernels(cudnn(), Q, key, key)] == [False, False]


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (4, 0)},
        {"query_seq_lengths": np.ones(BATCH, np.int32)},
    ],
)
def test_a_mask_of_cudnns_own_keeps_queries_together(options: dict[str, Any]) -> None:
    assert [sorted(cuts_of(node)) for node in kernels(cudnn(**options), Q, Q, Q)] == [["b", "n"]] * 2


def test_dropout_inside_the_kernel_is_not_described() -> None:
    node = kernels(cudnn(), Q, Q, Q)[0]
    params = {**node.signature.call.params, "dropout_rate": 0.1}

    def step(q: Any) -> Any:
        rest = [jnp.zeros(0, q.dtype)] * 7
        return _jax.bind(CUDNN[0], [q, q, q, *rest], params)[0]

    with pytest.raises(UndescribedPrimitiveError, match=CUDNN[0]):
        flatten(trace(step, Q).program)


# -- each cut is right --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(CUDNN[0], marks=pytest.mark.slow), CUDNN[1]])
def test_every_cut_of_the_formula_gives_what_the_whole_gives(name: str) -> None:
    found = prove(name, Drawn(1))
    assert (found.cuts, found.faults) == (4, ())


@pytest.mark.slow
def test_every_cut_of_the_pallas_kernel_gives_what_the_whole_gives() -> None:
    q, k, v = (np.random.default_rng(n).standard_normal((2, 32, 2, 16)).astype(np.float32) for n in range(3))
    case = traced(PALLAS[0], pallas(causal=False), q, k, v)
    found = verify(case.call, case.operands, ways=(2,), nested=0)
    assert (found.cuts, found.faults) == (3, ())


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PALLAS, *CUDNN])
def test_every_cut_of_many_drawn_cases(name: str) -> None:
    found = [prove(name, Drawn(seed)) for seed in range(6 if name in PALLAS else 60)]
    assert [str(f) for one in found for f in one.faults] == []
    jax.clear_caches()


@pytest.mark.parametrize(
    ("key_heads", "options"),
    [
        pytest.param(4, {}, marks=pytest.mark.slow),
        (2, {"is_causal": True}),
        pytest.param(1, {"is_causal": True, "local_window_size": (3, 0)}, marks=pytest.mark.slow),
    ],
)
def test_the_formula_is_that_of_the_plain_implementation(key_heads: int, options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    q, weights = (jnp.asarray(rng.standard_normal((2, 8, 4, 8)), jnp.bfloat16) for _ in range(2))
    k, v = (jnp.asarray(rng.standard_normal((2, 8, key_heads, 8)), jnp.bfloat16) for _ in range(2))
    bias = jnp.asarray(rng.standard_normal((1, 4, 8, 8)), jnp.bfloat16)

    def gradients(implementation: Any) -> Any:
        def loss(*operands: Any) -> Any:
            attended = jax.nn.dot_product_attention(*operands, implementation=implementation, **options)
            return jnp.sum((attended * weights).astype(jnp.float32))

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(q, k, v, bias)

    with _jax.cudnn_assumed(), _jax.run_on_cpu(cudnn_reference.FUNCTIONS):
        found = gradients("cudnn")
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(gradients("xla")), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())


def test_nothing_of_cudnn_is_assumed_afterwards() -> None:
    kernels(cudnn(), Q, Q, Q)
    with pytest.raises(RuntimeError, match=r"cuDNN (is not detected|not found)"):
        jax.eval_shape(cudnn(), Q, Q, Q)
    q = jnp.ones((1, 8, 1, 8), jnp.bfloat16)
    with _jax.cudnn_assumed(), pytest.raises(NotImplementedError, match="dot_product_attention"):
        jax.jit(cudnn())(q, q, q)


# -- what they cost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "forward", "backward"),
    [
        (pallas(causal=False), 4, 14),
        (pallas(causal=True), 4 * 65 / 128, 14 * 65 / 128),
        (cudnn(), 4, 10),
        (cudnn(is_causal=True), 4 * 65 / 128, 10 * 65 / 128),
    ],
)
def test_the_flops_are_those_of_the_products_over_the_pairs_that_are_not_masked(
    kernel: Callable[..., Any], forward: float, backward: float
) -> None:
    found = kernels(kernel, Q, Q, Q)
    pairs = BATCH * HEADS * QUERIES * QUERIES * HEAD
    counts = [flops(n.signature.description) / pairs for n in (found[0], found[-1]) if n.signature.description is not None]
    assert counts == pytest.approx([forward, backward])
    assert all(n.signature.multiplies for n in (found[0], found[-1]))


@pytest.mark.parametrize("kernel", [pallas(causal=True), cudnn(is_causal=True)])
def test_each_operand_is_read_once_and_no_scores_are_written(kernel: Callable[..., Any]) -> None:
    for node in kernels(kernel, Q, Q, Q):
        call, traffic = node.signature.call, node.costed.traffic
        assert traffic is not None
        assert traffic.launches == 1
        assert max(traffic.reads) == 1
        assert set(traffic.writes) <= {0, 1}
        assert max(np.prod(shape) for shape in (*call.operands, *call.results)) == BATCH * QUERIES * HEADS * HEAD
