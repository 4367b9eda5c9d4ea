"""What holds for every model's factory."""

import doctest
import functools
import importlib
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.attention import needs_flash

# the least of each that keeps its kinds of layer, so that all of them compile within a minute
TINY = {
    "mlp": {"layers": 2, "width": 16, "batch": 8},
    "gpt": {"layers": 1, "width": 16, "heads": 2, "vocabulary": 128, "sequence": 8, "batch": 4},
    "gpt_linen": {"layers": 1, "width": 16, "heads": 2, "vocabulary": 128, "sequence": 8, "batch": 4},
    "wresnet": {"blocks": (1,), "channels": 4, "image": 16, "batch": 16},
    "rnn": {"layers": 1, "hidden": 16, "steps": 4, "batch": 8},
    "llama": {"layers": 1, "width": 16, "heads": 4, "key_heads": 2, "inner": 24, "vocabulary": 128, "sequence": 8, "batch": 4},
    "moe": {"layers": 1, "width": 16, "heads": 2, "key_heads": 2, "inner": 16, "experts": 4, "sequence": 8, "batch": 4},
    "unet": {"levels": 2, "channels": 4, "image": 8, "batch": 8},
    "vit": {"layers": 1, "width": 16, "heads": 2, "image": 8, "patch": 2, "batch": 16},
    "lenet": {"image": 16, "batch": 16},
    "two_tower": {"layers": 2, "width": 16, "embedding": 16, "batch": 16},
    "alexnet": {"channels": 8, "dense": 64, "batch": 16},
    "inception": {"channels": 2, "batch": 8},
    "resnet": {"blocks": (1,), "channels": 4, "image": 16, "batch": 16},
    "rnntc": {"layers": 2, "hidden": 16, "steps": 2, "batch": 8},
    "rnnlm": {"layers": 1, "hidden": 16, "steps": 2, "batch": 8},
    "nmt": {"layers": 1, "hidden": 16, "steps": 2, "batch": 8},
}
LONG = ("gpt_linen", "unet", "vit", "wresnet", "alexnet", "inception", "resnet", "rnntc", "rnnlm", "nmt")
"""Those of the tiny models that take long, or whose layers other models have too."""
VARIANTS = [
    *TINY.items(),
    ("mlp", {"optimizer": "sgd", "dtype": "bfloat16", "layers": 1}),
    ("gpt", {"scan": True, "remat": True, "dropout": 0.1, "accumulate": 2, "dtype": "bfloat16", "tied": True}),
    ("gpt_linen", {"scan": True, "remat": True, "dropout": 0.1, "accumulate": 2, "dtype": "bfloat16", "tied": True}),
    ("gpt", {"vocabulary": 50257, "heads": 6, "width": 96, "batch": 15, "sequence": 31}),
    ("gpt_linen", {"vocabulary": 50257, "heads": 6, "width": 96, "batch": 15, "sequence": 31}),
    ("wresnet", {"depth": 50, "width": 2, "remat": True, "dtype": "bfloat16", "optimizer": "adam", "batch": 7}),
    ("rnn", {"scan": True, "dtype": "bfloat16", "vocabulary": 97, "batch": 7}),
    ("llama", {"size": "8b", "scan": True, "remat": True, "dtype": "bfloat16"}),
    ("llama", {"size": "70b", "layers": 1, "batch": 3, "block": 8}),
    ("moe", {"size": "8x7b", "scan": True, "remat": True, "dtype": "bfloat16"}),
    ("moe", {"experts": 6, "top": 3, "capacity": 0.5}),
    ("unet", {"blocks": 2, "image": 36, "channels": 6, "remat": True, "dtype": "bfloat16"}),
    ("vit", {"scan": True, "remat": True, "dropout": 0.1, "dtype": "bfloat16", "batch": 5}),
    ("vit", {"dropout": 0.1, "remat": True}),
    ("gpt", {"scan": True, "remat": "products", "dtype": "float16"}),
    ("llama", {"remat": "products", "accumulate": 4, "dtype": "float16"}),
    ("moe", {"scan": True, "remat": "products", "accumulate": 2}),
    ("vit", {"remat": "products", "accumulate": 2, "inner": 48, "dropout": 0.1}),
    ("wresnet", {"middle": 2, "dtype": "float16"}),
    ("lenet", {"dtype": "bfloat16", "optimizer": "adam", "batch": 7}),
    ("two_tower", {"dtype": "bfloat16", "optimizer": "sgd", "batch": 7}),
    ("alexnet", {"dropout": 0.5, "dtype": "bfloat16", "optimizer": "adam", "batch": 7}),
    ("inception", {"activation": "silu", "dtype": "bfloat16", "batch": 7}),
    ("resnet", {"depth": 26, "remat": True, "dtype": "bfloat16", "batch": 7}),
    ("rnntc", {"dtype": "bfloat16", "vocabulary": 97, "classes": 2, "batch": 7}),
    ("rnnlm", {"dtype": "bfloat16", "vocabulary": 97, "batch": 7}),
    ("nmt", {"dtype": "bfloat16", "vocabulary": 97, "batch": 7}),
    ("rnn", {"scan": True, "head_in_steps": True}),
    *(
        pytest.param(name, {"attention": "flash", "scan": True, "remat": True}, marks=needs_flash)
        for name in ("gpt", "gpt_linen", "llama", "moe", "vit")
    ),
]


