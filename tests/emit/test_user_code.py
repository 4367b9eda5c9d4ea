"""What users write inside their steps, under the explicit backend: control flow, random keys, callbacks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.schedule import Move, While, instructions_of
from tests.emit.test_explicit import check
from tests.machines import machine

X = jax.random.normal(jax.random.key(0), (64, 32))
W = jax.random.normal(jax.random.key(1), (32, 32)) / 6
WS = jax.random.normal(jax.random.key(2), (4, 32, 32)) / 6


def drop(key: Any, x: Any) -> Any:
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape), x / 0.7, 0.0)


# -- control flow ------------------------------------------------------------------------------------------------------


def test_an_unrolled_scan_sends_as_often_as_planned() -> None:
    def step(ws: Any, x: Any) -> Any:
        def loss(ws: Any) -> Any:
            h, ys = lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(0)), x, ws, reverse=True, unroll=3)
            return jnp.mean(h**2) + ys.mean()

        return ws - 0.1 * jax.grad(loss)(ws)

    plan = check(step, (WS, X), "2x4:slow", time_model="sum")
    assert any(s.times == 4 for s in plan.sends)


def test_a_while_loop_whose_test_reads_a_cut_array_stops_everywhere_at_once() -> None:
    def step(w: Any, x: Any) -> Any:
        return lax.while_loop(lambda s: (s[0] < 7) & (jnp.max(s[1]) < 9.0), lambda s: (s[0] + 1, s[1] @ w * 1.4), (0, x))

    plan = check(step, (W, X), "2x4:slow")
    (test,) = [i.test for i in plan.schedule.body.instructions if isinstance(i, While)]
    assert [s.kind for s in plan.sends] == ["all-reduce"], "the test alone reads what lies on other devices"
    assert any(type(i).__name__ == "Move" for i in instructions_of(test.instructions))
    assert 1 < int(step(W, X)[0]) < 7, "the array decides when the loop ends"


def test_a_loop_for_each_row_ends_with_the_last_row() -> None:
    def step(w: Any, x: Any, n: Any) -> Any:
        return jax.vmap(lambda x, n: lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x)))(x, n)

    check(step, (W, X, jnp.arange(64) % 5), "2x4:slow")


def test_values_without_elements_are_not_moved() -> None:
    def step(w: Any, x: Any) -> Any:
        return lax.associative_scan(lambda a, b: a * 0.5 + b, (x @ w)[:8], axis=0)

    plan = check(step, (W, X), "2x4:slow")
    assert all(s.nbytes for s in plan.sends)


def test_functions_inside_ops_are_told_apart() -> None:
    """Equal ops run once: two callbacks, or two reductions by functions of the user, are not equal."""

    def step(w: Any, x: Any) -> Any:
        y = x @ w
        like = jax.ShapeDtypeStruct(y.shape, y.dtype)
        doubled, tripled = (jax.pure_callback(lambda a, n=n: np.asarray(a) * n, like, y) for n in (2, 3))
        folded = [lax.reduce(y, 0.0, f, (1,)) for f in (lambda a, b: a + b * 2.0, lambda a, b: a * 0.5 + b)]
        return doubled, tripled, folded

    check(step, (W, X), "2x4:slow")


# -- random keys -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_are_split_folded_and_mapped_as_on_one_device(impl: str) -> None:
    """XLA's own generator draws the bits of a batch of keys from the first one: such a batch is never cut."""

    def step(w: Any, x: Any, key: Any) -> Any:
        keys = jax.random.split(key, 64)
        noise = jax.vmap(lambda k, n: drop(jax.random.fold_in(k, n), jnp.ones(32)))(keys, jnp.arange(64))
        return drop(key, jnp.tanh(x @ w)) + noise, jax.random.fold_in(key, 3)

    check(step, (W, X, jax.random.key(7, impl=impl)), "2x4:slow")


