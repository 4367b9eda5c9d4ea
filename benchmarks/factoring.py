"""What factors are worth that the search finds: seconds over whole levels beside seconds where levels may be taken apart.

``python benchmarks/factoring.py [--part models forced axes] [--models gpt ...] [--clusters 8 ...] [--repeats 1] [--json FILE]``

- ``models``: every model of models/ on every cluster of `CLUSTERS`: seconds (`plan.step_time_s`) with whole levels and
  with free factors, the matrix that was found, and planning seconds of both (medians of the repeats, in one process of a row).
- ``forced``: three models on one switch of eight: free factors beside each factoring by itself.
- ``axes``: P2's systems (``benchmarks/p2_a100.csv``, those with two axes) with data and tensor axes of a two-layer transformer:
  every parallelism matrix with the seconds of its best plan, and with those of its reductions alone by the network model (all
  gradients over the data axis, four activations a layer over the tensor axis).

Exits with 1 where free factors are slower than whole levels, or than a factoring by itself, or where the chosen matrix is not the
one with the fastest reductions.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent / "clusters"
ROOMY = "1000TiB"
CLUSTERS = ("8", "2x8", "4x8", "gcp-a100:2", "gb200-nvl72:1", "ec2-p2.8xlarge", "ring8", "torus4x4")
_LAYER = {"width": 1024, "sequence": 512, "batch": 64, "heads": 16, "vocabulary": 4096}
_GPT2 = {"layers": 12, "width": 768, "heads": 12, "batch": 8, "sequence": 1024, "vocabulary": 50304}
_LLAMA = {
    "layers": 1,
    "width": 1024,
    "inner": 2816,
    "sequence": 512,
    "batch": 64,
    "heads": 16,
    "key_heads": 8,
    "vocabulary": 4096,
}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"width": 4096, "batch": 1024},
    "gpt": _GPT2,
    "gpt_linen": {**_LAYER, "layers": 2},
    "wresnet": {"depth": 50, "width": 4, "batch": 64},
    "rnn": {"layers": 2, "hidden": 2048, "steps": 4, "batch": 256, "vocabulary": 4096},
    "llama": {"size": "8b", "scan": True},
    "moe": _LLAMA,
    "unet": {"levels": 2, "channels": 128, "image": 64, "batch": 64},
    "vit": {"layers": 2, "width": 1024, "image": 64, "batch": 128},
}
FORCED: Sequence[tuple[str, str, Mapping[str, Any]]] = [
    ("GPT-12", "gpt", _GPT2),
    ("WResNet-50-4", "wresnet", {"depth": 50, "width": 4, "batch": 64}),
    ("LLaMA-8B", "llama", {"size": "8b", "scan": True}),
]
FACTORS = ((8,), (2, 4), (4, 2), (2, 2, 2))
SLOWER = 1 + 1e-6
PARTS = ("models", "forced", "axes")
_TRANSFORMER = {"layers": 2, "width": 1024, "heads": 32, "batch": 64, "sequence": 512, "vocabulary": 4096}

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows and prints the tables; 1 where free factors are slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), metavar="CLUSTER")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(_measure(**json.loads(given.one))))
        return 0
    rows: dict[str, list[Row]] = {}
    if "models" in given.part:
        print("| model | cluster | whole ms | free ms | gain | factors | matrix | planned whole | free | times |")
        print("|---|---|---|---|---|---|---|---|---|---|", flush=True)
        for cluster in given.clusters:
            for model in given.models:
                task = {"model": model, "options": MODELS[model], "cluster": cluster, "repeats": given.repeats}
                row = {**task, **_fresh({**task, "choices": [{}, None]})}
                rows.setdefault("models", []).append(row)
                print(_model_line(row), flush=True)
        print(_said(rows["models"]))
    if "forced" in given.part:
        names = ["x".join(map(str, f)) for f in FACTORS]
        print(f"\n| step, 8 devices on one switch | {' | '.join(names)} | free | planned in |")
        print("|---" * (len(FACTORS) + 3) + "|", flush=True)
        for name, model, options in FORCED:
            choices = [*({"gpu": f} for f in FACTORS), None]
            task = {"model": model, "options": options, "cluster": "8", "choices": choices, "repeats": given.repeats}
            row = {"name": name, **task, **_fresh(task)}
            rows.setdefault("forced", []).append(row)
            print(_forced_line(row), flush=True)
    worse = [r for own in rows.values() for r in own if r["ms"][-1] > min(r["ms"][:-1]) * SLOWER]
    if "axes" in given.part:
        print("\n| system | data | tensor | ms of the plans; of the reductions alone, by matrix (data / tensor) | chosen |")
        print("|---|---|---|---|---|", flush=True)
        rows["axes"] = [_axes_row(*one) for one in _systems()]
        worse += [r for r in rows["axes"] if r["chosen"] != r["fastest"]]
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))
    return int(bool(worse))


def _systems() -> list[tuple[int, int, int]]:
    """(nodes, data, tensor) of P2's systems of two axes."""
    with (Path(__file__).parent / "p2_a100.csv").open(newline="", encoding="utf-8") as file:
        found = {(int(line["nodes"]), *map(int, line["parallelism_axes"].split())) for line in csv.DictReader(file)}
    return sorted(one for one in found if len(one) == 3)


