"""Meshes, arrays and compiled programs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@contextlib.contextmanager
def on_mesh(mesh: Any) -> Iterator[None]:
    """Traces for this mesh, whatever mesh the user has set."""
    with within_mesh(mesh.abstract_mesh):
        yield


@contextlib.contextmanager
def within_mesh(mesh: Any) -> Iterator[None]:
    """Enters an abstract mesh; JAX goes from one to another of another size only over none."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
        yield


def shard_mapped(function: Callable[..., Any], *, mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``jax.shard_map`` on flat operands, without the check of what is replicated.

    Operands without elements are made inside: the compiler of jaxlib 0.11.2 dies where the function of a ``jax.shard_map`` reads
    one from outside.
    """

    def run(*operands: Any) -> Any:
        """The function on each device's blocks of whole operands."""
        specs = (in_specs,) * len(operands) if isinstance(in_specs, jax.sharding.PartitionSpec) else tuple(in_specs)
        avals = [jax.typeof(x) for x in operands]
        inside = [a.size == 0 and not jax.numpy.issubdtype(a.dtype, jax.dtypes.extended) for a in avals]
        shapes = [jax.sharding.NamedSharding(mesh, spec).shard_shape(a.shape) for a, spec in zip(avals, specs, strict=True)]

        def local(*kept: Any) -> Any:
            left = iter(kept)
            rows = zip(inside, avals, shapes, strict=True)
            return function(*(jax.numpy.zeros(shape, a.dtype) if own else next(left) for own, a, shape in rows))

        outside = [i for i, own in enumerate(inside) if not own]
        ins = tuple(specs[i] for i in outside)
        made = jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=out_specs, check_vma=False)
        return made(*(operands[i] for i in outside))

    return run


def text_compiler(count: int) -> Callable[[str], None]:
    """A function that compiles the text of a lowered program for the first ``count`` devices, partitioned as by `jax.jit`.

    Raises:
        ImportError, AttributeError, TypeError: if JAX has moved its compiler.
    """
    compiler, mlir = (importlib.import_module(name) for name in ("jax._src.compiler", "jax._src.interpreters.mlir"))
    ir, client = importlib.import_module("jax._src.lib.mlir").ir, importlib.import_module("jax._src.lib").xla_client
    devices = tuple(jax.devices()[:count])
    assignment = np.arange(count).reshape(1, count)
    options = compiler.get_compile_options(num_replicas=1, num_partitions=count, device_assignment=assignment)
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    load, among = compiler.backend_compile_and_load, client.DeviceList(devices)

    def compile_text(text: str) -> None:
        with mlir.make_ir_context():
            load(devices[0].client, ir.Module.parse(text), among, options, [])

    return compile_text


def shape_struct(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """The shape of an array whose dtype has this name; those of keys are ``key<fry>`` and the like."""
    own = jax.random.key(0, impl=_KEYS[dtype]).dtype if dtype in _KEYS else jnp.dtype(dtype)
    return jax.ShapeDtypeStruct(shape, own)


def key_impl(dtype: Any) -> str:
    """The implementation of random keys of this dtype."""
    return _KEYS[dtype.name]


_KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def is_outermost() -> bool:
    """Whether nothing is being traced here: a function that is jitted now is a program of its own."""
    return importlib.import_module("jax._src.core").trace_state_clean()


def compilations(jitted: Any) -> int:
    """How many programs a jitted function holds: one for each shape, dtype and sharding that it was called with."""
    return jitted._cache_size()


@cache
def _compiled() -> list[str]:
    """A log with one entry for each program compiled after the first call. Its listener is never removed."""
    log: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event.endswith("/backend_compile_duration"):
            log.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return log


def programs_compiled() -> int:
    """A count that grows by one with each program compiled: only differences mean something."""
    return len(_compiled())


@cache
def array_type() -> type:
    """The class of concrete arrays, whose ``aval`` and ``sharding`` are cheap to read; random keys have another class."""
    with jax.ensure_compile_time_eval():  # under another trace it would be the class of a tracer
        return type(jax.numpy.zeros(()))


def explicit_axes(x: Any) -> tuple[str, ...]:
    """The Explicit axes that an array is cut over."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ()
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    used = {a for entry in sharding.spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)}
    return tuple(sorted(str(a) for a in used if types.get(a) == jax.sharding.AxisType.Explicit))


def in_host_memory(aval: Any) -> bool:
    """Whether a traced value lies in the memory of the device's host."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def moves_memory(source: Any, result: Any) -> bool:
    """Whether the operand and the result of an equation lie in the memories of a device and its host."""
    return in_host_memory(source.aval) != in_host_memory(result.aval)


def weakly_typed(x: Any) -> Any:
    """The value with a weak type, as a Python number leaves a step; unchanged if JAX removes this function."""
    try:
        return importlib.import_module("jax._src.lax.lax")._convert_element_type(x, weak_type=True)
    except (ImportError, AttributeError):
        return x


def row_major(x: Any) -> Any:
    """The value in row-major memory order on CPUs, whatever the compiler would choose; unchanged on other platforms, and if JAX
    removes this experimental API.
    """
    try:
        layout = importlib.import_module("jax.experimental.layout")
        order = layout.Layout(tuple(range(x.ndim)))
    except (ImportError, AttributeError):
        return x
    return jax.lax.platform_dependent(x, cpu=lambda x: layout.with_layout_constraint(x, order), default=lambda x: x)
