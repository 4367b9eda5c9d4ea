"""Seconds of a sweep: 60 points of GPT, over batches, clusters and memory limits.

``python benchmarks/sweep.py [--layers 12] [--repeats 1]``

The points of a batch share a trace, and points that differ only in the memory limit share a plan if it fits the smaller one.
Prints the points, the seconds of the whole sweep and a point, those of the processor (others may use it too), and the traces.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

import shardplan
from models import gpt
from shardplan.report.sweep import Sweep

BATCHES = (32, 64, 128, 256, 512)
CLUSTERS = ("dgx-h100:1", "dgx-h100:2", "dgx-h100:4", "dgx-h100:8")
MEMORY = ("auto", "50GiB", "40GiB")
SIZES = {"width": 1024, "sequence": 512, "heads": 16, "vocabulary": 4096}
TARGET_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the sweep, prints its seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    runs = [_timed(given.layers) for _ in range(given.repeats)]
    took_s, processor_s = statistics.median(run[0] for run in runs), statistics.median(run[1] for run in runs)
    _, _, made, traces = runs[0]
    print(f"GPT, {given.layers} layers: {made.total} points in {took_s:.1f} s, {took_s / made.total:.2f} s a point")
    print(f"{processor_s:.1f} s of processor time; {traces} traces; {len(made.planned)} of {made.total} points fit")
    print(f"60 points in at most {TARGET_S:.0f} s: {took_s:.1f} s")
    return 0


def _timed(layers: int) -> tuple[float, float, Sweep, int]:
    """(seconds, seconds of processor time, the sweep, how often it made and traced a step)."""
    made: list[int] = []

    @functools.wraps(gpt.train_step)
    def factory(**options: Any) -> Any:
        made.append(options["batch"])
        return gpt.train_step(**options)

    vary = {"batch": BATCHES, "cluster": CLUSTERS, "memory": MEMORY}
    began, began_processor = time.perf_counter(), time.process_time()
    swept = shardplan.sweep(factory, vary=vary, options={"layers": layers, **SIZES}, donate_argnums=0)
    return time.perf_counter() - began, time.process_time() - began_processor, swept, len(made)


if __name__ == "__main__":
    sys.exit(main())
