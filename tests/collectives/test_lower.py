"""Programs run on simulated devices and give what psum gives."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardplan.collectives import Reduction, ReductionError, parse, replay, synthesize
from shardplan.collectives.dsl import Refusal, advance, groups
from shardplan.collectives.laying import Laying, check, laying_over, reorderings, smallest_part
from shardplan.collectives.lower import _step, all_reduce, collective, lay, run
from shardplan.collectives.ranking import program_seconds
from shardplan.collectives.states import StateSpace
from shardplan.cost import Network
from shardplan.errors import ClusterError
from shardplan.ir import Collective
from shardplan.mesh import Cluster, Matrix, factors, matrices
from shardplan.mesh.matrix import parse as parse_matrix

SHAPES = ((2, 8), (2, 2, 2), (4, 4), (2, 2, 4))
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute")
FIGURE_10 = "(node, InsideGroup, ReduceScatter) (node, Parallel(root), AllReduce) (node, InsideGroup, AllGather)"


def mesh_of(shape: Sequence[int], matrix: Matrix) -> Mesh:
    cluster = Cluster.load("x".join(map(str, shape)))
    order = cluster.device_order(matrix)
    names = tuple("abc"[: len(matrix.rows)])
    return Mesh(np.array(jax.devices())[order], names, axis_types=(AxisType.Auto,) * len(names))


def on(mesh: Mesh, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` on every device's row of the first dim, in the mesh's order."""
    spec = P(mesh.axis_names)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@lru_cache(maxsize=1)
def hierarchies() -> tuple[tuple[tuple[int, ...], Matrix, tuple[str, ...], Laying], ...]:
    """Each distinct way in which one or two of two or three axes lie on the levels of the shapes."""
    found: dict[object, tuple[tuple[int, ...], Matrix, tuple[str, ...], Laying]] = {}
    for shape in SHAPES:
        size = math.prod(shape)
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        for count in (2, 3):
            for axes in itertools.product(divisors, repeat=count):
                for matrix in matrices(shape, axes) if math.prod(axes) == size else ():
                    for over in (o for r in (1, 2) for o in itertools.combinations("abc"[:count], r)):
                        laying, network, mine = lay(mesh_of(shape, matrix), over, "x".join(map(str, shape)))
                        where = sorted((f.level, f.size, f.stride) for f in (network.factors[i] for i in mine))
                        found.setdefault((shape, tuple(where)), (shape, matrix, over, laying))
    return tuple(found.values())


def test_the_hierarchies_are_many():
    depths = [len(laying.shape) for *_, laying in hierarchies()]
    assert (len(depths), depths.count(3)) == (73, 5)


@pytest.mark.parametrize("part", [*range(3), *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 10))])
def test_programs_equal_psum(part: int):
    """Two hundred drawn by seed, twenty a part; integers, so exactly; sizes that do not divide."""
    draw = random.Random(part)
    for shape, matrix, over, laying in draw.sample(hierarchies(), 4):
        mesh = mesh_of(shape, matrix)
        pool = synthesize(len(laying.shape))
        drawn = draw.sample(pool, min(5, len(pool)))

        def compare(x: jax.Array, laying: Laying = laying, drawn: Sequence[Reduction] = drawn) -> Any:
            want = jax.lax.psum(x, laying.names)
            return [jnp.all(run(x[0], program, laying) == want[0])[None] for program in drawn]

        x = np.random.default_rng(part).integers(-1000, 1000, (math.prod(shape), 3, draw.randint(1, 13))).astype(np.int32)
        for program, same in zip(drawn, on(mesh, compare)(x), strict=True):
            assert np.all(same), (shape, str(matrix), over, program.text([f"l{i}" for i in range(len(laying.shape))]))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(73))
def test_every_program_equals_psum(number: int):
    """All distinct lowerings. Programs share their beginnings, so each distinct step is compiled and run once."""
    shape, matrix, _, laying = hierarchies()[number]
    mesh = mesh_of(shape, matrix)
    sizes = [smallest_part(p, laying.shape) for p in synthesize(len(laying.shape))]
    x = np.random.default_rng(0).integers(-1000, 1000, (math.prod(shape), math.lcm(*sizes))).astype(np.int32)
    want = on(mesh, lambda v: jax.lax.psum(v, laying.names))(x)

    @cache
    def compiled(step: object, order: tuple[int, ...] | None) -> Callable[..., Any]:
        def one(v: jax.Array) -> jax.Array:
            out = _step(v[0], step, laying)  # pyright: ignore[reportArgumentType]
            return (out if order is None else out.reshape(len(order), -1)[np.array(order)].ravel())[None]

        return on(mesh, one)

    @lru_cache(maxsize=4096)
    def after(steps: tuple[tuple[object, tuple[int, ...] | None], ...]) -> Any:
        return compiled(*steps[-1])(after(steps[:-1])) if steps else x

    for program in synthesize(len(laying.shape)):
        orders = reorderings(program, laying.shape)
        scale = math.lcm(*sizes) // smallest_part(program, laying.shape)
        assert scale >= 1
        got = after(tuple(zip(program.steps, orders, strict=True)))
        assert np.array_equal(got, want), program.short


