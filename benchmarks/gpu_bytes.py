"""Planned beside compiled bytes and memory on H100s that are not there, under both backends (needs the extra ``gpu-aot``).

``python benchmarks/gpu_bytes.py [NAME ...] [--ways explicit flags] [--kinds] [--json FILE]``

A NAME is one of `STEPS`, on each of its clusters, or ``STEP@CLUSTER`` for one of them; without names all are run. Each step is
planned, its plan compiled ahead of time for H100s, the collectives of the compiled text counted (bytes of a device in a step,
ring convention, bodies of loops by their trips), and its `memory_analysis()` set beside the plan. The ways are the backends
``specs`` and ``explicit``, and ``flags``: explicit, compiled with `Plan.xla_flags`. ``--kinds`` adds a line for each kind of
collective. Each row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "collectives" / "h100_target.txtpb"
WAYS = ("specs", "explicit", "flags")
TEXT = {"heads": 16, "sequence": 512, "batch": 64}
DECODER = {**TEXT, "layers": 2, "width": 1024, "key_heads": 8, "vocabulary": 32000, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Step:
    """A model with its options, and the clusters that it is planned for."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    clusters: tuple[str, ...] = ("2x4", "8x8")


GPT = {**TEXT, "layers": 2, "width": 1024, "vocabulary": 32768}
DEEP = {**TEXT, "layers": 8, "width": 1024, "vocabulary": 32768, "remat": True}
STEPS = {
    "gradient": Step("", clusters=("gcp-a100 2x4",)),
    "mlp": Step("mlp", {"width": 4096, "batch": 4096, "inputs": 1024, "classes": 1024}),
    "gpt": Step("gpt", GPT),
    "gpt-bfloat16": Step("gpt", {**GPT, "dtype": "bfloat16"}),
    "gpt_linen": Step("gpt_linen", GPT),
    "llama": Step("llama", {**DECODER, "inner": 2816}),
    "moe": Step("moe", {**DECODER, "inner": 1024}),
    "rnn": Step("rnn", {"hidden": 1024, "steps": 16, "batch": 512, "scan": True}),
    "unet": Step("unet", {"channels": 64, "image": 32, "batch": 256}),
    "vit": Step("vit", {"layers": 4, "width": 768, "heads": 12, "image": 64, "batch": 256}),
    "wresnet": Step("wresnet", {"depth": 50, "width": 2, "image": 64, "batch": 256}),
    "gpt-remat": Step("gpt", DEEP),
    "gpt-scan-remat": Step("gpt", {**DEEP, "scan": True}),
    "llama-70b": Step(
        "llama",
        {"size": "70b", "sequence": 4096, "batch": 64, "block": 512, "scan": True, "remat": True, "dtype": "bfloat16"},
        ("dgx-h100:8",),
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--text", type=Path, metavar="DIRECTORY", help="keeps the compiled programs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(measured(given.one, given.ways, given.text)))
        return 0
    rows: list[dict[str, Any]] = []
    print("| step | cluster | way | planned MB | compiled MB | ratio | collectives | instructions | peak planned GiB |", end="")
    print(" compiled GiB | ratio | compile s |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in given.names or STEPS:
        for row in rows_of(parser, name, STEPS):
            found = fresh(row, given.ways, given.text)
            rows.append(found)
            print("\n".join(lines(found, kinds=given.kinds)), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"rows": rows}, indent=1))
    return 0


def rows_of(parser: argparse.ArgumentParser, name: str, steps: Mapping[str, Step]) -> list[str]:
    """The rows that a name asks for."""
    step, _, cluster = name.partition("@")
    if step not in steps:
        parser.error(f"no step {step!r}: there are {', '.join(steps)}")
    return [f"{step}@{cluster}"] if cluster else [f"{step}@{c}" for c in steps[step].clusters]


def lines(found: Mapping[str, Any], *, kinds: bool) -> list[str]:
    """The table's rows of one step on one cluster."""
    step, _, cluster = found["row"].partition("@")
    rows: list[str] = []
    for way, made in found["ways"].items():
        planned, sent, peak = made["planned"], made["compiled"], made["peak"]
        counts = f"{_total(planned, 'count'):.0f} | {_total(sent, 'count'):.0f}"
        rows.append(
            f"| {step} | {cluster} | {way} | {_total(planned, 'bytes') / 1e6:.2f} | {_total(sent, 'bytes') / 1e6:.2f} "
            f"| {_ratio(_total(sent, 'bytes'), _total(planned, 'bytes'))} | {counts} | {found['peak'] / 2**30:.2f} "
            f"| {peak / 2**30:.2f} | {_ratio(peak, found['peak'])} | {made['compile_s']:.1f} |"
        )
        for kind in sorted({*planned, *sent} if kinds else ()):
            ours, theirs = (side.get(kind, {"count": 0, "bytes": 0}) for side in (planned, sent))
            rows.append(
                f"| | | {kind} | {ours['bytes'] / 1e6:.2f} | {theirs['bytes'] / 1e6:.2f} "
                f"| {_ratio(theirs['bytes'], ours['bytes'])} | {ours['count']:.0f} | {theirs['count']:.0f} | | | | |"
            )
    return rows


