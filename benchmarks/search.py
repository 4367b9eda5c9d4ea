"""Planning seconds beside tracing seconds, each row in a process of its own.

``python benchmarks/search.py [--rows growth named] [--layers 2 12 48] [--clusters 2x4 2x2x2 64x8] [--repeats 3] [--json FILE]
[--plot FILE]``

Tracing is the first `jax.make_jaxpr` of the step in the process; planning is ``plan.search_s``: description, coarsening, tables,
baselines where they seed the search, and the plan itself. Medians of the repeats; GiB is the most memory of any process.
``growth`` rows are GPT unrolled, width 1024, sequence 512, in batches that divide over the devices; ``named`` rows are the models
and sizes of `NAMED`. ``--plot`` draws planning seconds against operators (needs matplotlib).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BATCH = {"2x4": 64, "2x2x2": 64, "8x8": 64, "64x8": 512}


@dataclass(frozen=True)
class Case:
    """A model with its options on a cluster."""

    name: str
    model: str
    cluster: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


_BLOCK = {"layers": 1, "batch": 16, "sequence": 1024, "width": 1024, "heads": 16}
_GPT = {"width": 1024, "sequence": 512, "heads": 16, "vocabulary": 4096}
_RNN = {"layers": 10, "hidden": 8192, "steps": 20, "batch": 128, "optimizer": "sgd"}
_WRESNET = {"depth": 152, "width": 10, "image": 224, "batch": 8, "classes": 1000}
_8B = {"size": "8b", "layers": 32, "sequence": 8192, "batch": 64, "remat": True, "dtype": "bfloat16"}
_LONG = {"sequence": 4096, "remat": True, "dtype": "bfloat16"}
_70B = {"size": "70b", "scan": True, **_LONG}

NAMED = (
    Case("WResNet-152-10", "wresnet", "ec2-p2.8xlarge", _WRESNET),
    Case("RNN-10-8K", "rnn", "ec2-p2.8xlarge", _RNN),
    Case("LLaMA-8B unrolled", "llama", "8x8", _8B),
    Case("transformer block", "gpt", "2x2x2", _BLOCK),
    Case("GPT 12 layers", "gpt", "2x4", {"layers": 12, "batch": 64, **_GPT}),
    Case("LLaMA-70B scan", "llama", "8x8", {**_70B, "batch": 64}),
    Case("LLaMA-70B scan", "llama", "512x8", {**_70B, "batch": 4096}),
    Case("LLaMA-405B unrolled", "llama", "512x8", {"size": "405b", **_LONG, "batch": 4096}),
)


@dataclass(frozen=True)
class Row:
    """Medians of one case. ``growth``: planning seconds an operator, against the shallowest model's."""

    name: str
    cluster: str
    batch: int
    operators: int
    trace_s: float
    plan_s: float
    ratio: float
    growth: float
    step_time_s: float
    exact: bool
    peak_gib: float
    repeats: int


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows, prints the tables and the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=["growth", "named"], default=["growth", "named"])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12, 48])
    parser.add_argument("--clusters", nargs="+", default=["2x4", "2x2x2", "64x8"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(_measure(Case(**json.loads(given.one)))))
        return 0
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print(_HEAD)
    growth = _growth(given.clusters, given.layers, given.repeats) if "growth" in given.rows else []
    named = [_shown(_row(case, given.repeats, None)) for case in NAMED] if "named" in given.rows else []
    print("\n" + "\n".join([*_targets(growth), *_named_targets(named)]))
    if given.json:
        given.json.write_text(json.dumps({"rows": [asdict(r) for r in [*growth, *named]]}, indent=1))
    if given.plot:
        _plot(growth, given.plot)
    return 0


_HEAD = (
    f"{'model':18} {'cluster':14} {'batch':>6} {'ops':>7} {'tracing s':>10} {'planning s':>11} {'ratio':>6} "
    f"{'growth':>7} {'GiB':>6}  exact"
)


def _growth(clusters: Sequence[str], layers: Sequence[int], repeats: int) -> list[Row]:
    rows: list[Row] = []
    for cluster in clusters:
        first: float | None = None
        for n in layers:
            case = Case(f"GPT {n} layers", "gpt", cluster, {"layers": n, "batch": BATCH.get(cluster, 64), **_GPT})
            rows.append(_shown(_row(case, repeats, first)))
            first = first if first is not None else rows[-1].plan_s / rows[-1].operators
    return rows


def _shown(r: Row) -> Row:
    sizes = f"{r.name:18} {r.cluster:14} {r.batch:6} {r.operators:7}"
    print(
        f"{sizes} {r.trace_s:10.2f} {r.plan_s:11.2f} {r.ratio:6.2f} {r.growth:7.2f} {r.peak_gib:6.2f}  "
        f"{'yes' if r.exact else 'no'}",
        flush=True,
    )
    return r


def _row(case: Case, repeats: int, first: float | None) -> Row:
    runs = [_fresh(case) for _ in range(repeats)]
    trace_s, plan_s = (statistics.median(r[k] for r in runs) for k in ("trace_s", "plan_s"))
    each = plan_s / runs[0]["operators"]
    return Row(
        case.name, case.cluster, case.options["batch"], runs[0]["operators"], trace_s, plan_s, plan_s / trace_s,
        each / (first or each), runs[0]["step_time_s"], runs[0]["exact"],
        max(r["peak_gib"] for r in runs), repeats,
    )  # fmt: skip


def _fresh(case: Case) -> dict[str, Any]:
    """One measurement in a new interpreter: nothing is warm but the file system."""
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(asdict(case))]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(case: Case) -> dict[str, Any]:
    import jax

    import shardplan

    step, args = importlib.import_module(f"models.{case.model}").train_step(**case.options)
    began = time.perf_counter()
    jax.make_jaxpr(step)(*args)
    trace_s = time.perf_counter() - began
    cluster = shardplan.Cluster.load(case.cluster)
    plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, memory_limit=cluster.device.memory_bytes)
    return {
        "trace_s": trace_s,
        "plan_s": plan.search_s,
        "operators": plan.operators,
        "step_time_s": plan.step_time_s,
        "exact": plan.exact,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _named_targets(rows: Sequence[Row]) -> list[str]:
    """Each planned in at most twice its tracing time; a scan on 512x8 in at most 1.5 times its seconds on 8x8; 405B's size in at
    most 60 s and 4 GB.
    """
    lines = [f"{r.name} on {r.cluster}: at most 2 times tracing: {r.ratio:.2f}" for r in rows if "scan" not in r.name]
    scans = {r.cluster: r for r in rows if "scan" in r.name}
    if scans:
        few, many = scans["8x8"].plan_s, scans["512x8"].plan_s
        lines.append(f"LLaMA-70B scan on 512x8: at most 1.5 times its seconds on 8x8: {many:.2f} s, {many / few:.2f}")
    lines += [f"{r.name}: at most 60 s and 4 GB: {r.plan_s:.1f} s, {r.peak_gib * 1.074:.1f} GB" for r in rows if "405B" in r.name]
    return lines


def _plot(rows: Sequence[Row], path: Path) -> None:
    """Planning seconds against operators, a line for each cluster, and tracing beside them."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for cluster in dict.fromkeys(r.cluster for r in rows):
        own = [r for r in rows if r.cluster == cluster]
        axes.loglog([r.operators for r in own], [r.plan_s for r in own], marker="o", label=f"planning for {cluster}")
    own = [r for r in rows if r.cluster == rows[0].cluster] if rows else []
    axes.loglog([r.operators for r in own], [r.trace_s for r in own], color="black", linestyle="--", label="tracing")
    axes.set(xlabel="operators", ylabel="seconds", title="GPT unrolled, 2 to 48 layers")
    axes.legend()
    figure.savefig(path)


def _targets(rows: Sequence[Row]) -> list[str]:
    """What is aimed at, and what it is."""
    lines: list[str] = []
    two = [r for r in rows if r.cluster == "2x4"]
    if two:
        lines.append(f"2x4: planning at most 3 times tracing: {', '.join(f'{r.ratio:.2f}' for r in two)}")
    for r in rows:
        same = next((s for s in two if s.name == r.name), None)
        if r.cluster == "64x8" and same is not None:
            lines.append(f"64x8, {r.name}: at most twice 2x4: {r.plan_s / same.plan_s:.2f}")
    deepest = {r.cluster: r for r in rows}
    for cluster, r in deepest.items():
        lines.append(f"{cluster}: seconds an operator of {r.name} against the fewest, at most 1: {r.growth:.2f}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
