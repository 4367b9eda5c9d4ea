"""Perturbs arguments by one unit in the last place, in the precision in which a step reads them.

A float argument is moved to one of its neighbours. Where the step narrows an argument before it computes with it (parameters in
float32, products in bfloat16), such a move seldom reaches the narrow copy, yet a different order of summation rounds in that
narrow type. There the copy is moved by one unit of its own type as well. The argument does not take this larger move: the
value that the optimizer updates stays precise.

Sums of narrow floats are added up in float32. Several devices add up fewer numbers each than one device does, and round less
often: float32 sums cause a change of that kind.

Evaluated op by op, each op rounds its narrow results; a compiler may keep them in float32 between ops that it merges. To cause a
change of that kind, `perturbed_op` moves every narrow result of an op that rounds, not only copies of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from shardplan import _jax
from shardplan.ir import Op, Program


def neighbours(x: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Each float moved to one of its neighbours, up or down at random; other arrays unchanged. Infinities and NaN stay, as does a
    number that has no finite neighbour on that side.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        near = np.empty_like(x)
        near.real, near.imag = neighbours(np.real(x), rng), neighbours(np.imag(x), rng)
        return near
    info = jnp.finfo(x.dtype)  # not infinities, which some types of 8 bits lack
    towards = np.where(rng.integers(2, size=x.shape) == 1, info.max, info.min).astype(x.dtype)
    near = np.nextafter(x, towards).astype(x.dtype)
    return np.where(np.isfinite(x) & np.isfinite(near), near, x)


PICKING = frozenset(
    "abs broadcast_in_dim clamp concatenate copy cummax cummin device_put dynamic_slice dynamic_update_slice "
    "expand_dims gather max min neg optimization_barrier pad reduce_max reduce_min reduce_window_max "
    "reduce_window_min reshape rev scatter scatter-max scatter-min select_n slice sort split squeeze stack tile top_k transpose "
    "unstack".split()
)
"""Primitives whose results are numbers of their operands, up to the sign: they round nothing."""


def narrows(program: Program) -> bool:
    """Whether a program, or a body in it, converts floats to a narrower type, or adds up floats narrower than float32."""

    def narrower(op: Op) -> bool:
        return op.handle is not None and (_makes_narrower(op.handle) or _adds_narrow(op.handle))

    return any(narrower(op) for op in program.every_op())


def narrowed(step: Callable[..., Any], seed: Any) -> Callable[..., Any]:
    """The step with each narrow copy of an argument moved, and narrow sums added up in float32; ``seed`` (a uint32 scalar)
    decides the directions.
    """

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(step, return_shape=True)(*args)
        flat = jax.tree.leaves(args)
        outs = _Reader(lambda copy: moved(copy, seed)).run(closed.jaxpr, closed.consts, flat, [True] * len(flat))
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


def perturbed_op(eqn: Any, run: Callable[..., Sequence[Any]], inputs: Sequence[Any], seed: int) -> Sequence[Any]:
    """The results of an op, which ``run`` computes, with each narrow result moved that it rounds. Narrow sums are added up in
    float32.
    """
    if _adds_narrow(eqn):
        results: Sequence[Any] = [_bound(eqn, [inputs[0].astype(jnp.float32)])[0].astype(inputs[0].dtype)]
    else:
        results = run(*inputs)
    rounded = _rounded_results(eqn)
    return [_moved(x, np.uint32(seed)) if n in rounded else x for n, x in enumerate(results)]


def rounds_narrow(eqn: Any) -> bool:
    """Whether an op, or one in its bodies, rounds a result to floats narrower than float32, or narrower than its operands."""
    return bool(_rounded_results(eqn)) or any(map(rounds_narrow, (e for body in _jax.bodies(eqn) for e in body.eqns)))


def _rounded_results(eqn: Any) -> set[int]:
    """The places of the results that an op rounds to narrow floats."""
    if eqn.primitive.name in PICKING:
        return set()
    narrower = _makes_narrower(eqn)
    return {n for n, v in enumerate(eqn.outvars) if narrower or _is_narrower(getattr(v.aval, "dtype", None), jnp.float32)}


def moved(x: Any, seed: Any) -> Any:
    """Each number of a narrow float array moved one unit up or down, by a hash of its bits, its place and the seed.

    Zeros, infinities and NaN stay, as does a number that has no finite neighbour on that side.
    """
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, unsigned)
    mixed = bits.astype(jnp.uint32) * jnp.uint32(0x9E3779B1) + jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x85EBCA6B)
    for dim in range(x.ndim):
        mixed = mixed + lax.broadcasted_iota(jnp.uint32, x.shape, dim) * jnp.uint32(0xC2B2AE35 + 2 * dim)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    up = ((mixed ^ (mixed >> 13)) & 1).astype(bool)
    near = lax.bitcast_convert_type(jnp.where(up, bits + unsigned(1), bits - unsigned(1)), x.dtype)
    keep = (x == 0) | ~jnp.isfinite(x) | ~jnp.isfinite(near)
    return jnp.where(keep, x, near)


_moved = jax.jit(moved)


class _Reader:
    """Evaluates a jaxpr and applies ``change`` to each narrow copy of an argument, inside calls, scans and remat too. Sums of
    narrow floats are added up in float32.

    The bodies of ``while`` and ``cond`` stay as they are.
    """

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], own: Sequence[bool]) -> list[Any]:
        """The results of a jaxpr; ``own`` marks which ``args`` are arguments of the step, or slices of them."""
        values: dict[Any, Any] = {**dict(zip(jaxpr.constvars, consts, strict=True)), **dict(zip(jaxpr.invars, args, strict=True))}
        arguments = {v for v, is_argument in zip(jaxpr.invars, own, strict=True) if is_argument}

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _jax.Literal) else values[atom]

        for eqn in jaxpr.eqns:
            inputs = [read(a) for a in eqn.invars]
            flags = [not isinstance(a, _jax.Literal) and a in arguments for a in eqn.invars]
            outs = self.equation(eqn, inputs, flags)
            values.update(zip(eqn.outvars, outs, strict=True))
        return [read(a) for a in jaxpr.outvars]

    def equation(self, eqn: Any, inputs: Sequence[Any], own: Sequence[bool]) -> list[Any]:
        """The results of one equation."""
        name, params = eqn.primitive.name, _jax.params_of(eqn)
        if _adds_narrow(eqn):
            return [_bound(eqn, [inputs[0].astype(jnp.float32)])[0].astype(inputs[0].dtype)]
        if any(own) or any(_adds_narrow(e) for body in _jax.bodies(eqn) for e in _jax.equations(body)):
            match name:
                case _ if _makes_narrower(eqn):
                    return [self.change(_bound(eqn, inputs)[0])]
                case _ if name in _jax.CALLS:
                    return self.run(*_jax.jaxpr_and_consts(_jax.called(eqn)), inputs, own)
                case "remat2" | "checkpoint":
                    body = jax.checkpoint(
                        lambda *xs: self.run(params["jaxpr"], (), xs, own),
                        prevent_cse=params["prevent_cse"],
                        policy=params["policy"],
                    )
                    return body(*inputs)
                case "scan":
                    return self.scan(params, inputs, own)
                case _:
                    pass
        return _bound(eqn, inputs)

    def scan(self, params: Any, inputs: Sequence[Any], own: Sequence[bool]) -> list[Any]:
        """A scan: its constants and slices count as arguments where the whole operand does; carries do not."""
        inner, consts, carry = params["jaxpr"], params["num_consts"], params["num_carry"]
        fixed, start, stacked = inputs[:consts], inputs[consts : consts + carry], inputs[consts + carry :]
        flags = [*own[:consts], *[False] * carry, *own[consts + carry :]]

        def body(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.run(inner.jaxpr, inner.consts, [*fixed, *state, *slices], flags)
            after = [lax.convert_element_type(x, s.dtype) for x, s in zip(results, state, strict=False)]
            return [_jax.weakly_typed(x) if s.weak_type else x for x, s in zip(after, state, strict=True)], results[carry:]

        end, ys = lax.scan(
            body, list(start), list(stacked), length=params["length"], reverse=params["reverse"], unroll=params.get("unroll", 1)
        )
        return [*end, *ys]


def _makes_narrower(eqn: Any) -> bool:
    """Whether an equation converts floats to a narrower type."""
    if eqn.primitive.name != "convert_element_type":
        return False
    return _is_narrower(eqn.outvars[0].aval.dtype, eqn.invars[0].aval.dtype)


def _adds_narrow(eqn: Any) -> bool:
    """Whether an equation adds up floats narrower than float32."""
    return eqn.primitive.name == "reduce_sum" and _is_narrower(eqn.invars[0].aval.dtype, jnp.float32)


def _is_narrower(new: Any, old: Any) -> bool:
    if new is None:
        return False
    floats = jnp.issubdtype(new, jnp.floating) and jnp.issubdtype(old, jnp.floating)
    return floats and jnp.finfo(new).nmant < jnp.finfo(old).nmant


def _bound(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    with eqn.ctx.manager:
        return _jax.bound(eqn, inputs)
