"""States go from one plan to another: every value stays, every layout is the new plan's, and what is sent is what is said."""

from __future__ import annotations

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.collectives.pieces import pieces
from shardplan.cost import Network
from shardplan.emit.state_moves import Collectives
from shardplan.hlo import measure
from shardplan.ir import Factor, Layout
from shardplan.mesh import Cluster, factors
from shardplan.mesh.devices import build_mesh
from shardplan.plans.movements import Leaf, Side, movements

UP, DOWN = (48, 32), (32, 48)


def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    """A step whose state has all kinds of leaves."""

    def loss_of(w: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["up"].astype(jnp.float32)) @ w["down"] - x) ** 2)

    loss, slopes = jax.value_and_grad(loss_of)(state["w"])
    w = jax.tree.map(lambda a, g: a - (0.1 * g).astype(a.dtype), state["w"], slopes)
    key = jax.random.split(state["key"])[0]
    return {"w": w, "key": key, "keys": state["keys"], "n": state["n"] + 1, "none": state["none"]}, loss


def state_of() -> Any:
    up, down = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate((UP, DOWN)))
    return {
        "w": {"up": up.astype(jnp.bfloat16), "down": down},
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 16),
        "n": jnp.zeros((), jnp.int32),
        "none": jnp.zeros((0, 5)),
    }


BATCH = jnp.ones((16, 48))


def planned(cluster: Any, up: P, down: P, **options: Any) -> shardplan.Plan:
    return shardplan.plan(step, state_of(), BATCH, cluster=cluster, pins={"*/up": up, "*/down": down}, **options)


@pytest.fixture(scope="module")
def old() -> shardplan.Plan:
    return planned("2x4", P("gpu", "node"), P(None, ("node", "gpu")))


def raw(x: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def moved_right(moved: Any, state: Any, plan: shardplan.Plan, devices: Any) -> None:
    shardings = plan.in_shardings(plan.mesh(devices))[0]
    for a, b, sharding in zip(*map(jax.tree.leaves, (moved, state, shardings)), strict=True):
        assert a.sharding.is_equivalent_to(sharding, a.ndim)
        assert (a.shape, a.dtype, jax.typeof(a).weak_type) == (b.shape, b.dtype, jax.typeof(b).weak_type)
        np.testing.assert_array_equal(raw(a), raw(b))


@pytest.mark.parametrize("first", [0, 4, 8])
def test_every_value_stays_on_the_same_overlapping_and_disjoint_devices(old: shardplan.Plan, first: int) -> None:
    new = planned("4x2", P(("node", "gpu")), P("gpu", "node"))
    state, batch = old.put((state_of(), BATCH))
    devices = jax.devices()[first : first + 8]
    moved_right(shardplan.reshard(state, old, new, devices=devices), state, new, devices)
    moved = shardplan.reshard((state, batch), old, new, devices=devices)
    assert isinstance(moved, tuple)
    moved_right(moved[0], state, new, devices)


@pytest.mark.parametrize("cluster", ["4", "1x4", "3", "2", "1", "2x2x4"])
def test_every_value_stays_on_more_and_fewer_devices(old: shardplan.Plan, cluster: str) -> None:
    last = shardplan.Cluster.load(cluster).level_names[-1]
    size = shardplan.Cluster.load(cluster).size
    new = planned(cluster, P(None, None if size % 2 else last), P(last if size < 3 else None))
    state = old.put((state_of(), BATCH))[0]
    moved_right(shardplan.reshard(state, old, new), state, new, None)


def test_plans_over_a_mesh_move_too(old: shardplan.Plan) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices()[7::-1])
    new = planned(mesh, P("data", "model"), P("model"))
    state = old.put((state_of(), BATCH))[0]
    moved_right(shardplan.reshard(state, old, new), state, new, None)
    back = shardplan.reshard(shardplan.reshard(state, old, new), new, old)
    moved_right(back, state, old, None)


def test_a_state_that_lies_elsewhere_than_the_old_plan_says_moves_too(old: shardplan.Plan) -> None:
    new = planned("4x2", P(("node", "gpu")), P("gpu", "node"))
    moved_right(shardplan.reshard(state_of(), old, new), state_of(), new, None)


