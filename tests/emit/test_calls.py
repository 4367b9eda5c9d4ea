"""A user's own kernels, cut as their descriptions say: the sharded step is the step, and each device calls on its share alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import tdl
from shardplan.tdl.describe import forget
from shardplan.verify.verify import verify

KEYS = jax.random.split(jax.random.key(0), 8)


def scores(q: Any, k: Any) -> Any:
    return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 4.0)


@jax.custom_vjp
def flash(q: Any, k: Any, v: Any) -> Any:
    """Attention as a fused kernel would be."""
    return jnp.einsum("bqk,bkd->bqd", scores(q, k), v)


@jax.jit
def flash_forward(q: Any, k: Any, v: Any) -> Any:
    return flash(q, k, v), (q, k, v)


@jax.jit
def flash_backward(saved: Any, g: Any) -> Any:
    q, k, v = saved
    p = scores(q, k)
    dp = jnp.einsum("bqd,bkd->bqk", g, v)
    ds = p * (dp - jnp.sum(dp * p, -1, keepdims=True)) / 4.0
    dq, dk = jnp.einsum("bqk,bkd->bqd", ds, k), jnp.einsum("bqk,bqd->bkd", ds, q)
    return dq, dk, jnp.einsum("bqk,bqd->bkd", p, g)


flash.defvjp(flash_forward, flash_backward)
EXAMPLE = [jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)] * 4


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    before = set(tdl.described())
    yield
    for name in sorted(set(tdl.described()) - before):
        forget(name)


def register_flash() -> None:
    @shardplan.register(flash, example=EXAMPLE[:3])
    def describe(q: Any, k: Any, v: Any) -> Any:
        return lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, d])

    @shardplan.register(flash_forward, example=EXAMPLE[:3])
    def describe_forward(q: Any, k: Any, v: Any) -> Any:
        return (
            lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, d]),
            lambda b, i, c: q[b, i, c],
            lambda b, j, c: k[b, j, c],
            lambda b, j, d: v[b, j, d],
        )

    @shardplan.register(flash_backward, example=[tuple(EXAMPLE[:3]), EXAMPLE[3]])
    def describe_backward(q: Any, k: Any, v: Any, g: Any) -> Any:
        return (
            lambda b, i, c: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, :], g[b, i, :])[c],
            lambda b, j, c: tdl.Sum(lambda i: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, :], g[b, i, :])[j, c]),
            lambda b, j, c: tdl.Sum(lambda i: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, :], g[b, i, :])[j, c]),
        )


def attention_step(remat: bool = False) -> tuple[Any, tuple[Any, ...]]:
    def loss(w: Any, x: Any) -> Any:
        out = flash(*(jnp.einsum("bsd,de->bse", x, w[n]) for n in "qkv"))
        return jnp.mean((jnp.einsum("bsd,de->bse", out, w["o"]) - x) ** 2)

    def step(w: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(jax.checkpoint(loss) if remat else loss)(w, x)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value

    w = {n: jax.random.normal(KEYS[i], (16, 16)) for i, n in enumerate("qkvo")}
    return step, (w, jax.random.normal(KEYS[4], (8, 8, 16)))


def names(plan: Any) -> set[str]:
    return {op.primitive for op in plan.traced.program.ops if ":" in op.primitive}


def cut_loops(plan: Any, name: str) -> set[str]:
    """The loops that the plan cuts of the op of this name."""
    graph = plan.session.problem.graph
    (node,) = [n for n in graph.nodes if n.op.primitive == name]
    return {node.signature.description.loops[v].name for v in plan.session.decisions.uses[node.id].loops if v >= 0}


@pytest.mark.slow
def test_a_registered_function_is_one_op_forward_and_backward(eager: Any) -> None:
    register_flash()
    step, args = attention_step()
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(("node", "gpu"))})
    assert names(plan) == {"jit:flash_forward", "jit:flash_backward"}
    assert cut_loops(plan, "jit:flash_forward") == cut_loops(plan, "jit:flash_backward") == {"b"}
    found = verify(plan, step, args, backend="specs")
    assert found.passed, found


@pytest.mark.slow
def test_what_is_partial_after_a_call_is_summed(eager: Any) -> None:
    register_flash()
    step, args = attention_step()
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P("node", "gpu")})
    found = verify(plan, step, args, backend="specs")
    assert found.passed, found


def test_a_registered_function_that_is_not_differentiated_is_one_op(eager: Any) -> None:
    register_flash()
    args = tuple(jax.random.normal(KEYS[i], (8, 8, 16)) for i in range(3))

    def step(q: Any, k: Any, v: Any) -> Any:
        return flash(q * 2.0, k, v)

    plan = shardplan.plan(step, *args, cluster=eager, pins={"q": P("node", "gpu")})
    assert names(plan) == {"custom_vjp_call:flash"}
    assert verify(plan, step, args, backend="specs").passed


@pytest.mark.slow
def test_a_call_that_remat_has_cut_down_is_seen_through(eager: Any) -> None:
    register_flash()
    step, args = attention_step(remat=True)
    with pytest.warns(UserWarning, match="jit:flash_forward is seen through where its description does not fit"):
        plan = shardplan.plan(step, *args, cluster=eager)
    inside = {op.primitive for outer in plan.traced.program.ops for body in outer.bodies for op in body.ops}
    assert names(plan) == {"custom_vjp_call:flash"}  # which the forward function calls
    assert "jit:flash_backward" in inside
    assert verify(plan, step, args, backend="specs").passed


@pytest.mark.slow
def test_a_registered_function_in_a_loop_is_one_op_of_its_body(eager: Any) -> None:
    register_flash()

    def loss(w: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return h + flash(h @ w["q"], h @ w["k"], h @ w["v"]), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def step(w: Any, x: Any) -> Any:
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w, x))

    w = {n: jax.random.normal(KEYS[i], (3, 16, 16)) / 4 for i, n in enumerate("qkv")}
    args = (w, jax.random.normal(KEYS[4], (8, 8, 16)))
    plan = shardplan.plan(step, *args, cluster=eager)
    inside = {op.primitive for outer in plan.traced.program.ops for body in outer.bodies for op in body.ops}
    assert inside >= {"jit:flash_forward", "jit:flash_backward"}
    assert verify(plan, step, args, backend="specs").passed


def test_a_call_under_vmap_is_seen_through(eager: Any) -> None:
    register_flash()
    args = tuple(jax.random.normal(KEYS[i], (2, 4, 8, 16)) for i in range(3))
    with pytest.warns(UserWarning, match="has a result of rank 4"):
        plan = shardplan.plan(jax.vmap(flash), *args, cluster=eager)
    assert names(plan) == set()


# -- kernels ------------------------------------------------------------------------------------------------------------


def _smooth(x_ref: Any, y_ref: Any) -> None:
    y_ref[...] = jnp.tanh(x_ref[...]) * jnp.sum(x_ref[...], axis=-1, keepdims=True)


def smooth(x: Any) -> Any:
    """A kernel that goes through whole rows."""
    return pl.pallas_call(_smooth, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="smooth")(x)


def kernel_step(kernel: Any) -> tuple[Any, tuple[Any, ...]]:
    @jax.custom_vjp
    def apply(x: Any) -> Any:
        return kernel(x)

    apply.defvjp(lambda x: (kernel(x), x), lambda x, g: (kernel(g) + x,))

    def step(w: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(lambda w: jnp.sum(apply(x @ w) ** 2) * 1e-3)(w)
        return w - 1e-3 * g, value

    return step, (jax.random.normal(KEYS[0], (16, 8)) / 4, jax.random.normal(KEYS[1], (32, 16)) / 4)


def test_a_pallas_kernel_runs_on_each_devices_rows(eager: Any) -> None:
    @shardplan.register("pallas_call:smooth", run=smooth, example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)])
    def describe(x: Any) -> Any:
        return lambda i, j: tdl.Opaque()(x[i, :])[j]

    step, args = kernel_step(smooth)
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(("node", "gpu"))}, factors={})
    assert names(plan) == {"pallas_call:smooth"}
    found = verify(plan, step, args, backend="specs")
    assert found.passed, found
    # no operand of a kernel is gathered; the partitioner makes the gradient's last move a slice
    assert 0.9 * found.predicted_bytes < found.measured_bytes <= found.predicted_bytes


def test_a_kernel_with_a_halo_gets_its_neighbours_edges(eager: Any) -> None:
    def apart(x: Any) -> Any:
        """Each row less the one before it; zeros stand before the first."""
        return x[1:] - x[:-1]

    @jax.jit
    def differences(x: Any) -> Any:
        return apart(jnp.pad(x, ((1, 0), (0, 0))))

    @shardplan.register(differences, run=apart)
    def describe(x: Any) -> Any:
        return lambda i, j: x[i, j] - x[i - 1, j]

    def step(x: Any) -> Any:
        return differences(x * 2.0) + 1.0

    args = (jax.random.normal(KEYS[0], (16, 4)),)
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(("node", "gpu"))})
    assert names(plan) == {"jit:differences"}
    assert cut_loops(plan, "jit:differences") == {"i"}
    assert verify(plan, step, args, backend="specs").passed


def cholesky_by_ffi(x: Any) -> Any:
    """LAPACK's own routine, of which jaxlib registers the target."""
    results = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], "int32"))
    factor = jax.ffi.ffi_call("lapack_spotrf_ffi", results)
    return factor(x, uplo=np.uint8(ord("L")))[0]


