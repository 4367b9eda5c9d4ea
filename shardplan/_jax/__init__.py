"""All uses of JAX's private names, each with its purpose and its fallback if JAX moves it, and what differs between releases.

Nothing outside this package reads a name of JAX that is not public; `shardplan.versions` alone compares versions.
"""

from shardplan._jax.binding import KERNEL_MODULES, REFERENCES, bind, linalg, primitives, run_on_cpu, select_and_scatter
from shardplan._jax.custom_kernels import (
    KERNEL_GRID,
    OWN_PARAMS,
    WHOLE_SHAPE,
    cudnn_assumed,
    kernel_grid,
    own_params,
    pallas_attention,
    resized_kernel,
)
from shardplan._jax.jaxprs import (
    CALLS,
    Literal,
    Parameters,
    bodies,
    called,
    equations,
    jaxpr_and_consts,
    jaxpr_as_fun,
    params_of,
    settings_of,
    threefry_partitionable,
)
from shardplan._jax.programs import (
    array_type,
    compilations,
    explicit_axes,
    is_outermost,
    on_mesh,
    programs_compiled,
    row_major,
    shard_mapped,
    text_compiler,
    weakly_typed,
)
from shardplan._jax.sources import argument_names, raised_at, source_line

__all__ = [
    "CALLS",
    "KERNEL_GRID",
    "KERNEL_MODULES",
    "OWN_PARAMS",
    "REFERENCES",
    "WHOLE_SHAPE",
    "Literal",
    "Parameters",
    "argument_names",
    "array_type",
    "bind",
    "bodies",
    "called",
    "compilations",
    "cudnn_assumed",
    "equations",
    "explicit_axes",
    "is_outermost",
    "jaxpr_and_consts",
    "jaxpr_as_fun",
    "kernel_grid",
    "linalg",
    "on_mesh",
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
    "shard_mapped",
    "source_line",
    "text_compiler",
    "threefry_partitionable",
    "weakly_typed",
]