def test_wrong_groups_are_refused_and_give_wrong_numbers():
    """One step left out, or two devices exchanged in the groups of one step: the semantics and the devices agree on each."""
    space, shape = StateSpace(4), (2, 2)
    laying = Laying((("a",), ("b",)), (2, 2), (((0, 2, 1),), ((1, 2, 1),)))
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    variants: list[tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]] = []
    for program in random.Random(0).sample([p for p in synthesize(2) if len(p.steps) < 5], 4):
        steps = tuple((s.collective, groups(shape, s)) for s in program.steps)
        for i, (kind, among) in enumerate(steps):
            variants.append(steps[:i] + steps[i + 1 :])
            swap = {1: 2, 2: 1}
            exchanged = tuple(tuple(swap.get(d, d) for d in g) for g in among)
            variants.append((*steps[:i], (kind, exchanged), *steps[i + 1 :]))
    judged: list[tuple[bool, Any]] = []
    for steps in variants:
        context: Any = space.initial()
        for kind, among in steps:
            context = context if isinstance(context, Refusal) else advance(space, kind, among, context)  # pyright: ignore[reportArgumentType]
        judged.append((context == space.target(), steps))

    def numbers(steps: Any) -> bool:
        def compute(v: jax.Array) -> jax.Array:
            out = v[0]
            for kind, among in steps:
                if kind == Collective.REDUCE_SCATTER and out.size % len(among[0]):
                    return jnp.zeros((1, 8), v.dtype)
                out = collective(out, kind, among, laying)
            return jnp.resize(out, (1, 8))

        got = on(mesh, compute)(x)
        return bool(np.array_equal(got, np.broadcast_to(x.sum(0), (4, 8))))

    x = np.random.default_rng(1).integers(1, 1000, (4, 8)).astype(np.int32)
    refused = [steps for right, steps in judged if not right and steps]
    assert len(refused) > 10
    for steps in refused:
        assert not numbers(steps), steps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint32", "complex64", "bool", "float64"])
def test_any_dtype(dtype: str):
    mesh = mesh_of((2, 8), parse_matrix("2 4 / 1 2"))
    raw = np.random.default_rng(0).integers(0, 3, (16, 5))
    laying = lay(mesh, ("a",), "2x8")[0]
    with jax.enable_x64(dtype == "float64"):
        x = raw.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for program in (FIGURE_10, "(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (root, InsideGroup, Broadcast)"):
            steps = parse(program, ("node", "gpu"))
            got = on(mesh, lambda v, steps=steps: run(v[0], steps, laying)[None])(x)
            want = on(mesh, lambda v: jax.lax.psum(v, "a"))(x)
            assert got.dtype == want.dtype
            assert np.array_equal(got, want)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,), (2, 0, 3)])
def test_any_shape(shape: tuple[int, ...]):
    mesh = mesh_of((2, 4), parse_matrix("2 4"))
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    got = on(mesh, lambda v: all_reduce(v[0], mesh, over="a", program=FIGURE_10, cluster="2x4")[None])(x)
    assert np.allclose(got, np.broadcast_to(x.sum(0), x.shape), atol=1e-5)


def test_sizes_that_share_no_divisor():
    """Scattered among three and among two in turn: the data divide by six."""
    mesh = Mesh(np.array(jax.devices()[:6]), ("a",), axis_types=(AxisType.Auto,))
    inside, across = "(node, InsideGroup, {})", "(node, Parallel(root), {})"
    steps = [
        inside.format("ReduceScatter"),
        inside.format("AllGather"),
        across.format("ReduceScatter"),
        across.format("AllGather"),
    ]
    x = np.random.default_rng(0).integers(-9, 9, (6, 7)).astype(np.int32)
    for shape in ("2x3", "3x2"):
        got = on(mesh, lambda v, c=shape: all_reduce(v[0], mesh, over="a", program=" ".join(steps), cluster=c)[None])(x)
        assert np.array_equal(got, np.broadcast_to(x.sum(0), x.shape))


