"""Moves between layouts on devices: every block is where its layout says, also padded ones, partial sums and other reductions."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardplan.collectives.reshard import Programs, Resharder
from shardplan.cost import Network
from shardplan.emit.stacked import partition_spec
from shardplan.emit.transfers import Transfers
from shardplan.ir import Collective, Factor, Layout, Reducer
from shardplan.mesh import Cluster
from shardplan.mesh.factoring import factors
from shardplan.schedule import Block, Move, Reblock
from shardplan.schedule.changes import single_steps
from shardplan.schedule.passes.dedupe import shared
from tests.machines import machine

SHAPES = ("8", "2x4", "2x2x2", "3x2")


class Bench:
    """A mesh of a cluster's factors, with everything that moves values over it."""

    def __init__(self, cluster: Cluster, splits: Mapping[str, Sequence[int]] | None = None) -> None:
        self.factors: tuple[Factor, ...] = factors(cluster, splits)
        self.sizes = [f.size for f in self.factors]
        self.names = [f.name for f in self.factors]
        network = Network(cluster, self.factors)
        self.resharder = Resharder(network, self.sizes)
        self.programs = Programs(self.resharder)
        self.transfers = Transfers(network, self.names, self.sizes)
        devices = np.array(jax.devices()[: math.prod(self.sizes)]).reshape(self.sizes)
        self.mesh = Mesh(devices, self.names)

    def ways(self, factors: tuple[int, ...]) -> int:
        return math.prod(self.sizes[f] for f in factors)

    def extents(self, shape: tuple[int, ...], layouts: list[Layout]) -> tuple[int, ...]:
        """The least extents that all these layouts divide."""
        result: list[int] = []
        for d, n in enumerate(shape):
            ways = math.lcm(*(self.ways(layout.dims[d]) for layout in layouts))
            result.append(-(-n // ways) * ways)
        return tuple(result)

    def padded(self, x: np.ndarray, layout: Layout, extents: tuple[int, ...], rank: int) -> np.ndarray:
        """An array whose split dims have their extents; what was added must not be read."""
        lead = x.ndim - rank
        short = [(0, 0)] * lead + [(0, extents[d] - x.shape[lead + d] if layout.dims[d] else 0) for d in range(rank)]
        return np.pad(x, short, constant_values=77)

    def moved(self, x: np.ndarray, move: Move) -> np.ndarray:
        """What a move makes of a value; ``x`` has a leading dim for each factor that it is partial over."""
        rank, before, after = len(move.shape), move.before, move.after
        given = self.padded(x, before, move.extents, rank)

        def local(block: Any) -> Any:
            block = jax.lax.squeeze(block, range(len(before.partial)))
            block = self.transfers.move(block, move)
            return jax.lax.expand_dims(block, range(len(after.partial)))

        ins, outs = partition_spec(before, self.names), partition_spec(after, self.names)
        out = np.asarray(jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=False))(given))
        return out[(slice(None),) * len(after.partial) + tuple(slice(0, n) for n in move.shape)]


@pytest.fixture(scope="module", params=SHAPES)
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(machine(f"{request.param}:slow"))


def _move(bench: Bench, shape: tuple[int, ...], before: Layout, after: Layout, reducer: Reducer = "sum") -> Move:
    steps = bench.programs.between(shape, 4 * math.prod(shape), before, after)
    every = [before, *(s.after for s in steps)]
    extents = bench.extents(shape, every)
    return Move(0, 1, 0, shape, before, after, steps, "", reducer, None, extents)


def _drawn(bench: Bench, shape: tuple[int, ...], count: int) -> list[Move]:
    """Moves between layouts drawn among those that may be met, terms in the first for some."""
    rng = random.Random(repr((bench.sizes, shape)))
    space = bench.resharder.space(shape)
    legal = bench.resharder.legal(shape, pad=True)
    stored = [s for s in space.stored if legal[s]]
    starts = [s for s in space.deferred if legal[s]]
    moves: list[Move] = []
    while len(moves) < count:
        a, b = rng.choice(starts), rng.choice(stored)
        if a != b:
            moves.append(_move(bench, shape, bench.resharder.layout(shape, a), bench.resharder.layout(shape, b)))
    return moves


