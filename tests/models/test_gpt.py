"""What holds for the GPTs: their variants are one function of the same weights."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt, gpt_linen

TINY = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 32, "sequence": 8, "batch": 4}


@functools.cache
def after_a_step(name: str, **options: Any):
    """State and loss; from one seed, so the parameters' changes are those that the variant's gradients make."""
    step, (state, batch) = importlib.import_module(name).train_step(**{**TINY, **options}, concrete=True)
    state, loss = jax.jit(step)(state, batch)
    return state, float(loss)


def test_scanned_and_unrolled_nnx_blocks_train_alike_from_one_seed():
    unrolled, loss = after_a_step(gpt.__name__, dropout=0.2)
    scanned, same_loss = after_a_step(gpt.__name__, dropout=0.2, scan=True, remat=True)
    assert loss == pytest.approx(same_loss, rel=1e-5)
    moments = [block["mlp"]["up"]["kernel"][...] for block in unrolled[1]["opt_state"][0]["mu"]["blocks"].values()]
    stacked = scanned[1]["opt_state"][0]["mu"]["blocks"]["mlp"]["up"]["kernel"][...]
    np.testing.assert_allclose(jnp.stack(moments), stacked, atol=1e-6)


def test_scanned_and_unrolled_linen_blocks_are_one_function_of_the_same_weights():
    _, (state, batch) = gpt_linen.train_step(**TINY, concrete=True)
    unrolled = dict(state.params)
    blocks = [unrolled.pop(f"block_{layer}") for layer in range(TINY["layers"])]
    stacked = {**unrolled, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    _, (scanned, _) = gpt_linen.train_step(**TINY, scan=True)
    expected = state.apply_fn({"params": state.params}, batch["tokens"])
    np.testing.assert_allclose(scanned.apply_fn({"params": stacked}, batch["tokens"]), expected, atol=1e-5)


@pytest.mark.parametrize("module", [gpt, gpt_linen])
def test_accumulated_microbatches_give_the_step_of_the_whole_batch(module):
    whole, loss = after_a_step(module.__name__, layers=1)
    parts, same_loss = after_a_step(module.__name__, layers=1, accumulate=2)
    assert loss == pytest.approx(same_loss, rel=1e-5)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("module", [gpt, gpt_linen])
def test_dropout_is_a_function_of_the_state(module):
    step, (state, batch) = module.train_step(**{**TINY, "layers": 1}, dropout=0.5, concrete=True)
    step = jax.jit(step)
    after, loss = step(state, batch)
    assert float(step(state, batch)[1]) == float(loss)
    assert float(step(after, batch)[1]) != float(loss)


@pytest.mark.parametrize("module", [gpt, gpt_linen])
def test_mixed_precision_keeps_parameters_and_moments_in_float32(module):
    state, loss = after_a_step(module.__name__, layers=1, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state)} <= {"float32", "int32", "uint32"}
    assert loss == pytest.approx(after_a_step(module.__name__, layers=1)[1], rel=1e-2)


@pytest.mark.parametrize("module", [gpt, gpt_linen])
def test_seventy_billion_parameters_are_described_and_traced(module):
    step, (state, batch) = module.train_step(
        layers=80, width=8192, heads=64, vocabulary=128256, sequence=2048, batch=256, scan=True, remat=True, dtype="bfloat16"
    )
    params = state[0] if module is gpt else state.params
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) > 60e9
    jaxpr = jax.make_jaxpr(step)(state, batch)
    assert sum(np.size(constant) for constant in jaxpr.consts) < 1000


def test_a_later_token_does_not_change_an_earlier_prediction():
    _, (state, batch) = gpt_linen.train_step(**TINY, concrete=True)
    logits = state.apply_fn({"params": state.params}, batch["tokens"])
    changed = batch["tokens"].at[:, 5].add(1) % TINY["vocabulary"]
    other = state.apply_fn({"params": state.params}, changed)
    np.testing.assert_array_equal(logits[:, :5], other[:, :5])
    assert not np.array_equal(logits[:, 5:], other[:, 5:])
