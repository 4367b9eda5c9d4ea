"""Restricted searches stay in their part of the space."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shardplan.placement.mcmc import ChainLimits, layers_of
from shardplan.placement.restrictions import colocrl, optcnn
from shardplan.placement.starts import data_parallel
from tests.placement.problems import problem

CASES = [("mlp", "flexflow-p100:1"), ("rnn", "flexflow-k80:1"), ("wresnet", "2x2")]


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_colocrl_places_whole_operators(model: str, cluster: str) -> None:
    here = problem(model, cluster)
    chain = colocrl(here, ChainLimits(proposals=60))
    here.check(chain.strategy, "the placement")
    assert all(len(c.devices) == 1 for c in chain.strategy)
    assert chain.seconds == here.seconds(chain.strategy)
    assert all(earlier[2] > later[2] for earlier, later in pairwise(chain.history))


@pytest.mark.parametrize(("model", "cluster"), CASES)
def test_optcnn_has_one_configuration_for_each_layer_and_no_two_operators_at_once(model: str, cluster: str) -> None:
    here = problem(model, cluster)
    chain = optcnn(here, [data_parallel(here)], ChainLimits(proposals=60))
    here.check(chain.strategy, "the strategy")
    for layer in layers_of(here.graph):
        assert len({chain.strategy[i] for i in layer}) == 1
    assert all(c.devices[0] == 0 for c in chain.strategy)
    assert chain.seconds == here.seconds(chain.strategy) <= here.seconds(data_parallel(here))


def test_the_steps_of_a_recurrence_are_one_layer() -> None:
    """An embedding, LSTM layers and a softmax layer, each with all its time steps."""
    graph = problem("rnn", "flexflow-k80:1").graph
    layers = layers_of(graph)
    assert sorted(i for layer in layers for i in layer) == list(range(len(graph.operators)))
    assert len(layers) < len(graph.operators)
    for weight in graph.weights:
        assert len({n for n, layer in enumerate(layers) if set(weight.users) & set(layer)}) <= 2


def test_restricted_searches_are_repeatable() -> None:
    here = problem("mlp", "flexflow-p100:1")
    limits = ChainLimits(proposals=80)
    assert colocrl(here, limits, seed=3).strategy == colocrl(here, limits, seed=3).strategy
    start = [data_parallel(here)]
    assert optcnn(here, start, limits, seed=3).strategy == optcnn(here, start, limits, seed=3).strategy
