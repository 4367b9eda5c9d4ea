"""Kernels of fused attention: what may be cut, that each cut is right, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from shardplan import _jax
from shardplan.cost.compute import flops
from shardplan.errors import UndescribedPrimitiveError
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.nodes import Node
from shardplan.ir import GridBlock, KernelGrid, Partial, Replicated, Split
from shardplan.tdl import cuts, describe
from shardplan.tdl.cut_proof import verify
from shardplan.tdl.description import Call
from shardplan.tdl.localize import evaluate
from shardplan.tdl.proof import CASES, Case, Drawn, cudnn_reference, interpreted, prove
from shardplan.tdl.proof.case import traced
from shardplan.tdl.strategies import Strategy
from tests.attention import HAS_TOKAMAX, for_gpus, needs_tokamax, of_tokamax
from tests.attention import of_jax as pallas

PALLAS = ("pallas_call:mha_forward", "pallas_call:mha_preprocess_backward", "pallas_call:mha_backward")
FORWARD, BACKWARD = "pallas_call:pallas_flash_attention_fwd_res", "pallas_call:pallas_flash_attention_vjp"
TOKAMAX = ("pallas_call:pallas_flash_attention", FORWARD, BACKWARD)
CUDNN = ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper")
BATCH, QUERIES, HEADS, HEAD = 4, 64, 8, 16


def shaped(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def kernels(attend: Callable[..., Any], *operands: Any) -> list[Node]:
    """The ops of a gradient that are attention kernels, in order."""

    def loss(*operands: Any) -> Any:
        return attend(*operands).astype(jnp.float32).sum()

    floats = tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    with for_gpus():
        program = trace(jax.grad(loss, floats), *operands).program
    return [n for n in flatten(program).nodes if n.op.primitive in (*PALLAS, *TOKAMAX, *CUDNN)]


def cuts_of(node: Node, ways: int = 2) -> dict[str, Strategy]:
    """By the name of the loop."""
    description = node.signature.description
    assert description is not None
    return {description.loops[s.loop].name: s for s in cuts(description, ways)}


def dims(strategy: Strategy) -> tuple[list[Any], list[Any]]:
    """The dims of operands and results that are split; "sum" for a partial result, None for a whole tensor."""
    words = {Split: lambda p: p.dim, Partial: lambda p: p.reducer, Replicated: lambda p: None}
    return tuple([words[type(p)](p) for p in own] for own in (strategy.operands, strategy.results))  # type: ignore[return-value]


def multiplied(node: Node) -> float:
    """The flops of the products in a kernel."""
    assert node.signature.description is not None
    return flops(node.signature.description)


def cudnn(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, *rest: jax.nn.dot_product_attention(q, k, v, *rest, implementation="cudnn", **options)


Q = shaped(BATCH, QUERIES, HEADS, HEAD)
LONG = shaped(BATCH, 4 * QUERIES, HEADS, HEAD)
"""Queries in four of tokamax's blocks."""


def heads(x: jax.ShapeDtypeStruct, count: int) -> jax.ShapeDtypeStruct:
    """The same with another number of heads."""
    return shaped(*x.shape[:2], count, x.shape[3])


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


def test_a_pallas_kernel_under_vmap_is_cut_along_what_vmap_adds() -> None:
    operands = [shaped(2, BATCH, QUERIES, HEADS, HEAD)] * 3
    forward = kernels(jax.vmap(pallas(causal=True)), *operands)[0]
    assert [dims(s) for s in cuts_of(forward).values()] == [([d] * 3, [d, d if d < 2 else 2]) for d in (0, 1, 3)]
    assert multiplied(forward) == 2 * multiplied(kernels(pallas(causal=True), Q, Q, Q)[0])