def test_the_planned_collectives_are_those_of_the_compiled_program(old: shardplan.Plan) -> None:
    new = planned("4x2", P(("node", "gpu")), P("gpu", "node"))
    found = shardplan.resharding(old, new, argument=0)
    runs = [m for m in found.movements if m.steps]
    assert {m.leaf.path for m in runs} == {"state/w/up", "state/w/down"}
    devices = jax.devices()[:8]
    state = old.put((state_of(), BATCH))[0]
    for m in runs:
        collectives = Collectives(Network(new.cluster, m.factors), devices)
        name = m.leaf.path.split("/")[-1]
        x, sharding = state["w"][name], new.in_shardings(new.mesh(devices))[0]["w"][name]
        assert m.move is not None
        text = collectives.program(m.move, sharding).lower(x).compile().as_text()
        kinds = [c.kind for c in measure(text).collectives]
        assert sorted(kinds) == sorted(s.kind.hlo for s in m.steps if s.nbytes)
    assert found.bytes_per_device == pytest.approx(sum(next(iter(m.sent.values())) for m in runs))
    assert found.seconds == pytest.approx(sum(s.seconds for m in runs for s in m.steps))


CLUSTERS = [("2x4", {}), ("4x2", {}), ("2x4", {"gpu": (2, 2)}), ("8", {}), ("8", {"gpu": (2, 4)}), ("2x2x2", {})]
CLUSTERS += [("2x6", {}), ("3x4", {}), ("12", {"gpu": (2, 2, 3)}), ("12", {"gpu": (3, 4)})]


def drawn_layout(rng: random.Random, over: tuple[Factor, ...], shape: tuple[int, ...]) -> Layout:
    dims: list[list[int]] = [[] for _ in shape]
    for f in rng.sample(range(len(over)), len(over)):
        d = rng.randrange(len(shape) + 1)
        if d < len(shape) and shape[d] % math.prod(over[g].size for g in (*dims[d], f)) == 0:
            dims[d].append(f)
    return Layout(tuple(map(tuple, dims)))


@pytest.mark.slow
def test_every_program_between_two_layouts_moves_every_value() -> None:
    """Drawn layouts over drawn factorings of the same devices; no program gathers more than the larger of both blocks."""
    rng, run = random.Random(0), 0
    for _ in range(90):
        ends = [(Cluster.load(name), parts) for name, parts in rng.sample(CLUSTERS, 2)]
        shape = tuple(rng.choice([1, 2, 6, 8, 12, 24]) for _ in range(rng.randint(1, 3)))
        sides = [Side(cluster, factors(cluster, parts), tuple(range(cluster.size))) for cluster, parts in ends]
        if sides[0].cluster.size != sides[1].cluster.size:
            continue
        first, last = (drawn_layout(rng, side.factors, shape) for side in sides)
        x = jnp.arange(math.prod(shape), dtype=jnp.float32).reshape(shape)
        leaf = Leaf("x", shape, "float32", x.nbytes, (sides[0], first), (sides[1], last))
        (movement,) = movements([leaf], [(side.cluster, side.devices) for side in reversed(sides)]).movements
        if not movement.steps:
            continue
        assert movement.move is not None
        local = [jax.ShapeDtypeStruct(shape, x.dtype, sharding=s) for s in map(sharding_of, sides, (first, last))]
        devices = jax.devices()[: sides[0].cluster.size]
        moved = Collectives(Network(sides[1].cluster, movement.factors), devices).moved(
            jax.device_put(x, local[0].sharding), movement.move, local[1].sharding
        )
        np.testing.assert_array_equal(np.asarray(moved), np.asarray(x))
        assert moved.sharding.is_equivalent_to(local[1].sharding, x.ndim)
        sizes = [f.size for f in movement.factors]
        parts = [math.prod(sizes[f] for f in a.used) for s in movement.steps for a in (s.before, s.after)]
        assert min(parts) == min(parts[0], parts[-1])
        run += 1
    assert run > 15


