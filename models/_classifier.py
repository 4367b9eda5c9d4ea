"""A train step of a flax linen module that classifies images, its batch statistics and dropout included."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

from models import data
from models._arguments import Floats, Tokens, make_batch, make_state
from models._options import require
from models.losses import cross_entropy

_DIGITS = 10


class TrainState(train_state.TrainState):
    """With the running mean and variance of each batch norm."""

    batch_stats: Any


def classifier_step(
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    image: tuple[int, int, int, int],
    classes: int,
    dropout: float = 0.0,
    concrete: bool,
    seed: int,
) -> tuple[Callable, tuple[TrainState, dict[str, Any]]]:
    """(step, (state, batch)): `state` a TrainState with batch_stats, `batch` {"image" [batch, h, w, channels], "label" [batch]}.

    With `dropout`, each step hands the module a key of its own, as the rngs' "dropout".
    """

    def init(key):
        variables = model.init(key, jnp.zeros((1, *image[1:])))
        batch_stats = variables.get("batch_stats", {})
        state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer, batch_stats=batch_stats)
        # an array, not the int 0 of create: its type is then the same after every step
        return state.replace(step=jnp.zeros((), jnp.int32))

    def step(state, batch):
        rngs = {"dropout": jax.random.fold_in(jax.random.key(seed), state.step)} if dropout else {}

        def loss_of(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"], rngs=rngs)
            return cross_entropy(logits, batch["label"]), updated.get("batch_stats", {})

        (loss, batch_stats), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients, batch_stats=batch_stats), loss

    draws = {"image": Floats(image), "label": Tokens(image[:1], min(classes, _DIGITS))}
    state = make_state(init, concrete=concrete, seed=seed)
    return step, (state, make_batch(draws, concrete=concrete, seed=seed))


def digits_for(*, image: int, channels: int, batch: int, classes: int, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Endless batches of digits, enlarged to the image size."""
    require(classes >= _DIGITS, f"classes={classes}: the digits have {_DIGITS} classes")
    return data.digit_batches(image=image, channels=channels, batch=batch, seed=seed)