@needs_tokamax
@pytest.mark.parametrize(("key_heads", "keys"), [(8, 2), (4, 2), (1, None)])
def test_tokamaxs_kernel_is_cut_along_batch_and_heads_and_without_a_causal_mask_along_queries(
    key_heads: int, keys: int | None
) -> None:
    key = heads(LONG, key_heads)
    forward, backward = kernels(of_tokamax(), LONG, key, key)
    by_head = [2, keys, keys]
    assert [dims(s) for s in cuts_of(forward).values()] == [
        ([0, 0, 0], [0, 0, 0]),
        ([1, None, None], [1, 2, 2]),
        (by_head, [2, 1, 1]),
    ]
    assert [dims(s) for s in cuts_of(backward).values()] == [([0] * 7, [0] * 3), ([*by_head, 1, 1, 1, 2], [2] * 3)]
    causal = kernels(of_tokamax(is_causal=True), LONG, key, key)[0]
    assert [dims(s) for s in cuts_of(causal).values()] == [([0, 0, 0], [0, 0, 0]), (by_head, [2, 1, 1])]


@needs_tokamax
def test_heads_that_share_keys_in_tokamaxs_kernel_stay_together() -> None:
    key = heads(LONG, 2)
    counts = [[len(cuts_of(node, ways)) for ways in (2, 4)] for node in kernels(of_tokamax(), LONG, key, key)]
    assert counts == [[3, 2], [2, 1]]


@needs_tokamax
@pytest.mark.parametrize(
    ("options", "rest", "extra"),
    [
        ({}, [shaped(1, HEADS, 256, 256)], [(None, 1, 0)]),
        ({}, [shaped(BATCH, 1, 256, 256)], [(0, 2, None)]),
        ({"mask": np.ones((BATCH, 1, 256, 256), bool)}, [], [(0, 2, None)]),
        ({"key_value_seq_lengths": np.ones(BATCH, np.int32)}, [], [(0, None, None)]),
        ({"is_causal": True, "key_value_seq_lengths": np.ones(BATCH, np.int32)}, [], [(0, 2, None)]),
        ({"local_window_size": (5, 3)}, [], [(None, 1, None)]),
    ],
)
def test_what_tokamaxs_kernel_reads_beside_is_cut_as_its_blocks_say(
    options: dict[str, Any], rest: list[Any], extra: list[tuple[int | None, ...]]
) -> None:
    forward = kernels(of_tokamax(**options), LONG, LONG, LONG, *rest)[0]
    found = [reads[3:] for reads, _ in map(dims, cuts_of(forward).values())]
    assert found == [list(own) for own in zip(*extra, strict=True)]


@needs_tokamax
def test_a_last_block_that_is_not_full_keeps_queries_together_and_heads_of_any_size_are_cut() -> None:
    x = shaped(BATCH, 100, HEADS, 24)
    forward, backward = kernels(of_tokamax(), x, x, x)
    assert [dims(s)[1] for s in cuts_of(forward).values()] == [[0, 0, 0], [2, 1, 1]]
    assert [dims(s)[1] for s in cuts_of(backward).values()] == [[0, 0, 0], [2, 2, 2]]


@needs_tokamax
def test_quantized_operands_of_tokamaxs_kernel_are_not_described() -> None:
    call = kernels(of_tokamax(), LONG, LONG, LONG)[0].signature.call
    grid = call.params["kernel_grid"]
    names = tuple(f"{name}.qvalue" if name == "args[3]" else name for name in grid.names)
    assert describe(call) is not None
    assert describe(replace(call, params={**call.params, "kernel_grid": replace(grid, names=names)})) is None


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


def attention_of(name: str, operands: tuple[int, ...]) -> Case:
    """tokamax's kernel of this name, on operands [batch, queries, heads, keys' heads]."""
    batch, queries, own, shared = operands
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((batch, queries, n, 16)).astype(np.float32) for n in (own, shared, shared))

    def loss(*operands: Any) -> Any:
        return jnp.sum(of_tokamax()(*operands) ** 2)

    with for_gpus(), _jax.run_on_cpu(interpreted.functions()):
        return traced(name, jax.grad(loss, (0, 1, 2)), q, k, v)


@needs_tokamax
@pytest.mark.parametrize("name", [FORWARD, pytest.param(BACKWARD, marks=pytest.mark.slow)])
def test_every_cut_of_tokamaxs_kernel_gives_what_the_whole_gives(name: str) -> None:
    case = attention_of(name, (2, 128, 4, 2))
    with _jax.run_on_cpu(interpreted.functions()):
        assert all(np.isfinite(x).all() for x in evaluate(case.call, case.operands))
        found = verify(case.call, case.operands, ways=(2,), nested=0)
    assert (found.cuts, found.faults) == (3 if name == FORWARD else 2, ())


