"""What XLA makes of a step with given shardings of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.frontend.nnx_state import Pure
from shardplan.frontend.trace import Traced
from shardplan.hlo.meter import Measured, measure
from shardplan.verify.stand_ins import stand_ins


def compiled_as_given(
    step: Any, traced: Traced, specs: Sequence[PartitionSpec], mesh: Mesh, donate_argnums: Sequence[int], donated: Sequence[int]
) -> tuple[Measured, int]:
    """The collectives of ``jax.jit(step, in_shardings=...)`` and its peak bytes on one device; nothing is run.

    ``specs`` are those of the leaves, ``donated`` the leaves of the arguments ``donate_argnums``. State comes back in the
    sharding of the argument that it replaces. XLA's partitioner chooses the rest.
    """
    pure, shardings = Pure(step, donate_argnums), [NamedSharding(mesh, spec) for spec in specs]

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(pure(*jax.tree.unflatten(traced.in_tree, leaves)))

    out = [None if i is None else shardings[i] for i in traced.program.feedback]
    jitted = jax.jit(flat, in_shardings=shardings, out_shardings=out, donate_argnums=tuple(donated), keep_unused=True)
    with stand_ins(traced.program, mesh.devices.ravel().tolist()):
        compiled = jitted.lower(*traced.in_shapes).compile()
    held: Any = compiled.memory_analysis()
    peak = held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes
    return measure(compiled.as_text() or ""), int(peak)
