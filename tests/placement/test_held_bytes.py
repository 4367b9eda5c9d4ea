"""What devices hold: sums that a hand count gives, the same after changes, and no answer beyond a device's memory."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from shardplan.errors import PlacementError, PlacementMemoryError
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.mesh import Cluster, SingleDevice
from shardplan.placement.configurations import Configuration, single
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.held_bytes import Memory, may_exceed, whole_bytes
from shardplan.placement.mcmc import ChainLimits
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.search import search, starts_of
from shardplan.placement.starts import data_parallel, random_strategy
from shardplan.placement.whole_operators import SCHEDULERS, Scheduler, scheduled
from shardplan.shell.cli import main
from tests.placement.problems import operators, problem


def _limited(model: str, **memory: int) -> PlacementProblem:
    """On 2x2 devices, of which d3 has so many bytes where ``d3=`` says so."""
    own = tuple(SingleDevice(int(name[1:]), memory_bytes=n) for name, n in memory.items())
    return problem_of(operators(model), machine_of(replace(Cluster.load("2x2"), single_devices=own)))


def test_data_parallelism_holds_every_weight_on_every_device() -> None:
    here = problem("mlp", "2x2")
    held = Memory(here, data_parallel(here)).bytes
    weights = sum(2 * math.prod(w.shape) * w.itemsize + w.state_bytes for w in here.graph.weights)
    saved = sum(nbytes for o in here.graph.operators for _, nbytes in o.saved)
    data = sum(math.prod(a.shape) * a.itemsize for a in here.graph.arguments)
    assert [a.path for a in here.graph.arguments] == ["batch/inputs", "batch/labels"]
    assert saved > 0
    assert held.tolist() == [weights + (data + saved) // 4] * 4


def test_one_device_holds_everything_and_receives_nothing() -> None:
    here = problem("gpt", "2x2")
    held = Memory(here, [Configuration((1,) * len(o.loops), (2,)) for o in here.graph.operators]).bytes
    weights = sum(2 * math.prod(w.shape) * w.itemsize + w.state_bytes for w in here.graph.weights)
    saved = sum(nbytes for o in here.graph.operators for _, nbytes in o.saved)
    data = sum(math.prod(a.shape) * a.itemsize for a in here.graph.arguments)
    assert held.tolist() == [0, 0, weights + data + saved, 0]


def test_weights_that_are_not_trained_are_held_once() -> None:
    def predict(weight: jax.Array, x: jax.Array) -> jax.Array:
        return jax.numpy.tanh(x @ weight)

    program = trace_step(predict, (jax.ShapeDtypeStruct((32, 16), "float32"), jax.ShapeDtypeStruct((8, 32), "float32"))).program
    here = problem_of(operator_graph(flatten(program), program), machine_of(Cluster.load("2")))
    over_samples, over_weight = (Memory(here, (Configuration(d, (0, 1)),)).bytes.tolist() for d in ((2, 1), (1, 2)))
    assert over_samples == [4 * (32 * 16 + 8 * 32 // 2)] * 2
    assert over_weight == [4 * (32 * 16 // 2 + 8 * 32)] * 2


def test_adam_keeps_two_moments_of_each_weight() -> None:
    for w in problem("gpt", "2x2").graph.weights:
        assert w.state_bytes == 2 * math.prod(w.shape) * w.itemsize


@pytest.mark.parametrize("model", ["mlp", "rnn", "gpt"])
def test_a_change_gives_the_sum_of_the_changed_strategy(model: str) -> None:
    here, draw = problem(model, "2x2"), np.random.default_rng(0)
    strategy, other = random_strategy(here, draw), random_strategy(here, draw)
    memory = Memory(here, strategy)
    for i in range(0, len(strategy), 1 + len(strategy) // 10):
        for at in ({i}, set(range(i, len(strategy), 3))):
            changed = tuple(other[j] if j in at else own for j, own in enumerate(strategy))
            assert memory.changed(changed, {j: strategy[j] for j in at})
            assert memory.bytes.tolist() == Memory(here, changed).bytes.tolist()
            assert memory.changed(strategy, {j: other[j] for j in at})
        assert (
            Memory(here, strategy[:i]).extended(strategy[: i + 1]).bytes.tolist()
            == Memory(here, strategy[: i + 1]).bytes.tolist()
        )


def test_no_answer_is_beyond_the_memory_of_a_device() -> None:
    roomy = _limited("mlp")
    assert not may_exceed(roomy)
    full = int(Memory(roomy, data_parallel(roomy)).bytes[3])
    here = _limited("mlp", d3=full // 2)
    assert may_exceed(here)
    on_three = tuple(Configuration((1,) * len(o.loops), (n % 3,)) for n, o in enumerate(here.graph.operators))
    starts = {"dp": data_parallel(here), "three": on_three}
    found = search(here, starts, ChainLimits(proposals=300), seed=1, workers=1, engine="python")
    assert Memory(here, found.strategy).fits
    assert not Memory(here, starts["dp"]).fits
    assert set(found.starts) == {"dp", "three"}
    assert {c.proposals for c in found.chains} == {300}
    assert len(found.chains) == 1


@pytest.mark.parametrize("method", SCHEDULERS)
def test_whole_operators_are_scheduled_within_the_memory_of_devices(method: Scheduler) -> None:
    most = max(whole_bytes(_limited("mlp")))
    here = _limited("mlp", d0=most, d1=most, d2=most, d3=most)
    assert may_exceed(here)
    strategy = scheduled(here, method)
    assert Memory(here, strategy).fits
    assert len({c.devices for c in strategy}) == 4
    with pytest.raises(PlacementError, match=f"method '{method}' places operators whole: .*mlp.py:.* holds .* largest device"):
        scheduled(_limited("mlp", d0=most // 2, d1=most // 2, d2=most // 2, d3=most // 2), method)


@pytest.mark.parametrize("model", ["mlp", "rnn", "gpt"])
def test_no_device_holds_more_than_the_sizes_of_its_whole_operators(model: str) -> None:
    here, draw = problem(model, "2x2"), np.random.default_rng(0)
    strategy = [single(o, int(draw.integers(4))) for o in here.graph.operators]
    sizes = np.bincount([c.devices[0] for c in strategy], whole_bytes(here), 4)
    assert np.all(Memory(here, strategy).bytes <= sizes)


def test_where_no_start_fits_the_error_has_the_numbers() -> None:
    here = _limited("mlp", d3=1000)
    with pytest.raises(
        PlacementMemoryError, match=r"no strategy to begin from fits in memory \(dp holds .* of 1000 bytes on device 3\)"
    ) as caught:
        search(here, starts_of(here, ("dp",), 0, None), ChainLimits(proposals=10), workers=1, engine="python")
    held = int(Memory(here, data_parallel(here)).bytes[3])
    assert caught.value.needs == {"dp": (3, held, 1000)}


def test_the_command_says_that_nothing_fits_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    cluster = Cluster.load("2x2")
    options = ["place", "models.mlp:train_step", "--cluster", str(file), "--start", "dp", "--proposals", "10"]
    file.write_text(replace(cluster, device=replace(cluster.device, memory_bytes=1000)).to_toml())
    assert main([*options, "-o", str(tmp_path / "s.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shardplan: no strategy to begin from fits in memory (dp holds ")
    assert error.count("\n") == 1
    assert not (tmp_path / "s.json").exists()
    file.write_text(cluster.to_toml())
    assert main([*options, "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["held_bytes"]
    assert len(held) == 4
    assert max(held) < cluster.device.memory_bytes
