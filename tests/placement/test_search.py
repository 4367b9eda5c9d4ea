"""Searches: starts, chains, the answer beside its starts, and strategy files."""

from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardplan.constants import CONSTANTS
from shardplan.errors import PlacementError
from shardplan.mesh.singles import SingleDevice
from shardplan.placement.chains import _begun, run_all, tasks_of
from shardplan.placement.configurations import Configuration, Strategy
from shardplan.placement.device_topology import machine_of
from shardplan.placement.mcmc import ChainLimits, Present, anneal, propose, related_of
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.search import check_limits, check_names, search, starts_of
from shardplan.placement.starts import data_parallel, expert, random_strategy
from shardplan.placement.strategy_files import fingerprint, read_strategy, strategy_json
from tests.placement.problems import problem

CASES = [("mlp", "flexflow-p100:1"), ("gpt", "2x2"), ("rnn", "flexflow-k80:1"), ("wresnet", "2x2")]


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_every_start_fits_the_problem(model: str, cluster: str) -> None:
    here = problem(model, cluster)
    for name, strategy in starts_of(here, ("dp", "expert", "random"), 0, None).items():
        here.check(strategy, name)


def test_data_parallelism_cuts_samples_alone() -> None:
    for operator, chosen in zip(problem("gpt", "2x2").graph.operators, data_parallel(problem("gpt", "2x2")), strict=True):
        kinds = {loop.kind for loop, k in zip(operator.loops, chosen.degrees, strict=True) if k > 1}
        assert kinds == {"S"}
        assert chosen.devices == (0, 1, 2, 3)


def test_experts_place_the_layers_of_a_recurrence_on_devices_of_a_node() -> None:
    """Wu et al. 2016, as FlexFlow, section 8.1.1 has it: data parallel over nodes, a layer on each GPU inside."""
    here = problem("rnn", "flexflow-k80:2")
    strategy = expert(here)
    used = {c.devices for c in strategy}
    assert all(len(devices) == 2 and devices[1] == devices[0] + 4 for devices in used)
    assert len(used) == 3  # embedding, one layer, softmax


def test_experts_cut_the_dense_layers_of_a_convolutional_network_over_parameters() -> None:
    here = problem("wresnet", "2x2")
    cut = {
        o.name: [x.kind for x, k in zip(o.loops, c.degrees, strict=True) if k > 1]
        for o, c in zip(here.graph.operators, expert(here), strict=True)
    }
    dense = [name for name in cut if name.startswith("head")]
    assert dense
    assert all(cut[name] == ["P"] for name in dense)
    assert cut["stem/kernel"] == ["S"]


@pytest.mark.parametrize(("model", "cluster"), CASES[:3])
def test_the_answer_is_never_worse_than_a_start(model: str, cluster: str) -> None:
    here = problem(model, cluster)
    starts = starts_of(here, ("dp", "expert", "random"), 0, None)
    found = search(here, starts, ChainLimits(proposals=40), seed=1, workers=1, engine="python")
    assert found.seconds <= min(found.starts.values())
    assert found.seconds == here.seconds(found.strategy, "python")
    assert found.proposals == 3 * 40


def test_a_start_from_which_no_chain_begins_counts_too() -> None:
    here = problem("mlp", "2x2")
    strategies = [random_strategy(here, np.random.default_rng(seed)) for seed in range(4)]
    worst, *_, best = sorted(strategies, key=here.seconds, reverse=True)
    found = search(here, {"worst": worst, "best": best}, ChainLimits(proposals=1), chains=1, workers=1, engine="python")
    assert found.starts["best"] < found.starts["worst"]
    assert (found.origin, found.seconds) == ("best", found.starts["best"])


def test_equal_seeds_give_equal_chains() -> None:
    here = problem("rnn", "2x2")
    first, second = (
        anneal(here, data_parallel(here), np.random.default_rng(3), ChainLimits(proposals=60), engine="python") for _ in range(2)
    )
    assert first.strategy == second.strategy
    assert (first.proposals, first.simulated, first.accepted) == (second.proposals, second.simulated, second.accepted)