def test_keys_that_a_scan_takes_one_by_one_are_whole() -> None:
    def step(ws: Any, x: Any, key: Any) -> Any:
        return lax.scan(lambda h, wk: (drop(wk[1], jnp.tanh(h @ wk[0])), None), x, (ws, jax.random.split(key, 4)))[0]

    check(step, (WS, X, jax.random.key(7)), "2x4:slow")


def test_numbers_that_a_scan_takes_one_by_one_are_whole() -> None:
    def step(w: Any, x: Any, rates: Any) -> Any:
        return lax.scan(lambda h, r: (jnp.tanh(h @ w) * r, None), x, jnp.sin(rates))[0]

    check(step, (W, X, jnp.arange(8.0)), "2x4:slow", pins={"rates": P(("node", "gpu"))})


# -- sharding constraints ----------------------------------------------------------------------------------------------


def mesh(*names: str) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), names or ("node", "gpu"))


def lies(x: Any, *entries: Any, over: Mesh | None = None) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(over or mesh(), P(*entries)))


@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_a_sharding_constraint_holds(backend: str) -> None:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = lies(jnp.tanh(x @ w), "gpu", None)
            h = lies(jnp.sin(h), None, ("node", "gpu"))
            return jnp.mean(lies(h @ w, P.UNCONSTRAINED, "node") ** 2)

        return w - 0.1 * jax.grad(loss)(w), lies(x @ w, None, "gpu")

    plan = check(step, (W, X), "2x4:slow") if backend == "explicit" else shardplan.plan(step, W, X, cluster=machine("2x4:slow"))
    held = {n.signature.constraint: plan.planned.layouts[t] for t, n in plan.graph.placed.items()}
    assert {str(c): layout.dims for c, layout in held.items() if layout is not None} == {
        "P('gpu', None)": ((1,), ()),
        "P(None, ('node', 'gpu'))": ((), (0, 1)),
        "P('UNCONSTRAINED', 'node')": (held_rows(held), (0,)),
        "P(None, 'gpu')": ((), (1,)),
    }
    assert plan.out_specs[1] == P(None, "gpu")
    run = plan.jit(step, jax.devices()[:8], backend)
    for found, want in zip(run(W, X), jax.jit(step)(W, X), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def held_rows(held: Any) -> Any:
    """Whatever the plan chose for the dim that the step leaves open."""
    return next(layout.dims[0] for constraint, layout in held.items() if constraint.dims[0] is None)


def test_moves_that_begin_alike_make_their_first_step_once() -> None:
    def step(w: Any, x: Any) -> Any:
        return lies(w - 0.1 * (x.T @ x), "gpu", "node"), lies(jnp.tanh(x @ w), None, ("node", "gpu"))

    plan = check(step, (W, X), "2x4:slow")
    moves = [i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, Move)]
    begun = [(m.source, m.before, m.steps[0].after) for m in moves]
    assert len(set(begun)) == len(begun)


def test_a_constraint_over_another_mesh_is_refused() -> None:
    def step(w: Any, x: Any) -> Any:
        return lies(x @ w, "data", over=mesh("data", "model"))

    says = r"P\('data', None\) at .*test_user_code.py.* axis 'data' of size 2, and the plan's mesh has node=2, gpu=4: plan with"
    with pytest.raises(shardplan.PinError, match=says):
        shardplan.plan(step, W, X, cluster=machine("2x4:slow"))
    assert shardplan.plan(step, W, X, cluster=mesh("data", "model")).out_specs == P("data")


def test_a_constraint_on_an_order_of_axes_that_no_layout_has_is_refused() -> None:
    with pytest.raises(shardplan.PinError, match=r"unsupported order: use slowest first, \('node', 'gpu'\)"):
        shardplan.plan(lambda x: lies(x * 2, ("gpu", "node")), X, cluster="2x4")


