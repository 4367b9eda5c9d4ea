# pyright: basic
"""Pallas kernels on CPUs: the body of a kernel for GPUs runs in Pallas's interpreter, one program of its grid after another.

The interpreter does not know a program's number inside a branch or a loop of the body. So the body is evaluated anew with all
numbers of the program taken at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardplan import _jax


def functions() -> Mapping[str, Callable[..., Any]]:
    """The function that runs kernels which do not ask for the interpreter themselves, by the name of JAX's primitive."""
    import jax.experimental.pallas  # noqa: F401 - the primitive exists once it is imported

    return {"pallas_call": interpreted}


def interpreted(*operands: Any, **params: Any) -> Any:
    """The results of a kernel that has a `KernelGrid`: its grid and the index maps of its blocks say all of how it is launched.

    Raises:
        NotImplementedError: for another kernel.
    """
    from jax.experimental import pallas as pl

    if _jax.kernel_grid(params) is None:
        raise NotImplementedError(
            f"Pallas's interpreter is not set up here for the launch of {params['name']}: pass interpret=True"
        )
    jaxpr, grid_mapping = params["jaxpr"], params["grid_mapping"]
    axes = [dim for dim in range(len(grid_mapping.grid)) if dim not in grid_mapping.vmapped_dims]

    def kernel(*refs: Any) -> None:
        programs = {"program_id": [pl.program_id(a) for a in axes], "num_programs": [pl.num_programs(a) for a in axes]}
        _evaluate(jaxpr, refs, programs)

    def spec(mapping: Any) -> pl.BlockSpec:
        shape = tuple(None if type(b).__name__ == "Squeezed" else b.block_size for b in mapping.block_shape)
        return pl.BlockSpec(shape, lambda *at: tuple(_jax.jaxpr_as_fun(mapping.index_map_jaxpr)(*at)))

    specs = [spec(m) for m in grid_mapping.block_mappings]
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in params["out_avals"]],
        grid=tuple(grid_mapping.grid),
        in_specs=specs[: len(operands)],
        out_specs=specs[len(operands) :],
        interpret=True,
    )(*operands)


def _evaluate(
    jaxpr: Any, operands: Sequence[Any], programs: Mapping[str, Sequence[Any]], consts: Sequence[Any] = ()
) -> list[Any]:
    """The results of a body, or of a jaxpr inside it; ``programs`` are the numbers of the program and of all programs."""
    values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))
    for eqn in jaxpr.eqns:
        inputs = [a.val if isinstance(a, _jax.Literal) else values[a] for a in eqn.invars]
        with _jax.settings_of(eqn):
            values.update(zip(eqn.outvars, _equation(eqn, inputs, programs), strict=True))
    return [a.val if isinstance(a, _jax.Literal) else values[a] for a in jaxpr.outvars]


def _equation(eqn: Any, inputs: list[Any], programs: Mapping[str, Sequence[Any]]) -> Sequence[Any]:
    name, params = eqn.primitive.name, _jax.params_of(eqn)

    def function(body: Any) -> Callable[..., list[Any]]:
        inner, consts = _jax.jaxpr_and_consts(body)
        return lambda *own: _evaluate(inner, own, programs, consts)

    match name:
        case "program_id" | "num_programs":
            return [programs[name][params["axis"]]]
        case "cond":
            branches = [function(b) for b in params["branches"]]
            return lax.switch(inputs[0].astype("int32"), [lambda b=b: b(*inputs[1:]) for b in branches])
        case "while":
            a, b = params["cond_nconsts"], params["body_nconsts"]
            test, body, start = function(params["cond_jaxpr"]), function(params["body_jaxpr"]), inputs[a + b :]
            return lax.while_loop(lambda s: test(*inputs[:a], *s)[0], lambda s: body(*inputs[a : a + b], *s), start)
        case "scan":
            return _scan(function(params["jaxpr"]), params, inputs)
        case _ if name in _jax.CALLS:
            return function(_jax.called(eqn))(*inputs)
        case _:
            if name == "masked_load":
                inputs = _of_one_dtype(inputs, params["args_tree"], eqn.outvars[0].aval.dtype)
            return _jax.bound(eqn, inputs)


def _of_one_dtype(inputs: Sequence[Any], tree: Any, dtype: Any) -> list[Any]:
    """The inputs of a load, with the value of elements that its mask leaves out in the dtype of all others.

    The interpreter would promote both, and so load integers from an array of bools.
    """
    ref, transforms, mask, other = jax.tree.unflatten(tree, inputs)
    return jax.tree.leaves((ref, transforms, mask, None if other is None else jnp.asarray(other, dtype)))


def _scan(body: Callable[..., list[Any]], params: Mapping[str, Any], inputs: Sequence[Any]) -> list[Any]:
    consts, carry = params["num_consts"], params["num_carry"]

    def iteration(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*inputs[:consts], *state, *slices)
        return results[:carry], results[carry:]

    start, stacked = inputs[consts : consts + carry], inputs[consts + carry :]
    end, ys = lax.scan(iteration, start, stacked, length=params["length"], reverse=params["reverse"])
    return [*end, *ys]
