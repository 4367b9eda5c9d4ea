"""Pipelines: LLaMA-70B on clusters with and without stages, and plans run on simulated devices beside their simulation.

    python benchmarks/pipelines.py [--parts models run idle] [--clusters NAME:NODES ...] [--json FILE]

1. *models*: LLaMA-70B (bfloat16, a scan over layers with remat, 4,096 tokens a sequence, 1,024 sequences or eight a device if
   that is less) planned on all devices and in stages with four microbatches a stage. *shorter* is the step on all devices over
   the step of the row.
2. *run*: a GPT in two stages of one CPU device each, in ten plans: the most bytes that a device holds as the plan says, and as
   run, where a device holds the arrays that are alive when a program starts and what XLA says that the program needs. Kendall's
   tau compares the orders; exits with 1 where it is below 0.6.
3. *idle*: ten plans of that GPT in two processes of one device each, since XLA's client for CPUs runs the programs of two devices
   of a process in turn, without a memory limit and within the least memory: the part of the step in which a device computes
   nothing as the plan says, and as run, where each process has a core of its own and computes as long as it uses it. Needs two
   cores that nothing else uses. Compared like bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
if __name__ == "__main__":  # before JAX starts: two devices, each with one thread
    os.environ["JAX_PLATFORMS"] = "cpu"
    count = 1 if "--process" in sys.argv else 2
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count} --xla_cpu_multi_thread_eigen=false"

import jax
import numpy as np
import scipy.stats

import shardplan
from models import gpt, llama

CLUSTERS = ("gcp-a100:32", "dgx-h100:64", "benchmarks/clusters/dgx-h100-100g.toml")
STAGES = (4, 8, 16)
EACH = 4
"""Microbatches a stage of the models."""
PLANS = [(count, layers) for count in (2, 4, 8, 16, 32) for layers in (4, 3)]
"""Microbatches of the plans that run, and layers: three make stages that take unequally long."""
IDLING = [(count, short) for count in (2, 4, 8, 16, 32) for short in (False, True)]
"""Microbatches of the plans whose idle time is compared, and whether memory is short: then one microbatch is in flight."""
LEAST_TAU = 0.6
CPUS = str(Path(__file__).parent / "clusters" / "two-cpus.toml")
MARK = "idle: "
"""Begins the lines of a process that the benchmark reads."""
TIMED = 5
"""Steps of a plan that are timed; their median counts."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; 1 if an order is not as simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("models", "run", "idle"), default=["models", "run", "idle"])
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS, metavar="NAME:NODES")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--process", nargs=2, help=argparse.SUPPRESS)  # number and port of a process of *idle*
    given = parser.parse_args(argv)
    if given.process:
        run_process(*map(int, given.process))
        return 0
    found: dict[str, Any] = {}
    if "models" in given.parts:
        found["models"] = planned(given.clusters)
    good = True
    if "run" in given.parts:
        found["run"], good = run()
    if "idle" in given.parts:
        found["idle"], ordered = idle()
        good = good and ordered
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    return 0 if good else 1


# -- models ------------------------------------------------------------------------------------------------------------