@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_a_step_traced_under_a_mesh_runs_under_a_plan(backend: str) -> None:
    """`jax.set_mesh` puts its mesh into every op that it traces; a constraint by names alone means that mesh."""

    def step(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, _: (lax.with_sharding_constraint(jnp.tanh(h @ w), P("gpu")), None), x, None, length=2)[0]

    with jax.set_mesh(mesh()):
        plan = shardplan.plan(step, W, X, cluster=mesh())
        want = jax.jit(step)(W, X)
        inside = plan.jit(step, backend=backend)(W, X)
    np.testing.assert_allclose(inside, want, rtol=1e-5)
    np.testing.assert_allclose(plan.jit(step, backend=backend)(W, X), want, rtol=1e-5)


# -- functions that the user runs on each device -------------------------------------------------------------------------


def product(w: Any, x: Any, **options: Any) -> Any:
    """A product cut along its inner dim over "gpu" and along its rows over "node", by hand."""
    over = jax.shard_map(
        lambda w, x: lax.psum(x @ w, "gpu"),
        mesh=options.pop("over", None) or mesh(),
        in_specs=(P("gpu", None), P("node" if not options.get("axis_names") else None, "gpu")),
        out_specs=P("node" if not options.get("axis_names") else None, None),
        **options,
    )
    return over(w, x)


@pytest.mark.parametrize("options", [{}, {"check_vma": False}, {"axis_names": {"gpu"}}], ids=["all", "unchecked", "some axes"])
def test_a_shard_map_runs_on_the_blocks_that_it_asks_for(options: Any) -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(product(w, x, **options) @ w) ** 2))(w)

    plan = check(step, (W, X), "2x4:slow")
    (forward, *_) = [n for n in plan.graph.nodes if n.signature.manual is not None]
    use = plan.planned.uses[forward.id]
    rows = () if options.get("axis_names") else (0,)
    assert [need.dims for need in use.needs if need is not None] == [((1,), ()), (rows, (1,))]
    assert use.gives[0].dims == (rows, ())


def test_a_shard_map_runs_on_the_users_mesh_under_the_specs_backend_too() -> None:
    def step(w: Any, x: Any) -> Any:
        return jnp.tanh(product(w, x)) @ w

    plan = shardplan.plan(step, W, X, cluster=mesh())
    np.testing.assert_allclose(plan.jit(step, backend="specs")(W, X), jax.jit(step)(W, X), rtol=1e-5, atol=1e-6)


def test_a_loop_for_each_row_inside_a_shard_map_ends_with_its_last_row() -> None:
    def until(v: Any) -> Any:
        return lax.while_loop(lambda a: a.sum() < 100.0, lambda a: a * 2 + 1, v)

    def step(x: Any) -> Any:
        return jax.shard_map(jax.vmap(until), mesh=mesh(), in_specs=P("node", None), out_specs=P("node", None))(jnp.abs(x)) * 2

    plan = shardplan.plan(step, X, cluster=mesh())
    for backend in ("explicit", "specs"):
        np.testing.assert_allclose(plan.jit(step, backend=backend)(X), jax.jit(step)(X), rtol=1e-5)


def test_remat_inside_a_shard_map_computes_again() -> None:
    def step(w: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda w, x: jnp.tanh(jnp.sin(x @ w)))
        local = jax.shard_map(layer, mesh=mesh(), in_specs=(P(), P("node")), out_specs=P("node"))
        return w - 0.1 * jax.grad(lambda w: jnp.mean(local(w, x) ** 2))(w)

    plan = check(step, (W, X), "2x4:slow")
    assert "optimization_barrier" in plan.jit(step, jax.devices()[:8], "explicit").lower(W, X).as_text()


