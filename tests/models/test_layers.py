"""What holds for the parts of the later models."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import _fused_attention, alexnet, gpt, gpt_linen, inception, llama, moe, nmt, resnet, rnn, two_tower, vit
from models._attention import attend, attend_blockwise, attend_in_kernel
from models._fused_attention import flash
from models._gpt_options import GPTOptions
from tests.attention import needs_flash, on_an_abstract_gpu


@pytest.mark.parametrize(("size", "billions"), [("8b", 8.03), ("70b", 70.55)])
def test_llama_has_the_published_number_of_parameters(size, billions):
    _, (state, _) = llama.train_step(size=size, scan=True)
    assert sum(leaf.size for leaf in jax.tree.leaves(state[0])) == pytest.approx(billions * 1e9, rel=1e-3)


def test_mixtral_has_the_published_number_of_parameters():
    _, (state, _) = moe.train_step(size="8x7b", scan=True)
    assert sum(leaf.size for leaf in jax.tree.leaves(state[0])) == pytest.approx(46.70e9, rel=1e-3)


@pytest.mark.parametrize(
    ("factory", "options", "parameters"),
    [
        (alexnet.train_step, {"channels": 64, "dense": 4096, "image": 224}, 61_100_840),
        (inception.train_step, {"channels": 32, "blocks": (3, 4, 2), "image": 299}, 23_834_568),
        (resnet.train_step, {"depth": 101, "channels": 64, "image": 224}, 44_549_160),
    ],
)
def test_a_network_for_imagenet_has_the_published_number_of_parameters(factory, options, parameters):
    _, (state, _) = factory(**options, classes=1000)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.params)) == parameters


def test_rotated_queries_and_keys_meet_by_their_distance_alone():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    q, k = (llama.rotate(jnp.broadcast_to(v, (1, 6, 1, 8)))[0, :, 0] for v in (x, y))
    scores = q @ k.T
    np.testing.assert_allclose(scores[1:, 1:], scores[:-1, :-1], atol=1e-4)


def attention_inputs(sequence, dtype="float32"):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2, sequence, 2, 3, 4), (2, sequence, 2, 4), (2, sequence, 2, 4)
    return [3 * jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize("block", [1, 4, 16])
def test_blockwise_attention_is_attention_and_so_are_its_gradients(block):
    q, k, v = attention_inputs(16)
    weight = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def both(of):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(of(*x) * weight), argnums=(0, 1, 2)))(q, k, v)

    plain, blockwise = both(attend), both(lambda *x: attend_blockwise(*x, block=block))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), plain, blockwise)


@needs_flash
def test_attention_in_one_kernel_is_attention_and_so_are_its_gradients():
    q, k, v = attention_inputs(16)
    weight = jnp.cos(jnp.arange(q.size, dtype=jnp.float32)).reshape(q.shape)

    def both(of):
        return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(of(*x) * weight), argnums=(0, 1, 2)))(q, k, v)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), both(attend), both(attend_in_kernel))


@needs_flash
@pytest.mark.slow
@pytest.mark.parametrize("factory", [gpt.train_step, gpt_linen.train_step, vit.train_step])
def test_a_step_with_flash_attention_is_the_plain_step(factory):
    losses = []
    for attention in ("xla", "flash"):
        step, (state, batch) = factory(layers=1, attention=attention, concrete=True)
        state, _ = jax.jit(step)(state, batch)
        losses.append(float(jax.jit(step)(state, batch)[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@needs_flash
def test_flash_attention_is_compiled_for_gpus_though_it_is_traced_on_a_cpu():
    def loss(q, k, v):
        return flash(q, k, v, 1.0, True).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    with on_an_abstract_gpu():
        lowered = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text().lower()
    assert "stablehlo.while" not in lowered.as_text(), "Pallas's interpreter walks the grid by a loop"


def test_a_model_without_a_kernel_for_flash_attention_says_what_to_install(monkeypatch):
    monkeypatch.setattr(_fused_attention, "_of_jax", lambda: None)
    monkeypatch.setattr(_fused_attention, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install tokamax"):
        gpt.train_step(attention="flash")
    assert gpt.train_step(attention="xla")


@needs_flash
def test_flash_attention_keeps_no_scores_for_its_backward_pass():
    def kept(sequence):
        x = jax.ShapeDtypeStruct((1, sequence, 2, 64), jnp.float32)
        return max(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(attended, *x)[1], x, x, x)))

    def attended(q, k, v):
        return flash(q, k, v, 1.0, True)

    assert kept(1024) == 1024 * 2 * 64
    assert kept(2048) == 2 * kept(1024)


def every_size(jaxpr):
    """Elements of every value of a program and of its bodies."""
    found = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    for eqn in jaxpr.eqns:
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(param, "jaxpr", param)
            found += every_size(inner) if hasattr(inner, "eqns") else []
    return found


def test_blockwise_attention_holds_no_more_than_grows_with_the_sequence():
    def largest(sequence, of):
        gradient = jax.grad(lambda *x: jnp.sum(of(*x)), argnums=(0, 1, 2))
        return max(every_size(jax.make_jaxpr(gradient)(*attention_inputs(sequence)).jaxpr))

    def blockwise(q, k, v):
        return attend_blockwise(q, k, v, block=8)

    assert largest(256, blockwise) == 2 * largest(128, blockwise)
    assert largest(256, attend) == 4 * largest(128, attend)


def test_every_token_fills_a_slot_of_each_of_its_experts_and_no_two_the_same():
    logits = jax.random.normal(jax.random.key(0), (2, 8, 4))
    dispatch, combine, _ = moe.route(logits, top=2, slots=8)
    np.testing.assert_array_equal(dispatch.sum(axis=(2, 3)), 2)
    assert dispatch.sum(axis=1).max() == 1
    np.testing.assert_allclose(combine.sum(axis=(2, 3)), 1, atol=1e-6)


def test_an_expert_takes_no_more_tokens_than_it_has_slots():
    dispatch, _, imbalance = moe.route(jnp.zeros((1, 8, 4)).at[..., 1].set(9.0), top=1, slots=3)
    np.testing.assert_array_equal(dispatch.sum(axis=(0, 1, 3)), [0, 3, 0, 0])
    assert imbalance == pytest.approx(4.0, rel=1e-2)


@pytest.mark.parametrize("variant", [{"scan": True}, {"head_in_steps": True}, {"scan": True, "head_in_steps": True}])
def test_time_steps_are_one_function_scanned_or_with_their_own_heads(variant):
    options = rnn.RNNOptions(hidden=8, steps=4, batch=2)
    params = rnn.init_params(options, jax.random.key(0))
    tokens = jnp.arange(8).reshape(2, 4)
    apply = jax.jit(rnn.apply, static_argnums=0)
    other = apply(rnn.RNNOptions(hidden=8, steps=4, batch=2, **variant), params, tokens)
    np.testing.assert_allclose(apply(options, params, tokens), other, atol=1e-5)


@pytest.mark.slow
def test_a_translation_reads_all_of_its_source_and_what_it_has_said_so_far():
    options = nmt.NMTOptions(layers=1, hidden=8, steps=3, batch=1)
    params = nmt.init_params(options, jax.random.key(0))

    def said(x, y):
        params_of = {**params, "source": x, "target": y}
        return nmt.apply(options, params_of, jnp.arange(3)[None], jnp.arange(3)[None])[0].sum(axis=-1)

    source, target = jax.jit(jax.jacobian(said, argnums=(0, 1)))(params["source"], params["target"])
    reads_source, reads_target = (np.abs(jacobian).max(axis=-1)[:, :3] > 0 for jacobian in (source, target))
    assert reads_source.all()
    np.testing.assert_array_equal(reads_target, np.tril(np.ones((3, 3), bool)))


def test_pairs_that_are_told_apart_cost_nothing_and_equal_ones_the_logarithm_of_their_number():
    assert two_tower.contrast(100 * jnp.eye(8)) == pytest.approx(0, abs=1e-6)
    assert two_tower.contrast(jnp.ones((8, 8))) == pytest.approx(math.log(8))


@pytest.mark.parametrize(
    ("module", "options", "keys"),
    [
        (gpt.GPT, {"options_type": GPTOptions, "heads": 2, "dropout": 0.2}, [jax.random.key(1)]),
        pytest.param(
            moe.MoE, {"options_type": moe.MoEOptions, "layers": 2, "heads": 4, "key_heads": 2}, [], marks=pytest.mark.slow
        ),
    ],
)
def test_scanned_and_unrolled_nnx_blocks_are_one_function_of_one_seed(module, options, keys):
    options = dict(options)
    options_type = options.pop("options_type")
    tokens = jnp.arange(8).reshape(2, 4)

    def run(key, *, scan):
        variant = options_type(**options, width=16, sequence=4, batch=2, scan=scan, remat=scan)
        return module(variant, key)(tokens, *keys)

    unrolled, scanned = (jax.jit(run, static_argnames="scan")(jax.random.key(0), scan=scan) for scan in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), unrolled, scanned)