@pytest.mark.parametrize("over", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_a_part_of_an_axis_is_reduced_in_groups_of_its_indices(over: tuple[int, ...]):
    """One axis of sixteen made of a node and two parts of its GPUs; only some of these are reduced."""
    cluster = Cluster.load("2x8")
    network = Network(cluster, factors(cluster, {"gpu": (4, 2)}))
    laying = laying_over(network, over, {"other": (), "all": (0, 1, 2)})
    mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
    x = np.random.default_rng(0).integers(-99, 99, (16, 48)).astype(np.int32)
    want = x.reshape(2, 4, 2, 48).sum(over, keepdims=True) * np.ones((2, 4, 2, 1), np.int32)
    programs = random.Random(0).sample(synthesize(len(laying.shape)), min(6, len(synthesize(len(laying.shape)))))
    for got in on(mesh, lambda v: [run(v[0], p, laying)[None] for p in programs])(x):
        assert np.array_equal(np.asarray(got).reshape(want.shape), want)


def test_all_reduce_takes_trees_and_chooses_by_size():
    mesh = mesh_of((2, 8), parse_matrix("2 4 / 1 2"))
    tree = {"w": np.ones((16, 4, 300), np.float32), "b": [np.arange(16, dtype=np.int32).reshape(16, 1)]}
    got = on(mesh, lambda t: all_reduce(t, mesh, over="a", cluster="2x8"))(tree)
    want = on(mesh, lambda t: jax.lax.psum(t, "a"))(tree)
    assert np.array_equal(got["w"], want["w"])
    assert np.array_equal(got["b"][0], want["b"][0])


def test_the_program_is_the_best_for_the_bytes():
    """Four nodes of four behind one slow NIC each: large data is scattered within the nodes first, small data is not."""
    cluster = Cluster.load("gcp-a100").resized(4, 4)
    mesh = mesh_of((4, 4), parse_matrix("4 4"))

    def kinds(n: int) -> list[bool]:
        f = on(mesh, lambda v: all_reduce(v[0], mesh, over="a", cluster=cluster)[None])
        text = f.lower(jax.ShapeDtypeStruct((16, n), np.float32)).as_text()
        return [f"stablehlo.{c}" in text for c in ("reduce_scatter", "all_reduce", "all_gather")]

    assert kinds(1 << 24) == [True, True, True]
    assert kinds(1)[0] is False


@pytest.mark.parametrize("chunks", [2, 3, 64])
def test_chunks_change_nothing_but_the_pieces(chunks: int):
    mesh = mesh_of((2, 4), parse_matrix("2 4"))
    x = np.random.default_rng(0).integers(-9, 9, (8, 101)).astype(np.int32)
    f = on(mesh, lambda v: all_reduce(v[0], mesh, over="a", program=FIGURE_10, cluster="2x4", chunks=chunks)[None])
    assert np.array_equal(f(x), np.broadcast_to(x.sum(0), x.shape))
    scatters = f.lower(x).as_text().count("stablehlo.reduce_scatter")
    assert scatters == min(chunks, 101 // 4)


def test_steps_are_collectives_over_their_axes():
    """Whole axes need no groups of indices; two all-reduces in a row have a barrier between them."""
    mesh = mesh_of((2, 4), parse_matrix("2 1 / 1 4"))
    x = np.ones((8, 16), np.float32)

    def text(program: str) -> str:
        f = on(mesh, lambda v: all_reduce(v[0], mesh, over=("a", "b"), program=program, cluster="2x4")[None])
        return f.lower(x).as_text()

    hlo = text(FIGURE_10)
    assert [hlo.count(f"stablehlo.{c}") for c in ("reduce_scatter", "all_reduce", "all_gather")] == [1, 1, 1]
    twice = text("(node, InsideGroup, AllReduce) (node, Parallel(root), AllReduce)")
    assert twice.count("stablehlo.all_reduce") == 2
    assert twice.count("optimization_barrier") == 1


@pytest.mark.parametrize("shape", [(2, 4), (2, 2, 2)])
def test_a_price_counts_a_launch_for_every_instruction(shape: tuple[int, ...]):
    """With links that cost nothing, the price of a program is the number of collectives that it becomes."""
    cluster = Cluster.load("x".join(map(str, shape)))
    levels = tuple(replace(level, bandwidth_bytes_per_s=1e30, latency_s=0.0) for level in cluster.levels)
    free = replace(cluster, levels=levels, device=replace(cluster.device, collective_launch_s=1.0))
    network, over = Network(free, factors(free)), tuple(range(len(shape)))
    mesh = mesh_of(shape, Matrix((shape,)))
    laying, *_ = lay(mesh, ("a",), cluster)
    for program in synthesize(len(shape), 3)[:24]:
        f = on(mesh, lambda v, program=program: run(v[0], program, laying)[None])
        text = f.lower(np.ones((8, 8), np.float32)).as_text()
        emitted = sum(text.count(f"stablehlo.{c}") for c in COLLECTIVES)
        price = program_seconds(network, over, program, 8.0, algorithm="emitted")
        assert price == pytest.approx(emitted, abs=1e-9), program.text(cluster.level_names)


def test_what_cannot_run_is_refused():
    mesh = mesh_of((2, 4), parse_matrix("2 2 / 1 2"))
    x = np.ones((8, 4), np.float32)
    with pytest.raises(ReductionError, match=r"the mesh has no axis 'aa' \(nearest: a\): its axes are a, b"):
        on(mesh, lambda v: all_reduce(v, mesh, over="aa", cluster="2x4"))(x)
    with pytest.raises(ClusterError, match="the mesh has 8 devices, the cluster '4x4' has 16"):
        on(mesh, lambda v: all_reduce(v, mesh, over="a", cluster="4x4"))(x)
    wrong = "(node, InsideGroup, AllReduce) (root, InsideGroup, AllReduce)"
    with pytest.raises(ReductionError, match=r"step 2, .*reduced twice"):
        on(mesh, lambda v: all_reduce(v, mesh, over="a", program=wrong, cluster="2x4"))(x)
    with pytest.raises(ReductionError, match="all_reduce over 'a' outside of a shard_map over it: call it in"):
        all_reduce(x, mesh, over="a", cluster="2x4")
    with pytest.raises(ReductionError, match="with its devices, not an AbstractMesh"):
        all_reduce(x, mesh.abstract_mesh, over="a", cluster="2x4")  # type: ignore[arg-type]
    with pytest.raises(ReductionError, match="no level 'rack'"):
        on(mesh, lambda v: all_reduce(v, mesh, over="a", program="(rack, InsideGroup, AllReduce)", cluster="2x4"))(x)


def test_no_synthesized_program_needs_what_the_lowering_loses():
    for depth, size in ((1, 5), (2, 5), (3, 5)):
        for program in synthesize(depth, size):
            check(program, (2,) * depth)
    replay(parse(FIGURE_10, ("node", "gpu")), (3, 2))


def test_a_detected_machine_serves_as_well():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = np.arange(8, dtype=np.float32).reshape(8, 1)
    got = on(mesh, lambda v: all_reduce(v, mesh, over=("b", "a")))(x)
    assert np.all(np.asarray(got) == 28)


TREES = "(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (node, InsideGroup, Broadcast)"


@pytest.mark.parametrize("program", ["auto", FIGURE_10, TREES])
def test_gradients_and_batches_go_through_as_through_psum(program: str):
    mesh = mesh_of((2, 4), parse_matrix("2 1 / 1 4"))
    x, w = np.arange(8 * 3 * 5, dtype=np.float32).reshape(8, 3, 5), np.arange(5, dtype=np.float32) + 1

    def ours(v: jax.Array) -> jax.Array:
        return all_reduce(v, mesh, over=("a", "b"), program=program, cluster="2x4")

    def both(f: Callable[[Callable[[jax.Array], jax.Array]], Any]) -> tuple[Any, Any]:
        return f(ours), f(lambda v: jax.lax.psum(v, ("a", "b")))

    def outside(reduce: Callable[[jax.Array], jax.Array]) -> Any:
        mapped = jax.shard_map(
            lambda w, x: reduce((w * x[0]) ** 2)[None],
            mesh=mesh,
            in_specs=(P(), P(("a", "b"))),
            out_specs=P(("a", "b")),
            check_vma=False,
        )
        return jax.jit(jax.grad(lambda w: mapped(w, x)[0].sum()))(w)

    def inside(reduce: Callable[[jax.Array], jax.Array]) -> Any:
        return on(mesh, lambda x: reduce(jax.grad(lambda w: ((w * x[0]) ** 2).sum())(jnp.asarray(w)))[None])(x)

    def batched(reduce: Callable[[jax.Array], jax.Array]) -> Any:
        return on(mesh, lambda x: jax.vmap(reduce)(x[0])[None])(x)

    for f in (outside, inside, batched):
        np.testing.assert_allclose(*both(f), rtol=1e-6)


def test_explicit_axes_and_axes_that_are_not_reduced():
    mesh = jax.make_mesh((2, 4, 2), ("a", "b", "c"))  # Explicit
    x = np.arange(16 * 3, dtype=np.int32).reshape(2, 4, 2, 3)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("a", "b", "c")))
    for over, axes in (("b", (1,)), (("a", "c"), (0, 2)), (("c", "b", "a"), (0, 1, 2))):
        reduced = jax.shard_map(
            lambda v, over=over: all_reduce(v, mesh, over=over, cluster="2x8"),
            mesh=mesh, in_specs=P("a", "b", "c"), out_specs=P("a", "b", "c"), check_vma=False,
        )  # fmt: skip
        assert np.array_equal(jax.jit(reduced)(placed), np.broadcast_to(x.sum(axes, keepdims=True), x.shape))


