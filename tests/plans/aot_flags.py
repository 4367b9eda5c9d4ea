"""Compiles a plan for H100s that are not there, without its XLA flags and with each kind of them. Run by test_xla_flags.

Prints for each set of flags, as JSON, the operands of every collective instruction and how many are under way at once. It needs a
process of its own: the compiler's flags are read when the backend starts.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import hlo
from shardplan.hlo.text import parse_module

TARGET = Path(__file__).parents[1] / "collectives" / "h100_target.txtpb"
LAYERS, WIDTH = 5, 1024


def step(weights: list[Any], x: Any) -> list[Any]:
    """Data parallel: gradients of a few equal layers."""

    def loss(weights: list[Any]) -> Any:
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.sum(y * y)

    return [w - 0.1 * g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


def main() -> None:
    """Prints {"sends": [bytes, ...], "merge_bytes": bytes, "limit_of_all": collectives, SET: what `_read` finds}.

    SET is "none", "merge", "limit" and "all" of the flags.
    """
    preset = shardplan.Cluster.load("gcp-a100")
    cluster = replace(preset, levels=tuple(replace(level, size=n) for level, n in zip(preset.levels, (2, 4), strict=True)))
    args = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS, jax.ShapeDtypeStruct((1 << 16, WIDTH), jnp.float32)
    pins = {"weights/*": P(), "x": P(("node", "gpu"))}
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, pins=pins)
    machine = topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology="1x2x4")
    lowered = plan.jit(step, machine.devices, "explicit", xla_flags=False).lower(*args)
    merge = {name: value for name, value in plan.xla_flags.items() if "combine" in name}
    limit = {name: value for name, value in plan.xla_flags.items() if name not in merge}
    found: dict[str, Any] = {"sends": [s.nbytes for s in plan.sends], "merge_bytes": max(merge.values())}
    found["limit_of_all"] = next(value for name, value in limit.items() if name.endswith("overlap_limit"))
    for name, flags in {"none": {}, "merge": merge, "limit": limit, "all": plan.xla_flags}.items():
        found[name] = _read(lowered.compile(compiler_options=flags).as_text())
    sys.stdout.write(json.dumps(found) + "\n")


def _read(text: str) -> dict[str, Any]:
    """Bytes of the operands of every collective, and the most that are under way at once."""
    collectives = {c.name for c in hlo.parse(text)}
    module = parse_module(text)
    under_way = most = 0
    operands: list[list[int]] = []
    entry = module.computations[module.entry]
    for instruction in entry.instructions.values():
        if instruction.name in collectives:
            assert instruction.opcode.endswith("-start"), "all collectives of the entry are asynchronous"
            operands.append([entry.instructions[name].shape.nbytes for name in instruction.operands])
            under_way += 1
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in collectives:
            under_way -= 1
        most = max(most, under_way)
    return {"operands": operands, "open": most}


if __name__ == "__main__":
    main()
