"""A user's own op is cut as its author says, and an author who errs is told so at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan import tdl
from shardplan.errors import DescriptionError
from shardplan.ir import Split
from shardplan.tdl.describe import forget
from shardplan.tdl.register import register


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    """As a fused kernel would be: opaque from outside."""
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


attention.defvjp(lambda q, k, v: (attention(q, k, v), (q, k, v)), lambda saved, g: (g, g, g))
EXAMPLE = [jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)] * 3
NAME = "custom_vjp_call:attention"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in (NAME, "pallas_call:double"):
        forget(name)


def test_flash_attention_is_cut_along_batch_and_queries() -> None:
    @register(attention, example=EXAMPLE)
    def describe(q: Any, k: Any, v: Any) -> Any:
        return lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, d])

    (eqn,) = jax.make_jaxpr(attention)(*(jnp.zeros(x.shape) for x in EXAMPLE)).eqns
    name = tdl.named_call(eqn.primitive.name, eqn.params)
    assert name == NAME
    description = tdl.describe(tdl.Call(name, ((4, 6, 8),) * 3, ((4, 6, 8),), {}))
    assert description is not None
    assert {description.loops[s.loop].name: s.operands[0] for s in tdl.cuts(description, 2)} == {
        "b": Split(0), "i": Split(1), "d": tdl.cuts(description, 2)[2].operands[0],
    }  # fmt: skip


def test_a_call_without_description_is_seen_through() -> None:
    (eqn,) = jax.make_jaxpr(attention)(*(jnp.zeros(x.shape) for x in EXAMPLE)).eqns
    assert tdl.named_call(eqn.primitive.name, eqn.params) is None


def test_a_kernel_is_described_by_its_name() -> None:
    @register("pallas_call:double", example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)], run=lambda x: 2 * x)
    def describe(x: Any) -> Any:
        return lambda i, j: 2.0 * x[i, j]

    assert tdl.named_call("pallas_call", {"name": "double"}) == "pallas_call:double"


def test_a_description_that_does_not_hold_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"does not hold on the example: .*loop 1 2 ways"):

        @register(attention, example=EXAMPLE)
        def describe(q: Any, k: Any, v: Any) -> Any:
            return lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, i, :], v[b, i, d])

    assert NAME not in tdl.described()


def test_a_description_of_another_shape_is_refused() -> None:
    with pytest.raises(DescriptionError, match="has a result of rank 3"):

        @register(attention, example=EXAMPLE)
        def describe(q: Any, k: Any, v: Any) -> Any:
            return lambda b, i: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, :])


def test_an_index_outside_its_operand_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"operand 0 has 6 elements along dim 1, its index runs from 1 to 6"):

        @register(attention, example=EXAMPLE)
        def describe(q: Any, k: Any, v: Any) -> Any:
            return lambda b, i, d: tdl.Opaque()(q[b, i + 1, :], k[b, :, :], v[b, :, d])


def test_a_thing_that_is_no_op_is_refused() -> None:
    with pytest.raises(DescriptionError, match="registered for a primitive, a custom_vjp or jit function, or a name"):
        register(3)
