"""Predicted beside compiled memory of GPT with activations in host memory, for H100s that are not there (extra ``gpu-aot``).

``python benchmarks/offload.py [--layers 6]``

GPT (scan and unrolled layers, float32, AdamW) is planned for dgx-h100:1 without a limit, and within a half and a quarter of that
peak with ``offload="auto"``. Each plan is compiled ahead of time for that topology, and its `memory_analysis()` set beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence

sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"

import jax

import shardplan
from benchmarks.memory import TARGET
from models import gpt

SIZES = {"width": 512, "batch": 64, "sequence": 512, "heads": 8, "vocabulary": 1024}
SHARES = (1.0, 0.5, 0.25)
HEAD = "| layers | limit | activations in host memory | peak predicted | compiled | host, compiled | step | copies |"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"{HEAD}\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for scan in (True, False):
        for row in rows(given.layers, scan=scan):
            print(row, flush=True)
    return 0


def rows(layers: int, *, scan: bool) -> Iterator[str]:
    """The rows of one form of the layers."""
    from jax.experimental import topologies

    machine = topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology="1x1x8")
    step, args = gpt.train_step(layers=layers, scan=scan, **SIZES)
    free = shardplan.plan(step, *args, cluster="dgx-h100:1", donate_argnums=0)
    for share in SHARES:
        plan, limit = free, round(free.peak_bytes * share)
        if share < 1:
            plan = shardplan.plan(
                step, *args, cluster="dgx-h100:1", donate_argnums=0, memory_limit=limit, offload="auto", traced=free.traced
            )
        found = plan.jit(step, machine.devices, xla_flags=False).lower(*args).compile().memory_analysis()
        held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        sizes = plan.peak_bytes, held + found.temp_size_in_bytes, found.host_temp_size_in_bytes
        asked = "none" if share == 1 else f"{limit / 2**20:.0f} MiB"
        yield (
            f"| {'scan' if scan else 'unrolled'} | {asked} | {len(plan.hosted)} | "
            f"{' | '.join(f'{n / 2**20:.0f} MiB' for n in sizes)} | {plan.step_time_s * 1e3:.1f} ms | "
            f"{plan.host_s * 1e3:.1f} ms |"
        )


if __name__ == "__main__":
    sys.exit(main())