def test_numbers_are_summed_as_psum_sums_them():
    mesh = mesh_of((2, 4), parse_matrix("2 4"))
    x = np.zeros((8, 1), np.float32)
    assert np.all(np.asarray(on(mesh, lambda v: v + all_reduce(1.5, mesh, over="a", cluster="2x4"))(x)) == 12)
    empty = on(mesh, lambda v: all_reduce(v[:0] > 0, mesh, over="a", cluster="2x4"))(x)
    assert empty.dtype == np.int32


FLAT_TREE = "(root, InsideGroup, Reduce) (root, InsideGroup, Broadcast)"


def test_a_mesh_that_is_not_the_one_around_is_refused():
    def mesh(sizes: tuple[int, int], names: tuple[str, str]) -> Mesh:
        return Mesh(np.array(jax.devices()[:8]).reshape(sizes), names, axis_types=(AxisType.Auto,) * 2)

    around, x = mesh((2, 4), ("data", "model")), np.arange(80, dtype=np.int32)
    cases = (
        (
            mesh((4, 2), ("data", "model")),
            "model",
            "the axis 'model' has size 2 in the mesh given to all_reduce, 4 in the shard_map",
        ),
        (
            mesh((8, 1), ("data", "model")),
            "model",
            "the axis 'model' has size 1 in the mesh given to all_reduce, 4 in the shard_map",
        ),
        (mesh((4, 2), ("model", "data")), ("data", "model"), "in the order model, data, the shard_map around it data, model"),
    )
    for other, over, message in cases:
        with pytest.raises(ReductionError, match=message):
            on(around, lambda v, m=other, o=over: all_reduce(v, m, over=o, program=FLAT_TREE, cluster="8x1"))(x)


