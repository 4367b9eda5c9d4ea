"""The explicit backend: what was planned is what runs, one for one, and the numbers are those of one device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.experimental
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.schedule import Compute, Move, Reblock, Scan, instructions_of
from shardplan.verify.emitted import Call
from shardplan.verify.mutate import DroppingExplicitEmitter
from shardplan.verify.one_for_one import folded
from shardplan.verify.verify import verify
from tests.machines import machine
from tests.models.test_factories import TINY, factory, tiny_on

MACHINES = ("2x4:slow", "2x2x2:slow", "3x2:slow", "8:slow", "4x2:slow")
OPTIONS: dict[str, dict[str, Any]] = {
    "scan": {"scan": True},
    "remat": {"remat": True},
    "scan and remat": {"scan": True, "remat": True},
    "dropout": {"dropout": 0.1},
    "bfloat16": {"dtype": "bfloat16"},
    "all": {"scan": True, "remat": True, "dropout": 0.1, "accumulate": 2, "dtype": "bfloat16", "tied": True},
}
"""What users turn on, and turn on at once."""
HAVE = {
    "gpt": tuple(OPTIONS),
    "gpt_linen": ("scan and remat", "all"),
    "llama": ("scan", "scan and remat", "bfloat16"),
    "moe": ("scan", "scan and remat", "bfloat16"),
    "rnn": ("scan", "bfloat16"),
    "unet": ("remat", "bfloat16"),
    "wresnet": ("remat", "bfloat16"),
    "vit": ("scan", "remat", "bfloat16"),
}


LONG = ("moe", "lenet", "llama", "rnn", "two_tower")
"""The models that take longest: the suite of every change leaves them out."""

MERGED = {"unet": 144.0}
"""Bytes that XLA does not send: two biases that are added have one gradient, by a sum and by a sum of sums, reduced once."""


def check(step: Any, args: Any, on: str, *, merged: float = 0.0, **options: Any) -> shardplan.Plan:
    """Plans the step on a machine where cutting pays, and verifies it under the explicit backend.

    At most ``merged`` of the planned bytes are not sent.
    """
    plan = shardplan.plan(step, *args, cluster=machine(on), **options)
    found = verify(plan, step, args, steps=2, backend="explicit", reference="unequal", devices=jax.devices()[: plan.cluster.size])
    assert found.equal, (found.worst, found.unequal)
    assert not found.unmatched, found.unmatched[:5]
    assert found.passed, found
    unsent = sum(pair.planned_bytes - pair.wire_bytes for pair in found.folded)
    assert unsent <= merged, found.folded[:5]
    assert found.measured_bytes == pytest.approx(found.predicted_bytes - unsent, abs=0.5)
    return plan


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "on"),
    [pytest.param(*p.values, marks=[*p.marks, *[pytest.mark.slow] * (p.values[0] in LONG)]) for p in tiny_on(MACHINES[:3])],
)
def test_a_tiny_model_runs_as_planned(name: str, on: str) -> None:
    step, args = factory(name)(**TINY[name], concrete=True)
    plan = check(step, args, on, donate_argnums=0)
    assert plan.sends, "nothing is cut that has to be reduced"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on"), [*zip(TINY, itertools.cycle(MACHINES), strict=False)])
def test_a_model_runs_as_planned(name: str, on: str) -> None:
    step, args = factory(name)(concrete=True)
    check(step, args, on, donate_argnums=0, merged=MERGED.get(name, 0.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chosen", "on"),
    [(*row, on) for row, on in zip(((n, c) for n, have in HAVE.items() for c in have), itertools.cycle(MACHINES), strict=False)],
)
def test_a_model_with_options_runs_as_planned(name: str, chosen: str, on: str) -> None:
    size = {key: value for key, value in TINY[name].items() if key != "layers"} | (
        {"layers": 3} if "layers" in TINY[name] else {}
    )
    step, args = factory(name)(**{**size, **OPTIONS[chosen]}, concrete=True)
    check(step, args, on, donate_argnums=0)


@pytest.mark.parametrize("on", [pytest.param("2x2x2:slow", marks=pytest.mark.slow), "3x2:slow"])
def test_leaving_out_any_one_exchange_is_noticed(on: str) -> None:
    step, args = factory("mlp")(**TINY["mlp"], concrete=True)
    plan = check(step, args, on, time_model="sum")  # one that splits no softmax: its maximum changes no result
    devices = jax.devices()[: plan.cluster.size]
    emitter = DroppingExplicitEmitter(plan.planned, plan.mesh(devices), -1, plan.schedule)
    jax.eval_shape(emitter, *jax.tree.leaves(args))
    assert len(emitter.exchanges) >= 5
    missed = [
        emitter.exchanges[n]
        for n in range(len(emitter.exchanges))
        if verify(plan, step, args, steps=2, backend="explicit", drop=n, devices=devices).equal
    ]
    assert not missed


def test_a_dim_that_does_not_divide_is_padded_and_its_end_is_not_read() -> None:
    """22 rows over three and over six devices, reduced, normalised and multiplied."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        def loss(w: jax.Array) -> jax.Array:
            y = x @ w
            y = (y - y.mean(axis=0)) / (1e-3 + y.max(axis=0) - y.min(axis=0))
            return jnp.sum(jnp.argmax(y, axis=0)) * 1e-3 + jnp.sum(jax.nn.softmax(y, axis=0) * x[:, :1])

        return w - jax.grad(loss)(w), loss(w)

    keys = jax.random.split(jax.random.key(1), 2)
    args = (jax.random.normal(keys[0], (46, 22)), jax.random.normal(keys[1], (22, 46)))
    plan = check(step, args, "3x2:slow")
    cuts = [
        (i.node.signature, c) for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, Compute) for c in i.cuts
    ]
    assert any(s.description.loops[c.loop].extent != c.extent for s, c in cuts if s.description is not None)


