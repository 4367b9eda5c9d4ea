"""Seconds of a sweep: 60 points of GPT, over batches, clusters and memory limits.

``python benchmarks/sweep.py [--layers 12] [--repeats 1] [--workers CORES]``

Points that differ only in the memory limit share a plan if it fits the smaller one. Prints the points, and the seconds of the
whole sweep and of a point.
"""

from __future__ import annotations

import argparse
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
from shardplan.placement.chains import cores
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
    parser.add_argument("--workers", type=int, default=cores())
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    runs = [_timed(given.layers, given.workers) for _ in range(given.repeats)]
    took_s, made = statistics.median(run[0] for run in runs), runs[0][1]
    print(f"GPT, {given.layers} layers: {made.total} points in {took_s:.1f} s, {took_s / made.total:.2f} s a point")
    print(f"{given.workers} processes; {len(made.planned)} of {made.total} points fit")
    print(f"60 points in at most {TARGET_S:.0f} s: {took_s:.1f} s")
    return 0


def _timed(layers: int, workers: int) -> tuple[float, Sweep]:
    """(seconds, the sweep)."""
    vary = {"batch": BATCHES, "cluster": CLUSTERS, "memory": MEMORY}
    began = time.perf_counter()
    options: dict[str, Any] = {"layers": layers, **SIZES}
    swept = shardplan.sweep(gpt.train_step, vary=vary, options=options, workers=workers, donate_argnums=0)
    return time.perf_counter() - began, swept


if __name__ == "__main__":
    sys.exit(main())
