"""A description is for one function: another of the same name runs as it is, and never as the one that was registered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import tdl
from shardplan.errors import DescriptionError
from shardplan.tdl.describe import forget

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)), jnp.float32)
SMALL = [jax.ShapeDtypeStruct((4, 6), jnp.float32)]


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = set(tdl.described())
    yield
    for name in sorted(set(tdl.described()) - before):
        forget(name)


def rows(x: Any) -> Any:
    return lambda i, j: tdl.Opaque()(x[i, :])[j]


def named(step: Callable[..., Any], eager: Any) -> set[str]:
    """The registered calls of the step's plan, which runs as the step does."""
    plan = shardplan.plan(step, X, cluster=eager, pins={"x": P(("node", "gpu"))})
    np.testing.assert_allclose(plan.jit(step, backend="specs")(*plan.put((X,))), jax.jit(step)(X), rtol=1e-5, atol=1e-5)
    return {op.primitive for op in plan.traced.program.ops if ":" in op.primitive}


def jitted(slope: Any) -> Any:
    def silu(x: Any) -> Any:
        return x * jax.nn.sigmoid(slope * x)

    return jax.jit(silu)


def custom(slope: Any) -> Any:
    @jax.custom_vjp
    def attention(x: Any) -> Any:
        return jax.nn.softmax(slope * x, -1)

    attention.defvjp(lambda x: (attention(x), x), lambda x, g: (g,))
    return attention


@pytest.mark.parametrize(
    ("make", "slopes"), [(jitted, (1.7, 3.0)), (custom, (1.7, 3.0)), (jitted, (jnp.arange(6.0), jnp.ones(6)))]
)
def test_another_function_of_a_registered_name_runs_as_itself(make: Any, slopes: Any, eager: Any) -> None:
    one, two = (make(s) for s in slopes)
    shardplan.register(one, example=SMALL)(rows)
    with pytest.warns(UserWarning, match="is seen through where it is not the registered function"):
        assert named(lambda x: two(x[:, :6] * 2.0), eager) == set()
    assert len(named(lambda x: one(x[:, :6] * 2.0), eager)) == 1


def test_jaxs_own_function_of_a_registered_name_runs_as_itself(eager: Any) -> None:
    shardplan.register(jitted(1.7), example=SMALL)(rows)
    with pytest.warns(UserWarning, match="jit:silu is seen through"):
        assert named(lambda x: jax.nn.silu(x * 2.0), eager) == set()


def test_a_call_with_other_static_arguments_runs_as_itself(eager: Any) -> None:
    @partial(jax.jit, static_argnames="axis")
    def running(x: Any, axis: int = 1) -> Any:
        return jnp.cumsum(x, axis)

    shardplan.register(running, example=SMALL)(rows)
    assert named(lambda x: running(x * 2.0), eager) == {"jit:running"}
    with pytest.warns(UserWarning, match="with other static arguments"):
        assert named(lambda x: running(x * 2.0, axis=0), eager) == set()


def test_a_second_function_of_one_name_takes_its_place_and_says_so(eager: Any) -> None:
    one, two = custom(1.0), custom(3.0)
    shardplan.register(one, example=SMALL)(rows)
    with pytest.warns(UserWarning, match="custom_vjp_call:attention was registered for another function"):
        shardplan.register(two, example=SMALL)(rows)
    assert named(lambda x: two(x * 2.0), eager) == {"custom_vjp_call:attention"}
    with pytest.warns(UserWarning, match="is seen through"):
        assert named(lambda x: one(x * 2.0), eager) == set()


def test_a_refused_description_leaves_the_one_before_it(eager: Any) -> None:
    one, two = jitted(1.0), jitted(3.0)
    shardplan.register(one, example=SMALL)(rows)
    with pytest.raises(DescriptionError):
        shardplan.register(two, example=SMALL)(lambda x: lambda i, j: x[i, 0])
    assert named(lambda x: one(x * 2.0), eager) == {"jit:silu"}


def kernel(scale: float) -> Callable[[Any], Any]:
    def body(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = scale * x_ref[...] / jnp.sum(jnp.abs(x_ref[...]), axis=-1, keepdims=True)

    return lambda x: pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="shares")(x)


def test_another_kernel_of_a_registered_name_is_refused(eager: Any) -> None:
    shardplan.register("pallas_call:shares", run=kernel(1.0), example=SMALL)(rows)
    assert named(lambda x: kernel(1.0)(x) * 2.0, eager) == {"pallas_call:shares"}
    with pytest.raises(DescriptionError, match=r"two kernels share the name pallas_call:shares, and run= calls the other one"):
        shardplan.plan(lambda x: kernel(3.0)(x) * 2.0, X, cluster=eager)


def test_a_function_is_not_registered_by_its_name() -> None:
    with pytest.raises(DescriptionError, match="register the function itself, not its name"):
        shardplan.register("jit:silu", run=jax.nn.silu, example=SMALL)
