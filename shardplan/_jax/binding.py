"""The primitives of the installed JAX, by name."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from jax.extend.core import Primitive

from shardplan._jax.custom_kernels import OWN_PARAMS

# Modules that register primitives when they are imported. One that has moved is skipped; the coverage test then reports it.
_FAMILIES = (
    "jax.lax.linalg", "jax.experimental.shard_map", "jax._src.ad_checkpoint", "jax._src.callback", "jax._src.checkify",
    "jax._src.custom_batching", "jax._src.custom_partitioning", "jax._src.debugging", "jax._src.ffi", "jax._src.hijax",
    "jax._src.lax.ann", "jax._src.lax.scaled_dot", "jax._src.random.core", "jax._src.random.philox2x32",
    "jax._src.random.philox4x32", "jax._src.random.threefry2x32", "jax._src.random.threefry4x32", "jax._src.shard_map",
    "jax._src.state.discharge", "jax._src.state.primitives", "jax._src.xla_metadata", "jax.export",
)  # fmt: skip


KERNEL_MODULES = ("jax._src.cudnn", "jax._src.pallas", "jax.experimental", "jax._src.tpu", "jax._src.mosaic")
"""Where JAX keeps the primitives of kernels."""


REFERENCES = frozenset("accum_grad_in_ref addupdate empty_ref free_ref freeze get new_ref pin run_state swap unpin".split())
"""The primitives that make or use mutable references."""


def primitives() -> Mapping[str, tuple[str, Any]]:
    """Every primitive of the installed JAX by name, with its module: an attribute of any loaded ``jax`` module counts, also of a
    module that was loaded since the last call.
    """
    _load_families()
    return _primitives_of(tuple(sorted(m for m in sys.modules if m == "jax" or m.startswith(("jax.", "jax._src")))))


@cache
def _load_families() -> None:
    for family in _FAMILIES:
        try:
            importlib.import_module(family)
        except (ImportError, AttributeError):
            continue


@lru_cache(maxsize=1)
def _primitives_of(modules: tuple[str, ...]) -> Mapping[str, tuple[str, Any]]:
    """The primitives that are attributes of these modules."""
    found: dict[str, tuple[str, Any]] = {}
    for module in modules:
        for value in list(vars(sys.modules[module]).values()):
            if isinstance(value, Primitive):
                previous = found.get(value.name)
                if previous is None or _innermost(module) > _innermost(previous[0]):
                    found[value.name] = (module, value)
    return found


@cache
def _primitive(name: str) -> Any:
    """The primitive of a name."""
    return primitives()[name][1]


def _innermost(module: str) -> tuple[bool, int]:
    """Orders modules with the same primitive: packages re-export, so the innermost counts; but those of Pallas only import."""
    return ".pallas" not in module, module.count(".")


@contextlib.contextmanager
def run_on_cpu(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, CPUs run these primitives by functions of the same operands and parameters.

    A Pallas kernel that asks for an interpreter (``interpret=``) runs in that one.
    """
    mlir = importlib.import_module("jax.interpreters.mlir")
    lowerings = importlib.import_module("jax._src.interpreters.mlir")
    rules = lowerings._platform_specific_lowerings["cpu"]
    known = {name: _primitive(name) for name in functions}
    before = {name: rules.get(primitive) for name, primitive in known.items()}

    def lowered(name: str) -> Callable[..., Any]:
        own, usual = mlir.lower_fun(functions[name], multiple_results=True), lowerings._lowerings.get(known[name])
        return lambda context, *operands, **params: (usual.rule if params.get("interpret") else own)(context, *operands, **params)

    for name, primitive in known.items():
        mlir.register_lowering(primitive, lowered(name), platform="cpu")
    try:
        yield
    finally:
        for name, primitive in known.items():
            rules.pop(primitive, None)
            if before[name] is not None:
                rules[primitive] = before[name]


def bind(primitive: str, operands: Sequence[Any], params: Mapping[str, Any], *, own: Any = None) -> Any:
    """Applies a primitive by name: ``own`` if it has that name (a user's primitive, unknown to JAX), else JAX's."""
    value = own if own is not None and own.name == primitive else _primitive(primitive)
    return value.bind(*operands, **value.get_bind_params({k: v for k, v in params.items() if k not in OWN_PARAMS}))


def bound(equation: Any, operands: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    """The results of an equation's primitive on these operands, with its own parameters or others."""
    primitive = equation.primitive
    made = primitive.bind(*operands, **primitive.get_bind_params(equation.params if params is None else params))
    return list(made) if primitive.multiple_results else [made]


def runs_by_itself(equation: Any) -> bool:
    """Whether JAX runs the primitive of an equation outside of compiled functions without compiling it anew each time, as it does
    Pallas's.
    """
    run = vars(equation.primitive).get("impl")
    return run is not None and not getattr(run, "__module__", "").startswith("jax._src.pallas")


def linalg() -> Any:
    """The module with the factorisations that ``jax.lax.linalg`` does not export, for proof cases: geqrf, geqp3, ormqr."""
    return importlib.import_module("jax._src.lax.linalg")


def select_and_scatter() -> Callable[..., Any]:
    """The function that binds the primitive of the same name, for its proof case: JAX itself only uses its ``_add`` form."""
    return importlib.import_module("jax._src.lax.windowed_reductions")._select_and_scatter