def test_the_bounds_change_no_decision() -> None:
    """A chain whose simulations never end early accepts the same proposals."""
    here = problem("rnn", "2x2")
    chain = anneal(here, data_parallel(here), np.random.default_rng(5), ChainLimits(proposals=80), engine="python")
    assert chain.strategy == _plain_chain(here, np.random.default_rng(5), 80)


def _plain_chain(here: PlacementProblem, draw: np.random.Generator, proposals: int) -> Strategy:
    """The same walk by full simulations alone (FlexFlow, section 6)."""
    simulation, related = here.simulation("python"), related_of(here)
    strategy = list(data_parallel(here))
    cost = best = simulation.full(strategy)
    best_strategy = tuple(strategy)
    for _ in range(proposals):
        changed = propose(Present(here, strategy, related, draw))
        slack = -math.log(1.0 - draw.random()) / (CONSTANTS.beta * len(strategy))
        proposed = [changed.get(i, own) for i, own in enumerate(strategy)]
        if proposed == strategy:
            continue
        ticks = simulation.full(proposed)
        if ticks <= cost + int(cost * slack):
            strategy, cost = proposed, ticks
            if cost < best:
                best, best_strategy = cost, tuple(strategy)
    return best_strategy


def test_chains_in_processes_are_those_in_this_one() -> None:
    here = problem("mlp", "2x2")
    starts = starts_of(here, ("dp", "random"), 0, None)
    tasks = tasks_of(here, starts, ChainLimits(proposals=30), chains=2, seed=0, workers=2, engine="python")
    apart, here_alone = run_all(tasks, workers=2), run_all(tasks, workers=1)
    assert {n: c.strategy for n, c in apart.items()} == {n: c.strategy for n, c in here_alone.items()}
    assert sorted(apart) == [0, 1]


def test_an_interrupt_ends_a_chain_with_the_best_so_far() -> None:
    here = problem("rnn", "2x2")
    told: list[float] = []

    def observer(seconds: float, _: float) -> None:
        told.append(seconds)
        if len(told) == 2:
            raise KeyboardInterrupt

    tasks = tasks_of(
        here, starts_of(here, ("dp", "random"), 0, None), ChainLimits(), chains=2, seed=0, workers=1, engine="python"
    )
    found = run_all(tasks, workers=1, observer=observer)
    assert sorted(found) == [0], "no other chain begins"
    assert found[0].interrupted
    assert found[0].seconds == told[-1] == here.seconds(found[0].strategy)


def test_an_interrupted_process_that_is_starting_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    here = problem("mlp", "2")
    tasks = tasks_of(here, starts_of(here, ("dp",), 0, None), ChainLimits(), chains=1, seed=0, workers=1, engine="python")
    with _begun(tasks) as process:
        time.sleep(0.3)  # it imports for longer than this
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert capfd.readouterr().err == ""


def test_an_interrupt_ends_the_chains_of_processes_with_the_best_so_far() -> None:
    here = problem("rnn", "2x2")

    def observer(*_: float) -> None:
        raise KeyboardInterrupt

    starts = starts_of(here, ("dp", "random"), 0, None)
    found = search(here, starts, ChainLimits(), workers=2, observer=observer, engine="python")
    assert found.interrupted
    assert all(c.interrupted for c in found.chains)
    assert found.seconds == here.seconds(found.strategy) <= min(found.starts.values())


def test_processes_tell_of_each_improvement() -> None:
    here = problem("mlp", "2x2")
    starts = starts_of(here, ("dp", "random"), 0, None)
    told: list[tuple[float, float]] = []
    tasks = tasks_of(here, starts, ChainLimits(proposals=200), chains=3, seed=0, workers=2, engine="python")
    found = run_all(tasks, workers=2, observer=lambda seconds, done: told.append((seconds, done)))
    assert len(told) == sum(len(c.history) for c in found.values())  # a history begins with the start, and a chain ends once
    assert [seconds for seconds, _ in told] == sorted((s for s, _ in told), reverse=True)
    assert told[-1] == (min(c.seconds for c in found.values()), 1.0)
    assert len(told) > 3


def test_a_process_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    here = problem("mlp", "2x2")
    monkeypatch.setattr("shardplan.placement.chains.sys.executable", "/bin/false")
    with pytest.raises(PlacementError, match="ended early: run the search with --chains 1"):
        search(here, {"dp": data_parallel(here)}, ChainLimits(proposals=1), chains=2, workers=2)


