"""Programs over a level that is taken apart: the least of all, priced alike however the level is cut, and right on devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardplan.collectives import table
from shardplan.collectives.divided import Division, best_programs, divisions, hierarchy, read
from shardplan.collectives.dsl import ReductionError
from shardplan.collectives.states import Goal
from shardplan.collectives.step import Step
from shardplan.cost import Network
from shardplan.emit.transfers import Transfers
from shardplan.ir import Collective, Layout
from shardplan.mesh import Cluster, factors

SIZES = np.logspace(0, 10, 21)
GOALS: tuple[Goal, ...] = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER)


def network(cluster: str, splits: dict[str, tuple[int, ...]] | None = None) -> Network:
    loaded = Cluster.load(cluster)
    return Network(loaded, factors(loaded, splits))


def least(net: Network, over: Sequence[int], goal: Goal, nbytes: float) -> float:
    best = best_programs(net, over, goal)
    return min(p.latency_s + p.seconds_per_byte * nbytes for p in best)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("cluster", ["16", "12", "3x8", "gcp-a100:4", "gb200-nvl72:1"])
def test_the_best_is_the_least_of_all_programs_over_all_divisions(cluster: str, goal: Goal) -> None:
    whole = network(cluster)
    every = tuple(range(len(whole.factors)))
    tables = [table(whole, every, algorithm="emitted", goal=goal)]
    for level in whole.cluster.levels:
        for a in (a for a in range(2, level.size) if level.size % a == 0):
            fine = network(cluster, {level.name: (a, level.size // a)})
            each = tuple((i,) for i in range(len(fine.factors)))
            tables.append(table(fine, range(len(each)), algorithm="emitted", goal=goal, levels=each))
    for nbytes in SIZES:
        assert least(whole, every, goal, nbytes) == pytest.approx(min(t.best(nbytes)[0] for t in tables), rel=1e-12)


def test_many_devices_on_a_switch_are_worth_taking_apart_for_few_bytes() -> None:
    few, *_, many = best_programs(network("gb200-nvl72:1"), (0,))
    assert few.text in (f"gpu={a}: (gpu.0, Parallel(root), AllReduce) (gpu.0, InsideGroup, AllReduce)" for a in ("8x9", "9x8"))
    assert many.seconds_per_byte <= network("gb200-nvl72:1").lines(Collective.ALL_REDUCE, (0,))[:, 1].min()
    assert {p.text for p in best_programs(network("8"), (0,))} == {"(root, InsideGroup, AllReduce)"}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("parts", [(4, 4), (2, 8), (2, 2, 4), (2, 2, 2, 2)])
def test_how_the_level_is_cut_changes_neither_programs_nor_prices(parts: tuple[int, ...], goal: Goal) -> None:
    for cluster, over_node in (("gcp-a100:4", True), ("gcp-a100:4", False), ("16", False)):
        whole, cut = network(cluster), network(cluster, {"gpu": parts})
        first = len(whole.factors) - 1
        node = tuple(range(first)) if over_node else ()
        own = best_programs(whole, (*node, first), goal)
        assert best_programs(cut, (*node, *range(first, len(cut.factors))), goal) == own


def test_a_division_may_cut_through_factors_that_lie_side_by_side() -> None:
    cut = network("12", {"gpu": (6, 2)})
    of = hierarchy(cut, (0, 1), Division("gpu", 4, 3))
    assert (of.laying(("gpu0", "gpu1")).shape, of.names) == ((4, 3), ("gpu.0", "gpu.1"))
    assert of.laying(("gpu0", "gpu1")).positions() == list(range(12))


def test_factors_apart_allow_the_divisions_that_none_of_them_forbids() -> None:
    cut = network("24", {"gpu": (6, 2, 2)})
    assert divisions(cut, (0, 2)) == [Division("gpu", a, 12 // a) for a in (2, 3, 6)]
    for a in (2, 3, 6):
        laying = hierarchy(cut, (0, 2), Division("gpu", a, 12 // a)).laying(("gpu0", "gpu1", "gpu2"))
        assert laying.names == ("gpu0", "gpu2")
        assert laying.shape == (a, 12 // a)
        assert laying.positions() == list(range(12))


@pytest.mark.parametrize("text", ["gpu=4x3: ", "gpu=2x4: ", "node=2x6: ", "rack=2x2: ", "gpu=12x1: ", "gpu=1x12: "])
def test_a_division_that_does_not_fit_is_refused(text: str) -> None:
    with pytest.raises(ReductionError, match="does not take apart"):
        read(network("24", {"gpu": (6, 2, 2)}), (0, 2), f"{text}(gpu.0, Parallel(root), AllReduce)")


CUTS = [
    ("2x8", (2, 2, 2), (0, 3, 1)),
    *[
        pytest.param(*cut, marks=pytest.mark.slow)
        for cut in (
            ("12", (6, 2), (1, 0)),
            ("12", (12,), (0,)),
            ("12", (2, 3, 2), (0, 2)),
            ("2x6", (6,), (1, 0)),
            ("2x8", (4, 2), (1, 2)),
        )
    ],
]


@pytest.mark.parametrize("kind", GOALS)
@pytest.mark.parametrize(("cluster", "parts", "over"), CUTS, ids=str)
def test_programs_over_divisions_give_what_the_collective_gives(
    cluster: str, parts: tuple[int, ...], over: tuple[int, ...], kind: Goal
) -> None:
    net = network(cluster, {"gpu": parts})
    sizes = [f.size for f in net.factors]
    mesh = Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), net.names)
    transfers, plain = Transfers(net, net.names, sizes), Step(kind, over, 0.0, Layout(()), Layout(()), 0.0)
    x = np.random.default_rng(0).integers(-99, 99, (math.prod(sizes), 3, 24)).astype(np.int32)

    def local(block: Any, step: Step) -> Any:
        match kind:
            case Collective.ALL_REDUCE:
                return transfers.all_reduce(block, step, "sum", None)
            case Collective.ALL_GATHER:
                return transfers.gather(block, step, over, 2)
            case Collective.REDUCE_SCATTER:
                return transfers.reduce_scatter(block, step, over, "sum", 2)

    def of(program: str) -> Any:
        step = Step(kind, over, 0.0, plain.before, plain.after, 0.0, program)
        spec = PartitionSpec(net.names)
        one = jax.shard_map(lambda v: local(v, step), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return np.asarray(jax.jit(one)(x))

    want = of("")
    found = [(f"{division}: ", hierarchy(net, over, division)) for division in divisions(net, over)]
    assert found
    for prefix, levels in found:
        programs = table(levels.network, range(len(levels.network.factors)), algorithm="emitted", goal=kind, levels=levels.levels)
        for program in programs.programs[:: max(1, len(programs.programs) // 4)]:
            text = prefix + program.text(levels.names)
            assert np.array_equal(of(text), want), text
