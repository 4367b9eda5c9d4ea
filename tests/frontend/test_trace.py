"""A step becomes a program: paths, feedback, source lines and loops survive; nothing is allocated."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

from models import gpt, gpt_linen, llama
from shardplan.errors import TraceError
from shardplan.frontend.trace import Traced, trace
from shardplan.ir import Op, Program


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def every_op(program: Program) -> list[Op]:
    return [op for own in program.ops for op in (own, *(o for body in own.bodies for o in every_op(body)))]


def fed(traced: Traced) -> dict[str, str]:
    """Path of each output that replaces an input -> that input's path."""
    program = traced.program
    pairs = zip(program.output_paths, program.feedback, strict=True)
    return {o: program.input_paths[i] for o, i in pairs if i is not None}


def plain(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    x, y = batch

    def loss(p: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


PLAIN = {"w": array(4, 3), "b": array(3)}, (array(8, 4), array(8, 3))


def test_a_plain_step_keeps_its_paths_and_feeds_its_state_back() -> None:
    traced = trace(plain, *PLAIN, donate_argnums=(0,))
    assert traced.program.input_paths == ("params/b", "params/w", "batch/0", "batch/1")
    assert traced.program.output_paths == ("0/b", "0/w", "1")
    assert fed(traced) == {"0/b": "params/b", "0/w": "params/w"}


def test_an_nnx_step_keeps_its_paths_and_feeds_its_state_back() -> None:
    step, args = gpt.train_step(layers=2)
    traced = trace(step, *args)
    program = traced.program
    assert "state/0/blocks/1/attention/qkv/kernel" in program.input_paths
    state = [p for p in program.input_paths if p.startswith("state/")]
    assert sorted(fed(traced).values()) == sorted(state)
    assert {o.removeprefix("0/"): i.removeprefix("state/") for o, i in fed(traced).items()} == {
        i.removeprefix("state/"): i.removeprefix("state/") for i in state
    }


def test_a_key_called_value_stays_in_its_path_and_a_variables_own_value_does_not() -> None:
    step, args = llama.train_step(layers=1)
    paths = trace(step, *args).program.input_paths
    assert "state/0/blocks/0/attention/value/kernel" in paths


def test_a_linen_step_keeps_its_paths_and_feeds_its_state_back() -> None:
    step, args = gpt_linen.train_step(layers=2)
    traced = trace(step, *args)
    state = [p for p in traced.program.input_paths if p.startswith("state/")]
    assert any(p.startswith("state/params/") for p in state)
    assert any("/mu/" in p for p in state), "the optimizer's moments are state"
    assert sorted(fed(traced).values()) == sorted(state)


def test_a_train_state_and_adamw_of_ones_own() -> None:
    model = linen.Dense(6)

    def make() -> TrainState:
        params = model.init(jax.random.key(0), jnp.zeros((1, 4)))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), loss

    traced = trace(step, jax.eval_shape(make), array(8, 4))
    assert "state/params/params/kernel" in traced.program.input_paths
    assert len(fed(traced)) == len(traced.program.input_paths) - 1


def test_two_states_of_one_shape_are_not_mixed_up() -> None:
    def swap(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        return b * 2, a * 3

    assert fed(trace(swap, array(4), array(4))) == {"0": "a", "1": "b"}, "the same place of the result"
    both = {"a": array(4), "b": array(4)}
    kept = trace(lambda s: {"b": s["a"] + 1, "a": s["b"] + 1}, both, donate_argnums=(0,))
    assert {o.split("/")[-1]: i.split("/")[-1] for o, i in fed(kept).items()} == {"a": "a", "b": "b"}


def test_an_op_knows_the_users_line_and_scope() -> None:
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jnp.tanh(x)

    op = next(o for o in trace(step, array(4)).program.ops if o.primitive == "tanh")
    line = inspect.getsourcelines(step)[1] + 2
    assert f"{__file__.rsplit('/', 1)[-1]}:{line}" in str(op.source)
    assert "outer" in op.scope


def test_calls_are_seen_through() -> None:
    @jax.custom_vjp
    def clip(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    clip.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * x,))

    def step(x: jax.Array) -> jax.Array:
        return jax.jit(lambda y: clip(jax.nn.relu(y)))(x)

    names = {op.primitive for op in trace(step, array(4)).program.ops}
    assert names == {"tanh", "max"}
    grad = trace(jax.grad(lambda x: jnp.sum(step(x))), array(4)).program
    assert not {op.primitive for op in grad.ops} & {"jit", "pjit", "custom_vjp_call", "custom_jvp_call", "closed_call"}


def test_functions_with_a_vmap_or_a_rematerialization_of_their_own_are_inlined() -> None:
    @jax.custom_batching.custom_vmap
    def own(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    own.def_vmap(lambda size, batched, x: (own(x), True))

    @jax.custom_vjp
    def kept(x: jax.Array) -> jax.Array:
        return jnp.sin(own(x))

    kept.defvjp(lambda x: (kept(x), x), lambda x, g: (g * jnp.cos(own(x)),), optimize_remat=True)
    grad = trace(jax.value_and_grad(lambda x: jnp.sum(kept(x))), array(4)).program
    names = {op.primitive for op in grad.ops}
    assert names >= {"tanh", "sin", "cos"}
    assert not names & {"custom_vmap_call", "remat_opt"}


def test_a_scan_keeps_its_body_and_its_trips() -> None:
    def step(x: jax.Array, ws: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)[0]

    (scan,) = [op for op in trace(step, array(4, 4), array(7, 4, 4)).program.ops if op.bodies]
    assert (scan.primitive, scan.trips, len(scan.bodies)) == ("scan", 7, 1)
    assert {op.primitive for op in scan.bodies[0].ops} >= {"dot_general", "tanh"}


def test_a_while_has_unknown_trips_and_two_bodies() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c.sum() < 10, lambda c: c * 2, x)

    (loop,) = [op for op in trace(step, array(4)).program.ops if op.bodies]
    assert (loop.primitive, loop.trips, len(loop.bodies)) == ("while", None, 2)


def test_a_cond_keeps_its_branches() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)

    (cond,) = [op for op in trace(step, array(4)).program.ops if op.bodies]
    assert cond.primitive == "cond"
    assert [body.ops[0].primitive for body in cond.bodies] == ["cos", "sin"]


