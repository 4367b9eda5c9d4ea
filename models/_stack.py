"""A stack of equal nnx blocks, unrolled or scanned, rematerialised or not: the same function of the same weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models._options import REMAT_POLICIES


def make_blocks(make: Callable[[nnx.Rngs], nnx.Module], key: jax.Array, *, layers: int, scan: bool) -> Any:
    """A list of `layers` blocks, each seeded by `key` and its number; with `scan`, one block of stacked parameters."""
    keys = [jax.random.fold_in(key, layer) for layer in range(layers)]
    if scan:
        return nnx.vmap(lambda key: make(nnx.Rngs(key)))(jnp.stack(keys))
    return nnx.List([make(nnx.Rngs(key)) for key in keys])


def bounded(x: Any, boundary: tuple[Any, ...] | None) -> Any:
    """The activations [batch, sequence, width] of a pytree where `boundary` says that they lie between blocks; the rest as is."""
    if boundary is None:
        return x
    spec = jax.sharding.PartitionSpec(*boundary)
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, spec) if a.ndim == 3 else a, x)


def run_blocks(
    blocks: Any,
    x: Any,
    *,
    scan: bool,
    remat: bool | str,
    key: jax.Array | None = None,
    boundary: tuple[Any, ...] | None = None,
) -> Any:
    """x through the blocks in turn, each called with its own key as block(x, key); x may be any pytree (`bounded`).

    With `remat`, only the input of each block is kept for the backward pass; with "products", the products with weights too."""
    x = bounded(x, boundary)
    if not scan:
        for layer, block in enumerate(blocks):
            with jax.named_scope(f"block_{layer}"):
                x = bounded(_block_function(block, remat, scan)(nnx.split(block)[1], x, fold(key, layer)), boundary)
        return x
    _, stacked = nnx.split(blocks)
    layers = jax.tree.leaves(stacked)[0].shape[0]
    run = _block_function(blocks, remat, scan)

    def body(x, parameters_and_layer):
        parameters, layer = parameters_and_layer
        return bounded(run(parameters, x, fold(key, layer)), boundary), None

    return jax.lax.scan(body, x, (stacked, None if key is None else jnp.arange(layers)))[0]


def fold(key: jax.Array | None, number: Any) -> jax.Array | None:
    """`jax.random.fold_in` that lets None, for no randomness, pass."""
    return None if key is None else jax.random.fold_in(key, number)


def _block_function(block, remat, scan):
    graphdef, _ = nnx.split(block)

    def run(parameters, x, key):
        return nnx.merge(graphdef, parameters)(x, key)

    # inside a scan there is no later copy of the forward pass for XLA to merge with
    return jax.checkpoint(run, prevent_cse=not scan, policy=REMAT_POLICIES.get(remat)) if remat else run