def test_loops_and_branches_inside_a_shard_map_run_on_blocks() -> None:
    def local(m: Any, x: Any) -> Any:
        h = lax.scan(lambda h, _: (h * 0.5 + lax.pmean(h.sum(), ("node", "gpu")) * m, None), x, None, length=3)[0]
        h = lax.while_loop(
            lambda s: (s[0] < 3) & (lax.pmax(s[1].max(), ("node", "gpu")) < 9), lambda s: (s[0] + 1, s[1] * 1.5), (0, h)
        )[1]
        return lax.cond(lax.axis_index("gpu") > 1, lambda h: h * 2.0, jnp.sin, h) + jax.nn.relu(h)

    constant = np.arange(2048.0, dtype="float32").reshape(64, 32)

    def step(w: Any, x: Any) -> Any:
        rows = P(("node", "gpu"))
        made = jnp.arange(64.0)[:, None] * jnp.ones((1, 32))  # whole on every device, as is a constant: each takes its block
        once = jax.shard_map(local, mesh=mesh(), in_specs=(rows, rows), out_specs=rows)(made, x @ w)
        return jax.shard_map(jnp.multiply, mesh=mesh(), in_specs=(rows, rows), out_specs=rows)(constant, once)

    check(step, (W, X), "2x4:slow")


def test_a_shard_map_over_another_mesh_is_refused() -> None:
    with pytest.raises(shardplan.PinError, match=r"shard_map at .*test_user_code.py.* axis 'node' of size 2, .*gpu=8: plan with"):
        shardplan.plan(lambda w, x: product(w, x), W, X, cluster="8")


def test_an_axis_of_vmap_is_none_of_the_mesh() -> None:
    """Batch statistics over a mapped axis that is named like an axis of the plan's mesh."""

    def step(w: Any, x: Any) -> Any:
        def one(row: Any) -> Any:
            h = row @ w
            h = (h - lax.pmean(h, "gpu")) / (1.0 + lax.stop_gradient(lax.pmax(h, "gpu") - lax.pmin(h, "gpu")))
            return h + 0.01 * lax.axis_index("gpu")

        return jax.vmap(one, axis_name="gpu")(x)

    check(step, (W, X), "2x4:slow")


# -- devices -------------------------------------------------------------------------------------------------------------


def test_a_plan_that_splits_an_axis_of_the_users_mesh_runs_on_its_devices() -> None:
    devices = jax.devices()[6:0:-1]
    ones = jnp.ones((1024, 1024))
    plan = shardplan.plan(jnp.dot, ones, ones, cluster=Mesh(np.array(devices), ("data",)))
    assert plan.axes == {"data0": 2, "data1": 3}
    assert plan.mesh().devices.ravel().tolist() == devices
    assert jnp.array_equal(plan.jit(jnp.dot, backend="explicit")(ones, ones), 1024 * ones)


def test_arrays_of_other_devices_come_along() -> None:
    """Arguments are moved; what a step closes over is moved too."""
    closed = jax.device_put(jnp.arange(32.0), NamedSharding(mesh(), P("gpu")))

    def step(x: Any) -> Any:
        return x * closed

    plan = shardplan.plan(step, X, cluster=machine("2x2:slow"))
    out = plan.jit(step, jax.devices()[2:6], "explicit")(jax.device_put(X, jax.devices()[7]))
    assert out.sharding.device_set == set(jax.devices()[2:6])
    assert jnp.array_equal(out, X * jnp.arange(32.0))


def test_a_donated_argument_is_not_used_again() -> None:
    def step(w: Any, x: Any) -> Any:
        return w + 1.0, (x @ w).sum()

    plan = shardplan.plan(step, W, X, cluster=machine("2x4:slow"), donate_argnums=0)
    run, (w, x) = plan.jit(step, jax.devices()[:8], "explicit"), plan.put((W, X), mesh=plan.mesh(jax.devices()[:8]))
    run(w, x)
    with pytest.raises(shardplan.ShardplanError, match="w was donated to an earlier call and is deleted"):
        run(w, x)


# -- what is reduced -----------------------------------------------------------------------------------------------------


def weighed(loss: Any, *shapes: Any, on: str) -> tuple[list[tuple[int, float]], list[int]]:
    """Of a step's gradients (bytes, times) for each reduction, and the sizes of all else that it sends."""
    parameters = {name: jax.ShapeDtypeStruct((1024, 1024), "float32") for name in "ab"}
    data = (jax.ShapeDtypeStruct(s, "float32") for s in shapes)
    sends = shardplan.plan(loss, parameters, *data, cluster=on, time_model="sum").sends
    reduced = [(s.nbytes, s.times) for s in sends if s.kind in ("all-reduce", "reduce-scatter") and s.nbytes > 2**16]
    return reduced, [s.nbytes for s in sends if s.kind not in ("all-gather", "reduce-scatter") and s.nbytes < 2**16]


