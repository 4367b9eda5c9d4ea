"""Partial sums that wait: terms of a gradient are added up before they are reduced, once."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from shardplan.frontend.trace import trace
from shardplan.graph.flattening import flatten
from shardplan.graph.partials import deferrable
from shardplan.search.coarsening.coarsen import coarsen
from shardplan.verify.mutate import DroppingEmitter
from shardplan.verify.verify import verify

WIDTH, ROWS, PARTS = 64, 8192, 4
MOST = 2 * WIDTH * WIDTH * 4 + PARTS * 4
"""Bytes of both weights and of the losses: what one reduction of every gradient moves at most, with all that may go along."""


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)


def _accumulated(kind: str) -> tuple[Any, tuple[Any, Any]]:
    """A step that adds gradients up over parts of its batch, by a scan or written out."""

    def step(params: Any, batch: Any) -> tuple[Any, jax.Array]:
        parts = tuple(a.reshape(PARTS, -1, WIDTH) for a in batch)
        if kind == "scan":

            def add(total: Any, part: Any) -> tuple[Any, jax.Array]:
                loss, gradient = jax.value_and_grad(_loss)(params, *part)
                return jax.tree.map(jnp.add, total, gradient), loss

            total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
            loss = losses.mean()
        else:
            found = [jax.value_and_grad(_loss)(params, parts[0][i], parts[1][i]) for i in range(PARTS)]
            loss = jnp.stack([value for value, _ in found]).mean()
            total = jax.tree.map(lambda *terms: sum(terms[1:], terms[0]), *(gradient for _, gradient in found))
        return jax.tree.map(lambda p, g: p - 0.1 * g / PARTS, params, total), loss

    rng = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) / 16, "float32")

    return step, ({"up": draw(WIDTH, WIDTH), "down": draw(WIDTH, WIDTH)}, (draw(ROWS, WIDTH), draw(ROWS, WIDTH)))


@pytest.mark.parametrize("kind", ["scan", "written out"])
def test_accumulated_gradients_are_reduced_once(devices: list[Any], kind: str) -> None:
    step, args = _accumulated(kind)
    plan = shardplan.plan(step, *args, cluster=_slow_devices(), time_model="sum")
    sums = [c for c in plan.collectives if c.kind in ("all-reduce", "reduce-scatter") and c.bytes > 1024]
    assert sums
    assert sum(c.bytes * c.times for c in sums) <= MOST
    found = verify(plan, step, args, backend="specs")
    assert (found.equal, found.unequal) == (True, ())
    assert found.measured_bytes == pytest.approx(found.predicted_bytes, rel=0.05)


def _slow_devices(shape: str = "8") -> shardplan.Cluster:
    """Devices that need long for little, so that a small step is worth spreading."""
    cluster = shardplan.Cluster.load(shape)
    # without tiles: on a device of 132 processors, a part of a step this small costs as much as the whole
    device = replace(cluster.device, memory_bytes_per_s=2e10, flops_per_s={"float32": 1e11}, compute_units=None)
    return replace(cluster, device=device)


def _deferred(step: Any, *args: Any) -> set[tuple[int, ...]]:
    """Shapes of the values that may stay partial."""
    graph = flatten(trace(step, *args).program)
    return {graph.tensors[t].shape for t in deferrable(graph, coarsen(graph).free).late}


def _like(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def test_a_carry_that_starts_from_something_is_whole() -> None:
    def step(start: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda s, xy: (s + xy[0].T @ xy[1], None), start, (x, y))[0] * 2

    x, y = _like(3, 16, 8), _like(3, 16, 4)
    assert _deferred(step, _like(8, 4), x, y) == set()
    assert (8, 4) in _deferred(lambda x, y: step(jnp.zeros((8, 4)), x, y), x, y)


def _adapted(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step that trains two factors of low rank of what it adds to a weight."""

    def loss(factors: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ (params["weight"] + factors[0] @ factors[1])) ** 2)

    value, gradients = jax.value_and_grad(loss)(params["factors"])
    return {**params, "factors": jax.tree.map(lambda p, g: p - 0.1 * g, params["factors"], gradients)}, value


