"""All uses of JAX's private names, each with its purpose and its fallback if JAX moves it, and what differs between releases.

Nothing outside this package tests for a version of JAX or reads a name that is not public.
"""

from shardplan._jax.binding import KERNEL_MODULES, bind, linalg, primitives, run_on_cpu, select_and_scatter
from shardplan._jax.jaxprs import (
    CALLS,
    Literal,
    bodies,
    equations,
    expanded,
    jaxpr_as_fun,
    opened,
    params_of,
    settings_of,
    threefry_partitionable,
)
from shardplan._jax.kernels import (
    KERNEL_GRID,
    OWN_PARAMS,
    WHOLE_SHAPE,
    cudnn_assumed,
    kernel_grid,
    own_params,
    pallas_attention,
    resized_kernel,
)
from shardplan._jax.programs import (
    array_type,
    compilations,
    compile_text,
    explicit_axes,
    mapped,
    on_mesh,
    programs_compiled,
    row_major,
    weakly_typed,
)
from shardplan._jax.sources import argument_names, raised_at, source_line

__all__ = [
    "CALLS",
    "KERNEL_GRID",
    "KERNEL_MODULES",
    "OWN_PARAMS",
    "WHOLE_SHAPE",
    "Literal",
    "argument_names",
    "array_type",
    "bind",
    "bodies",
    "compilations",
    "compile_text",
    "cudnn_assumed",
    "equations",
    "expanded",
    "explicit_axes",
    "jaxpr_as_fun",
    "kernel_grid",
    "linalg",
    "mapped",
    "on_mesh",
    "opened",
    "own_params",
    "pallas_attention",
    "params_of",
    "primitives",
    "programs_compiled",
    "raised_at",
    "resized_kernel",
    "row_major",
    "run_on_cpu",
    "select_and_scatter",
    "settings_of",
    "source_line",
    "threefry_partitionable",
    "weakly_typed",
]
