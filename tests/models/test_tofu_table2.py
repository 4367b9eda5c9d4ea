"""Tofu's Table 2 (Wang, Huang and Li, EuroSys 2019): weights, gradients and one history of each; its GB are of 2^30 bytes."""

import math

import jax
import pytest

from models import rnn, wresnet

RNN_GIB = {  # (layers, thousands of hidden units)
    (6, 4): 8.4, (8, 4): 11.4, (10, 4): 14.4,
    (6, 6): 18.6, (8, 6): 28.5, (10, 6): 32.1,
    (6, 8): 33.0, (8, 8): 45.3, (10, 8): 57.0,
}  # fmt: skip
WRESNET_GIB = {  # (depth, widening factor)
    (50, 4): 4.2, (101, 4): 7.8, (152, 4): 10.5,
    (50, 6): 9.6, (101, 6): 17.1, (152, 6): 23.4,
    (50, 8): 17.1, (101, 8): 30.6, (152, 8): 41.7,
    (50, 10): 26.7, (101, 10): 47.7, (152, 10): 65.1,
}  # fmt: skip


def gib(*trees) -> float:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(trees)) / 2**30


@pytest.mark.parametrize(("layers", "thousands"), RNN_GIB)
def test_an_rnn_of_tofus_size_holds_what_its_table_2_says(layers, thousands):
    _, (state, _) = rnn.train_step(layers=layers, hidden=1024 * thousands, batch=512, optimizer="sgd")
    weights = state["params"]
    assert gib(weights, weights, state["optimizer"]) == pytest.approx(RNN_GIB[layers, thousands], rel=0.1)


@pytest.mark.parametrize(("depth", "width"), [pytest.param(d, w, marks=[pytest.mark.slow] * (w != 4)) for d, w in WRESNET_GIB])
def test_a_wresnet_of_tofus_size_holds_what_its_table_2_says(depth, width):
    _, (state, _) = wresnet.train_step(depth=depth, width=width, image=224, batch=8, classes=1000)
    assert gib(state.params, state.params, state.opt_state) == pytest.approx(WRESNET_GIB[depth, width], rel=0.03)
