"""Planning seconds beside tracing seconds, each row in a process of its own.

``python benchmarks/search.py [--layers 2 12 48] [--clusters 2x4 2x2x2 64x8] [--repeats 3] [--json FILE]``

Tracing is the first `jax.make_jaxpr` of the step in the process; planning is ``plan.search_s``: description, coarsening, tables,
every baseline and the plan itself. Medians of the repeats; GPT unrolled, width 1024, sequence 512, batches that divide over the
devices.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH = {"2x4": 64, "2x2x2": 64, "8x8": 64, "64x8": 512}


@dataclass(frozen=True)
class Row:
    """Medians of one model on one cluster. ``growth``: planning seconds an operator, against the shallowest model's."""

    cluster: str
    layers: int
    batch: int
    operators: int
    trace_s: float
    plan_s: float
    ratio: float
    growth: float
    step_time_s: float
    exact: bool
    repeats: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows, prints the table and the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 48])
    parser.add_argument("--clusters", nargs="+", default=["2x4", "2x2x2", "64x8"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("CLUSTER", "LAYERS", "BATCH"), help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(_measure(given.one[0], int(given.one[1]), int(given.one[2]))))
        return 0
    rows: list[Row] = []
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(_HEAD)
    for cluster in given.clusters:
        first: float | None = None
        for layers in given.layers:
            row = _row(cluster, layers, BATCH.get(cluster, 64), given.repeats, first)
            first = first if first is not None else row.plan_s / row.operators
            rows.append(row)
            print(_line(row), flush=True)
    print("\n" + "\n".join(_targets(rows)))
    if given.json:
        given.json.write_text(json.dumps({"rows": [asdict(r) for r in rows]}, indent=1))
    return 0


_HEAD = (
    f"{'cluster':8} {'layers':>6} {'batch':>6} {'ops':>7} {'tracing s':>10} {'planning s':>11} {'ratio':>6} {'growth':>7}  exact"
)


def _line(r: Row) -> str:
    sizes = f"{r.cluster:8} {r.layers:6} {r.batch:6} {r.operators:7}"
    return f"{sizes} {r.trace_s:10.2f} {r.plan_s:11.2f} {r.ratio:6.2f} {r.growth:7.2f}  {'yes' if r.exact else 'no'}"


def _row(cluster: str, layers: int, batch: int, repeats: int, first: float | None) -> Row:
    runs = [_fresh(cluster, layers, batch) for _ in range(repeats)]
    trace_s, plan_s = (statistics.median(r[k] for r in runs) for k in ("trace_s", "plan_s"))
    each = plan_s / runs[0]["operators"]
    return Row(
        cluster, layers, batch, runs[0]["operators"], trace_s, plan_s, plan_s / trace_s, each / (first or each),
        runs[0]["step_time_s"], runs[0]["exact"], repeats,
    )  # fmt: skip


def _fresh(cluster: str, layers: int, batch: int) -> dict[str, Any]:
    """One measurement in a new interpreter: nothing is warm but the file system."""
    command = [sys.executable, str(Path(__file__)), "--one", cluster, str(layers), str(batch)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(cluster: str, layers: int, batch: int) -> dict[str, Any]:
    import jax

    import shardplan
    from models import gpt

    step, args = gpt.train_step(layers=layers, width=1024, sequence=512, batch=batch, heads=16, vocabulary=4096)
    began = time.perf_counter()
    jax.make_jaxpr(step)(*args)
    trace_s = time.perf_counter() - began
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0)
    return {
        "trace_s": trace_s,
        "plan_s": plan.search_s,
        "operators": plan.operators,
        "step_time_s": plan.step_time_s,
        "exact": plan.exact,
    }


def _targets(rows: Sequence[Row]) -> list[str]:
    """What is aimed at, and what it is."""
    lines: list[str] = []
    two = [r for r in rows if r.cluster == "2x4"]
    if two:
        lines.append(f"2x4: planning at most 3 times tracing: {', '.join(f'{r.ratio:.2f}' for r in two)}")
    for r in rows:
        same = next((s for s in two if s.layers == r.layers), None)
        if r.cluster == "64x8" and same is not None:
            lines.append(f"64x8, {r.layers} layers: at most twice 2x4: {r.plan_s / same.plan_s:.2f}")
    deepest = {r.cluster: r for r in rows}
    for cluster, r in deepest.items():
        lines.append(f"{cluster}: seconds an operator at {r.layers} layers against the fewest, at most 1: {r.growth:.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