def each_tiny() -> list[Any]:
    """Each tiny model; those that take longest to compile, or resemble another, are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in TINY]


def tiny_on(machines: Sequence[str]) -> list[Any]:
    """Each tiny model with one of these machines in turn."""
    return [
        pytest.param(*model.values, on, marks=model.marks)
        for model, on in zip(each_tiny(), itertools.cycle(machines), strict=False)
    ]


def factory(name):
    return importlib.import_module(f"models.{name}").train_step


def batches_of(name, **rest):
    module = importlib.import_module(f"models.{name}")
    batches = module.digit_batches if hasattr(module, "digit_batches") else module.text_batches
    return batches(**TINY[name], **rest)


@functools.cache
def concrete(name):
    return factory(name)(**TINY[name], learning_rate=1e-2, concrete=True)


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*v, marks=pytest.mark.slow) if v[0] in ("inception", "wresnet") else v for v in VARIANTS]
)
def test_the_state_that_comes_out_has_the_tree_and_types_that_went_in(name, options):
    step, (state, batch) = factory(name)(**options)
    after, loss = jax.eval_shape(step, state, batch)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert types(after) == types(state)
    assert (loss.shape, loss.dtype) == ((), np.float32)


@pytest.mark.parametrize("name", each_tiny())
def test_arguments_are_abstract_until_concrete_ones_of_the_same_types_are_asked_for(name):
    _, abstract = factory(name)(**TINY[name])
    _, real = concrete(name)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(real))
    assert types(jax.tree.leaves(real)) == types(jax.tree.leaves(abstract))


@pytest.mark.parametrize("name", TINY)
def test_two_calls_with_equal_options_give_arguments_of_one_tree(name):
    (_, first), (_, second) = factory(name)(**TINY[name]), factory(name)(**TINY[name])
    assert jax.tree.structure(first) == jax.tree.structure(second)


@pytest.mark.parametrize("name", TINY)
def test_the_batches_are_those_of_the_factory(name):
    _, (_, abstract) = factory(name)(**TINY[name])
    first, again = next(batches_of(name)), next(batches_of(name, seed=0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), first) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
    jax.tree.map(np.testing.assert_array_equal, first, again)


@pytest.mark.slow
@pytest.mark.parametrize("name", each_tiny())
def test_thirty_steps_on_real_data_reduce_the_loss(name):
    step, (state, _) = concrete(name)
    step, losses = jax.jit(step), []
    for batch in itertools.islice(batches_of(name), 30):
        state, loss = step(state, batch)
        losses.append(float(loss))
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.3


@pytest.mark.parametrize("name", TINY)
def test_every_option_and_its_default_shows_in_the_signature(name):
    parameters = inspect.signature(factory(name)).parameters
    assert parameters["concrete"].default is False
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY and p.default is not p.empty for p in parameters.values())


@pytest.mark.parametrize("name", TINY)
def test_the_examples_in_its_docstrings_hold(name):
    results = doctest.testmod(importlib.import_module(f"models.{name}"))
    assert results.failed == 0
    assert results.attempted > 0


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("gpt", {"heads": 7}, "heads=7 does not divide width=64"),
        ("gpt_linen", {"accumulate": 3}, "accumulate=3 does not divide batch=16"),
        ("gpt", {"layers": 0}, "layers=0: layers is to be a positive integer"),
        ("gpt", {"batch": True}, "batch=True"),
        ("gpt", {"dtype": "float8"}, "dtype='float8': dtype is to be one of 'float32', 'bfloat16'"),
        ("gpt", {"scan": "yes"}, "scan='yes': scan is to be True or False"),
        ("gpt_linen", {"dropout": 1.0}, r"dropout=1.0: dropout is to be a number in \[0, 1\)"),
        ("gpt", {"widht": 64}, "widht=64: no such option; there are layers, width,"),
        ("wresnet", {"depth": 34}, "depth=34"),
        ("wresnet", {"blocks": (1, 0)}, r"blocks=\(1, 0\)"),
        ("mlp", {"optimizer": "lion"}, "optimizer='lion'"),
        ("llama", {"size": "13b"}, "size='13b': size is to be one of 'tiny', '8b', '70b'"),
        ("llama", {"key_heads": 3}, "key_heads=3 does not divide heads=16"),
        ("llama", {"heads": 64}, "heads=64: width / heads = 1 is to be even"),
        ("moe", {"top": 9}, "top=9 is more than experts=8"),
        ("unet", {"image": 18}, "image=18 is not divisible by 4"),
        ("vit", {"patch": 5}, "patch=5 does not divide image=32"),
        ("rnn", {"scan": 1}, "scan=1"),
        ("alexnet", {"image": 32}, "image=32 is too small for three pools: 63 is the least"),
        ("lenet", {"image": 8}, "image=8 is too small for two pools: 16 is the least"),
        ("inception", {"image": 64}, "image=64 is too small for its pools: 75 is the least"),
        ("inception", {"channels": 3}, "channels=3 is to be even"),
        ("inception", {"blocks": (1, 1)}, r"blocks=\(1, 1\): blocks is to be a tuple of three positive integers"),
        ("resnet", {"depth": 34}, "depth=34"),
        ("two_tower", {"temperature": 0}, "temperature=0: temperature is to be a positive number"),
        ("gpt", {"attention": "fast"}, "attention='fast': attention is to be one of 'xla', 'flash'"),
        ("gpt", {"attention": "flash", "dropout": 0.1}, "attention='flash' has no dropout, dropout=0.1"),
        ("gpt_linen", {"attention": "flash", "sequence": 48}, "sequences of 16, 32, 64 or a multiple of 128, not 48"),
        pytest.param("llama", {"attention": "flash", "block": 8}, "block=8: attention='flash' has its own", marks=needs_flash),
        ("vit", {"attention": "flash", "image": 24}, "not 9"),
    ],
)
def test_a_bad_option_is_named(name, options, says):
    with pytest.raises(ValueError, match=says):
        factory(name)(**options)