@pytest.mark.parametrize("scan", [False, True])
def test_remat_keeps_its_bodies(scan: bool) -> None:
    step, args = gpt.train_step(layers=3, remat=True, scan=scan)
    ops = every_op(trace(step, *args).program)
    rematerialised = [op for op in ops if op.primitive in ("remat2", "checkpoint")]
    assert len(rematerialised) == (1 if scan else 3)
    assert all(op.bodies and op.bodies[0].ops for op in rematerialised)
    scans = [op for op in ops if op.primitive == "scan"]
    assert [op.trips for op in scans] == ([3, 3] if scan else [])


def test_dead_ops_are_left_out() -> None:
    def step(x: jax.Array) -> jax.Array:
        jnp.linalg.cholesky(x)
        return x + 1

    assert [op.primitive for op in trace(step, array(4, 4)).program.ops] == ["add"]


def test_seventy_billion_parameters_are_traced_without_being_there() -> None:
    step, args = llama.train_step(size="70b", layers=80, sequence=4096, batch=64, scan=True)
    count = sum(x.size for x in jax.tree.leaves(args[0]))
    assert count > 2 * 68e9, "parameters and what the optimizer keeps of them"
    before = len(jax.live_arrays())
    program = trace(step, *args).program
    assert len(jax.live_arrays()) - before < 20
    assert [op.trips for op in program.ops if op.primitive == "scan"] == [80, 80]
    assert program.count_ops() < 3000


def test_every_tensor_is_made_before_it_is_read() -> None:
    step, args = gpt.train_step(layers=1, scan=True, remat=True)
    program = trace(step, *args).program

    def check(p: Program) -> None:
        known = {*p.inputs, *(t for t, _ in p.constants)}
        for op in p.ops:
            assert set(op.tensors) <= known
            known |= set(op.outputs)
            for body in op.bodies:
                check(body)
        assert {o for o in p.outputs if isinstance(o, int)} <= known
        assert [t.id for t in p.tensors] == list(range(len(p.tensors)))

    check(program)


def test_an_nnx_module_can_be_an_argument() -> None:
    model = nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    traced = trace(lambda s, x: nnx.merge(graphdef, s)(x), state, array(8, 4))
    assert traced.program.input_paths == ("s/bias", "s/kernel", "x")


def test_a_step_that_fails_says_why() -> None:
    with pytest.raises(TraceError, match=r"could not be traced.*at \S*test_trace\.py:\d+ \(.*; jax\.eval_shape") as caught:
        trace(lambda x, w: x @ w, array(3, 4), array(3, 4))
    assert caught.value.__cause__ is not None


def test_a_step_that_looks_at_values_says_why() -> None:
    def step(x: jax.Array) -> jax.Array:
        return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match="could not be traced"):
        trace(step, array(4))


def test_a_linear_solve_is_its_solver_and_keeps_the_users_line() -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.linalg.solve(a, b)

    program = trace(step, *(jax.ShapeDtypeStruct((8, 8), "float32") for _ in range(2))).program
    assert "triangular_solve" in {op.primitive for op in program.ops}
    assert all("test_trace.py" in str(op.source) for op in program.ops)


def test_what_a_library_raises_is_a_trace_error_at_the_users_line() -> None:
    """Also an error of flax, which is none of Python's own; its frames are not the user's."""
    model = linen.Dense(4)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.ones((2, 3))))
    with pytest.raises(TraceError, match=r"ScopeParamShapeError.*at \S*test_trace\.py:\d+ \(<lambda>\)"):
        trace(lambda p, x: model.apply(p, x), params, array(8, 5))


def test_a_barrier_is_an_op_for_each_of_its_values() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        x, w = jax.lax.optimization_barrier((x, w))
        return x @ w

    ops = trace(step, array(8, 4), array(4, 6)).program.ops
    assert [(op.primitive, len(op.inputs), len(op.outputs)) for op in ops if op.primitive != "dot_general"] == [
        ("optimization_barrier", 1, 1),
        ("optimization_barrier", 1, 1),
    ]


@pytest.mark.parametrize(("kind", "nbytes"), [("threefry2x32", 8), ("rbg", 16), ("unsafe_rbg", 16)])
def test_a_key_is_as_large_as_its_words(kind: str, nbytes: int) -> None:
    program = trace(lambda key: jax.random.uniform(key, (4,)), jax.random.key(0, impl=kind)).program
    assert program.tensors[program.inputs[0]].itemsize == nbytes


def test_a_mutable_reference_is_refused_by_its_line() -> None:
    def step(x: jax.Array) -> jax.Array:
        kept = jax.new_ref(x)
        kept[...] = kept[...] * 2
        return kept[...]

    with pytest.raises(TraceError, match=r"new_ref at .*test_trace\.py:\d+ .* makes or uses a mutable reference"):
        trace(step, array(4))