def test_equal_moves_are_made_once() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        y = x @ w
        return jnp.tanh(y).sum() + jnp.sin(y).sum() + 0.0 * jax.lax.stop_gradient(y).sum(), w, jnp.sum(jnp.sin(x) @ w)

    args = (jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (64, 32)))
    plan = check(step, args, "2x4:slow")
    moves = [i for i in instructions_of(plan.schedule.body.instructions) if isinstance(i, Move)]
    assert len({(m.source, m.before, m.after) for m in moves}) == len(moves)


def test_nothing_moves_for_what_nobody_reads() -> None:
    """A carry that is only handed on, and a result without elements."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        (total, _, _), _ = jax.lax.scan(lambda c, v: ((c[0] * v, c[1] + v, c[1]), None), (x, w, jnp.cos(w)), jnp.ones(3))
        return total, (x @ w)[:0].sum(axis=0)

    args = (jax.random.normal(jax.random.key(0), (32, 32)), jax.random.normal(jax.random.key(1), (64, 32)))
    plan = check(step, args, "2x4:slow", pins={"w": jax.sharding.PartitionSpec("gpu")})
    (loop,) = [i for i in plan.schedule.body.instructions if isinstance(i, Scan)]
    assert len(loop.start) == 1
    assert not plan.sends


def test_lookups_by_equal_constants_are_one() -> None:

    def step(table: jax.Array, x: jax.Array) -> Any:
        rows = [(table @ x)[jnp.array([5, 3, 3, 0])].sum() for _ in range(2)]
        return rows[0] * rows[1]

    args = (jax.random.normal(jax.random.key(0), (16, 32)), jax.random.normal(jax.random.key(1), (32, 32)))
    plan = check(step, args, "2x4:slow", pins={"x": jax.sharding.PartitionSpec("gpu")}, time_model="sum")
    assert plan.sends
    instructions = instructions_of(plan.schedule.body.instructions)
    assert len([i for i in instructions if isinstance(i, Compute) and i.node.op.primitive == "gather"]) == 1


def test_a_loop_over_single_elements_reads_them_whole() -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return jax.lax.scan(lambda c, v: (jnp.tanh(c * v), c.sum()), w, jnp.sin(x))

    args = (jax.random.normal(jax.random.key(0), (8, 16)), jax.random.normal(jax.random.key(1), (12,)))
    plan = check(step, args, "2x2:slow", pins={"x": jax.sharding.PartitionSpec("gpu")})
    assert any(c.kind == "all-gather" for c in plan.collectives), "the plan has no price for it"


def test_extremes_of_narrow_types_have_the_widths_that_travel() -> None:
    """Beside a place its extreme as it is; an extreme of floats alone as integers of 32 bits."""

    def step(flags: jax.Array, x: jax.Array) -> Any:
        places = jnp.argmax(flags), jnp.argmin(x.astype("bfloat16"))
        return *places, x.astype("bfloat16").max(), jnp.cumsum(jnp.tanh(x)[None], axis=0)[0]

    args = (jnp.arange(64) == 40, jax.random.normal(jax.random.key(1), (64,)))
    spec = jax.sharding.PartitionSpec("gpu")
    plan = check(step, args, "2x4:slow", pins={"flags": spec, "x": spec})
    assert sorted(s.nbytes for s in plan.sends if s.kind == "all-reduce") == [1, 2, 4, 4, 4]


def test_what_xla_folds_is_known_and_what_was_not_handed_to_it_is_not_forgiven() -> None:
    """The place of the least of one element: XLA knows it, so that its gather is left out of what is compiled."""

    def step(x: jax.Array) -> Any:
        return jnp.argmin(x, axis=0)

    args = (jnp.ones((1, 16)),)
    plan = shardplan.plan(step, *args, cluster=machine("3x2:eager"))
    found = verify(plan, step, args, steps=1, backend="explicit", devices=jax.devices()[:6])
    assert found.passed
    assert found.folded
    bare = [replace(pair, folded=0) for pair in found.pairs]
    handed: dict[Call, int] = {(p.scope, p.kind, p.groups, p.nbytes): p.planned for p in bare}
    assert folded(bare, handed) == found.pairs
    assert not any(p.matched for p in folded(bare, {key: n + 1 for key, n in handed.items()}) if p.planned != p.compiled)


def test_an_argument_that_divides_meets_a_padded_copy() -> None:
    """30 rows are stored over two nodes, 15 each; products cut them eight ways, 4 each."""

    def step(w: jax.Array, x: jax.Array) -> Any:
        return jnp.tanh(jnp.tanh(w @ x) @ x).sum(), w * 0.5

    args = (jax.random.normal(jax.random.key(0), (30, 64)), jax.random.normal(jax.random.key(1), (64, 64)))
    plan = check(step, args, "2x4:slow", pins={"w": jax.sharding.PartitionSpec("node")})
    instructions = list(instructions_of(plan.schedule.body.instructions))
    cuts = [(i.node.signature.description, c) for i in instructions if isinstance(i, Compute) for c in i.cuts]
    padded = [c for description, c in cuts if description is not None and description.loops[c.loop].extent != c.extent]
    assert padded
    assert any(isinstance(i, Reblock) for i in instructions)


def test_loops_branches_and_remat_run_on_blocks() -> None:
    def step(w: jax.Array, x: jax.Array, flag: jax.Array) -> Any:
        @jax.checkpoint
        def layer(h: jax.Array, p: jax.Array) -> jax.Array:
            return jnp.tanh(h @ p)

        def loss(w: jax.Array) -> jax.Array:
            h, _ = jax.lax.scan(lambda h, p: (layer(h, p), h.sum()), x, w)
            h = jax.lax.cond(flag > 0, lambda h: h * 2.0, lambda h: h - 1.0, h)
            h = jax.lax.fori_loop(0, 3, lambda i, h: h * 0.9 + jnp.float32(i), jax.lax.stop_gradient(h)) + h
            return jnp.mean(h**2)

        return w - 0.1 * jax.grad(loss)(w), loss(w)

    args = (jax.random.normal(jax.random.key(0), (4, 32, 32)) / 6, jax.random.normal(jax.random.key(1), (64, 32)), jnp.int32(1))
    check(step, args, "2x4:slow")
    check(step, args, "3x2:slow")


def test_random_bits_are_those_of_one_device() -> None:
    """Each device draws its own block of a dropout mask: with the mask of the whole, bit by bit."""

    def step(key: jax.Array, x: jax.Array, w: jax.Array) -> Any:
        mask = jax.random.bernoulli(key, 0.7, (64, 32))
        return jnp.where(mask, x @ w, 0.0), jax.random.normal(key, (22, 32)) @ w

    args = (jax.random.key(7), jax.random.normal(jax.random.key(1), (64, 32)), jax.random.normal(jax.random.key(2), (32, 32)))
    check(step, args, "2x4:slow")
    check(step, args, "3x2:slow")


def test_effects_happen_once(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[float] = []

    def note(x: Any) -> Any:
        seen.append(float(x))
        return x * 2

    def step(w: jax.Array, x: jax.Array) -> Any:
        y = x @ w
        jax.debug.print("largest {}", y.max())
        doubled = jax.experimental.io_callback(note, jax.ShapeDtypeStruct((), "float32"), y.sum())
        return y * doubled

    args = (jnp.eye(32), jnp.ones((64, 32)))
    plan = shardplan.plan(step, *args, cluster=machine("2x4:slow"))
    run = plan.jit(step, jax.devices()[:8], "explicit")
    out = run(*args)
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == 1
    assert seen == [2048.0]
    assert jnp.array_equal(out, jnp.ones((64, 32)) * 4096.0)


def test_ordered_effects_are_refused() -> None:
    def step(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x.sum(), ordered=True)
        return x * 2

    args = (jnp.ones((64, 32)),)
    with pytest.raises(shardplan.ShardplanError, match=r"at .*test_explicit.py.* is ordered, which JAX allows on one device"):
        shardplan.plan(step, *args, cluster=machine("2x4:slow"))
    alone = shardplan.plan(step, *args, cluster="1")
    assert alone.jit(step)(*args).sum() == 2 * 64 * 32


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_rows_are_looked_up_among_those_that_there_are(mode: str) -> None:
    """15 rows over four devices are padded to 16; the index 15 is beyond the end."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        rows = jnp.array([7, 15, 1, 4, 6, 1, 4, 12])
        return sum(jnp.take(x @ z, rows, axis=0, mode=mode) for z in (y, 2 * y))

    args = (jax.random.normal(jax.random.key(0), (15, 1)), jnp.ones((1, 1)))
    plan = check(step, args, "2x2:eager")
    lookups = [i for i in plan.schedule.body.instructions if isinstance(i, Compute) and i.node.op.primitive == "gather"]
    assert any(c.extent == 16 for i in lookups for c in i.cuts)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_rows_are_written_among_those_that_there_are(mode: str) -> None:
    """As above, for what scatters: the gradient of a lookup."""

    def step(x: jax.Array, y: jax.Array) -> Any:
        rows = jnp.array([7, 15, 1, 4, 6, 1, 4, 12])

        def loss(x: jax.Array) -> Any:
            return sum(jnp.sum(jnp.take(x @ z, rows, axis=0, mode=mode, fill_value=0.0) ** 2) for z in (y, 2 * y))

        return x - 0.1 * jax.grad(loss)(x)

    args = (jax.random.normal(jax.random.key(0), (15, 1)), jnp.ones((1, 1)))
    plan = check(step, args, "2x2:eager")
    scatters = [i for i in plan.schedule.body.instructions if isinstance(i, Compute) and i.node.op.primitive == "scatter-add"]
    assert any(c.extent == 16 for i in scatters for c in i.cuts)
