"""Plans and hand-written shardings by the schedules of their compiled programs, on H100s that are not there (extra ``gpu-aot``).

``python benchmarks/overlap.py [NAME ...] [--plans all|N] [--json FILE] [--limit SECONDS] [--contention 1.3]``

A NAME is one of `ROWS`; without names all are run. For each row, the plan (under both time models) and the hand plans `HAND`,
with the fastest of their products with tensor parallelism, are compiled ahead of time with the plan's XLA flags. The time of each
is that of its compiled schedule (`shardplan.emit.hlo_timeline`): kernels by the roofline, collectives by the network model from
their groups and bytes, at once where the schedule lets them overlap. The models are the same for all plans. ``--plans N``
compiles only the N hand plans that are predicted to be the fastest. A hand plan is left out if it does not fit in memory, or if
it could not win even with all its communication hidden.

A row is planned in a process of its own, and each of its programs has ``--limit`` seconds to compile. With ``--json``, results
are kept as they come; a program that is in the file is not compiled again, so that an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from by_hand import LLAMA, LONG, MEDIUM, MOE, SLOW, SMALL, VIT, gpt_options
from gpu_bytes import TARGET, Step, cluster_of, step_of

ROOT = Path(__file__).parent.parent
HAND = ("data parallel", "FSDP", "data x FSDP", "tensor parallel")
"""Shardings that people write by hand: "data x FSDP" is hybrid FSDP, "tensor parallel" is Megatron's."""
MODELS = ("overlap", "sum")
"""The time models, the default first."""


@dataclass(frozen=True)
class Row:
    """A step with a device's part of its batch, on a cluster of nodes x GPUs, whose NICs are ``slow`` (100 Gb/s a GPU) or not."""

    model: str
    shape: str
    each: int
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    slow: bool = False

    @property
    def step(self) -> Step:
        """The step of the whole batch."""
        nodes, _, gpus = self.shape.rpartition("x")
        return Step(self.model, {**self.options, "batch": self.each * int(nodes or 1) * int(gpus)})

    @property
    def place(self) -> str:
        """The cluster, as `cluster_of` reads it."""
        return f"{SLOW} {self.shape}" if self.slow else self.shape


