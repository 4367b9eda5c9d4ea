"""Equations and their parameters, in one form for every release of JAX."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal as Literal  # a constant inside a jaxpr
from jax.extend.core import jaxpr_as_fun as jaxpr_as_fun

from shardplan._jax.programs import within_mesh
from shardplan.errors import JaxVersionError


@contextlib.contextmanager
def settings_of(eqn: Any) -> Iterator[None]:
    """The settings under which an equation was traced, all but the mesh: it runs on the one in scope here."""
    here = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, within_mesh(here):
        yield


@contextlib.contextmanager
def traced_at(eqn: Any, scope: str) -> Iterator[None]:
    """Equations that are traced inside have the source line of this one, and this named scope."""
    with contextlib.ExitStack() as stack:
        try:
            from jax._src import source_info_util
        except ImportError:  # the module moved: only messages lose their line
            pass
        else:
            stack.enter_context(source_info_util.user_context(eqn.source_info.traceback))
        if scope:
            stack.enter_context(jax.named_scope(scope))
        yield


class Parameters(dict[str, Any]):
    """The parameters of a primitive; asking for one that JAX does not record is an error that names the release."""

    def __init__(self, primitive: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.primitive = primitive

    def __missing__(self, key: str) -> Any:
        raise JaxVersionError(self.primitive, f"it records no parameter {key!r}, but {', '.join(sorted(self)) or 'none'}")


def params_of(eqn: Any, **own: Any) -> Parameters:
    """The parameters of an equation in one form for every JAX, with our ``own``: a ``scan`` has ``num_consts``, ``num_carry``.

    JAX 0.11 and later record trees of a scan's operands (``ft_in``) in place of these counts.

    Raises:
        JaxVersionError: for a scan whose parameters have neither form, and when a parameter that is not there is read.
    """
    params = Parameters(eqn.primitive.name, eqn.params)
    if eqn.primitive.name == "composite" and "jaxpr" in params:  # JAX 0.10
        params["call_jaxpr"] = params.pop("jaxpr")
    if eqn.primitive.name == "scan" and "num_consts" not in params:
        try:
            params["num_consts"], params["num_carry"], _ = (len(group) for group in params.pop("ft_in").unpack())
        except (KeyError, AttributeError, TypeError, ValueError) as error:
            raise JaxVersionError("scan", f"its parameters are {', '.join(sorted(eqn.params))}") from error
        params.pop("ft_out", None)
    params.update(own)
    return params


_CALLS: Mapping[str, str] = {
    **dict.fromkeys(("jit", "pjit", "xla_metadata_call"), "jaxpr"),
    **dict.fromkeys(
        ("closed_call", "core_call", "custom_jvp_call", "custom_lin", "custom_vjp_call", "eval_jaxpr", "program_order"),
        "call_jaxpr",
    ),
    **dict.fromkeys(("custom_partitioning", "custom_vmap_call"), "call"),
    "composite": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
}
_HIGH_LEVEL = "call_hi_primitive"
CALLS = (*_CALLS, _HIGH_LEVEL)
"""The primitives that only call a function on all their operands (`called`)."""


def called(eqn: Any) -> Any | None:
    """The jaxpr that an equation calls on all its operands; None for an equation that is no such call.

    A high-level primitive (``jnp.nonzero`` and others, since JAX 0.12) stands for the jaxpr of its ``expand``, one of
    `jax.experimental.sparse` for that of its implementation on dense arrays, which JAX lowers it to.

    Raises:
        JaxVersionError: if JAX records the called function elsewhere.
    """
    name = eqn.primitive.name
    if name == _HIGH_LEVEL:
        high = params_of(eqn)["_prim"]
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in (v.aval for v in eqn.invars)]
        return jax.make_jaxpr(lambda *flat: jax.tree.leaves(high.expand(*jax.tree.unflatten(high.in_tree, flat))))(*shapes)
    sparse = _sparse(name)
    if sparse is not None:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        return jax.make_jaxpr(lambda *flat: jax.tree.leaves(sparse(*flat, **eqn.params)))(*shapes)
    return params_of(eqn)[_CALLS[name]] if name in _CALLS else None


def _sparse(name: str) -> Callable[..., Any] | None:
    """The implementation of a primitive of `jax.experimental.sparse`; None for any other, and for calls of cuSPARSE."""
    module = sys.modules.get(f"jax.experimental.sparse.{name.partition('_')[0]}")
    return getattr(module, f"_{name}_impl", None)


def jaxpr_and_consts(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
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