@pytest.mark.parametrize(
    "shape", [(24, 1, 48), (23, 46), *(pytest.param(s, marks=pytest.mark.slow) for s in ((24,), (48, 24), (22, 16)))], ids=str
)
def test_a_moved_block_is_where_its_layout_says(bench: Bench, shape: tuple[int, ...]) -> None:
    kinds: set[str] = set()
    for number, move in enumerate(_drawn(bench, shape, 12)):
        terms = [bench.sizes[f] for f in move.before.partial]
        x = np.random.default_rng(number).integers(0, 9, (*terms, *shape)).astype(np.float32)
        kinds |= {step.kind for step in move.steps}
        expected = x.sum(axis=tuple(range(len(terms))))
        assert np.array_equal(bench.moved(x, move), expected), move
    assert len(kinds) > 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((0,), ()), ((1, 2), ())),
        (((0,), (1, 2)), ((1, 2), (0,))),
        (((1, 2), (0,)), ((0,), (1, 2))),
        (((0, 1), (2,)), ((1, 2, 0), ())),
    ],
    ids=str,
)
def test_one_factor_and_two_of_its_size_change_places(before: Any, after: Any) -> None:
    bench = Bench(machine("4x4:slow"), {"gpu": (2, 2)})
    move = _move(bench, (16, 8), Layout(before), Layout(after))
    x = np.arange(128, dtype=np.float32).reshape(16, 8)
    assert any(step.kind == Collective.PERMUTE for step in move.steps)
    assert np.array_equal(bench.moved(x, move), x), move.steps


def test_terms_of_a_sum_change_places_among_their_own() -> None:
    """A permute of a value that is still partial: no device gets a term of another one's sum."""
    bench, shape, found = Bench(machine("2x2x2:slow")), (24,), 0
    layouts = [Layout((dims,), partial) for f in range(3) for dims in ((f,),) for partial in [(g,) for g in range(3) if g != f]]
    for before, after in itertools.permutations(layouts, 2):
        if before.partial != after.partial:
            continue
        move = _move(bench, shape, before, after)
        found += any(step.kind == Collective.PERMUTE for step in move.steps)
        x = np.random.default_rng(found).integers(0, 9, (2, *shape)).astype(np.float32)
        assert np.array_equal(bench.moved(x, move), x), move.steps
    assert found > 2


def test_moves_that_begin_alike_share_their_steps() -> None:
    bench, shape = Bench(machine("2x2x2:slow")), (16,)
    new = itertools.count(3).__next__
    before, ends = Layout(((0, 1),)), (Layout(((2,),)), Layout(((),)))
    moves = [replace(_move(bench, shape, before, after), result=n) for n, after in enumerate(ends, 1)]
    single = [one for move in moves for one in single_steps(move, new)]
    assert [one.steps for one in single] == [(step,) for move in moves for step in move.steps]
    kept = shared(Block((0,), tuple(single), (1, 2))).instructions
    alike = sum(a == b for a, b in zip(moves[0].steps, moves[1].steps, strict=False))
    assert len(kept) == len(single) - alike < len(single)


@pytest.mark.parametrize("reducer", ["max", "min", "prod", "and", "or"])
def test_other_reductions_than_sums_go_the_same_way(bench: Bench, reducer: Reducer) -> None:
    shape, over = (24, 16), tuple(range(len(bench.sizes)))
    before = Layout(((), ()), over)
    for after in (Layout(((), ())), Layout((over, ())), Layout(((), over[:1]))):
        move = _move(bench, shape, before, after, reducer)
        logical = reducer in ("and", "or")
        x = np.random.default_rng(3).integers(0, 4, (*bench.sizes, *shape)).astype(np.int32 if logical else np.float32)
        combine = {"max": np.max, "min": np.min, "prod": np.prod, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce}
        assert np.array_equal(bench.moved(x, move), combine[reducer](x, axis=over)), move.steps