def ffi_step() -> tuple[Any, tuple[Any, ...]]:
    jax.jit(jnp.linalg.cholesky).lower(jnp.eye(2))  # jaxlib loads LAPACK when it first lowers to it

    def step(w: Any, x: Any) -> Any:
        value, g = jax.value_and_grad(lambda w: jnp.mean((x @ w - jax.lax.stop_gradient(cholesky_by_ffi(x))) ** 2))(w)
        return w - 0.1 * g, value

    x = jax.random.normal(KEYS[2], (8, 4, 4))
    return step, (jnp.eye(4), x @ x.transpose(0, 2, 1) + 4 * jnp.eye(4))


def test_an_ffi_call_is_cut_along_its_batch(eager: Any) -> None:
    @shardplan.register("ffi_call:lapack_spotrf_ffi")
    def describe(x: Any) -> Any:
        return lambda b, i, j: tdl.Opaque()(x[b, :, :])[i, j], lambda b: tdl.Opaque()(x[b, :, :])

    step, args = ffi_step()
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(("node", "gpu"))})
    assert cut_loops(plan, "ffi_call:lapack_spotrf_ffi") == {"b"}
    found = verify(plan, step, args, backend="specs")
    assert found.passed, found


def test_a_primitive_that_jax_does_not_know_runs_on_each_devices_rows(eager: Any) -> None:
    def ranked(x: Any, *, scale: float) -> Any:
        return scale * x / jnp.sum(jnp.abs(x), axis=-1, keepdims=True)

    shares = Primitive("shares_of_row")
    shares.def_impl(ranked)
    shares.def_abstract_eval(lambda x, *, scale: x)
    mlir.register_lowering(shares, mlir.lower_fun(ranked, multiple_results=False))

    @tdl.rule("shares_of_row")
    def describe(call: tdl.Call, x: Any) -> Any:
        return lambda i, j: tdl.Opaque()(x[i, :])[j]

    def step(x: Any) -> Any:
        return shares.bind(x * 2.0, scale=3.0) + 1.0

    args = (jax.random.normal(KEYS[0], (16, 4)),)
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(("node", "gpu"))})
    assert cut_loops(plan, "shares_of_row") == {"i"}
    found = verify(plan, step, args, backend="specs")
    assert found.passed, found