def test_an_axis_of_one_device_is_summed_as_psum_sums_it():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(4, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    x = np.array([True, False, True, True])
    got, want = on(mesh, lambda v: (all_reduce(v, mesh, over="b", cluster="1x4"), jax.lax.psum(v, "b")))(x)
    assert (got.dtype, got.tolist()) == (want.dtype, want.tolist())
    with pytest.raises(ReductionError, match="all_reduce over 'b' outside of a shard_map"):
        all_reduce(x, mesh, over="b", cluster="1x4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"program": None}, "unsupported program=None: give 'auto'"),
        ({"program": ["AllReduce"]}, r"unsupported program=\['AllReduce'\]: give 'auto'"),
        ({"over": None}, "over=None names no mesh axes: give a name like 'data'"),
        ({"over": (0,)}, r"over=\(0,\) names no mesh axes"),
        ({"over": ("a", "a")}, r"names the axis 'a' twice: once is enough"),
        ({"cluster": 5}, "unsupported cluster=5: give a preset"),
        ({"cluster": ["2x4"]}, r"unsupported cluster=\['2x4'\]: give a preset"),
        ({"chunks": 1.5}, "unsupported chunks=1.5: give a whole number of at least 1"),
        ({"chunks": "2"}, "unsupported chunks='2': give a whole number"),
        ({"chunks": 0}, "unsupported chunks=0: give a whole number"),
        ({"chunks": True}, "unsupported chunks=True: give a whole number"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str):
    mesh = mesh_of((2, 4), parse_matrix("2 4"))
    given: dict[str, Any] = {"over": "a", "cluster": "2x4"} | options
    with pytest.raises(ReductionError, match=message):
        on(mesh, lambda v: all_reduce(v, mesh, **given))(np.ones((8, 4), np.float32))


def test_a_mesh_is_a_cluster_of_its_devices():
    mesh = mesh_of((2, 4), parse_matrix("2 4"))
    got = on(mesh, lambda v: all_reduce(v, mesh, over="a", cluster=mesh))(np.arange(8, dtype=np.int32))
    assert np.all(np.asarray(got) == 28)