def test_a_buffer_is_split_beside_the_dims(bench: Bench) -> None:
    """A program that reduces over its buffer, splits dims meanwhile, and gathers the buffer: nothing is out of place."""
    found = 0
    for shape in ((24, 5), (7, 3), (48,)):
        space = bench.resharder.space(shape)
        starts = [s for s in space.deferred if space.partial[s] and bench.resharder.legal(shape, pad=True)[s]]
        for a in starts:
            for b in space.stored:
                if not bench.resharder.legal(shape, pad=True)[b]:
                    continue
                move = _move(bench, shape, bench.resharder.layout(shape, a), bench.resharder.layout(shape, b))
                if found < 6 and any(len(s.after.dims) > len(shape) for s in move.steps):
                    found += 1
                    x = np.random.default_rng(found).integers(0, 9, (*(bench.sizes[f] for f in move.before.partial), *shape))
                    expected = x.sum(axis=tuple(range(len(move.before.partial))))
                    assert np.array_equal(bench.moved(x.astype(np.float32), move), expected), move.steps
    assert found or len(bench.sizes) == 1


@pytest.mark.parametrize(("n", "old", "new"), [(30, 32, 30), (30, 30, 32), (22, 24, 32), (22, 32, 24), (17, 24, 40)])
def test_rows_are_exchanged_where_blocks_change_their_extent(n: int, old: int, new: int) -> None:
    bench = Bench(machine("2x4:slow"))
    splits = [split for split in ((1,), (0, 1), (1, 0), (0,)) if not old % bench.ways(split) and not new % bench.ways(split)]
    assert splits
    for split in splits:
        ways = bench.ways(split)
        layout = Layout((split, ()))
        reblock = Reblock(0, 1, 0, (n, 3), layout, (old, 3), 0, new, "")
        x = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
        given = np.pad(x, [(0, old - n), (0, 0)], constant_values=-1)
        spec = partition_spec(layout, bench.names)
        run = jax.shard_map(
            lambda b, reblock=reblock: bench.transfers.reblocked(b, reblock),
            mesh=bench.mesh,
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
        assert np.array_equal(np.asarray(jax.jit(run)(given))[:n], x), (split, reblock.heads(ways))


def test_pairs_of_places_and_extremes_are_reduced_together() -> None:
    """The first place of the largest over all devices, that of a NaN before any other."""
    bench = Bench(machine("2x4:slow"))
    move = _move(bench, (6,), Layout(((),), (0, 1)), Layout(((),)), "argmax")
    values = np.random.default_rng(0).normal(size=(2, 4, 6, 5)).astype(np.float32)
    values[1, 2, 3, 4] = np.nan
    places = values.argmax(axis=-1).astype(np.int32) + 5 * np.arange(8, dtype=np.int32).reshape(2, 4, 1)
    extremes = np.take_along_axis(values, values.argmax(axis=-1)[..., None], -1)[..., 0]

    def local(place: Any, extreme: Any) -> Any:
        return bench.transfers.move(place[0, 0], move, extreme[0, 0])

    spec = PartitionSpec(*bench.names)
    run = jax.shard_map(local, mesh=bench.mesh, in_specs=(spec, spec), out_specs=PartitionSpec(), check_vma=False)
    whole = jnp.asarray(values.transpose(2, 0, 1, 3).reshape(6, 40))
    assert np.array_equal(np.asarray(run(places, extremes)), np.asarray(jnp.argmax(whole, axis=-1)))


def test_keys_that_do_not_divide_are_filled_up_with_copies() -> None:
    bench = Bench(machine("8:slow"))
    keys = jax.random.split(jax.random.key(0), 23)
    whole, split = Layout(((),)), Layout(((0,),))
    move = _move(bench, (23,), whole, split)
    assert move.extents == (24,)
    ins, outs = (partition_spec(layout, bench.names) for layout in (whole, split))
    run = jax.shard_map(
        lambda block: bench.transfers.move(block, move), mesh=bench.mesh, in_specs=ins, out_specs=outs, check_vma=False
    )
    made = jax.random.key_data(jax.jit(run)(keys))
    assert made.shape[0] == 24
    assert np.array_equal(made[:23], jax.random.key_data(keys))
