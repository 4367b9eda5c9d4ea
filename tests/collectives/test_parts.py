"""A level that is taken apart costs what it costs whole, wherever it is treated as a whole."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardplan.collectives.parts import in_runs, open_seams, runs, seams
from shardplan.collectives.reshard import Resharder
from shardplan.cost import Network, WireBytes
from shardplan.ir import Collective, Factor
from shardplan.mesh import Cluster, factors
from tests.machines import machine

CASES = [
    ("8", {"gpu": (2, 4)}),
    ("8", {"gpu": (4, 2)}),
    ("8", {"gpu": (2, 2, 2)}),
    ("12", {"gpu": (3, 4)}),
    ("2x8", {"gpu": (2, 4)}),
    ("2x8", {"gpu": (2, 2, 2)}),
    ("4x4", {"node": (2, 2), "gpu": (2, 2)}),
    ("2x4:slow", {"gpu": (2, 2)}),
    ("ec2-p2.8xlarge", {"gpu": (2, 2, 2)}),
]
SHAPES = [(64,), (16, 48), (12, 7), (24, 16, 40)]


def resharder(cluster: Cluster, parts: tuple[Factor, ...], unit: str = "s") -> Resharder:
    network = Network(cluster, parts) if unit == "s" else WireBytes(cluster, parts)
    return Resharder(network, [f.size for f in parts])


def loaded(name: str) -> Cluster:
    return Cluster.load(machine(name))


@pytest.mark.parametrize("unit", ["s", "bytes"])
@pytest.mark.parametrize(("name", "split"), CASES, ids=str)
def test_what_treats_a_level_as_a_whole_is_priced_as_over_whole_levels(
    name: str, split: dict[str, tuple[int, ...]], unit: str
) -> None:
    cluster = loaded(name)
    names = {level.name for level in cluster.levels}
    split = {level: sizes for level, sizes in split.items() if level in names} or {cluster.levels[-1].name: (2, 2, 2)}
    whole, fine = resharder(cluster, factors(cluster), unit), resharder(cluster, factors(cluster, split), unit)
    of = runs(len(fine.sizes), frozenset(seams(fine.network.factors)))
    assert [math.prod(fine.sizes[f] for f in run) for run in of] == list(whole.sizes)
    for shape in SHAPES:
        nbytes = 4 * math.prod(shape) * 1000
        space, over = fine.space(shape), whole.space(shape)
        at = in_runs(space, over, of)
        alike = np.flatnonzero(at >= 0)
        assert set(at[alike].tolist()) == set(range(len(over)))
        for into in (False, True):
            mine = fine.prices(shape, nbytes, alike.tolist(), into=into)[:, alike]
            theirs = whole.prices(shape, nbytes, at[alike].tolist(), into=into)[:, at[alike]]
            np.testing.assert_array_equal(mine, theirs)
    for kind in (
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.SHIFT,
    ):
        for g, run in enumerate(of):
            assert fine.seconds(kind, run, 1e6) == whole.seconds(kind, (g,), 1e6)
    for g, h in itertools.permutations(range(len(of)), 2):
        turned = (*of[g], *of[h], *of[h], *of[g])
        assert fine.seconds(Collective.PERMUTE, turned, 1e6) == whole.seconds(Collective.PERMUTE, (g, h, h, g), 1e6)


@pytest.mark.parametrize(("name", "split"), CASES[2:3] + CASES[4:7], ids=str)
def test_programs_take_the_seconds_that_they_are_priced_at(name: str, split: dict[str, tuple[int, ...]]) -> None:
    cluster = loaded(name)
    fine = resharder(cluster, factors(cluster, split))
    shape, nbytes = (16, 48), 4 * 16 * 48 * 100
    space, draw = fine.space(shape), np.random.default_rng(0)
    legal = np.flatnonzero(fine.legal(shape, pad=True))
    open_ = open_seams(space, seams(fine.network.factors))
    seen: set[int] = set()
    for before, after in draw.choice(legal, (400, 2)).tolist():
        price = float(fine.prices(shape, nbytes, (before,))[0, after])
        if not np.isfinite(price):
            continue
        steps = fine.program(shape, nbytes, before, after)
        assert sum(s.seconds for s in steps) == pytest.approx(price, rel=1e-6, abs=1e-10)
        assert sum(fine.seconds(s.kind, s.over, s.nbytes) for s in steps if s.kind != Collective.SLICE) == pytest.approx(
            price, rel=1e-6, abs=1e-10
        )
        if steps:
            assert fine.state(shape, steps[0].before) == before or len(steps[0].before.dims) > 2
            assert all(a.after == b.before for a, b in itertools.pairwise(steps))
        seen.add(int(open_[before] | open_[after]))
    assert len(seen) > 1


def test_levels_in_any_order_where_a_level_has_parts() -> None:
    cluster = loaded("2x8")
    fine = resharder(cluster, factors(cluster, {"gpu": (2, 2, 2)}))
    space = fine.space((64,))
    assert space.state(space.number((((1, 2, 3, 0), ()), ())))[0][0] == (1, 2, 3, 0)
    with pytest.raises(KeyError):
        space.number((((1, 0, 2), ()), ()))