@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_the_gradients_of_a_weights_factors_are_reduced_and_its_own_is_not(devices: list[Any], backend: Any) -> None:
    rng = np.random.default_rng(0)
    shapes = (256, 1024), (256, 4), (4, 1024), (4096, 256)
    weight, a, b, x = (jnp.asarray(rng.standard_normal(shape) / 16, "float32") for shape in shapes)
    args = {"weight": weight, "factors": (a, b)}, x
    plan = shardplan.plan(_adapted, *args, cluster=_slow_devices("2x4"), donate_argnums=0)
    factors_bytes = (a.size + b.size) * 4
    assert 0 < plan.communication_bytes <= 2 * factors_bytes + 64
    found = verify(plan, _adapted, args, backend=backend)
    assert (found.equal, found.unequal) == (True, ())


def test_all_the_factors_of_a_weight_wait_for_their_gradients() -> None:
    def step(factors: Any, w: jax.Array, x: jax.Array) -> Any:
        return jax.grad(lambda f: jnp.sum(jnp.tanh(x @ (w + f[0] @ f[1] @ f[2]))))(factors)

    shapes = (WIDTH, 4), (4, 4), (4, WIDTH)
    factors = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    args = factors, jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32"), jax.ShapeDtypeStruct((ROWS, WIDTH), "float32")
    assert _deferred(step, *args) == {(WIDTH, WIDTH), (WIDTH, 4)}


def test_a_sum_with_a_reader_that_needs_it_whole_is_not_late() -> None:
    def step(w: jax.Array, a: jax.Array, x: jax.Array) -> Any:
        gradient = x.T @ x
        return w - gradient, gradient @ a

    def alone(a: jax.Array, x: jax.Array) -> jax.Array:
        return (x.T @ x) @ a

    w, a, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((WIDTH, WIDTH), (WIDTH, 4), (ROWS, WIDTH)))
    assert _deferred(alone, a, x) == {(WIDTH, WIDTH), (WIDTH, 4)}
    assert _deferred(step, w, a, x) == set()
    b = jax.ShapeDtypeStruct((WIDTH, 3 * WIDTH // 4), "float32")
    assert _deferred(lambda b, x: (lambda g: (g @ b, b.T @ g))(x.T @ x), b, x) == set(), "together, its readers make more"
    assert _deferred(alone, jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), "float32"), x) == set(), "nothing is made less"


def test_what_is_not_linear_ends_a_partial_sum() -> None:
    def step(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.cos(x @ v) + jnp.cos(x @ w))

    assert _deferred(step, _like(4, 8), _like(8, 6), _like(8, 6)) == set()
    assert _deferred(lambda x, v, w: jnp.sin(x @ v - 2 * (x @ w)), _like(4, 8), _like(8, 6), _like(8, 6)) == {(4, 6)}


def test_a_partial_sum_is_never_narrowed() -> None:
    def step(x: jax.Array, v: jax.Array, w: jax.Array, wide: str) -> jax.Array:
        return jnp.sin((x @ v).astype(wide) + (x @ w).astype(wide))

    x, v = _like(4, 8), _like(8, 6)
    assert _deferred(lambda x, v, w: step(x, v, w, "bfloat16"), x, v, v) == set()
    narrow = [jax.ShapeDtypeStruct(a.shape, "bfloat16") for a in (x, v, v)]
    assert _deferred(lambda x, v, w: step(x, v, w, "float32"), *narrow) == {(4, 6)}


def test_terms_side_by_side_are_reduced_as_they_are() -> None:
    def step(x: jax.Array, v: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(jnp.pad(x @ v, ((0, 0), (0, 6))) + jnp.pad(x @ w, ((0, 0), (6, 0))))

    assert _deferred(step, _like(4, 8), _like(8, 6), _like(8, 6)) == set()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["scan", "written out"])
def test_leaving_out_a_late_sum_is_noticed(devices: list[Any], kind: str) -> None:
    step, args = _accumulated(kind)
    plan = shardplan.plan(step, *args, cluster=_slow_devices(), time_model="sum")
    emitter = DroppingEmitter(plan.planned, plan.mesh(), dropped=-1)
    jax.eval_shape(emitter, *jax.tree.leaves(args))
    late = [n for n, what in enumerate(emitter.exchanges) if "terms" in what]
    assert len(late) == 2
    assert not any(verify(plan, step, args, backend="specs", drop=n).equal for n in late)


# -- everything that terms may meet on their way ---------------------------------------------------------------------------------


