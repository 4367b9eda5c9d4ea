"""Compiles reductions for H100s that are not there, and prints the collectives of their GPU HLO as JSON. Run by test_gpu_aot.

It needs a process of its own: the compiler's flags are read when the backend starts.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.collectives.lower import all_reduce

START = re.compile(r"= .*?\b(all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\((.*)")
GROUPS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")


def main() -> None:
    """Arguments: nodes, GPUs a node, then programs."""
    nodes, gpus, programs = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    target = (Path(__file__).parent / "h100_target.txtpb").read_text()
    machine = topologies.get_topology_desc("h100", "cuda", target_config=target, topology=f"1x{nodes}x{gpus}")
    mesh = Mesh(np.array(machine.devices).reshape(nodes * gpus), ("data",), axis_types=(AxisType.Auto,))
    spec = P("data")
    x = jax.ShapeDtypeStruct((nodes * gpus, 1 << 16), jnp.float32, sharding=NamedSharding(mesh, spec))
    result: list[list[list[object]]] = []
    for program in programs:

        def step(v: jax.Array, program: str = program) -> jax.Array:
            return all_reduce(v[0], mesh, over="data", program=program, cluster=f"{nodes}x{gpus}")[None]

        f = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        text = f.lower(x).compile().as_text() or ""
        found = [m for m in map(START.search, text.splitlines()) if m]
        result.append([[m[1], _groups(m[2])] for m in found])
    sys.stdout.write(json.dumps(result) + "\n")


def _groups(line: str) -> list[list[int]]:
    match = GROUPS.search(line)
    return [[int(d) for d in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1] if match else "")]


if __name__ == "__main__":
    main()