def sharding_of(side: Side, layout: Layout) -> jax.NamedSharding:
    names = [f.name for f in side.factors]
    mesh = build_mesh(side.cluster, side.factors, {name: (i,) for i, name in enumerate(names)})
    return jax.NamedSharding(mesh, P(*layout.entries(names)))


def test_the_bytes_of_pieces_are_what_devices_lack(old: shardplan.Plan) -> None:
    """On the first node alone: each device holds blocks of 1/8 of down, and needs a half from devices of both nodes."""
    new = planned("2", P(), P(None, "gpu"))
    found = {m.leaf.path: m for m in shardplan.resharding(old, new, argument=0).movements}
    down = found["state/w/down"]
    assert sum(down.sent.values()) == pytest.approx((4 + 4 - 1 - 0) * down.leaf.nbytes / 8)
    assert down.seconds is not None
    assert down.seconds > 0
    assert found["state/n"].sent == {}
    apart = shardplan.resharding(old, new, argument=0, devices=(8, 9))
    assert apart.seconds is None, "no cluster has the links between both"
    grown = shardplan.resharding(new, old, argument=0)
    assert grown.seconds is not None, "the new cluster holds all devices"


def test_nothing_is_read_from_lost_devices() -> None:
    old = planned("2x4", P(None, "gpu"), P("gpu"))
    new = planned("4", P(None, "gpu"), P("gpu"))
    state = old.put((state_of(), BATCH))[0]
    lost = jax.devices()[:4]
    devices = jax.devices()[4:8]
    moved_right(shardplan.reshard(state, old, new, devices=devices, lost=lost), state, new, devices)
    spread = planned("2x4", P("node", "gpu"), P("gpu"))
    state = spread.put((state_of(), BATCH))[0]
    with pytest.raises(shardplan.ReshardError, match="state/w/up lies in part on lost devices alone: restore it"):
        shardplan.reshard(state, spread, new, devices=devices, lost=lost)


def test_pieces_come_from_the_device_itself_then_from_one_that_stays() -> None:
    held = [(d, ((0, 4),)) for d in (0, 1)] + [(d, ((4, 8),)) for d in (2, 3)]
    (own,) = pieces(held, [(1, ((0, 8),))], near={1, 3})
    assert [(p.source, p.box) for p in own] == [(1, ((0, 4),)), (3, ((4, 8),))]
    assert pieces(held[:2], [(1, ((0, 8),))], near=()) == ((),)


def test_blocks_are_those_of_jax(old: shardplan.Plan) -> None:
    mesh = old.mesh()
    numbers = {d: n for n, d in enumerate(mesh.devices.ravel().tolist())}
    side = Side(old.cluster, old.factors, tuple(range(8)))
    for argument, spec in zip(old.arguments, old.flat_in_specs, strict=True):
        index = jax.NamedSharding(mesh, spec).devices_indices_map(argument.shape)
        boxes = {numbers[d]: tuple(s.indices(n)[:2] for s, n in zip(i, argument.shape, strict=True)) for d, i in index.items()}
        assert dict(side.blocks(argument.shape, argument.layout)) == boxes


@pytest.mark.slow
def test_nnx_objects_move() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.up = nnx.Linear(16, 32, rngs=nnx.Rngs(0))
            self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(1))

    def train(model: Model, x: jax.Array) -> jax.Array:
        loss, slopes = nnx.value_and_grad(lambda m: jnp.mean(m.drop(m.up(x)) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), slopes))
        return loss

    model, x = Model(), jnp.ones((8, 16))
    old = shardplan.plan(train, model, x, cluster="2x4", pins={"model/up/kernel": P(None, "gpu")})
    new = shardplan.replan(old, "4")
    model, x = old.put((model, x))
    old.jit(train)(model, x)
    moved = shardplan.reshard(model, old, new, devices=jax.devices()[4:8])
    assert isinstance(moved, Model)
    assert moved.up.kernel.sharding.device_set == set(jax.devices()[4:8])
    np.testing.assert_array_equal(moved.up.kernel[...], model.up.kernel[...])
    whole, _ = shardplan.reshard((model, x), old, new)
    one = float(train(model, x))
    assert float(new.jit(train)(*new.put((whole, x)))) == pytest.approx(one, rel=1e-5)


