# pyright: basic
"""Cases of random keys and bits."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardplan.tdl.proof.case import (
    Case,
    Draw,
    array,
    bound,
    case,
    shape,
    traced,
)

_SHAPES = ((4, 6), (12,))


def _keys(draw: Draw) -> Any:
    return array(draw, draw.choose(((), (), (2,))), draw.choose(("key<fry>", "key<fry>", "key<rbg>", "key<urbg>")))


@case("random_bits")
def _bits(name: str, draw: Draw) -> Case:
    return bound(name, _keys(draw), bit_width=draw.choose((8, 16, 32, 32)), shape=draw.choose(_SHAPES))


@case("random_split")
def _split(name: str, draw: Draw) -> Case:
    return bound(name, _keys(draw), shape=draw.choose(_SHAPES))


@case("random_fold_in")
def _fold_in(name: str, draw: Draw) -> Case:
    keys = _keys(draw)
    return bound(name, keys, array(draw, keys.shape, "uint32", low=0))


@case("random_seed")
def _seed(name: str, draw: Draw) -> Case:
    impl = jax.make_jaxpr(jax.random.key)(0).eqns[0].params["impl"]
    return bound(name, array(draw, draw.choose(((), (4,), (2, 6))), "int32"), impl=impl)


@case("random_wrap")
def _wrap(name: str, draw: Draw) -> Case:
    words = array(draw, (*draw.choose(((), (4,), (2, 6))), 2), "uint32", low=0, high=2**31)
    return traced(name, lambda w: jax.random.wrap_key_data(w, impl="threefry2x32"), words)


@case("random_unwrap")
def _unwrap(name: str, draw: Draw) -> Case:
    return bound(name, _keys(draw))


@case("random_clone")
def _clone(name: str, draw: Draw) -> Case:
    return bound(name, _keys(draw))


@case("random_gamma")
def _gamma(name: str, draw: Draw) -> Case:
    dims = (2,)  # compiling it takes seconds
    alpha = np.abs(array(draw, (*dims, *draw.choose(((), (4,)))))) + np.float32(0.5)
    return bound(name, array(draw, dims, "key<fry>"), alpha, log_space=False)


@case("threefry2x32")
def _threefry(name: str, draw: Draw) -> Case:
    dims = draw.choose(_SHAPES)
    return bound(name, *(array(draw, dims, "uint32", low=0, high=2**31) for _ in range(4)))


@case("threefry4x32", "philox4x32", "philox2x32")
def _counter(name: str, draw: Draw) -> Case:
    dims = draw.choose(_SHAPES)
    count = {"threefry4x32": 8, "philox4x32": 6, "philox2x32": 3}[name]
    return bound(name, *(array(draw, dims, "uint32", low=0, high=2**31) for _ in range(count)))


@case("rng_bit_generator")
def _generator(name: str, draw: Draw) -> Case:
    key = array(draw, (4,), "uint32", low=0, high=2**31)
    return traced(name, lambda k: jax.lax.rng_bit_generator(k, shape(draw)), key)