def _summed(x: jax.Array, y: jax.Array) -> jax.Array:
    return x[1].T @ y[1] + x[2].T @ y[2]


def _running_sum(x: jax.Array, y: jax.Array) -> jax.Array:
    def body(total: jax.Array, xy: Any) -> tuple[jax.Array, jax.Array]:
        total = total + xy[0].T @ xy[1]
        return total, total

    return jax.lax.scan(body, jnp.zeros((WIDTH, WIDTH)), (x, y))[1]


def _carry_through_a_branch(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    def body(total: jax.Array, xy: Any) -> tuple[jax.Array, jax.Array]:
        total = total + xy[0].T @ xy[1]
        other = jax.lax.cond(xy[0][0, 0] > 9, lambda s, u: s, lambda s, u: jnp.sin(u), total, xy[1][:WIDTH])
        return total, other.sum()

    total, sums = jax.lax.scan(body, jnp.zeros((WIDTH, WIDTH)), (x, y))
    return total * 2, sums


def _branch_of_a_carry(x: jax.Array, y: jax.Array) -> jax.Array:
    def body(total: jax.Array, xy: Any) -> tuple[jax.Array, None]:
        total = total + xy[0].T @ xy[1]
        return jax.lax.cond(xy[0][0, 0] > 0, lambda s: s, lambda s: s * 2, total), None

    return jax.lax.scan(body, jnp.zeros((WIDTH, WIDTH)), (x, y))[0] * 2


def _read_beside_a_table(x: jax.Array, y: jax.Array) -> jax.Array:
    rows = x.shape[1]
    table = jnp.tile(jnp.arange(float(rows))[:, None], (1, WIDTH)) / rows
    return jnp.sin(x[0].T @ table + _summed(x, y))


def _scattered_into_a_base(x: jax.Array, y: jax.Array) -> jax.Array:
    at = jnp.argmax(x[3], -1)
    base = jnp.ones((WIDTH, WIDTH)) + jnp.arange(float(WIDTH))[:, None]
    return jnp.sin(base.at[at].add(x[0]) + _summed(x, y))


def _masked(x: jax.Array, y: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((WIDTH, WIDTH)))
    return jnp.sin((x[0].T @ y[0]) * mask + _summed(x, y))


def _masked_vector(x: jax.Array, y: jax.Array) -> jax.Array:
    mask = jnp.where(jnp.arange(WIDTH) > 3, 1.0, 0.0)
    return jnp.sin((x[0].T @ y[0, :, 0]) * mask + (x[1].T @ y[1, :, 0]) * mask + x[2].T @ y[2, :, 0])


def _returned_and_scaled(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    first = x[0].T @ y[0]
    return first, jnp.sin(first * 0.5 + _summed(x, y))


def _in_a_remat_of_a_remat(x: jax.Array, y: jax.Array) -> jax.Array:
    inner = jax.checkpoint(lambda x, y: _summed(x, y))
    return jnp.sin(jax.checkpoint(lambda x, y: inner(x, y) + x[0].T @ y[0])(x, y))


def _turned(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sin((x[0].T @ y[0]).T + _summed(x, y).reshape(WIDTH // 2, 2, WIDTH).reshape(WIDTH, WIDTH))


MEETINGS = [
    _running_sum, _carry_through_a_branch, _branch_of_a_carry, _read_beside_a_table, _scattered_into_a_base, _masked,
    _masked_vector, _returned_and_scaled, _in_a_remat_of_a_remat, _turned,
]  # fmt: skip


@pytest.mark.parametrize("cluster", ["2x4", *(pytest.param(shape, marks=pytest.mark.slow) for shape in ("8", "2x2x2"))])
@pytest.mark.parametrize("step", MEETINGS, ids=lambda f: f.__name__.strip("_"))
def test_terms_are_added_up_to_what_they_are_terms_of(devices: list[Any], step: Any, cluster: str) -> None:
    rng = np.random.default_rng(0)
    args = tuple(jnp.asarray(rng.standard_normal((4, ROWS // 2, WIDTH)) / 16, "float32") for _ in range(2))
    plan = shardplan.plan(step, *args, cluster=_slow_devices(cluster))
    found = verify(plan, step, args, backend="specs")
    assert (found.equal, found.unequal) == (True, ())
