"""Random keys and bits. Threefry computes each element from its own index, so a cut does not change the bits."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import Opaque, Scalar, TensorRef, apply
from shardplan.tdl.rules.elementwise import at

_ALL = slice(None)


@rule("random_bits", "random_split", "random_bits_at", "random_split_at")
def _bits(call: Call, keys: TensorRef, *_: TensorRef) -> Lambda:
    """Result dims: those of the keys, then ``shape``. Only threefry is known to count elements; other generators stay whole.

    Traced under ``jax_threefry_partitionable=False``, the bits of a key depend on the whole shape. The ``_at`` forms run on a
    worker's block: they take the position of its first element in the whole.
    """
    rank = len(keys.shape)

    def element(*i: Any) -> Scalar:
        if keys.dtype == "key<fry>" and "whole_shape" not in call.params:
            return apply(call.primitive, keys[i[:rank]])
        if _of_its_own_key(call, keys):
            return Opaque()(keys[i[:rank]])[i[rank:]]
        return Opaque()(keys[(_ALL,) * rank])[i]

    return element


def _of_its_own_key(call: Call, keys: TensorRef) -> bool:
    """Whether each result depends on one key alone. XLA's generator draws the bits of all keys from the first one."""
    splits = call.primitive in ("random_split", "random_split_at", "random_fold_in")
    return keys.dtype == "key<fry>" or (keys.dtype == "key<rbg>" and splits)


@rule("random_fold_in")
def _fold_in(call: Call, keys: TensorRef, data: TensorRef) -> Lambda:
    if not _of_its_own_key(call, keys):
        return lambda *i: Opaque()(keys[(_ALL,) * len(keys.shape)], data[(_ALL,) * len(data.shape)])[i]
    return lambda *i: apply("random_fold_in", at(keys, i), at(data, i))


@rule("random_seed", "random_clone")
def _seed(call: Call, seeds: TensorRef) -> Lambda:
    return lambda *i: apply(call.primitive, seeds[i])


@rule("random_wrap", "to_edtype")
def _wrap(call: Call, data: TensorRef) -> Lambda:
    """The last dims are a key's data."""
    tail = len(data.shape) - len(call.results[0])
    return lambda *i: Opaque()(data[(*i, *[_ALL] * tail)])


@rule("random_unwrap", "from_edtype")
def _unwrap(call: Call, keys: TensorRef) -> Lambda:
    rank = len(keys.shape)
    return lambda *i: Opaque()(keys[i[:rank]])[i[rank:]]


@rule("threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
def _counter(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
    return (lambda *i: apply(call.primitive, *(at(x, i) for x in operands)),) * len(call.results)


@rule("iota_2x32_shape", "iota_2x32_shape_at")
def _iota_2x32(call: Call, *_: TensorRef) -> tuple[Lambda, ...]:
    return (lambda *i: apply("iota_2x32_shape", 1),) * len(call.results)


@rule("random_gamma")
def _gamma(call: Call, keys: TensorRef, alpha: TensorRef) -> Lambda:
    """Each element is drawn from its own key, or each key is split for all of its elements, which then stay whole."""
    rank = len(keys.shape)
    if not _of_its_own_key(call, keys):
        return lambda *i: Opaque()(keys[(_ALL,) * rank], alpha[(_ALL,) * len(alpha.shape)])[i]
    if rank == len(alpha.shape):
        return lambda *i: apply("random_gamma", at(keys, i), at(alpha, i))
    return lambda *i: Opaque()(keys[i[:rank]], alpha[(*i[:rank], *[_ALL] * (len(i) - rank))])[i[rank:]]


@rule("rng_bit_generator")
def _generator(call: Call, key: TensorRef) -> tuple[Lambda, ...]:
    """The bits depend on the global shape: nothing may be cut."""
    from shardplan.tdl.language import Named

    return (
        Named(tuple(f"k{d}" for d in range(len(call.results[0]))), lambda *i: Opaque()(key[(_ALL,) * len(key.shape)])[i]),
        Named(tuple(f"i{d}" for d in range(len(call.results[1]))), lambda *i: Opaque()(key[(_ALL,) * len(key.shape)])[i]),
    )


@rule("rng_uniform")
def _uniform(call: Call, low: TensorRef, high: TensorRef) -> Lambda:
    """Draws from the device's own state: nothing may be cut."""
    return lambda *i: Opaque()(low[()], high[()])[i]