def test_the_stop_rule_ends_a_chain_that_no_longer_improves() -> None:
    here = problem("mlp", "2")
    chain = anneal(here, data_parallel(here), np.random.default_rng(0), ChainLimits(), engine="python")
    assert chain.proposals >= 1000
    assert chain.proposals == max(1000, 2 * chain.history[-1][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0}, "budget_s is 0: give a finite number of seconds above 0"),
        ({"budget_s": float("inf")}, "budget_s is inf: give a finite number"),
        ({"budget_s": -1.0}, "above 0"),
        ({"chains": 0}, "chains is 0: give a whole number of at least 1"),
        ({"proposals": 1.5}, "proposals is 1.5: give a whole number of at least 1"),
        ({"seed": -1}, "seed is -1: give a whole number of at least 0"),
    ],
)
def test_what_leaves_nothing_to_search_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        check_limits(**{"budget_s": 1.0, **options})


def test_starts_are_known_names_or_files() -> None:
    check_names((), ("s.json",))
    with pytest.raises(PlacementError, match="no start 'best': use some of dp, expert, random, plan"):
        check_names(("dp", "best"), ("s.json",))
    with pytest.raises(PlacementError, match="no start is given"):
        check_names(())


def test_a_strategy_file_gives_the_strategy_back() -> None:
    here = problem("gpt", "2x2")
    strategy = random_strategy(here, np.random.default_rng(0))
    text = json.dumps(strategy_json(here, strategy, 1.0))
    assert read_strategy(text, here, "s.json") == strategy


def test_a_strategy_of_another_step_or_cluster_is_refused() -> None:
    here = problem("mlp", "2x2")
    values = strategy_json(here, data_parallel(here), 1.0)
    with pytest.raises(PlacementError, match=r"s\.json is a strategy of another step"):
        read_strategy(json.dumps(values), problem("gpt", "2x2"), "s.json")
    with pytest.raises(PlacementError, match=r"s\.json is a strategy for the cluster .*, not for"):
        read_strategy(json.dumps(values), problem("mlp", "flexflow-p100:1"), "s.json")
    for text in ("{", "[" * 100_000, "9" * 5_000):
        with pytest.raises(PlacementError, match="is not JSON"):
            read_strategy(text, here, "s.json")
    with pytest.raises(PlacementError, match="is no strategy"):
        read_strategy("{}", here, "s.json")
    for key in ("cluster", "operators"):
        with pytest.raises(PlacementError, match=rf"s\.json: {key} must be a table, got None"):
            read_strategy(json.dumps(values | {key: None}), here, "s.json")
    other = replace(here, machine=machine_of(replace(here.machine.cluster, single_devices=(SingleDevice(1, speed=0.5),))))
    with pytest.raises(PlacementError, match="is a strategy for a 2x2 with other devices or links"):
        read_strategy(json.dumps(values), other, "s.json")
    with pytest.raises(PlacementError, match="places layer_9, which is no operator"):
        read_strategy(json.dumps(values | {"operators": {**values["operators"], "layer_9": {}}}), here, "s.json")
    values["operators"]["layer_0/kernel"]["devices"] = [0]
    with pytest.raises(PlacementError, match="no degrees and devices for layer_0/kernel"):
        read_strategy(json.dumps(values), here, "s.json")
    values["operators"]["layer_0/kernel"] = {"degrees": [1, 1], "devices": [9]}
    with pytest.raises(PlacementError, match=r"places layer_0/kernel on \(9,\)"):
        read_strategy(json.dumps(values), here, "s.json")


def test_degrees_that_do_not_divide_are_refused() -> None:
    here = problem("mlp", "2x2")
    strategy = (Configuration((3, 1), (0, 1, 2)), *data_parallel(here)[1:])
    with pytest.raises(PlacementError, match="cuts layer_0/kernel into"):
        here.check(strategy, "it")


def test_equal_steps_have_equal_fingerprints() -> None:
    assert fingerprint(problem("mlp", "2x2").graph) == fingerprint(problem("mlp", "2").graph)
