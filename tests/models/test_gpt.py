"""What holds for the GPTs: their variants are one function of the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import gpt, gpt_linen, llama, vit

TINY = {"layers": 1, "width": 16, "heads": 2, "vocabulary": 32, "sequence": 8, "batch": 4}


@pytest.mark.slow
def test_scanned_and_unrolled_linen_blocks_are_one_function_of_the_same_weights():
    two = {**TINY, "layers": 2}
    _, (state, batch) = gpt_linen.train_step(**two, concrete=True)
    unrolled = dict(state.params)
    blocks = [unrolled.pop(f"block_{layer}") for layer in range(2)]
    stacked = {**unrolled, "blocks": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    _, (scanned, _) = gpt_linen.train_step(**two, scan=True)
    expected = jax.jit(state.apply_fn)({"params": state.params}, batch["tokens"])
    np.testing.assert_allclose(jax.jit(scanned.apply_fn)({"params": stacked}, batch["tokens"]), expected, atol=1e-5)


SMALL_IMAGES = {"layers": 1, "width": 16, "heads": 2, "image": 8, "patch": 4, "batch": 4}


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (gpt, TINY),
        pytest.param(gpt_linen, TINY, marks=pytest.mark.slow),
        pytest.param(llama, {**TINY, "key_heads": 1, "inner": 24}, marks=pytest.mark.slow),
        pytest.param(vit, SMALL_IMAGES, marks=pytest.mark.slow),
    ],
)
def test_accumulated_microbatches_give_the_step_of_the_whole_batch(module, options):
    step, args = module.train_step(**options, concrete=True)
    in_parts, _ = module.train_step(**options, accumulate=2)
    whole, parts = jax.jit(step)(*args), jax.jit(in_parts)(*args)
    for (path, one), other in zip(jax.tree.leaves_with_path(whole), jax.tree.leaves(parts), strict=True):
        where = jax.tree_util.keystr(path)
        if "mu" in where or where == "[1]":  # the mean gradients and the loss: an update of Adam is rounding where these are zero
            np.testing.assert_allclose(one, other, atol=1e-6, err_msg=where)
    assert any("mu" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(whole))


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_kept_products_are_not_made_again_and_change_no_result(scan):
    steps, products = [], []
    for remat in (False, "products", True):
        step, args = gpt.train_step(**TINY, scan=scan, remat=remat, concrete=True)
        products.append(str(jax.make_jaxpr(step)(*args)).count("dot_general"))
        steps.append(jax.jit(step)(*args))
    # attention's two products have a batch; of the four with weights, only the last one's result is never needed again
    assert products[0] < products[1] < products[2]
    for other in steps[1:]:
        for one, same in zip(jax.tree.leaves(steps[0]), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(one, same, atol=1e-5)


@pytest.mark.parametrize("module", [gpt, pytest.param(gpt_linen, marks=pytest.mark.slow)])
def test_dropout_is_a_function_of_the_state(module):
    step, (state, batch) = module.train_step(**TINY, dropout=0.5, concrete=True)
    step = jax.jit(step)
    after, loss = step(state, batch)
    assert float(step(state, batch)[1]) == float(loss)
    assert float(step(after, batch)[1]) != float(loss)


@pytest.mark.slow
def test_mixed_precision_computes_in_bfloat16_from_float32_parameters():
    _, (state, batch) = gpt_linen.train_step(**TINY, concrete=True)
    _, (mixed, _) = gpt_linen.train_step(**TINY, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(mixed)} == {"float32", "int32"}
    exact, logits = (jax.jit(s.apply_fn)({"params": state.params}, batch["tokens"]) for s in (state, mixed))
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(exact, logits, atol=1e-2)


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
    logits_of = jax.jit(state.apply_fn)
    logits = logits_of({"params": state.params}, batch["tokens"])
    changed = batch["tokens"].at[:, 5].add(1) % TINY["vocabulary"]
    other = logits_of({"params": state.params}, changed)
    np.testing.assert_array_equal(logits[:, :5], other[:, :5])
    assert not np.array_equal(logits[:, 5:], other[:, 5:])
