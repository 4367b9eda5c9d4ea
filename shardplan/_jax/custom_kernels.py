"""Kernels: the grids of Pallas, fused attention, and what stands in for kernels that are not here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from shardplan._jax.jaxprs import bodies, equations
from shardplan.ir import GridBlock, KernelGrid

WHOLE_SHAPE = "whole_shape"
"""Our own parameter of ops that draw bits: they depend on the whole shape."""

KERNEL_GRID = "kernel_grid"
"""Our own parameter of kernels: their `KernelGrid`."""


OWN_PARAMS = (WHOLE_SHAPE, KERNEL_GRID)


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