# Widths, sequences and batches are those of the models by these names; depth is cut to 4 to 8 layers, as all layers are alike.
ROWS = {
    "gpt-125m": Row("gpt", "8", 16, SMALL),
    "gpt-125m-small-batch": Row("gpt", "2x8", 2, SMALL),
    "gpt-125m-slow": Row("gpt", "4x8", 8, SMALL, slow=True),
    "gpt-350m-scan": Row("gpt", "4x8", 8, gpt_options(1024, 16, 8, scan=True)),
    "gpt-1.3b": Row("gpt", "2x8", 8, MEDIUM),
    "gpt-1.3b-small-batch": Row("gpt", "4x8", 1, MEDIUM),
    "gpt-1.3b-slow": Row("gpt", "4x8", 4, MEDIUM, slow=True),
    "gpt-2.7b-scan": Row("gpt", "4x8", 4, gpt_options(2560, 32, 8, 2048, **LONG)),
    "gpt-7b-scan": Row("gpt", "8x8", 2, gpt_options(4096, 32, 8, 2048, **LONG)),
    "gpt-7b-scan-slow": Row("gpt", "4x8", 2, gpt_options(4096, 32, 8, 2048, **LONG), slow=True),
    "llama-8b": Row("llama", "8x8", 1, {"size": "8b", **LLAMA}),
    "llama-8b-slow": Row("llama", "8x8", 1, {"size": "8b", **LLAMA}, slow=True),
    "llama-70b": Row("llama", "8x8", 1, {"size": "70b", **LLAMA}),
    "moe": Row("moe", "4x8", 4, {**MOE, "dtype": "bfloat16"}),
    "vit-large": Row("vit", "8", 64, {**VIT, "dtype": "bfloat16"}),
    "vit-large-small-batch": Row("vit", "4x8", 8, {**VIT, "dtype": "bfloat16"}),
    "wresnet-50-2": Row("wresnet", "4x8", 16, {"depth": 50, "width": 2, "image": 224}),
    "unet": Row("unet", "2x8", 16, {"channels": 128, "image": 64}),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--plans", default="all", metavar="all|N", type=lambda text: None if text == "all" else int(text))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--limit", type=float, default=400.0, metavar="SECONDS", help="to plan, and for each program to compile")
    parser.add_argument("--contention", type=float, default=1.3)
    parser.add_argument("--text", type=Path, metavar="DIRECTORY", help="keeps the compiled programs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--done", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if unknown := [name for name in (*given.names, *filter(None, [given.one])) if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: there are {', '.join(ROWS)}")
    if given.one:
        for result in measured(given.one, given.plans, given.contention, set(given.done), given.text):
            print(json.dumps(result), flush=True)
        return 0
    kept = _Kept(given.json)
    print("| row | cluster | planned by | ms | exposed | best hand plan | ms | exposed | of its communication | ratio |")
    print("|---|---|---|---:|---:|---|---:|---:|---:|---:|", flush=True)
    for name in given.names or ROWS:
        for result in fresh(name, given, list(kept.programs(name))):
            kept.add(name, result)
        print("\n".join(lines(name, kept.programs(name), given.contention)), flush=True)
    return 0


class _Kept:
    """Results by row and program, in a file if there is one."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: dict[str, dict[str, Any]] = json.loads(file.read_text())["rows"] if file and file.exists() else {}

    def programs(self, row: str) -> dict[str, Any]:
        """The results of a row, by program."""
        return self.rows.get(row, {})

    def add(self, row: str, result: Mapping[str, Any]) -> None:
        """Keeps the result of one program."""
        self.rows.setdefault(row, {})[result["program"]] = result
        if self.file:
            whole = self.file.with_suffix(".tmp")
            whole.write_text(json.dumps({"rows": self.rows}, indent=1))
            whole.replace(self.file)


def lines(name: str, programs: Mapping[str, Any], contention: float) -> list[str]:
    """A row of the table for each time model."""
    timed = {p: r for p, r in programs.items() if "times" in r}
    key = str(contention)
    hand = {p: r["times"][key] for p, r in timed.items() if p not in MODELS}
    result: list[str] = []
    for model in (m for m in MODELS if m in programs):
        if model not in timed or not hand:
            result.append(f"| {name} | {ROWS[name].shape} | {model} | {programs[model].get('failed', '')} | | | | | | |")
            continue
        ours, best = timed[model]["times"][key], min(hand, key=lambda p: hand[p]["seconds"])
        theirs = hand[best]
        share = theirs["exposed_s"] / theirs["communication_s"] if theirs["communication_s"] else 0.0
        cells = f"{_ms(ours)} | {best} | {_ms(theirs)} | {share:.0%} | {ours['seconds'] / theirs['seconds']:.3f}"
        result.append(f"| {name} | {ROWS[name].shape}{', 100 Gb/s' * ROWS[name].slow} | {model} | {cells} |")
    return result


def _ms(spent: Mapping[str, float]) -> str:
    return f"{spent['seconds'] * 1e3:.2f} | {spent['exposed_s'] * 1e3:.2f}"


def fresh(name: str, given: argparse.Namespace, done: list[str]) -> Iterator[dict[str, Any]]:
    """The results of the programs of a row that are not done, each as soon as it is known.

    They come from a process of their own, which is stopped if one program takes too long, and started again for the rest.
    """
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    plans = "all" if given.plans is None else str(given.plans)
    while True:
        command = [sys.executable, str(Path(__file__)), "--one", name, "--plans", plans, "--contention", str(given.contention)]
        command += ["--done", *done, *(["--text", str(given.text)] if given.text else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            ended = yield from _read(process, done, given.limit)
        if ended:
            return


def _read(process: subprocess.Popen[str], done: list[str], limit: float) -> Iterator[dict[str, Any]]:
    """The results of a process; returns whether it ended by itself. The program at which it failed counts as done."""
    assert process.stdout is not None
    at = "overlap" if "overlap" not in done else "sum"
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            timely = bool(ready.select(limit))
            line = process.stdout.readline() if timely else ""
            result = json.loads(line) if line else None
            if result is not None and "program" in result:
                done.append(result["program"])
                yield result
            elif result is not None:
                at = result["at"]
            else:
                break
    if not timely:
        process.kill()
    if process.wait() == 0:
        return True
    failed = {"program": at, "failed": "failed" if timely else f"over {limit:.0f} s"}
    done.append(at)
    yield failed
    return False


def measured(name: str, plans: int | None, contention: float, done: set[str], text: Path | None) -> Iterator[dict[str, Any]]:
    """The times of each program of a row by its compiled schedule; before each, {"at": its name}."""
    import shardplan

    row = ROWS[name]
    step, args, pins = step_of(row.step)
    cluster = cluster_of(row.place)
    plan = functools.partial(shardplan.plan, cluster=cluster, donate_argnums=0, pins=pins)
    made: dict[str, Any] = {}
    for model in MODELS:
        if model not in done or model == MODELS[0]:
            yield {"at": model}
            made[model] = plan(step, *args, time_model=model)
    first = made[MODELS[0]]
    wanted = {model: plan for model, plan in made.items() if model not in done}
    hand = hand_plans(first, plans)
    for program in (*wanted, *(p for p in hand if p not in done)):
        yield {"at": program}
        started = time.perf_counter()
        chosen = wanted[program] if program in wanted else first.as_baseline(program)
        file = text / f"{name}.{program.replace(' ', '_')}.hlo" if text else None
        yield {"program": program, **timed(chosen, step, args, contention, file), "took_s": time.perf_counter() - started}


def hand_plans(plan: Any, count: int | None) -> list[str]:
    """The hand plans that fit and may win, fastest predicted first, with at most one product with tensor parallelism."""
    fits = {b.name: b for b in plan.baselines if b.fits}
    products = [n for n in fits if " x tensor parallel" in n]
    names = [n for n in HAND if n in fits] + sorted(products, key=lambda n: fits[n].step_time_s)[:1]
    names.sort(key=lambda n: fits[n].step_time_s)
    solved = plan.baseline_plans()
    to_beat = min((fits[n].step_time_s for n in names), default=0.0)
    return [n for n in names if max(solved[n].compute_s, solved[n].communication_s) <= to_beat][:count]


def timed(plan: Any, step: Any, args: Any, contention: float, file: Path | None) -> dict[str, Any]:
    """The time of a plan's compiled program, with and without contention, beside what was predicted."""
    from jax.experimental import topologies

    from shardplan.cost import Network
    from shardplan.emit.hlo import measure
    from shardplan.emit.hlo_timeline import network_price, timeline

    per_node = plan.cluster.levels[-1].size
    shape = f"1x{plan.cluster.size // per_node}x{per_node}"
    machine = topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology=shape)
    lowered = plan.jit(step, machine.devices, "explicit").lower(*args)
    started = time.perf_counter()
    made = lowered.compile()
    compile_s, text = time.perf_counter() - started, made.as_text()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    price = network_price(Network(plan.cluster, plan.factors))
    times: dict[str, dict[str, float]] = {}
    for factor in (contention, 1.0):
        spent = timeline(text, plan.cluster.device, price, contention=factor)
        names = ("seconds", "compute_s", "communication_s", "exposed_s", "overlapped_s")
        times[str(factor)] = dict(zip(names, spent.values, strict=True))
    held = made.memory_analysis()
    return {
        "times": times,
        "predicted": {"seconds": plan.step_time_s, "compute_s": plan.compute_s, "communication_s": plan.communication_s},
        "planned_bytes": sum(s.wire_bytes * s.times for s in plan.sends),
        "compiled_bytes": measure(text, undo_cpu=False).wire_bytes,
        "planned_peak": plan.peak_bytes,
        "peak": held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes,
        "axes": plan.axes,
        "compile_s": compile_s,
    }


if __name__ == "__main__":
    sys.exit(main())