def _total(side: Mapping[str, Mapping[str, float]], key: str) -> float:
    return sum(kind[key] for kind in side.values())


def _ratio(measured: float, predicted: float) -> str:
    return f"{measured / predicted:.3f}" if predicted else "1.000" if not measured else "-"


def fresh(row: str, ways: Sequence[str] = WAYS, text: Path | None = None) -> dict[str, Any]:
    """One row from a new process: the compiler's flags are read when its backend starts."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__)), "--one", row, "--ways", *ways, *(["--text", str(text)] if text else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(row: str, ways: Sequence[str], text: Path | None) -> dict[str, Any]:
    """A plan beside what is compiled of it, in each way: ``planned`` and ``compiled`` hold {kind: count, bytes}."""
    import shardplan

    name, _, place = row.partition("@")
    step, args, pins = step_of(STEPS[name])
    plan = shardplan.plan(step, *args, cluster=cluster_of(place), donate_argnums=0, pins=pins)
    result: dict[str, Any] = {"row": row, "peak": plan.peak_bytes, "plan_s": plan.trace_s + plan.search_s, "ways": {}}
    for way in ways:
        result["ways"][way] = _compiled(plan, step, args, way, text / f"{row}.{way}.hlo" if text else None)
    return result


def _compiled(plan: Any, step: Any, args: Any, way: str, text: Path | None) -> dict[str, Any]:
    """What the compiled plan sends and holds."""
    from jax.experimental import topologies

    from shardplan.emit.hlo import measure

    per_node = plan.cluster.levels[-1].size
    shape = f"1x{plan.cluster.size // per_node}x{per_node}"
    machine = topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology=shape)
    backend = "explicit" if way == "flags" else way
    lowered = plan.jit(step, machine.devices, backend, xla_flags=way == "flags").lower(*args)
    started = time.perf_counter()
    made = lowered.compile()
    seconds = time.perf_counter() - started
    if text:
        text.parent.mkdir(parents=True, exist_ok=True)
        text.write_text(made.as_text())
    sent = measure(made.as_text(), undo_cpu=False)
    planned: dict[str, dict[str, float]] = {}
    for one in plan.sends if backend == "explicit" else plan.collectives:
        kind = planned.setdefault(one.kind, {"count": 0.0, "bytes": 0.0})
        kind["count"] += one.times
        kind["bytes"] += one.times * one.wire_bytes
    held = made.memory_analysis()
    return {
        "planned": planned,
        "compiled": {kind: {"count": total.count, "bytes": total.wire_bytes} for kind, total in sent.kinds.items()},
        "peak": held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes,
        "arguments": held.argument_size_in_bytes,
        "compile_s": seconds,
    }


def step_of(step: Step) -> tuple[Any, Any, Any]:
    """The step, its arguments and pins: of no model, a data-parallel step with one weight of 64 MiB."""
    if step.model:
        return *importlib.import_module(f"models.{step.model}").train_step(**step.options), None
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec

    def descend(weight: Any, batch: Any) -> Any:
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(batch @ w) ** 2))(weight)
        return weight - 0.1 * gradient

    args = jax.ShapeDtypeStruct((4096, 4096), jnp.float32), jax.ShapeDtypeStruct((16384, 4096), jnp.float32)
    return descend, args, {"weight": PartitionSpec(), "batch": PartitionSpec(("node", "gpu"))}


def cluster_of(place: str) -> Any:
    """A cluster by name; ``PRESET NODESxGPUS`` is the preset with these sizes."""
    from shardplan import Cluster

    preset, _, shape = place.rpartition(" ")
    if not preset:
        return Cluster.load(shape)
    cluster = Cluster.load(preset)
    sizes = map(int, shape.split("x"))
    return replace(cluster, levels=tuple(replace(level, size=n) for level, n in zip(cluster.levels, sizes, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
