"""Collectives over an axis of `jax.vmap`: once traced they reduce a dim, and no axis of a mesh has a part in them."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax

_REDUCTIONS = {"psum": lax.reduce_sum, "pmax": lax.reduce_max, "pmin": lax.reduce_min}


def over_dims(eqn: Any) -> Any:
    """An equation that reduces over mapped dims as JAX's plain reduction of them; any other equation as it is."""
    reduction, axes = _REDUCTIONS.get(eqn.primitive.name), eqn.params.get("axes", ())
    if reduction is None or not all(isinstance(axis, int) for axis in axes) or eqn.params.get("axis_index_groups") is not None:
        return eqn
    (plain,) = jax.make_jaxpr(lambda x: reduction(x, axes))(eqn.invars[0].aval).jaxpr.eqns
    return eqn.replace(primitive=plain.primitive, params=plain.params)