def test_an_argument_is_told_by_its_tree_then_by_its_types_then_by_its_number() -> None:
    def momentum(w: Any, m: Any, x: jax.Array) -> tuple[Any, Any]:
        m = {"a": 0.9 * m["a"] + w["a"] * x.sum()}
        return {"a": w["a"] - m["a"]}, m

    args = ({"a": jnp.ones((8, 8))}, {"a": jnp.ones((8, 8))}, jnp.ones((8,)))
    old = shardplan.plan(momentum, *args, cluster="4", pins={"w/a": P("gpu"), "m/a": P("gpu")})
    new = shardplan.plan(momentum, *args, cluster="4", pins={"w/a": P("gpu"), "m/a": P(None, "gpu")})
    w, m, x = old.put(args)
    with pytest.raises(shardplan.ReshardError, match=r"may be w \(argument=0\) or m \(argument=1\), which lie differently"):
        shardplan.reshard(m, old, new)
    moved = shardplan.reshard(m, old, new, argument=1)
    assert moved["a"].sharding.spec == P(None, "gpu")
    assert shardplan.reshard(x, old, new).shape == (8,)
    assert shardplan.reshard((w, m, x), old, new)[1]["a"].sharding.spec == P(None, "gpu")


def test_what_does_not_fit_is_refused(old: shardplan.Plan) -> None:
    new = planned("4", P(), P())
    state = old.put((state_of(), BATCH))[0]
    with pytest.raises(
        shardplan.ReshardError, match=r"the state has 1 leaf \(params\).*state has 6 leaves \(key, keys, n, ...\)"
    ):
        shardplan.reshard({"params": 1.0}, old, new)
    with pytest.raises(shardplan.ReshardError, match="no argument of the step"):
        shardplan.reshard((state,), old, new)
    with pytest.raises(shardplan.ArgumentError, match=r"state/w/up is float32\[48, 32\], but the plan was made for bfloat16"):
        shardplan.reshard(state | {"w": {**state["w"], "up": jnp.ones(UP)}}, old, new)
    with pytest.raises(shardplan.ReshardError, match=r"state/n is a int: place it with plan\.put"):
        shardplan.reshard(state | {"n": 3}, old, new)
    with pytest.raises(shardplan.ReshardError, match="new is a str"):
        shardplan.reshard(state, old, "2x4")  # pyright: ignore[reportArgumentType]
    other = shardplan.plan(lambda state, x: step(state, 2 * x), state_of(), BATCH, cluster="4")
    with pytest.raises(shardplan.ReshardError, match="the plans are of different steps: they differ first at"):
        shardplan.reshard(state, old, other)
    with pytest.raises(shardplan.DeviceError, match="4 devices"):
        shardplan.reshard(state, old, new, devices=jax.devices()[:3])
    with pytest.raises(shardplan.DeviceError, match="a number for each of the 4 devices"):
        shardplan.resharding(old, new, devices=(0, 0, 1, 2))


def test_a_deleted_state_is_refused() -> None:
    old = planned("2x4", P(), P(), donate_argnums=0)
    state = old.put((state_of(), BATCH))[0]
    old.jit(step)(state, BATCH)
    state["n"].delete()
    with pytest.raises(shardplan.ShardplanError, match="was donated to an earlier call"):
        shardplan.reshard(state, old, planned("4", P(), P(), donate_argnums=0))


@pytest.mark.slow
def test_a_pipelines_state_moves_to_one_program_and_back() -> None:
    from models import mlp

    train, args = mlp.train_step(layers=4, width=16, batch=16, concrete=True)
    staged = shardplan.plan(train, *args, cluster="2x4", axes={"stage": 2}, microbatches=2)
    whole = shardplan.plan(train, *args, cluster="4")
    state, _ = staged.put(args)
    moved = shardplan.reshard(state, staged, whole)
    back = shardplan.reshard(moved, whole, staged)
    for a, b, c in zip(*map(jax.tree.leaves, (moved, back, args[0])), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(c))
        np.testing.assert_array_equal(np.asarray(b), np.asarray(c))
    assert shardplan.resharding(staged, whole, argument=0).bytes_per_device > 0