def squares(w: Any, x: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


@pytest.mark.parametrize("on", ["2x4", "8"])
@pytest.mark.parametrize("loop", ["scan", "python"])
def test_accumulated_gradients_are_reduced_once_a_step(loop: str, on: str) -> None:
    def step(w: Any, x: Any) -> Any:
        add = lambda g, part: jax.tree.map(jnp.add, g, jax.grad(squares)(w, part))  # noqa: E731
        total = jax.tree.map(jnp.zeros_like, w)
        if loop == "scan":
            total = lax.scan(lambda g, part: (add(g, part), None), total, x)[0]
        else:
            for part in x:
                total = add(total, part)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, total)

    reduced, others = weighed(step, (4, 2**16, 1024), on=on)
    assert sum(nbytes for nbytes, _ in reduced) == 2 * 4 * 1024**2, "each gradient once, together or apart"
    assert {times for _, times in reduced} == {1.0}
    assert not others


@pytest.mark.parametrize("on", ["2x4", "8"])
def test_means_norms_and_statistics_of_a_cut_batch_cost_their_own_numbers(on: str) -> None:
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def clipped(w: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(squares)(w, x)
        return optax.apply_updates(w, optimizer.update(g, optimizer.init(w))[0]), loss

    def normed(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = x @ w["a"]
            h = h - h.mean(0)
            h = h * lax.rsqrt((h**2).mean(0) + 1e-5)
            return jnp.mean((h @ w["b"]) ** 2)

        value, g = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, g), value

    for step, numbers in ((clipped, [4]), (normed, [4, *[4 * 1024] * 4])):  # the loss; two statistics and their gradients
        reduced, others = weighed(step, (2**18, 1024), on=on)
        assert sum(nbytes for nbytes, _ in reduced) + sum(others) == 2 * 4 * 1024**2 + sum(numbers), (
            "each once, together or apart"
        )
        assert {times for _, times in reduced} == {1.0}


# -- effects -----------------------------------------------------------------------------------------------------------


def test_a_callback_without_results_sees_the_whole_value_once() -> None:
    seen: list[Any] = []

    def step(w: Any, x: Any) -> Any:
        def body(h: Any, w: Any) -> Any:
            h = jnp.tanh(h @ w)
            jax.debug.callback(lambda h: seen.append(np.array(h)), h)
            return h, None

        return lax.scan(body, x, w)[0]

    plan = shardplan.plan(step, WS, X, cluster=machine("2x4:slow"))
    out = plan.jit(step, jax.devices()[:8], "explicit")(WS, X)
    jax.effects_barrier()
    assert len(seen) == 4
    assert any(np.array_equal(h, np.asarray(out)) for h in seen)


def test_a_check_outside_of_checkify_is_refused_with_its_line() -> None:
    def step(x: Any) -> Any:
        checkify.check(jnp.all(x > 0), "negative")
        return x * 2

    with pytest.raises(shardplan.TraceError, match=r"check at .*test_user_code.py.* is not functionalized: put .*checkify"):
        shardplan.plan(step, X, cluster=machine("2x4:slow"))


def test_checks_inside_of_checkify_are_those_of_the_whole() -> None:
    def step(w: Any, x: Any) -> Any:
        def logs(x: Any) -> Any:
            checkify.check(jnp.all(x > -1e9), "too small: {}", x.min())
            return jnp.log(x)

        error, y = checkify.checkify(logs, errors=checkify.user_checks | checkify.nan_checks)(x @ w)
        return error, y

    plan = shardplan.plan(step, W, X, cluster=machine("2x4:slow"))
    error, _ = plan.jit(step, jax.devices()[:8], "explicit")(W, X)
    assert "nan generated by primitive: log" in str(error.get())
