# pyright: basic
"""Whether a call in a program is of the registered function, and not of another one with the same name.

The registered function is traced on the call's shapes, and the two programs are compared op by op, with their constants. If they
differ (another function, other static arguments, another constant inside a kernel), the description does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.interpreters import partial_eval

from shardplan import _jax
from shardplan.errors import DescriptionError
from shardplan.tdl.describe import kernel_name
from shardplan.user_code import users_code

_CUSTOM = ("custom_jvp_call", "custom_vjp_call")


def same_function(function: Callable[..., Any], name: str, body: Any, operands: Sequence[Any]) -> bool:
    """Whether ``function`` on operands of these types is the call ``name`` whose program is ``body``."""
    primitive = name.partition(":")[0]
    traced = _traced(function, name, operands)
    if traced is None:
        return False
    for eqn in traced.jaxpr.eqns:
        program = eqn.params.get("jaxpr" if primitive == "jit" else "call_jaxpr")
        if eqn.primitive.name in (primitive, "pjit") and program is not None:
            return program is body or same_program(_without_dead_code(program), _without_dead_code(body))
    return False


def same_kernel(run: Callable[..., Any], name: str, params: Any, operands: Sequence[Any]) -> bool:
    """Whether ``run`` on operands of these types calls this kernel. True also if it calls no kernel of that name, or cannot be
    traced.
    """
    traced = _traced(run, name, operands)
    equations = () if traced is None else _jax.equations(traced.jaxpr)
    kernels = [e.params for e in equations if kernel_name(e.primitive.name, e.params) == name]
    return not kernels or any(_same_grid(p, params) and same_program(p["jaxpr"], params["jaxpr"]) for p in kernels)


def _traced(function: Callable[..., Any], name: str, operands: Sequence[Any]) -> Any | None:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)) for x in operands]
    try:
        with users_code(lambda error: DescriptionError(f"{name} cannot be traced", expression=str(error))):
            return jax.make_jaxpr(function)(*shapes)
    except DescriptionError:
        return None


def _without_dead_code(closed: Any) -> Any:
    """The program without dead code, which JAX removes from some calls only (those inside remat)."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return jaxpr if closed.jaxpr is closed else closed.replace(jaxpr=jaxpr)


def _same_grid(a: Any, b: Any) -> bool:
    """Whether two kernels have the same blocks, cut from the operands in the same way."""
    one, two = a.get("grid_mapping"), b.get("grid_mapping")
    maps = [[getattr(m, "index_map_jaxpr", None) for m in getattr(g, "block_mappings", ())] for g in (one, two)]
    return str(one) == str(two) and _alike(*maps)


def same_program(a: Any, b: Any) -> bool:
    """Whether two programs run the same ops on the same constants; variable names and source positions do not count."""
    if a is b:
        return True
    if not _alike(getattr(a, "consts", ()), getattr(b, "consts", ())):
        return False
    one, two = (getattr(x, "jaxpr", x) for x in (a, b))
    counterpart: dict[Any, Any] = {}
    if not (
        _bound(counterpart, one.constvars, two.constvars)
        and _bound(counterpart, one.invars, two.invars)
        and len(one.eqns) == len(two.eqns)
    ):
        return False
    for e, f in zip(one.eqns, two.eqns, strict=True):
        if e.primitive is not f.primitive or not _read(counterpart, e.invars, f.invars) or not _same_params(e, f):
            return False
        if not _bound(counterpart, e.outvars, f.outvars):
            return False
    return _read(counterpart, one.outvars, two.outvars)


def _bound(counterpart: dict[Any, Any], one: Sequence[Any], two: Sequence[Any]) -> bool:
    counterpart.update(zip(one, two, strict=False))
    return [_type(v) for v in one] == [_type(v) for v in two]


def _type(var: Any) -> Any:
    return getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)


def _read(counterpart: dict[Any, Any], one: Sequence[Any], two: Sequence[Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, _jax.Literal) or isinstance(b, _jax.Literal):
            return type(a) is type(b) and _type(a) == _type(b) and _alike(a.val, b.val)
        return counterpart[a] is b

    return len(one) == len(two) and all(map(same, one, two))


def _same_params(e: Any, f: Any) -> bool:
    """Whether two equations have the same parameters; for custom calls and ``jit``, only the programs count.

    Derivative rules are no longer needed by then, and a ``jit``'s preferred shardings do not change its values.
    """
    name = e.primitive.name
    key = "call_jaxpr" if name in _CUSTOM else "jaxpr" if name in ("jit", "pjit") else None
    return _alike(e.params[key], f.params[key]) if key in e.params else _alike(e.params, f.params)


def _alike(a: Any, b: Any) -> bool:
    """Whether two values are equal; values that cannot be compared are not."""
    if a is b:
        return True
    if hasattr(a, "eqns") or hasattr(a, "jaxpr"):
        return (hasattr(b, "eqns") or hasattr(b, "jaxpr")) and same_program(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_alike(a[k], b[k]) for k in a)
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, np.ndarray | np.generic | jax.Array | float | complex):
        return _same_array(a, b)
    if hasattr(a, "__code__") and hasattr(b, "__code__"):  # each trace makes a new function object
        cells = [tuple(c.cell_contents for c in f.__closure__ or ()) for f in (a, b)]
        return a.__code__ is b.__code__ and _alike(a.__defaults__, b.__defaults__) and _alike(*cells)
    return bool(a == b)


def _same_array(a: Any, b: Any) -> bool:
    if any(isinstance(x, Tracer) for x in (a, b)) or np.shape(a) != np.shape(b):
        return False
    if jax.numpy.issubdtype(getattr(a, "dtype", None) or np.float32, jax.dtypes.prng_key):
        return a.dtype == getattr(b, "dtype", None) and _same_array(jax.random.key_data(a), jax.random.key_data(b))
    one, two = np.asarray(a), np.asarray(b)
    return one.dtype == two.dtype and one.tobytes() == two.tobytes()
