"""All uses of JAX's private names, each with its purpose and its fallback if JAX moves it, and what differs between releases."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import os
import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal as Literal  # a constant inside a jaxpr; public in jax.extend
from jax.extend.core import Primitive

from shardplan.errors import JaxVersionError
from shardplan.ir import GridBlock, KernelGrid


def source_line(eqn: Any) -> str:
    """``file:line (function)`` of the user's code behind an equation, libraries left out; ``?`` if JAX no longer tells."""
    try:
        from jax._src import source_info_util
    except ImportError:  # the module moved: only messages lose their line
        return "?"
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [f for f in frames if not f.file_name.startswith(_INSTALLED)] or frames
    return f"{own[0].file_name}:{own[0].start_line} ({own[0].function_name})" if own else "?"


def raised_at(error: BaseException) -> str:
    """``file:line (function)`` of the user's last line in the traceback of an error, libraries left out.

    If the traceback has none, it is the user's line that called shardplan, or ``""`` if there is none.
    """
    for frames in (traceback.extract_tb(error.__traceback__), traceback.extract_stack()):
        own = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS)]
        if own:
            return f"{own[-1].filename}:{own[-1].lineno} ({own[-1].name})"
    return ""


_INSTALLED = tuple(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
_OTHERS = (*_INSTALLED, str(Path(__file__).parent), *(sysconfig.get_path(p) for p in ("stdlib", "scripts")))
_NOT_THE_USERS = ("<frozen ", *(path + os.sep for path in _OTHERS))


def argument_names(step: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of a step's positional arguments; ``args0``, ``args1`` ... where it has none."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for i in range(count):
        if i < len(parameters) and parameters[i].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameters[i].name)
        else:
            names.append(f"args{i}")
    return tuple(names)


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


@cache
def primitives() -> Mapping[str, tuple[str, Any]]:
    """Every primitive of the installed JAX by name, with its module: an attribute of any loaded ``jax`` module counts."""
    for family in _FAMILIES:
        try:
            importlib.import_module(family)
        except (ImportError, AttributeError):
            continue
    return _primitives_of_loaded_modules()


@cache
def _primitive(name: str) -> Any:
    """The primitive of a name, also of a module that was loaded after `primitives` was first asked."""
    known = primitives()
    return (known if name in known else _primitives_of_loaded_modules())[name][1]


def _primitives_of_loaded_modules() -> dict[str, tuple[str, Any]]:
    found: dict[str, tuple[str, Any]] = {}
    for module, contents in sorted(sys.modules.items()):
        if module == "jax" or module.startswith(("jax.", "jax._src")):
            for value in list(vars(contents).values()):
                if isinstance(value, Primitive):
                    previous = found.get(value.name)
                    if previous is None or _innermost(module) > _innermost(previous[0]):
                        found[value.name] = (module, value)
    return found


def _innermost(module: str) -> tuple[bool, int]:
    """Orders modules with the same primitive: packages re-export, so the innermost counts; but those of Pallas only import."""
    return ".pallas" not in module, module.count(".")


@contextlib.contextmanager
def settings_of(eqn: Any) -> Iterator[None]:
    """The settings under which an equation was traced, all but the mesh: it runs on the one in scope here."""
    here = jax.sharding.get_abstract_mesh()
    with eqn.ctx.manager, _on(here):
        yield


@contextlib.contextmanager
def on_mesh(mesh: Any) -> Iterator[None]:
    """Traces for this mesh, whatever mesh the user has set."""
    with _on(mesh.abstract_mesh):
        yield


@contextlib.contextmanager
def _on(mesh: Any) -> Iterator[None]:
    """Enters an abstract mesh; JAX goes from one to another of another size only over none."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())), jax.sharding.use_abstract_mesh(mesh):
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


WHOLE_SHAPE = "whole_shape"
"""Our own parameter of ops that draw bits: they depend on the whole shape."""


KERNEL_GRID = "kernel_grid"
"""Our own parameter of kernels: their `KernelGrid`."""


def own_params(eqn: Any) -> dict[str, Any]:
    """What we add to the parameters of an equation: ``kernel_grid`` of a Pallas kernel whose grid can be read."""
    grid = kernel_grid(eqn.params) if eqn.primitive.name == "pallas_call" else None
    return {} if grid is None else {KERNEL_GRID: grid}


def kernel_grid(params: Mapping[str, Any]) -> KernelGrid | None:
    """The grid of a ``pallas_call``, from its parameters. Dims that `jax.vmap` adds are dims of the grid like others.

    None for a kernel with scratch memory, prefetched scalars, aliased operands, a dynamic grid, or blocks that are not counted by
    one grid dim each; and for all kernels if Pallas changes what it records.
    """
    try:
        mapping, jaxpr = params["grid_mapping"], params["jaxpr"]
        plain = not (mapping.num_index_operands or mapping.scratch_avals)
        if not plain or params["input_output_aliases"] or params["mesh"] is not None:
            return None
        counted = [[(b, int(n)) for b, n in zip(_blocks(m), m.array_aval.shape, strict=True)] for m in mapping.block_mappings]
        uneven = {b.dim for own in counted for b, n in own if b.dim >= 0 and b.size * mapping.grid[b.dim] != n * b.per}
        blocks = tuple(tuple(GridBlock(-1, n) if b.dim in uneven else b for b, n in own) for own in counted)
        axes = [dim for dim in range(len(mapping.grid)) if dim not in mapping.vmapped_dims]  # the body does not count the others
        asked = (e for e in equations(jaxpr) if e.primitive.name in ("program_id", "num_programs"))
        fixed = uneven | {axes[int(e.params["axis"])] for e in asked}
        source = str(jaxpr.debug_info.func_src_info).partition(" at ")[2].rpartition(":")[0].replace(os.sep, "/")
        names = tuple(str(m.origin) for m in mapping.block_mappings)
        return KernelGrid(blocks, tuple(sorted(fixed)), _skips(jaxpr), source, names)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _blocks(mapping: Any) -> tuple[GridBlock, ...]:
    """The block of each dim of one operand or result.

    Raises:
        ValueError: if a block's place is not the number of a program along one grid dim, divided by a constant.
    """
    kinds = [type(b).__name__ for b in mapping.block_shape]
    if not {"Blocked", "Squeezed"}.issuperset(kinds):
        raise ValueError("blocks that may overlap")
    sizes = [1 if kind == "Squeezed" else int(b.block_size) for kind, b in zip(kinds, mapping.block_shape, strict=True)]
    index = mapping.index_map_jaxpr.jaxpr
    return tuple(_block(index, at, n, int(m)) for at, n, m in zip(index.outvars, sizes, mapping.array_aval.shape, strict=True))


def _block(index: Any, at: Any, size: int, extent: int) -> GridBlock:
    """The block of ``size`` elements, of a dim of this extent, that an index map places at ``at``."""
    if isinstance(at, Literal):
        if at.val != 0:
            raise ValueError("a block elsewhere than at the start")
        return GridBlock(-1, extent)
    if at in index.invars:
        return GridBlock(index.invars.index(at), size)
    (eqn,) = (e for e in index.eqns if at in e.outvars)
    program, per = eqn.invars
    if eqn.params.get("name") != "floor_divide" or not isinstance(per, Literal):
        raise ValueError("blocks in another order than programs")
    return GridBlock(-1, extent) if size == extent else GridBlock(index.invars.index(program), size, int(per.val))


def _skips(jaxpr: Any) -> bool:
    """Whether the length of some loop is known only when the kernel runs, but before it reads anything."""
    loaded: set[Any] = set()
    for eqn in jaxpr.eqns:
        inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
        if eqn.primitive.name == "while" and not any(v in loaded for v in inputs if _is_count(v.aval)):
            return True
        if any(_skips(body) for body in bodies(eqn)):
            return True
        if any(v in loaded or hasattr(v.aval, "inner_aval") for v in inputs):  # computed from memory, or a reference to it
            loaded.update(eqn.outvars)
    return False


def _is_count(aval: Any) -> bool:
    """Whether a value may count the iterations of a loop."""
    return aval.shape == () and getattr(aval.dtype, "kind", "") in "iu"


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


def resized_kernel(params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> dict[str, Any]:
    """A copy of parameters; those of a ``pallas_call`` that has a `kernel_grid`, for operands and results of these shapes.

    The body and its blocks stay; only the number of programs changes. Each dim that the grid counts must be whole blocks.
    """
    if KERNEL_GRID not in params:
        return dict(params)
    mapping, shapes = params["grid_mapping"], (*operands, *results)
    grid = list(mapping.grid)
    for own, shape in zip(params[KERNEL_GRID].blocks, shapes, strict=True):
        for block, extent in zip(own, shape, strict=True):
            if block.dim >= 0:
                assert extent % block.size == 0, "a cut keeps whole blocks"
                grid[block.dim] = block.programs(extent)
    blocks = tuple(
        dataclasses.replace(m, array_aval=m.array_aval.update(shape=tuple(shape)))
        for m, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    outs = tuple(a.update(shape=tuple(shape)) for a, shape in zip(params["out_avals"], results, strict=True))
    return {**params, "grid_mapping": dataclasses.replace(mapping, grid=tuple(grid), block_mappings=blocks), "out_avals": outs}


def pallas_attention() -> Any:
    """JAX's module of Pallas kernels for attention. JAX 0.11 and later call it deprecated: here that is no warning.

    Steps may use it as long as JAX has it, so its kernels stay described and proven.
    """
    name = "jax.experimental.pallas.ops.gpu.attention"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"{re.escape(name)} is deprecated", DeprecationWarning)
        return importlib.import_module(name)


@contextlib.contextmanager
def cudnn_assumed() -> Iterator[None]:
    """While this lasts, cuDNN's attention is traced as if for the newest GPU and cuDNN, if none is installed here.

    JAX asks for both when it traces, and keeps neither in the program. Where cuDNN is installed, JAX asks as always. The compiler
    for GPUs may be installed without it.
    """
    module = sys.modules.get("jax._src.cudnn.fused_attention_stablehlo")
    asked = ("check_cudnn_version", "check_compute_capability")
    if module is None or not all(hasattr(module, n) for n in asked) or _has_cudnn(module):
        yield
        return
    before = {name: getattr(module, name) for name in asked}
    vars(module).update(check_cudnn_version=lambda: sys.maxsize, check_compute_capability=lambda capability: True)
    try:
        yield
    finally:
        vars(module).update(before)


def _has_cudnn(module: Any) -> bool:
    if getattr(module, "cuda_versions", None) is None:
        return False
    try:
        module.check_cudnn_version()
    except RuntimeError:  # what JAX raises where it finds no cuDNN
        return False
    return True


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


OWN_PARAMS = (WHOLE_SHAPE, KERNEL_GRID)


def bind(primitive: str, operands: Sequence[Any], params: Mapping[str, Any], *, own: Any = None) -> Any:
    """Applies a primitive by name: ``own`` if it has that name (a user's primitive, unknown to JAX), else JAX's."""
    value = own if own is not None and own.name == primitive else _primitive(primitive)
    return value.bind(*operands, **value.get_bind_params({k: v for k, v in params.items() if k not in OWN_PARAMS}))


def mapped(function: Callable[..., Any], *, mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``jax.shard_map`` on flat operands, without the check of what is replicated.

    Operands without elements are made inside: the compiler of jaxlib 0.11.2 dies where the function of a ``jax.shard_map`` reads
    one from outside.
    """

    def run(*operands: Any) -> Any:
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


def compile_text(text: str, count: int) -> None:
    """Compiles the text of a lowered program for the first ``count`` devices, partitioned as `jax.jit` would have it."""
    compiler, mlir = (importlib.import_module(name) for name in ("jax._src.compiler", "jax._src.interpreters.mlir"))
    ir, client = importlib.import_module("jax._src.lib.mlir").ir, importlib.import_module("jax._src.lib").xla_client
    devices = tuple(jax.devices()[:count])
    assignment = np.arange(count).reshape(1, count)
    options = compiler.get_compile_options(num_replicas=1, num_partitions=count, device_assignment=assignment)
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = True
    with mlir.make_ir_context():
        compiler.backend_compile_and_load(devices[0].client, ir.Module.parse(text), client.DeviceList(devices), options, [])


def compilations(jitted: Any) -> int:
    """How many programs a jitted function holds: one for each shape, dtype and sharding that it was called with."""
    return jitted._cache_size()


@cache
def array_type() -> type:
    """The class of concrete arrays, whose ``aval`` and ``sharding`` are cheap to read; random keys have another class."""
    with jax.ensure_compile_time_eval():  # under another trace it would be the class of a tracer
        return type(jax.numpy.zeros(()))


def threefry_partitionable(eqn: Any) -> bool:
    """Whether the bits that threefry draws here depend on the key and the place of an element alone."""
    return bool(eqn.ctx.threefry_partitionable)


def explicit_axes(x: Any) -> tuple[str, ...]:
    """The Explicit axes that an array is cut over."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return ()
    types = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    used = {a for entry in sharding.spec if entry is not None for a in ((entry,) if isinstance(entry, str) else entry)}
    return tuple(sorted(str(a) for a in used if types.get(a) == jax.sharding.AxisType.Explicit))


def weakly_typed(x: Any) -> Any:
    """The value with a weak type, as a Python number leaves a step; unchanged if JAX removes this function."""
    try:
        return importlib.import_module("jax._src.lax.lax")._convert_element_type(x, weak_type=True)
    except (ImportError, AttributeError):
        return x


def row_major(x: Any) -> Any:
    """The value in row-major memory order, whatever the compiler would choose; unchanged if JAX removes this experimental API."""
    try:
        layout = importlib.import_module("jax.experimental.layout")
        return layout.with_layout_constraint(x, layout.Layout(tuple(range(x.ndim))))
    except (ImportError, AttributeError):
        return x


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


def linalg() -> Any:
    """The module with the factorisations that ``jax.lax.linalg`` does not export, for proof cases: geqrf, geqp3, ormqr."""
    return importlib.import_module("jax._src.lax.linalg")


def select_and_scatter() -> Callable[..., Any]:
    """The function that binds the primitive of the same name, for its proof case: JAX itself only uses its ``_add`` form."""
    return importlib.import_module("jax._src.lax.windowed_reductions")._select_and_scatter
