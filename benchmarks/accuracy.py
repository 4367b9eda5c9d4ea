"""Equality, bytes, memory and compile seconds of plans on simulated CPU devices, under both backends.

    python benchmarks/accuracy.py                # the table of docs/accuracy.md
    python benchmarks/accuracy.py --rows gpt     # the rows whose name begins so

Each row plans a step for `explicit` and for `specs`, and proves both plans (`shardplan.verify.verify`). Bytes are those that
a device sends in a step, predicted by the plan and measured in the compiled program; memory is the peak of one device. Seconds
are medians of ``--repeats`` of lowering and of compiling, beside those of the plain step under `jax.jit`.

The links are those of the shape; the devices are CPUs, so slow that small steps are worth cutting (`slow_devices`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
import jax

sys.path.insert(0, str(Path(__file__).parent.parent))

SMALL = {"layers": 1, "width": 256, "sequence": 64, "batch": 32}
RNN = {"layers": 2, "hidden": 256, "steps": 6, "batch": 512}
ROWS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("gpt", "gpt", "2x4", SMALL),
    ("gpt, dropout", "gpt", "2x4", {**SMALL, "dropout": 0.1}),
    ("gpt, remat", "gpt", "2x4", {**SMALL, "remat": True}),
    ("gpt, 2 layers, scan", "gpt", "2x4", {**SMALL, "layers": 2, "scan": True}),
    ("gpt, bfloat16", "gpt", "2x4", {**SMALL, "dtype": "bfloat16"}),
    ("gpt_linen", "gpt_linen", "2x4", SMALL),
    ("gpt", "gpt", "2x2x2", SMALL),
    ("gpt", "gpt", "8", SMALL),
    ("gpt", "gpt", "3x2", SMALL),
    ("wresnet", "wresnet", "2x4", {}),
    ("wresnet", "wresnet", "8", {}),
    ("mlp, width 2048", "mlp", "2x4", {"width": 2048}),
    ("rnn", "rnn", "2x4", RNN),
    ("rnn, scan", "rnn", "2x4", {**RNN, "scan": True}),
    ("llama", "llama", "2x4", SMALL),
    ("moe", "moe", "2x4", {"layers": 1, "batch": 64, "sequence": 64}),
)


def main() -> int:
    """Prints the table; 1 if any row is not equal, or not one for one under `explicit`."""
    parser = argparse.ArgumentParser(description="Compare both backends with one device")
    parser.add_argument("--rows", default="", help="the beginning of the names of the rows to run")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    print("| step | cluster | backend | equal | predicted | measured | ratio | memory ratio | lower s | compile s |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|---:|")
    good = True
    for name, model, cluster, settings in ROWS:
        if name.startswith(options.rows):
            good &= row(name, model, cluster, settings, options.repeats)
    return 0 if good else 1


def row(name: str, model: str, cluster: str, settings: dict[str, Any], repeats: int) -> bool:
    """Prints the rows of one step; whether its checks pass."""
    import importlib

    import shardplan
    from shardplan.verify.verify import verify

    step, args = importlib.import_module(f"models.{model}").train_step(**settings, concrete=True)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    plain = seconds(lambda: jax.jit(step, donate_argnums=0), shapes, repeats)
    print(f"| {name} | {cluster} | one device | | | | | | {plain[0]:.2f} | {plain[1]:.2f} |")
    good = True
    for backend in ("explicit", "specs"):
        plan = shardplan.plan(step, *args, cluster=slow_devices(cluster), donate_argnums=0, backend=backend)
        devices = jax.devices()[: plan.cluster.size]
        found = verify(plan, step, args, steps=2, backend=backend, devices=devices)
        lower, compiled = seconds(partial(plan.jit, step, devices, backend), shapes, repeats)
        ratio = found.measured_bytes / found.predicted_bytes if found.predicted_bytes else 1.0
        held = found.measured_peak_bytes / found.predicted_peak_bytes
        equal = "yes" if found.passed else "NO"
        sent = f"{found.predicted_bytes:,.0f} | {found.measured_bytes:,.0f} | {ratio:.3f}"
        print(f"| {name} | {cluster} | {backend} | {equal} | {sent} | {held:.2f} | {lower:.2f} | {compiled:.2f} |", flush=True)
        good &= found.passed
    return good


def slow_devices(shape: str) -> Any:
    """A cluster of this shape whose devices compute a hundredth of what an H100 does."""
    from shardplan import Cluster

    cluster = Cluster.load(shape)
    flops = {"float32": 1e11, "bfloat16": 1e11}
    return replace(cluster, device=replace(cluster.device, platform="cpu", memory_bytes_per_s=2e10, flops_per_s=flops))


def seconds(jitted: Callable[[], Any], shapes: Sequence[Any], repeats: int) -> tuple[float, float]:
    """Median seconds of tracing and lowering, and of compiling."""
    lowering: list[float] = []
    compiling: list[float] = []
    for _ in range(repeats):
        jax.clear_caches()
        started = time.perf_counter()
        lowered = jitted().lower(*shapes)
        lowering.append(time.perf_counter() - started)
        started = time.perf_counter()
        lowered.compile()
        compiling.append(time.perf_counter() - started)
    return statistics.median(lowering), statistics.median(compiling)


if __name__ == "__main__":
    sys.exit(main())
