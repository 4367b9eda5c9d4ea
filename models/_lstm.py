"""LSTM layers in plain JAX: their parameters, one time step, and a stack of them unrolled."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

Layer = dict[str, jax.Array]
Carry = tuple[jax.Array, jax.Array]
T = TypeVar("T")


def init_lstm(key: jax.Array, hidden: int) -> Layer:
    """Kernels [hidden, gate, hidden], the gates input, forget, cell, output; the forget gates start open."""
    scale = 1 / math.sqrt(hidden)
    into, recurrent = (jax.random.normal(k, (hidden, 4, hidden)) * scale for k in jax.random.split(key))
    return {"input": into, "recurrent": recurrent, "bias": jnp.zeros((4, hidden)).at[1].set(1.0)}


def lstm(layer: Layer, carry: Carry, x: jax.Array) -> Carry:
    """One time step. carry (output, cell) and x, all [batch, hidden] -> the new (output, cell)."""
    output, cell = carry
    gates = jnp.einsum("bi,igo->bgo", x, layer["input"]) + jnp.einsum("bi,igo->bgo", output, layer["recurrent"])
    into, forget, candidate, out = jnp.unstack(gates + layer["bias"], axis=1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(into) * jnp.tanh(candidate)
    return jax.nn.sigmoid(out) * jnp.tanh(cell), cell


def zero_carries(layers: int, batch: int, hidden: int, dtype: str) -> list[Carry]:
    """The carries before the first time step."""
    zeros = jnp.zeros((batch, hidden), dtype)
    return [(zeros, zeros)] * layers


def advance(layers: Sequence[Layer], carries: Sequence[Carry], x: jax.Array) -> tuple[list[Carry], jax.Array]:
    """One time step of a stack. x [batch, hidden] -> the new carries and the last layer's output [batch, hidden]."""
    new = []
    for layer, carry in zip(layers, carries, strict=True):
        x, cell = lstm(layer, carry, x)
        new.append((x, cell))
    return new, x


def unroll(body: Callable[[T, jax.Array], tuple[T, jax.Array]], carry: T, xs: jax.Array) -> tuple[T, list[jax.Array]]:
    """Every time step of `body(carry, x)`, each in a scope of its own. xs [batch, steps, ...] -> the last carry, every output."""
    outputs = []
    for time, x in enumerate(jnp.unstack(xs, axis=1)):
        with jax.named_scope(f"time_{time}"):
            carry, output = body(carry, x)
        outputs.append(output)
    return carry, outputs
