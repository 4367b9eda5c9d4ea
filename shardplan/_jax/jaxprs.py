"""Equations and their parameters, in one form for every release of JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal as Literal  # a constant inside a jaxpr
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun

from shardplan._jax.programs import _on
from shardplan.errors import JaxVersionError


@contextlib.contextmanager
def settings_of(eqn: Any) -> Iterator[None]:
    """The settings under which an equation was traced, all but the mesh: it runs on the one in scope here."""
    here = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, _on(here):
        yield


def params_of(eqn: Any) -> Mapping[str, Any]:
    """The parameters of an equation in one form for every JAX: a ``scan`` has ``num_consts`` and ``num_carry``.

    JAX 0.11 and later record trees of a scan's operands (``ft_in``) in place of these counts.

    Raises:
        JaxVersionError: for a scan whose parameters have neither form.
    """
    if eqn.primitive.name != "scan" or "num_consts" in eqn.params:
        return eqn.params
    try:
        consts, carry, _ = (len(group) for group in eqn.params["ft_in"].unpack())
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise JaxVersionError("scan", f"its parameters are {', '.join(sorted(eqn.params))}") from error
    own = {"num_consts": consts, "num_carry": carry}
    return {**{key: value for key, value in eqn.params.items() if key not in ("ft_in", "ft_out")}, **own}


def expanded(eqn: Any) -> Any | None:
    """The jaxpr that a high-level primitive stands for (``jnp.nonzero`` and others, since JAX 0.12); None for other equations."""
    if eqn.primitive.name != "call_hi_primitive":
        return None
    high = eqn.params["_prim"]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in (v.aval for v in eqn.invars)]
    return jax.make_jaxpr(lambda *flat: jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, flat))))(*shapes)


CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "custom_lin": "call_jaxpr",
    "xla_metadata_call": "jaxpr",
    "remat_opt": "fwd_jaxpr",
}
"""The primitives that only call a function on all their operands, each with the parameter that holds the function."""


def opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr in program order, each followed by those of its `bodies`."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in bodies(eqn):
            yield from equations(body)


def bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs among the parameters of an equation, without their constants."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            body = getattr(inner, "jaxpr", inner)
            if hasattr(body, "eqns"):
                yield body


def threefry_partitionable(eqn: Any) -> bool:
    """Whether the bits that threefry draws here depend on the key and the place of an element alone."""
    return bool(eqn.ctx.threefry_partitionable)
