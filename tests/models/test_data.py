"""What holds for the data, the losses and the command line."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from models import _train, data, mlp
from models.losses import cross_entropy


def test_targets_are_the_characters_that_follow():
    batch = next(data.char_batches(sequence=16, batch=3))
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() < data.CHARACTERS


def test_characters_stay_within_a_small_vocabulary():
    for batch in itertools.islice(data.char_batches(sequence=16, batch=3, vocabulary=32), 5):
        assert batch["targets"].max() < 32


def test_excerpts_are_from_the_modules_that_their_labels_say():
    texts = [bytes(module) for module in data.largest_modules(5)]
    assert sorted(map(len, texts), reverse=True) == list(map(len, texts))
    batch = next(data.module_batches(sequence=40, batch=16, modules=5))
    for tokens, label in zip(batch["tokens"], batch["label"], strict=True):
        assert bytes(tokens.astype(np.uint8)) in texts[label]


def test_the_text_is_source_code():
    text = bytes(data.standard_library_text()).decode("ascii")
    assert text.count("def ") > 1000


def test_enlarged_digits_show_the_same_digits():
    small = next(data.digit_batches(batch=4))
    large = next(data.digit_batches(batch=4, image=32, channels=3))
    np.testing.assert_array_equal(small["label"], large["label"])
    np.testing.assert_array_equal(small["image"][..., 0], large["image"][:, ::4, ::4, 2])


def test_cross_entropy_is_that_of_optax():
    logits = jax.random.normal(jax.random.key(0), (5, 7, 11))
    labels = jnp.arange(35).reshape(5, 7) % 11
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    np.testing.assert_allclose(cross_entropy(logits, labels), expected, rtol=1e-6)


def test_the_command_line_prints_a_loss_for_each_step(capsys):
    _train.main(mlp.train_step, mlp.digit_batches, ["--steps", "2", "--set", "width=16", "--set", "dtype=bfloat16"])
    assert capsys.readouterr().out.count("loss") == 2


@pytest.mark.parametrize("text", ["width", "width=0", "inputs=8"])
def test_the_command_line_names_a_bad_option(capsys, text):
    with pytest.raises(SystemExit) as stopped:
        _train.main(mlp.train_step, mlp.digit_batches, ["--set", text])
    assert stopped.value.code == 2
    assert text in capsys.readouterr().err