def planned(clusters: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each cluster and number of stages."""
    rows: list[dict[str, Any]] = []
    print("| cluster | devices | stages | microbatches | step s | shorter | idle | peak GiB | planned in s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for cluster in clusters:
        known = shardplan.Cluster.load(cluster)
        batch = min(1024, 8 * known.size)
        step, args = llama.train_step(size="70b", scan=True, remat=True, dtype="bfloat16", sequence=4096, batch=batch)
        whole_s = float("nan")
        for stages in (1, *STAGES):
            asked: dict[str, Any] = {} if stages == 1 else {"axes": {"stage": stages}, "microbatches": EACH * stages}
            start_s = time.perf_counter()
            try:
                plan = shardplan.plan(step, *args, cluster=known, donate_argnums=0, **asked)
            except shardplan.ShardplanError as error:
                print(
                    f"| {known.name} | {known.size} | {stages} | | {str(error).split(':', maxsplit=1)[0]} | | | | |", flush=True
                )
                continue
            took_s = time.perf_counter() - start_s
            whole_s = plan.step_time_s if stages == 1 else whole_s
            row = {
                "cluster": known.name, "devices": known.size, "stages": stages, "microbatches": EACH * stages if asked else 1,
                "step_s": plan.step_time_s, "shorter": whole_s / plan.step_time_s,
                "idle": plan.idle_share if stages > 1 else None, "peak_bytes": plan.peak_bytes, "planned_s": took_s,
            }  # fmt: skip
            rows.append(row)
            idle = "" if row["idle"] is None else f"{row['idle']:.0%}"
            shorter = "" if math.isnan(whole_s) else f"{row['shorter']:.2f}x"
            print(
                f"| {known.name} | {known.size} | {stages} | {row['microbatches']} | {row['step_s']:.3f} | {shorter} "
                f"| {idle} | {plan.peak_bytes / 2**30:.1f} | {took_s:.0f} |",
                flush=True,
            )
    return rows


# -- as run ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Watched:
    """A program that is run one at a time; ``peak_bytes`` has the most that it and the arrays that live meanwhile take."""

    program: Any
    devices: tuple[int, ...]
    peak_bytes: Counter[int]

    def __call__(self, *values: Any) -> Any:
        """Runs it."""
        jax.block_until_ready(values)
        stats = self.program.memory_analysis()
        inside = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        for device, live in living().items():
            here = inside if device in self.devices else 0
            self.peak_bytes[device] = max(self.peak_bytes[device], live + here)
        return jax.block_until_ready(self.program(*values))


def living() -> Counter[int]:
    """The bytes of all arrays, by device; those that share a buffer count once."""
    seen: set[tuple[int, int]] = set()
    found: Counter[int] = Counter()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            key = shard.device.id, shard.data.unsafe_buffer_pointer()
            if key not in seen:
                seen.add(key)
                found[shard.device.id] += shard.data.nbytes
    return found


def run() -> tuple[list[dict[str, Any]], bool]:
    """The rows of the plans, and whether their orders are as simulated."""
    rows: list[dict[str, Any]] = []
    print("| microbatches | layers | peak MiB simulated | as run | ratio |\n|---:|---:|---:|---:|---:|")
    for count, layers in PLANS:
        row = one(count, layers)
        rows.append(row)
        ratio = row["peak_run"] / row["peak_bytes"]
        sizes = f"{row['peak_bytes'] / 2**20:.1f} | {row['peak_run'] / 2**20:.1f}"
        print(f"| {count} | {layers} | {sizes} | {ratio:.2f} |", flush=True)
    return rows, ordered([r["peak_bytes"] for r in rows], [r["peak_run"] for r in rows])


def ordered(simulated: Sequence[float], as_run: Sequence[float]) -> bool:
    """Whether the plans are in the simulated order when run; prints Kendall's tau."""
    tau = scipy.stats.kendalltau(simulated, as_run).statistic
    print(f"\nKendall's tau: {tau:.2f} (at least {LEAST_TAU} asked).")
    return bool(tau >= LEAST_TAU)


def one(count: int, layers: int) -> dict[str, Any]:
    """A plan as simulated and as run."""
    step, args = model(layers, batch=64)
    plan = shardplan.plan(step, *args, cluster="2", **options(count))
    own = plan.put(args)
    jax.block_until_ready(own)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    compiled = plan.jit(step).lower(*shapes).compile()
    peak_bytes: Counter[int] = Counter()
    watched = [Watched(p.stage, p.devices, peak_bytes) for p in compiled.programs]
    state, *rest = own
    del own
    compiled.run(watched, state, *rest)
    return {"microbatches": count, "layers": layers, "peak_bytes": plan.peak_bytes, "peak_run": max(peak_bytes.values())}


def model(layers: int, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """A step of the GPT and its arguments in NumPy, so that what lives on devices is the plan's."""
    step, args = gpt.train_step(layers=layers, width=256, batch=batch, sequence=64, concrete=True)
    return step, jax.tree.map(np.array, args)


def options(count: int) -> dict[str, Any]:
    """What is asked of the plans."""
    return {"axes": {"stage": 2, "chunk": 1}, "microbatches": count, "donate_argnums": 0}


# -- idle time ---------------------------------------------------------------------------------------------------------


def idle() -> tuple[list[dict[str, Any]], bool]:
    """The rows of the plans, run by two processes, and whether their orders are as simulated."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--process"]
    with (
        subprocess.Popen([*command, "1", str(port)], stdout=subprocess.PIPE, text=True) as other,
        subprocess.Popen([*command, "0", str(port)], stdout=subprocess.PIPE, text=True) as first,
    ):
        texts = [first.communicate()[0], other.communicate()[0]]
    if first.returncode or other.returncode:
        sys.exit(f"a process of the pipelines ended with {first.returncode or other.returncode}")
    each = [[json.loads(line.removeprefix(MARK)) for line in text.splitlines() if line.startswith(MARK)] for text in texts]
    rows: list[dict[str, Any]] = []
    print("| microbatches | memory | step s simulated | as run | idle simulated | as run |\n|---:|---|---:|---:|---:|---:|")
    for (count, short), *both in zip(IDLING, *each, strict=True):
        wall_s = max(own["wall_s"] for own in both)
        as_run = 1 - sum(own["busy_s"] for own in both) / (len(both) * wall_s)
        row = {"microbatches": count, "memory": "least" if short else "free", "step_s": both[0]["step_s"], "step_run": wall_s,
               "idle": both[0]["idle"], "idle_run": as_run}  # fmt: skip
        rows.append(row)
        steps = f"{row['step_s']:.2f} | {wall_s:.2f}"
        print(f"| {count} | {row['memory']} | {steps} | {row['idle']:.1%} | {as_run:.1%} |")
    return rows, ordered([r["idle"] for r in rows], [r["idle_run"] for r in rows])


def least_memory(step: Any, args: Any, count: int) -> int:
    """The bytes of a device in the smallest plan, as refused plans say."""
    limit = 1
    while True:
        try:
            return shardplan.plan(step, *args, cluster=CPUS, **options(count), memory_limit=limit).peak_bytes
        except shardplan.MemoryLimitError as error:
            limit = error.smallest_bytes


def run_process(number: int, port: int) -> None:
    """One of the two processes, on a core of its own: runs all plans, and prints the seconds of a step and those of its core."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[number]})
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, number)
    for count, short in IDLING:
        step, args = model(4, batch=256)
        limit: dict[str, Any] = {"memory_limit": least_memory(step, args, count)} if short else {}
        plan = shardplan.agree(step, *args, cluster=CPUS, **options(count), **limit)
        run_step = plan.jit(step)
        state, *rest = plan.put(args)
        took: list[tuple[float, float]] = []
        for _ in range(1 + TIMED):
            start_s, used_s = time.perf_counter(), time.process_time()
            state, loss = run_step(state, *rest)
            plan.fetch(loss)
            jax.block_until_ready(state)
            took.append((time.perf_counter() - start_s, time.process_time() - used_s))
        wall_s, busy_s = np.median(took[1:], axis=0).tolist()
        print(
            MARK + json.dumps({"step_s": plan.step_time_s, "idle": plan.idle_share, "wall_s": wall_s, "busy_s": busy_s}),
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