# -- without a description ----------------------------------------------------------------------------------------------


def test_an_opaque_call_is_an_error_that_shows_the_lines_to_write(eager: Any) -> None:
    step, args = kernel_step(smooth)
    with pytest.raises(shardplan.UndescribedPrimitiveError) as caught:
        shardplan.plan(step, *args, cluster=eager)
    lines = str(caught.value).splitlines()
    assert "pallas_call:smooth" in lines[0]
    assert "test_calls.py" in lines[0]
    assert [line.strip() for line in lines[1:4]] == [
        "@shardplan.register('pallas_call:smooth', run=function_that_calls_it)",
        "def describe(x0):",
        "return lambda i0, i1: tdl.Opaque()(x0[i0, :])[i1]",
    ]


def test_a_kernel_without_a_name_is_an_error_that_asks_for_one(eager: Any) -> None:
    nameless = lambda x: pl.pallas_call(lambda a, b: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)  # noqa: E731
    with pytest.raises(shardplan.UndescribedPrimitiveError, match=r"has no name to describe it by: .* name=\), or allow it"):
        shardplan.plan(nameless, jnp.ones((8, 4)), cluster=eager)


def test_the_lines_of_the_error_work(eager: Any) -> None:
    step, args = ffi_step()
    with pytest.raises(shardplan.UndescribedPrimitiveError) as caught:
        shardplan.plan(step, *args, cluster=eager)
    text = "\n".join(line[4:] for line in str(caught.value).splitlines()[1:4])
    exec(text, {"shardplan": shardplan, "tdl": tdl})
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(("node", "gpu"))})
    assert cut_loops(plan, "ffi_call:lapack_spotrf_ffi") == {"i0"}


def test_an_opaque_call_may_run_whole(eager: Any) -> None:
    step, args = kernel_step(smooth)
    plan = shardplan.plan(step, *args, cluster=eager, replicate=("pallas_call",))
    assert verify(plan, step, args, backend="specs").passed


# -- reductions of pairs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [jnp.argmax, jnp.argmin])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_the_place_of_an_extreme_is_found_across_devices(place: Any, dtype: str, eager: Any) -> None:
    x = np.random.default_rng(0).integers(0, 6, (4, 16)).astype(np.float32)
    x[0, 2:] = x[0].max()
    if dtype in ("float32", "bfloat16"):
        x[1, [3, 9]], x[2, [1, 12]], x[3, 5], x[3, 8] = np.nan, np.inf, -np.inf, np.nan
    args = (jnp.asarray(x).astype(dtype),)

    def step(x: Any) -> Any:
        return place(x, axis=1)

    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P(None, ("node", "gpu"))})
    assert "k0" in cut_loops(plan, place.__name__)
    found = verify(plan, step, args, backend="specs")
    assert found.passed, found
    if dtype == "int32":
        assert found.predicted_bytes == pytest.approx(found.measured_bytes, rel=0.15)


def test_the_values_of_a_barrier_are_cut_each_in_its_own_way(eager: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y, v = jax.lax.optimization_barrier((jnp.tanh(x), w))
            return jnp.mean((y @ v) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    args = (jax.random.normal(KEYS[0], (16, 8)), jax.random.normal(KEYS[1], (32, 16)))
    plan = shardplan.plan(step, *args, cluster=eager, pins={"x": P("node"), "w": P(None, "gpu")})
    assert verify(plan, step, args, backend="specs").passed
