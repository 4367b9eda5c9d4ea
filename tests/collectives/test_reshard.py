"""Programs of reshardings: each step is within its collective's reach, they lead to the target, the price is their sum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import dijkstra

from shardplan.collectives import parse, program_seconds
from shardplan.collectives.divided import best_programs
from shardplan.collectives.layouts import LayoutSpace, State
from shardplan.collectives.moves import Name, every_move
from shardplan.collectives.ranking import entries, names_of
from shardplan.collectives.reshard import Resharder
from shardplan.collectives.states import Goal
from shardplan.collectives.step import Step
from shardplan.constants import CONSTANTS
from shardplan.cost import Network
from shardplan.ir import Collective, Layout
from shardplan.mesh import Cluster, factors
from tests.machines import launchless

SHAPES = {"4": (8, 12), "2x2": (8, 4, 8), "2x4": (8, 16), "2x2x2": (8, 8), "3x2": (6, 12)}


def _network(own: Resharder) -> Network:
    assert isinstance(own.network, Network)
    return own.network


@cache
def resharder(cluster: str | Cluster) -> Resharder:
    loaded = Cluster.load(cluster)
    cut = factors(loaded)
    return Resharder(Network(loaded, cut), [f.size for f in cut])


@st.composite
def moves(draw: st.DrawFn, *, stored: bool = False) -> tuple[str, tuple[int, ...], int, int]:
    """A cluster, a shape, and two states that divide it."""
    cluster = draw(st.sampled_from(sorted(SHAPES)))
    shape = SHAPES[cluster]
    space, legal = resharder(cluster).space(shape), resharder(cluster).legal(shape, pad=False)
    states = [s for s in range(len(space)) if legal[s] and not space.state(s)[0][-1]]
    into = [s for s in states if s in space.stored] if stored else states
    return cluster, shape, draw(st.sampled_from(states)), draw(st.sampled_from(into))


def program(cluster: str, shape: tuple[int, ...], before: int, after: int, itemsize: int = 4) -> tuple[Step, ...] | None:
    """None where no program leads there: nothing becomes partial."""
    nbytes = int(np.prod(shape)) * itemsize
    prices = resharder(cluster).prices(shape, nbytes, (before,))
    return resharder(cluster).program(shape, nbytes, before, after) if np.isfinite(prices[0, after]) else None


def _held(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...], at: tuple[int, ...]) -> np.ndarray:
    """Which elements (of the tensor, flattened where a buffer dim is split) a device at these coordinates has."""
    found = np.ones(shape, bool)
    for dim, over in enumerate(layout.dims):
        block, parts = 0, 1
        for f in over:
            block, parts = block * sizes[f] + at[f], parts * sizes[f]
        if dim == len(shape):
            flat = np.zeros(found.size, bool)
            n = -(-found.size // parts)
            flat[block * n : (block + 1) * n] = True
            found &= flat.reshape(shape)
        else:
            n = shape[dim] // parts
            mine = np.zeros(shape[dim], bool)
            mine[block * n : (block + 1) * n] = True
            found &= mine.reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return found


def _group(at: tuple[int, ...], over: tuple[int, ...], sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(k) if f in over else (at[f],) for f, k in enumerate(sizes))))


def _states(factors: int, rank: int) -> Iterator[State]:
    for roles in itertools.product([*range(rank), "buffer", "none", "partial"], repeat=factors):
        split = [[f for f in range(factors) if roles[f] == d] for d in range(rank)]
        orders = (itertools.permutations(d) if factors <= CONSTANTS.ordered_factors else [tuple(d)] for d in split)
        buffer, partial = (tuple(f for f in range(factors) if roles[f] == name) for name in ("buffer", "partial"))
        yield from (((*dims, buffer), partial) for dims in itertools.product(*orders))


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [(), (4,), (2, 4), (2, 2, 2), (2, 2, 2, 2)])
def test_states_and_their_numbers(sizes: tuple[int, ...], rank: int) -> None:
    space = LayoutSpace(sizes, rank)
    every = [space.state(i) for i in range(len(space))]
    assert every == sorted(_states(len(sizes), rank))
    assert [space.number(state) for state in every] == list(range(len(space)))
    for wrong in ((((0, 0), (), ()), ()), (((0,), (), ()), (0,)), (((9,), (), ()), ()), (((), (), (), ()), (8,))):
        with pytest.raises(KeyError):
            space.number(wrong)


@settings(max_examples=300)
@given(move=moves())
def test_every_step_finds_what_it_needs_in_its_group(move: tuple[str, tuple[int, ...], int, int]) -> None:
    cluster, shape, before, after = move
    sizes = resharder(cluster).sizes
    for step in program(cluster, shape, before, after) or ():
        reduced = set(step.before.partial) - set(step.after.partial)
        if step.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            assert reduced == set(step.over)
        else:
            assert step.before.partial == step.after.partial
        assert set(step.after.partial) <= set(step.before.partial)
        for at in itertools.product(*map(range, sizes)):
            wanted = _held(step.after, shape, sizes, at)
            if step.kind in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):  # every member has a term of all of it
                for other in _group(at, step.over, sizes):
                    assert not np.any(wanted & ~_held(step.before, shape, sizes, other))
            else:
                union = np.logical_or.reduce([_held(step.before, shape, sizes, o) for o in _group(at, step.over, sizes)])
                assert not np.any(wanted & ~union), step


@settings(max_examples=200)
@given(move=moves())
def test_steps_follow_each_other_from_the_layout_to_the_target(move: tuple[str, tuple[int, ...], int, int]) -> None:
    cluster, shape, before, after = move
    space = resharder(cluster).space(shape)
    steps = program(cluster, shape, before, after)
    if steps is None:
        assert set(space.layout(after).partial) - set(space.layout(before).partial)
        return
    layouts = [space.layout(before), *(s.after for s in steps)]
    assert [s.before for s in steps] == layouts[:-1]
    assert layouts[-1] == space.layout(after)
    assert bool(steps) == (before != after)


@settings(max_examples=200)
@given(move=moves())
def test_the_price_is_the_sum_of_the_steps(move: tuple[str, tuple[int, ...], int, int]) -> None:
    cluster, shape, before, after = move
    own = resharder(cluster)
    nbytes = int(np.prod(shape)) * 4
    steps = program(cluster, shape, before, after)
    price = own.prices(shape, nbytes, (before,))[0, after]
    assert own.prices(shape, nbytes, (after,), into=True)[0, before] == pytest.approx(price, rel=1e-12)
    if steps is None:
        return
    assert price == pytest.approx(sum(s.seconds for s in steps), abs=1e-11)
    for step in steps:
        local = {k: _local(own, getattr(step, k)) for k in ("before", "after")}
        moved = nbytes * local["after" if step.kind == Collective.ALL_GATHER else "before"]
        if step.kind == Collective.SLICE:
            assert step.seconds == 0
        else:
            assert step.nbytes == pytest.approx(moved)
            itself = float(_network(own).seconds(step.kind, step.over, step.nbytes))  # type: ignore[arg-type]
            assert step.seconds < itself if step.program else step.seconds == pytest.approx(itself)
            if step.program:
                levels = names_of(_network(own), entries(_network(own), step.over))
                said = {"algorithm": "emitted", "goal": step.kind}
                assert step.seconds == pytest.approx(
                    program_seconds(_network(own), step.over, parse(step.program, levels), step.nbytes, **said)  # type: ignore[arg-type]
                )


def _local(own: Resharder, layout: Layout) -> float:
    return 1.0 / np.prod([own.sizes[f] for dim in layout.dims for f in dim], initial=1.0)


@given(move=moves(), data=st.data())
def test_a_detour_is_never_cheaper(move: tuple[str, tuple[int, ...], int, int], data: st.DataObject) -> None:
    cluster, shape, before, after = move
    own = resharder(cluster)
    prices = own.prices(shape, 4 * int(np.prod(shape)), (before,))[0]
    via = data.draw(st.sampled_from(range(len(prices))))
    rest = own.prices(shape, 4 * int(np.prod(shape)), (via,))[0, after]
    assert prices[after] <= prices[via] + rest + 1e-15


@given(move=moves())
def test_more_bytes_are_never_cheaper(move: tuple[str, tuple[int, ...], int, int]) -> None:
    cluster, shape, before, after = move
    small, large = (resharder(cluster).prices(shape, n, (before,))[0, after] for n in (4000, 8000))
    assert small <= large


@pytest.mark.parametrize("shape", [(8, 8, 8), (8, 9, 16), (8, 1, 16, 8), (4, 24), (0, 8)], ids=str)
@pytest.mark.parametrize("into", [False, True])
def test_what_differs_in_the_names_of_dims_alone_is_priced_as_if_it_did_not(shape: tuple[int, ...], into: bool) -> None:
    own = resharder("2x2x2")
    every = range(len(own.space(shape)))
    graph = own._graph(own._key(shape, 1e6, into))  # pyright: ignore[reportPrivateUsage]
    prices = own.prices(shape, 1e6, every, into=into)
    np.testing.assert_allclose(prices, dijkstra(graph), rtol=1e-12)
    for before, after in itertools.islice(zip(*np.nonzero(np.isfinite(prices)), strict=True), 0, None, 97):
        ends = (int(after), int(before)) if into else (int(before), int(after))
        steps = own.program(shape, 1e6, *ends)
        assert sum(s.seconds for s in steps) == pytest.approx(prices[before, after], abs=1e-11)


def _collectives_from(space: LayoutSpace, state: int) -> dict[int, tuple[float, Name]]:
    """For each state that one collective leads to: the part of the tensor that moves, the collective over the fewest factors."""
    best: dict[int, tuple[float, Name]] = {}
    for kind, over, layout in every_move(space.state(state), space.rank, space.sizes):
        try:
            target = space.number(layout)
        except KeyError:  # no layout, but where any order is one
            continue
        if target == state:
            continue
        moved = 0.0 if kind == Collective.SLICE else float(space.local[target if kind == Collective.ALL_GATHER else state])
        if target not in best or (len(set(over)), moved) < (len(set(best[target][1][1])), best[target][0]):
            best[target] = moved, (kind, over)
    return best


@pytest.mark.parametrize("sizes", [(2,), (2, 4), (2, 2, 2), (2, 3, 2), (2, 2, 2, 2)], ids=str)
def test_every_collective_from_a_state_is_an_edge(sizes: tuple[int, ...]) -> None:
    space = LayoutSpace(sizes, 3)
    edges = space.edges
    for s in range(len(space)):
        at = np.flatnonzero(edges.source == s)
        found = {int(edges.target[e]): (float(edges.fraction[e]), edges.names[int(edges.which[e])]) for e in at}
        assert found == _collectives_from(space, s)
    assert list(zip(edges.source, edges.target, strict=True)) == sorted(zip(edges.source, edges.target, strict=True))


def test_a_dim_is_split_in_no_more_ways_than_it_has_elements() -> None:
    """Eight rows over nine devices need padding of an eighth, but one device would have none of them."""
    own = resharder("9")
    split = own.state((8,), Layout(((0,),)))
    assert not own.legal((8,), pad=True)[split]
    assert own.legal((17,), pad=True)[split]


def test_dims_of_one_element_are_none_of_a_layout_space() -> None:
    own = resharder("2x4")
    flat, shape = (8, 16), (8, 1, 16, 1)
    assert own.space(shape) is own.space(flat)
    every = range(len(own.space(shape)))
    np.testing.assert_array_equal(own.prices(shape, 512.0, every), own.prices(flat, 512.0, every))
    for state in every:
        dims, partial = own.layout(flat, state).dims, own.layout(flat, state).partial
        layout = own.layout(shape, state)
        assert layout == Layout((dims[0], (), dims[1], (), *dims[2:]), partial)
        if len(dims) == 2:
            assert own.state(shape, layout) == own.state(flat, own.layout(flat, state)) == state
    with pytest.raises(KeyError):
        own.state(shape, Layout(((), (0,), (), ())))
    split = own.state(flat, Layout(((), (0,))))
    (step,) = own.program(shape, 512, split, own.state(flat, Layout(((), ()))))
    assert (step.before, step.after) == (Layout(((), (), (0,), ())), Layout(((), (), (), ())))


def test_only_the_minormost_factor_leaves_by_a_plain_gather() -> None:
    """On factors (n, g): P(('n', 'g')) -> P('n') is one all-gather over g; -> P('g') has no such way."""
    own = resharder("2x4")
    space = own.space((8,))
    both = space.of(Layout(((0, 1),)))
    ways = {f: [(s.kind, s.over) for s in own.program((1024,), 2**30, both, space.of(Layout(((f,),))))] for f in (0, 1)}
    assert ways[0] == [(Collective.ALL_GATHER, (1,))]
    assert ways[1] in (
        [(Collective.PERMUTE, (0, 1, 1, 0)), (Collective.ALL_GATHER, (0,))],
        [(Collective.ALL_GATHER, (0, 1)), (Collective.SLICE, ())],
    )


def test_a_large_gradient_is_reduced_in_parts() -> None:
    """Over two levels: scattered in the node, reduced between nodes, gathered in the node (P2, section 3)."""
    own = resharder("gcp-a100:4")  # one NIC a node
    space = own.space((8, 8))
    steps = own.program((4096, 4096), 2**26, space.of(Layout(((), ()), (0, 1))), space.of(Layout(((), ()))))
    assert [(s.kind, s.over) for s in steps] == [
        (Collective.REDUCE_SCATTER, (1,)),
        (Collective.ALL_REDUCE, (0,)),
        (Collective.ALL_GATHER, (1,)),
    ]


CLUSTERS = ["8x8", "2x4", "8", "2x2x2", "4x2x8", "dgx-h100:4", "gcp-a100:4", "gcp-v100:4", "gb200-nvl72:4"]


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("shape", [(), (3,), (256,), (16, 1024), (1024, 3, 16, 64), (50257, 768)])
def test_a_sum_pays_for_the_best_program_of_its_bytes(cluster: str, shape: tuple[int, ...]) -> None:
    """The way from a partial sum to the whole is the best that synthesis finds; only what its language cannot say is better."""
    own = resharder(cluster)
    nbytes = 4 * int(np.prod(shape))
    space = own.space(shape)
    whole = space.of(Layout(((),) * len(shape)))
    for over in _subsets(range(len(own.sizes))):
        steps = own.program(shape, nbytes, space.of(Layout(((),) * len(shape), over)), whole)
        price, best = sum(s.seconds for s in steps), _best(own, over, Collective.ALL_REDUCE, nbytes)
        assert price == pytest.approx(best, rel=1e-9) or (price < best and _beyond_the_language(steps, over))


@pytest.mark.parametrize("cluster", [c for c in CLUSTERS if c != "8"])
@pytest.mark.parametrize("goal", [Collective.REDUCE_SCATTER, Collective.ALL_GATHER])
def test_shards_too_are_made_and_gathered_by_the_best_program(cluster: str, goal: Goal) -> None:
    own = resharder(cluster)
    every = tuple(range(len(own.sizes)))
    shape = (int(np.prod(own.sizes)), 1024)
    space = own.space((8, 8))
    scattered, other = (
        space.of(Layout((every, ()))),
        space.of(Layout(((), ()), every if goal == Collective.REDUCE_SCATTER else ())),
    )
    ends = (other, scattered) if goal == Collective.REDUCE_SCATTER else (scattered, other)
    for nbytes in (64, 2**14, 2**20, 2**30):
        price = sum(s.seconds for s in own.program(shape, nbytes, *ends))
        best = _best(own, every, goal, nbytes)
        assert price <= best * (1 + 1e-9)
        assert price == pytest.approx(best, rel=1e-9) or _beyond_the_language(own.program(shape, nbytes, *ends), every)


def _best(own: Resharder, over: tuple[int, ...], goal: Goal, nbytes: float) -> float:
    return min(p.latency_s + p.seconds_per_byte * nbytes for p in best_programs(_network(own), over, goal))


def test_a_step_names_the_program_that_it_is_priced_as() -> None:
    own = resharder(launchless(Cluster.load("gcp-a100:4")))
    space = own.space((8,))
    (few,) = own.program((4,), 16, space.of(Layout(((),), (0, 1))), space.of(Layout(((),))))
    assert (few.kind, few.over) == (Collective.ALL_REDUCE, (0, 1))
    in_nodes = "(node.0, InsideGroup, Reduce) (node.0, Master(root), AllReduce) (node.0, InsideGroup, Broadcast)"
    assert few.program == f"node=2x2: {in_nodes}"
    _, more, _ = own.program((2**18,), 2**20, space.of(Layout(((),), (0, 1))), space.of(Layout(((),))))
    scattered = "(node.0, Parallel(root), ReduceScatter) (node.0, InsideGroup, AllReduce) (node.0, Parallel(root), AllGather)"
    assert (more.kind, more.over, more.program) == (Collective.ALL_REDUCE, (0,), f"node=2x2: {scattered}")


def test_a_tree_of_permutes_is_no_program_for_a_few_bytes_where_each_is_launched() -> None:
    for cluster, trees in ((launchless(Cluster.load("gcp-a100:4")), True), (Cluster.load("gcp-a100:4"), False)):
        own = resharder(cluster)
        space = own.space((8,))
        (step,) = own.program((4,), 16, space.of(Layout(((),), (0, 1))), space.of(Layout(((),))))
        assert (", Reduce)" in step.program) == trees


def _beyond_the_language(steps: tuple[Step, ...], over: tuple[int, ...]) -> bool:
    """Idle devices that help, permutes, groups over an outer and an inner level but none between, two levels taken apart."""
    if len(steps) > 1 and any("=" in step.program for step in steps):
        return True
    for step in steps:
        inside = [i for i, f in enumerate(over) if f in step.over]
        if (
            step.kind in (Collective.PERMUTE, Collective.ALL_TO_ALL, Collective.SLICE)
            or set(step.over) - set(over)
            or inside[-1] - inside[0] >= len(inside)
        ):
            return True
    return False


def _subsets(items: range) -> list[tuple[int, ...]]:
    return [over for n in range(1, len(items) + 1) for over in itertools.combinations(items, n)]


@pytest.mark.parametrize("level", [0, 1])
def test_half_a_levels_bandwidth_doubles_its_bandwidth_term(level: int) -> None:
    whole = Cluster.load("4x4")
    changed = [
        replace(tier, bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s / 2) if i == level else tier
        for i, tier in enumerate(whole.levels)
    ]
    half = replace(whole, levels=tuple(changed))
    for kind in (
        Collective.ALL_REDUCE,
        Collective.REDUCE_SCATTER,
        Collective.ALL_GATHER,
        Collective.ALL_TO_ALL,
        Collective.SHIFT,
    ):
        fast, slow = (Network(c, factors(c)).lines(kind, (level,)) for c in (whole, half))
        other, same = (Network(c, factors(c)).lines(kind, (1 - level,)) for c in (whole, half))
        assert np.allclose(slow[:, 1], 2 * fast[:, 1]), kind
        assert np.array_equal(slow[:, 0], fast[:, 0]), "latency is not bandwidth"
        assert np.array_equal(other, same), "the other level is left as it was"
