"""Floats as integers in the same order, so that a maximum or minimum over devices keeps NaN.

Compilers and libraries lose NaN where they reduce floats by max or min across devices; integers have no NaN.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
from jax import lax


def as_integers(x: Any, reducer: Literal["max", "min"]) -> Any:
    """Integers in the order of the floats; NaN lies beyond all numbers on the reducer's side. Narrow floats become 32 bits."""
    wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
    nan = jnp.copysign(jnp.asarray(jnp.nan, wide.dtype), 1.0 if reducer == "max" else -1.0)
    return _flipped(lax.bitcast_convert_type(jnp.where(jnp.isnan(wide), nan, wide), _integer(wide.dtype)))


def as_floats(numbers: Any, dtype: Any) -> Any:
    """The floats that `as_integers` turned into these numbers, in their own dtype."""
    wide = jnp.float64 if numbers.dtype.itemsize == 8 else jnp.float32
    return lax.bitcast_convert_type(_flipped(numbers), wide).astype(dtype)


def _integer(dtype: Any) -> Any:
    return jnp.int64 if jnp.dtype(dtype).itemsize == 8 else jnp.int32


def _flipped(bits: Any) -> Any:
    """Bits as a number in the floats' order, and back: negative ones have all bits but the sign flipped."""
    return jnp.where(bits < 0, bits ^ jnp.asarray(jnp.iinfo(bits.dtype).max, bits.dtype), bits)