def fixed(grid: KernelGrid, *dims: int) -> KernelGrid:
    """The grid, with only these dims along which programs stay together."""
    return replace(grid, fixed=dims)


def apart(grid: KernelGrid) -> KernelGrid:
    """The grid, as if each program had a block of its own."""
    return replace(grid, blocks=tuple(tuple(replace(b, per=1) for b in own) for own in grid.blocks))


def of_every_program(grid: KernelGrid) -> KernelGrid:
    """The grid, as if each program read all heads of keys and values."""
    return replace(grid, blocks=tuple(tuple(GridBlock(-1, 2) if b.per > 1 else b for b in own) for own in grid.blocks))


@needs_tokamax
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"),
    [(BACKWARD, fixed), (FORWARD, of_every_program)],
    ids=["queries and keys cut backward", "each program reads all keys"],
)
def test_a_wrong_reading_of_tokamaxs_grid_fails_the_proof(name: str, wrong: Callable[..., Any]) -> None:
    case = attention_of(name, (2, 128, 4, 2))
    call = replace(case.call, params={**case.call.params, "kernel_grid": wrong(case.call.params["kernel_grid"])})
    with _jax.run_on_cpu(interpreted.functions()):
        assert refused(call, case.operands)


def refused(call: Call, operands: Any) -> bool:
    """Whether some cut of the call gives something else than the whole, or cannot be run."""
    try:
        return bool(verify(call, operands, ways=(2,), nested=0).faults)
    except (TypeError, ValueError, AssertionError, IndexError):
        return True


@needs_tokamax
def test_heads_that_share_keys_could_not_be_cut_if_each_program_had_keys_of_its_own() -> None:
    key = heads(LONG, 4)
    call = kernels(of_tokamax(), LONG, key, key)[0].signature.call
    wrong = replace(call, params={**call.params, "kernel_grid": apart(call.params["kernel_grid"])})
    description = describe(wrong)
    assert description is not None
    assert len(cuts(description, 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PALLAS, *(pytest.param(name, marks=needs_tokamax) for name in TOKAMAX), *CUDNN])
def test_every_cut_of_many_drawn_cases(name: str) -> None:
    found = [prove(name, Drawn(seed)) for seed in range(60 if name in CUDNN else 6)]
    assert [str(f) for one in found for f in one.faults] == []


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


def test_tokamaxs_kernels_have_cases_where_it_is_installed_and_are_left_out_elsewhere() -> None:
    assert set(TOKAMAX) & set(CASES) == (set(TOKAMAX) if HAS_TOKAMAX else set())


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
    counts = [multiplied(n) / pairs for n in (found[0], found[-1])]
    assert counts == pytest.approx([forward, backward])
    assert all(n.signature.multiplies for n in (found[0], found[-1]))


@needs_tokamax
@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, 1),
        ({"is_causal": True}, 257 / 512),
        ({"key_value_seq_lengths": np.ones(BATCH, np.int32)}, 1),
        ({"local_window_size": (5, 3)}, 1),
    ],
)
def test_tokamaxs_kernel_multiplies_all_pairs_but_those_that_its_programs_know_to_be_masked(
    options: dict[str, Any], part: float
) -> None:
    forward, backward = kernels(of_tokamax(**options), LONG, heads(LONG, 4), heads(LONG, 4))
    pairs = BATCH * HEADS * 256 * 256 * HEAD
    assert multiplied(forward) == pytest.approx(4 * pairs * part)
    assert multiplied(backward) == pytest.approx(14 * pairs * part)
    assert forward.signature.multiplies
    assert backward.signature.multiplies


@pytest.mark.parametrize("kernel", [pallas(causal=True), cudnn(is_causal=True)])
def test_each_operand_is_read_once_and_no_scores_are_written(kernel: Callable[..., Any]) -> None:
    for node in kernels(kernel, Q, Q, Q):
        call, traffic = node.signature.call, node.costed.traffic
        assert traffic is not None
        assert traffic.launches == 1
        assert max(traffic.reads) == 1
        assert set(traffic.writes) <= {0, 1}
        assert max(np.prod(shape) for shape in (*call.operands, *call.results)) == BATCH * QUERIES * HEADS * HEAD
