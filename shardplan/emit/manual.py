"""Evaluates the function of the user's own `jax.shard_map` as part of each device's program.

A `jax.shard_map` inside another over the same axes is an error. JAX marks in such a function which values differ between devices;
the plan's program does not use the marks, so they are dropped, in loops and branches too.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardplan import _jax
from shardplan.emit.walk import where_rows

OWN = "collectives_of_the_step"
"""The named scope of code that the step itself runs on each device: its collectives are the user's, and no plan has them."""

_MARKS = ("pvary", "pcast", "vary_unreduced_cast", "vary_unreduced_cast_p", "reduced_vary_cast", "reduced_vary_cast_p")


def evaluated(jaxpr: Any, operands: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
    """The results of a jaxpr on a device's blocks, with the axes of the mesh in scope."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [a.val if isinstance(a, _jax.Literal) else values[a] for a in eqn.invars]
        with _jax.settings_of(eqn):
            values.update(zip(eqn.outvars, _equation(eqn, inputs), strict=True))
    return [a.val if isinstance(a, _jax.Literal) else values[a] for a in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, _jax.params_of(eqn)
    if name in _MARKS:
        return inputs
    if name in ("remat2", "checkpoint") and params["differentiated"] and params["prevent_cse"]:
        inputs = list(lax.optimization_barrier(inputs))
    body = params["jaxpr"] if name in ("remat2", "checkpoint", "shard_map") else _jax.called(eqn)
    if body is not None:
        return _function(body)(*inputs)
    match name:
        case "psum_invariant":
            return [lax.psum(x, params["axes"]) for x in inputs]
        case "all_gather_invariant":
            return [
                lax.all_gather(x, params["axis_name"], axis=params["all_gather_dimension"], tiled=params["tiled"]) for x in inputs
            ]
        case "scan":
            return _scan(params, inputs)
        case "while":
            return _while(params, inputs)
        case "cond" if params.get("branches_platforms") is None:
            return lax.switch(inputs[0].astype("int32"), [_function(b) for b in params["branches"]], *inputs[1:])
        case _:
            return _jax.bound(eqn, inputs, params)


def _function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A jaxpr, closed or not, as a function that returns arrays."""
    inner, consts = _jax.jaxpr_and_consts(jaxpr)
    return lambda *xs: [jnp.asarray(x) for x in evaluated(inner, xs, consts)]


def _scan(params: Any, inputs: Sequence[Any]) -> list[Any]:
    consts, carry = params["num_consts"], params["num_carry"]
    body, fixed = _function(params["jaxpr"]), inputs[:consts]

    def iteration(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*fixed, *state, *slices)
        return results[:carry], results[carry:]

    start, stacked = ([jnp.asarray(x) for x in own] for own in (inputs[consts : consts + carry], inputs[consts + carry :]))
    end, ys = lax.scan(iteration, start, stacked, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return [*end, *ys]


def _while(params: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    a, b = params["cond_nconsts"], params["body_nconsts"]
    test, body = _function(params["cond_jaxpr"]), _function(params["body_jaxpr"])
    start = [jnp.asarray(x) for x in inputs[a + b :]]
    batched = bool(params["cond_jaxpr"].out_avals[0].shape)

    def holds(state: Sequence[Any]) -> Any:
        return jnp.any(test(*inputs[:a], *state)[0])

    def iteration(state: Sequence[Any]) -> list[Any]:
        after = body(*inputs[a : a + b], *state)
        if not batched:
            return after
        on = test(*inputs[:a], *state)[0]  # under vmap each element goes on as long as its own test holds
        return [where_rows(on, x, before) for x, before in zip(after, state, strict=True)]

    return lax.while_loop(holds, iteration, start)