def _axes_row(nodes: int, data: int, tensor: int) -> Row:
    """The matrices of one system, as planned and by their reductions alone."""
    import shardplan
    from models import gpt
    from shardplan.cost import Network
    from shardplan.ir import Collective
    from shardplan.mesh import Cluster, matrices

    step, args = gpt.train_step(**_TRANSFORMER)
    cluster = Cluster.load(f"gcp-a100:{nodes}")
    plan = shardplan.plan(
        step, *args, cluster=cluster, memory_limit=ROOMY, donate_argnums=0, axes={"data": data, "tensor": tensor}
    )
    width, batch, length = _TRANSFORMER["width"], _TRANSFORMER["batch"], _TRANSFORMER["sequence"]
    gradients = 4 * (_TRANSFORMER["layers"] * 12 * width**2 + _TRANSFORMER["vocabulary"] * width) / tensor
    activations = 4 * batch * length * width / data
    alone: dict[str, float] = {}
    for matrix in matrices(cluster.shape, (data, tensor)):
        own, axes = matrix.factors(cluster)
        network = Network(cluster, own)
        reduced = network.seconds(Collective.ALL_REDUCE, axes[0], gradients)
        alone[_matrix_text(matrix.rows)] = float(
            reduced + 4 * _TRANSFORMER["layers"] * network.seconds(Collective.ALL_REDUCE, axes[1], activations)
        )
    planned = sorted(row["seconds"] for row in plan.provenance["factorings"])
    chosen = _matrix_text(plan.matrix["factors"])
    row = {"nodes": nodes, "data": data, "tensor": tensor, "planned_s": planned, "alone_s": alone, "chosen": chosen}
    row["fastest"] = min(alone, key=lambda text: alone[text])
    each = "; ".join(f"{text}: {s * 1e3:.1f}" for text, s in sorted(alone.items(), key=lambda one: one[1]))
    plans = ", ".join(f"{s * 1e3:.1f}" for s in planned)
    print(f"| gcp-a100:{nodes} | {data} | {tensor} | plans {plans}; reductions {each} | {chosen} |", flush=True)
    return row


def _matrix_text(rows: Sequence[Sequence[int]]) -> str:
    return " / ".join(" ".join(map(str, row)) for row in rows)


def _fresh(task: Row) -> Row:
    """A row measured in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--one", json.dumps(task)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{task['model']} on {task['cluster']}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(model: str, options: Mapping[str, Any], cluster: str, choices: Sequence[Any], repeats: int) -> Row:
    """The plans of one step under each choice of factors (None: free)."""
    import shardplan
    from shardplan.report.parallelism import factors_text, purposes_text

    step, args = importlib.import_module(f"models.{model}").train_step(**options)
    file = HERE / f"{cluster}.toml"
    on = str(file) if file.exists() else cluster
    shardplan.plan(step, *args, cluster="2", memory_limit=ROOMY)  # what a first plan imports and describes is not measured
    seconds: list[list[float]] = [[] for _ in choices]
    plans: list[Any] = [None for _ in choices]
    for _ in range(repeats):
        for n, factors in enumerate(choices):
            plans[n] = shardplan.plan(step, *args, cluster=on, memory_limit=ROOMY, donate_argnums=0, factors=factors)
            seconds[n].append(plans[n].search_s)
    best = plans[-1]
    return {
        "ms": [p.step_time_s * 1e3 for p in plans],
        "searched_ms": [p.searched_s * 1e3 for p in plans],
        "search_s": [statistics.median(s) for s in seconds],
        "factors": factors_text(best.factors),
        "matrix": purposes_text(best.data),
        "tried": len(best.provenance["factorings"]),
    }


def _model_line(row: Row) -> str:
    whole, free = row["ms"]
    planned = row["search_s"]
    return (
        f"| {row['model']} | {row['cluster']} | {whole:.3f} | {free:.3f} | {1 - free / whole:.1%} | {row['factors']} | "
        f"{row['matrix']} | {planned[0]:.1f} | {planned[1]:.1f} | {planned[1] / planned[0]:.1f} |"
    )


def _said(rows: Sequence[Row]) -> str:
    gains = [1 - r["ms"][1] / r["ms"][0] for r in rows]
    times = [r["search_s"][1] / r["search_s"][0] for r in rows]
    most = max(rows, key=lambda r: r["search_s"][1])
    return (
        f"\n{len(rows)} rows: gain {statistics.median(gains):.1%} in the median, {max(gains):.1%} at most, "
        f"{sum(g > 1e-3 for g in gains)} rows gain over 0.1%, {sum(g < -1e-6 for g in gains)} are slower; planning takes "
        f"{statistics.median(times):.1f} times as long in the median, {most['search_s'][1]:.1f} s at most "
        f"({most['model']} on {most['cluster']})"
    )


def _forced_line(row: Row) -> str:
    return f"| {row['name']} | " + " | ".join(f"{ms:.3f}" for ms in row["ms"]) + f" | {row['search_s'][-1]:.1f} s |"


if __name__ == "__main__":
    sys.exit(main())
