"""Predicted beside compiled memory of LLaMA-70B on 64 H100s that are not there (needs the extra ``gpu-aot``).

``python benchmarks/memory.py [--rows 4096x64/512 ...] [--json FILE]``

All of a device's memory is the limit. A row is sequence x batch / block of attention (0: all scores at once). Each step is
planned for dgx-h100:8, compiled ahead of time for that topology, and its `memory_analysis()` set beside the plan: arguments,
and the peak (arguments + outputs - aliases + temporaries). Each row in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "collectives" / "h100_target.txtpb"
ROWS = ["4096x64/512", "8192x128/1024", "4096x64/0"]
NODES, GPUS = 8, 8


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="SEQUENCExBATCH/BLOCK")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(measured(given.one)))
        return 0
    rows: list[dict[str, Any]] = []
    print("| row | arguments predicted | compiled | peak predicted | compiled | ratio |\n|---|---:|---:|---:|---:|---:|")
    for name in given.rows:
        row = fresh(name)
        rows.append(row)
        sizes = [row[key] / 2**30 for key in ("arguments", "compiled_arguments", "peak", "compiled_peak")]
        print(f"| {name} | {' | '.join(f'{gib:.2f}' for gib in sizes)} | {row['compiled_peak'] / row['peak']:.2f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


def fresh(row: str) -> dict[str, Any]:
    """One row from a new process: the compiler's flags are read when its backend starts."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = "--xla_gpu_autotune_level=0"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__)), "--one", row]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(row: str) -> dict[str, Any]:
    """Bytes on one device: ``arguments`` and ``peak`` as planned, ``compiled_*`` as `memory_analysis()` says."""
    from jax.experimental import topologies

    import shardplan
    from models import llama
    from shardplan.search.memory.liveness import local_part

    shape, _, block = row.partition("/")
    sequence, batch = map(int, shape.split("x"))
    options = {"sequence": sequence, "batch": batch, "block": int(block) or None}
    step, args = llama.train_step(size="70b", scan=True, remat=True, dtype="bfloat16", **options)
    cluster = shardplan.Cluster.load(f"dgx-h100:{NODES}")
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, memory_limit=cluster.device.memory_bytes)
    problem = plan.session.problem
    arguments = 0
    for t in problem.graph.inputs:
        v = problem.coarse.of[t]
        part = 1.0 if v < 0 else local_part(problem, v, plan.session.solution.states[v])
        arguments += round(problem.graph.tensors[t].nbytes * part)
    machine = topologies.get_topology_desc(
        "h100", "cuda", target_config=TARGET.read_text(), topology=f"1x{NODES}x{GPUS}"
    )  # fmt: skip
    found = plan.jit(step, machine.devices, xla_flags=False).lower(*args).compile().memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {
        "row": row,
        "arguments": arguments,
        "peak": plan.peak_bytes,
        "limit": plan.memory_limit,
        "compiled_arguments": found.argument_size_in_bytes,
        "compiled_peak": held + found.temp_size_in_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
