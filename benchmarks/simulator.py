"""The simulator: tasks a second, and simulated beside priced steps.

``python benchmarks/simulator.py [--rows speed models] [--tasks 1000000] [--devices 1 16 64] [--repeats 5] [--json FILE]``

*Speed*: random graphs of so many tasks with up to three dependencies each, on a compute stream and two links of each device, with
contention. A row is the median of the repeats, in seconds of this process (not of the wall clock: other processes do not count),
without compilation. Plain Python runs a tenth of the tasks. *Models*: `plan.simulate` of plans for H100s with donated state,
priced by the time model "sum". The columns "one by one" and "overlap" are simulated steps over the priced one; "in order" and
"overlap" after "peak" are simulated peaks over the plan's.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import shardplan  # noqa: E402
from shardplan.report.tables import seconds, size, table  # noqa: E402
from shardplan.simulate import event_loop  # noqa: E402
from shardplan.simulate.compile_loops import compiled  # noqa: E402
from shardplan.simulate.engine import Contention, Engine, Stream, StreamKind, TaskGraph, simulate  # noqa: E402

_GPT = {"layers": 4, "width": 1024, "sequence": 512, "heads": 16, "vocabulary": 4096, "batch": 64}
MODELS: tuple[tuple[str, str, Mapping[str, Any], str], ...] = (
    ("GPT, 4 layers", "gpt", _GPT, "2x4"),
    ("GPT, 12 layers, scan, remat", "gpt", {**_GPT, "layers": 12, "scan": True, "remat": True}, "2x4"),
    ("GPT, 4 layers, bfloat16", "gpt", {**_GPT, "dtype": "bfloat16"}, "2x4"),
    ("GPT, 4 layers", "gpt", _GPT, "8x8"),
    ("WResNet-50, batch 64", "wresnet", {"depth": 50, "width": 4, "image": 64, "batch": 64}, "2x4"),
    ("RNN, 4 layers, scan", "rnn", {"layers": 4, "hidden": 2048, "steps": 40, "batch": 128, "scan": True}, "2x4"),
    ("MLP", "mlp", {"width": 8192, "batch": 2048}, "2x4"),
    ("UNet", "unet", {}, "8"),
)


def random_graph(tasks: int, devices: int = 1, seed: int = 0) -> TaskGraph:
    """A random graph: each task waits for up to three of the 200 before it for each device."""
    rng = np.random.default_rng(seed)
    counts = np.minimum(rng.integers(0, 4, tasks), np.arange(tasks))
    reader = np.repeat(np.arange(tasks), counts)
    waits_for = np.maximum(reader - 1 - rng.integers(0, 200 * devices, len(reader)), 0)
    kinds: tuple[tuple[str, StreamKind], ...] = (("compute", "compute"), ("node links", "link"), ("gpu links", "link"))
    streams = tuple(Stream(f"{d}: {name}", kind, d) for d in range(devices) for name, kind in kinds)
    return TaskGraph(
        streams,
        np.asarray(rng.integers(1, 1000, tasks) * 1e-9, np.float64),
        rng.integers(0, len(streams), tasks).astype(np.int32),
        np.concatenate([[0], np.cumsum(counts)]),
        waits_for,
        np.arange(tasks),
    )


def speed(tasks: int, devices: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Tasks a second of both loops."""
    rows: list[dict[str, Any]] = []
    engines: list[tuple[Engine, int]] = [("python", max(tasks // 10, 1))]
    if compiled(event_loop.FUNCTIONS) is not None:
        simulate(random_graph(1000), Contention(), "numba")  # compiles
        engines.insert(0, ("numba", tasks))
    for (engine, count), n in itertools.product(engines, devices):
        graph = random_graph(count, n)
        took: list[float] = []
        for _ in range(repeats):
            begin = time.process_time()
            simulate(graph, Contention(), engine)
            took.append(time.process_time() - begin)
        median = statistics.median(took)
        rows.append({"engine": engine, "devices": n, "tasks": count, "seconds": median, "tasks_per_s": count / median})
    return rows


def models() -> list[dict[str, Any]]:
    """Each model's priced and simulated step."""
    rows: list[dict[str, Any]] = []
    for name, model, options, cluster in MODELS:
        step, args = importlib.import_module(f"models.{model}").train_step(**options)
        plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=(0,), time_model="sum")
        begin = time.process_time()
        shown = plan.simulate()
        took = time.process_time() - begin
        alone = plan.simulate(overlap=False)
        rows.append(
            {
                "model": name,
                "cluster": cluster,
                "tasks": int(shown.times[shown.stream >= 0].sum()),
                "simulated_in_s": took,
                "priced_s": plan.step_time_s,
                "time_model": plan.time_model,
                "sum_s": alone.step_time_s,
                "overlap_s": shown.step_time_s,
                "communication_s": shown.communication_s,
                "exposed_s": shown.exposed_s,
                "peak_bytes": plan.peak_bytes,
                "simulated_peak_bytes": shown.peak_bytes,
                "in_order_peak_bytes": alone.peak_bytes,
            }
        )
        print(f"{name} on {cluster}: done", file=sys.stderr)
    return rows


def model_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as text: times over the priced step, peaks over the plan's."""
    priced, peak = row["priced_s"], row["peak_bytes"]
    return (
        row["model"],
        row["cluster"],
        f"{row['tasks']:,}",
        seconds(priced),
        f"{row['sum_s'] / priced:.4f}",
        f"{row['overlap_s'] / priced:.3f}",
        seconds(row["communication_s"]),
        seconds(row["exposed_s"]),
        size(peak),
        f"{row['in_order_peak_bytes'] / peak:.2f}",
        f"{row['simulated_peak_bytes'] / peak:.2f}",
        seconds(row["simulated_in_s"]),
    )


HEADERS = (
    "step",
    "cluster",
    "tasks",
    "priced",
    "one by one",
    "overlap",
    "sent",
    "exposed",
    "peak",
    "in order",
    "overlap",
    "took",
)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=["speed", "models"], default=["speed", "models"])
    parser.add_argument("--tasks", type=int, default=1_000_000)
    parser.add_argument("--devices", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    result: dict[str, Any] = {}
    if "speed" in options.rows:
        result["speed"] = speed(options.tasks, options.devices, options.repeats)
        rows = [
            (r["engine"], r["devices"], f"{r['tasks']:,}", seconds(r["seconds"]), f"{r['tasks_per_s']:,.0f}")
            for r in result["speed"]
        ]
        print(table(("loop", "devices", "tasks", "median", "tasks/s"), rows) + "\n")
    if "models" in options.rows:
        result["models"] = models()
        print(table(HEADERS, map(model_row, result["models"])))
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
