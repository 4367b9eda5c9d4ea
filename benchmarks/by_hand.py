"""Plans beside programs that people write by hand, compiled for H100s that are not there (extra ``gpu-aot``).

``python benchmarks/by_hand.py [NAME ...] [--only PROGRAM ...] [--again] [--json FILE] [--limit SECONDS] [--table TABLE]``

A NAME is one of `ROWS`; without names all are run. A program by hand is the step under `jax.jit`, with a `NamedSharding` for each
argument (`HANDS`) and, where people write it, `with_sharding_constraint` between blocks; XLA's partitioner does the rest. It
contains no code of shardplan. It is compiled with XLA's default flags and with those of the plan, and the faster of the two
counts. The best program by hand is the fastest that fits a device.

All programs are timed alike, by their compiled schedules (`benchmarks.hlo_timeline`): kernels by the roofline, collectives by
the network model from their groups and bytes, at once where the schedule lets them overlap. A second timeline (``xla_seconds``)
prices kernels without products by XLA's own cost model (``xla_gpu_collect_cost_model_stats``).

Four tables: *judge* compares the plan with the best program by hand; *fsdp* is a short form of it for README.md; *ours* compares
the programs that shardplan emits for the same shardings (`OURS`) with those by hand, by step, compute, bytes and temporary
memory; *planned* compares what is compiled of the plan with what the plan predicts.

Each program by hand is compiled in a process of its own, and all of ours of a row in another; a process may take ``--limit``
seconds. Each result is kept in ``--json`` (``by_hand.json``) as soon as it is there, with the commit that ran. A kept result that
did not fail is measured anew only with ``--again``: ask for that after a change of the steps or the shardings by hand, for ours
also after a change of the emitter or the search, and for all after a change of the network's prices. ``--table`` prints a table
of the kept results and runs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.hand_rows import ROWS, Row
from benchmarks.hand_shardings import HANDS, by_hand

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "collectives" / "h100_target.txtpb"
PLAN = "plan"
OURS = {"data parallel": "data parallel", "FSDP": "FSDP", "hybrid FSDP": "data x FSDP"}
"""Programs by hand whose sharding is also that of one of our baselines."""
KEPT = ROOT / "benchmarks" / "by_hand.json"
AIMS: Mapping[str, float] = {"seconds": 0.01, "compute_s": 0.01, "bytes": 0.02, "temporary": 0.05}
"""How much more than by hand our program of the same sharding may take, compute, send and hold."""


# -- one program -------------------------------------------------------------------------------------------------------


def programs_of(row: Row) -> list[str]:
    """The names of a row's programs."""
    hands = [name for name, hand in HANDS.items() if hand.needs(row)]
    return [PLAN, *(f"our {name}" for name in hands if name in OURS), *hands]


def measured(name: str, programs: Sequence[str], text: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(program, its figures) for these programs of a row, one by one as they are compiled; one search serves all of ours."""
    from jax.experimental import topologies

    row = ROWS[name]
    nodes, gpus = row.sizes
    machine = topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology=f"1x{nodes}x{gpus}")
    for program in programs:
        if program in HANDS:
            yield program, _by_hand(name, program, machine, text)
    if own := [program for program in programs if program not in HANDS]:
        yield from _planned(name, own, machine, text)


def _by_hand(name: str, program: str, machine: Any, text: Path | None) -> dict[str, Any]:
    """The figures of a program by hand with the faster flags with which it fits; ``xla_seconds`` is the less of both."""
    from shardplan.plans.xla_flags import xla_flags

    cluster = ROWS[name].cluster()
    lowered = by_hand(ROWS[name], HANDS[program], machine)
    compiled = [
        {**figures(lowered, flags, cluster, _file(text, name, f"{program}.{which}")), "flags": which}
        for which, flags in (("default", {}), ("plan's", xla_flags(cluster)))
    ]
    fitting = [one for one in compiled if _fits(one)] or compiled
    return {**min(fitting, key=lambda one: one["seconds"]), "xla_seconds": min(one["xla_seconds"] for one in fitting)}


def _planned(name: str, programs: Sequence[str], machine: Any, text: Path | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The figures of the plan and of our programs of other shardings, each as it is compiled."""
    import shardplan

    row = ROWS[name]
    (_, gpus), cluster, (step, args) = row.sizes, row.cluster(), row.step()
    plan: Any = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0)
    for program in programs:
        chosen = plan if program == PLAN else plan.as_baseline(_own_name(plan, OURS[program.removeprefix("our ")], gpus))
        lowered = chosen.jit(step, machine.devices, "explicit").lower(*args)
        compiled = figures(lowered, {}, cluster, _file(text, name, program))
        yield program, {**compiled, **predictions(chosen), "axes": plan.axes, "plan_s": plan.trace_s + plan.search_s}


def _own_name(plan: Any, name: str, gpus: int) -> str:
    """The name of a baseline in a plan over these factors. Over more than two, several baselines begin with ``name``: the one
    wanted splits weights over a node's ``gpus`` and no more.
    """
    names = [baseline.name for baseline in plan.baselines]
    inside = (n for n in names if n.startswith(f"{name} (") and math.prod(map(int, n[:-1].split("| ")[-1].split("x"))) == gpus)
    return name if name in names else next(inside, name)


def predictions(plan: Any) -> dict[str, float]:
    """What the plan predicts: seconds, bytes on the wire, and bytes at the peak. Copies beside collectives, which a plan counts
    as communication, count as compute here, as they are kernels.
    """
    from shardplan.planning.scheduled import scheduled

    copied_s = sum(one.copied_s * one.times for one in scheduled(plan.session).issued)
    return {
        "predicted_s": plan.step_time_s,
        "predicted_compute_s": plan.compute_s + copied_s,
        "predicted_bytes": sum(one.times * one.wire_bytes for one in plan.sends),
        "predicted_peak": plan.peak_bytes,
    }


def figures(lowered: Any, flags: Mapping[str, Any], cluster: Any, file: Path | None) -> dict[str, Any]:
    """The seconds of a compiled program by the roofline and by XLA's cost model (``xla_``), what it sends and
    what it holds, in bytes (``temporary``; ``peak`` is all of it). ``triton`` is that of `_compiled`. Its text goes to ``file``.
    """
    from benchmarks.hlo_timeline import network_price, timeline
    from shardplan.cost import Network
    from shardplan.hlo.meter import measure
    from shardplan.mesh import factors

    began = time.perf_counter()
    made, triton = _compiled(lowered, {**flags, "xla_gpu_collect_cost_model_stats": True})
    compile_s, text = time.perf_counter() - began, made.as_text()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    price = network_price(Network(cluster, factors(cluster)))
    spent = timeline(text, cluster.device, price)
    by_xla = timeline(text, cluster.device, price, kernel_s=modelled_s(text))
    held = made.memory_analysis()
    return {
        "seconds": spent.seconds,
        "compute_s": spent.compute_s,
        "exposed_s": spent.exposed_s,
        "communication_s": spent.communication_s,
        "xla_seconds": by_xla.seconds,
        "xla_compute_s": by_xla.compute_s,
        "bytes": measure(text, undo_cpu=False).wire_bytes,
        "temporary": held.temp_size_in_bytes,
        "peak": held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes,
        "memory": cluster.device.memory_bytes,
        "triton": triton,
        "compile_s": compile_s,
    }


def _compiled(lowered: Any, options: Mapping[str, Any]) -> tuple[Any, bool]:
    """A compiled program, and whether its products are Triton's.

    Without a GPU, XLA takes Triton's first kernel for each product, and fails where there is none. Then all products take cuBLAS.
    The time of such a program is an upper bound, since a GPU's autotuner would change that one product alone.
    """
    import jax

    try:
        return lowered.compile(compiler_options=dict(options)), True
    except jax.errors.JaxRuntimeError as error:
        if "No supported config found" not in str(error):
            raise
        return lowered.compile(compiler_options={**options, "xla_gpu_enable_triton_gemm": False}), False


_COSTS = re.compile(r'"reification_cost":\[(.*?)\],"device_type')
_COST = re.compile(r'"exec_time_us":([0-9.e+-]+).*?"name":"([^"]*)"')
_MODELS = ("indexing-cost-model", "")
"""The names of XLA's cost models, in the order in which they are asked: only the first knows fusions of the Triton emitter."""


def modelled_s(text: str) -> dict[tuple[str, str], float]:
    """The seconds of each kernel without products by XLA's own cost model, by (computation, instruction).

    Kernels with products are left out: the model knows no tensor cores, and prices tiles that no tuned program has, since nothing
    is tuned without a GPU.
    """
    from benchmarks.hlo_kernels import kernels_of
    from shardplan.hlo.text import parse_module

    module = parse_module(text)
    found: dict[tuple[str, str], float] = {}
    for (computation, name), kernel in kernels_of(module).items():
        costs = _COSTS.search(module.computations[computation].instructions[name].attributes)
        by_model = {model: float(us) * 1e-6 for us, model in _COST.findall(costs[1] if costs else "")}
        model = next((model for model in _MODELS if model in by_model), None)
        if model is not None and not kernel.flops:
            found[computation, name] = by_model[model]
    return found


def _fits(program: Mapping[str, Any]) -> bool:
    """Whether a compiled program fits a device."""
    return program["peak"] <= program["memory"]


def _file(text: Path | None, row: str, program: str) -> Path | None:
    return text / f"{row}.{program.replace(' ', '_')}.hlo" if text else None


# -- all of them -------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="these programs alone")
    parser.add_argument("--again", action="store_true", help="measures kept results anew")
    parser.add_argument("--json", type=Path, default=KEPT, help=f"where results are kept (default: {KEPT.relative_to(ROOT)})")
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="for each process")
    parser.add_argument("--text", type=Path, metavar="DIRECTORY", help="keeps the compiled programs")
    parser.add_argument("--table", choices=TABLES, help="prints this table of what is kept, and runs nothing")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if strange := set(given.only or ()) - {PLAN, *HANDS, *(f"our {name}" for name in OURS)}:
        parser.error(f"no program {min(strange)!r}")
    if unknown := [name for name in given.names if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}: there are {', '.join(ROWS)}")
    if given.one:
        name, *programs = given.one
        for program, found in measured(name, programs, given.text):
            print(json.dumps({program: found}), flush=True)
        return 0
    kept: dict[str, dict[str, Any]] = json.loads(given.json.read_text()) if given.json.exists() else {}
    for name in () if given.table else given.names or ROWS:
        known = set() if given.again else {p for p, found in kept.get(name, {}).items() if "seconds" in found}
        due = [p for p in given.only or programs_of(ROWS[name]) if p in programs_of(ROWS[name]) and p not in known]
        own = [p for p in due if p not in HANDS]
        for programs in [*([own] if own else []), *([p] for p in due if p in HANDS)]:
            for program, found in fresh(name, programs, given).items():
                kept.setdefault(name, {})[program] = {**found, "commit": _commit()}
                print(f"{name}, {program}: {json.dumps(found)}", file=sys.stderr, flush=True)
            whole = given.json.with_suffix(".tmp")
            whole.write_text(json.dumps(kept, indent=1))
            whole.replace(given.json)
    if given.table and not kept:
        parser.error(f"{given.json} has no rows: run this without --table first")
    of_rows = {name: kept[name] for name in ROWS if name in kept and (not given.names or name in given.names)}
    print("\n".join(line for table in ([given.table] if given.table else TABLES) for line in [*TABLES[table](of_rows), ""]))
    return 0


def _commit() -> str:
    """The commit that runs; with a plus where the working tree differs from it."""
    commit, *changed = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--", "*.py"))
    )
    return commit + "+" * any(changed)


def fresh(name: str, programs: Sequence[str], given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Programs of a row from a new process: the compiler's flags are read when its backend starts."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [
        sys.executable,
        str(Path(__file__)),
        *(["--text", str(given.text)] if given.text else []),
        "--one",
        name,
        *programs,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            out, errors = process.communicate(timeout=given.limit)
            lines = [line for line in errors.splitlines() if "Error: " in line] or errors.splitlines() or ["it said nothing"]
            failed = lines[-1][:300]
        except subprocess.TimeoutExpired:
            process.kill()
            out, failed = process.communicate()[0], f"over {given.limit:.0f} s"
    found: dict[str, dict[str, Any]] = {program: {"failed": failed} for program in programs}
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            found |= json.loads(line)
    return found


Kept = Mapping[str, Mapping[str, Any]]
"""The figures of each program, by row and program."""


def judge(kept: Kept) -> list[str]:
    """The plan of each row beside the fastest program by hand that fits a device."""
    lines = [
        "| row | cluster | plan, ms | exposed | GiB | best by hand | ms | exposed | GiB | plan / best | by XLA's model |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    ratios, by_xla, exposing, failed = list[float](), list[float](), list[float](), 0
    for name, found in kept.items():
        hands = {p: r for p, r in found.items() if p in HANDS and "seconds" in r and _fits(r)}
        plan = found.get(PLAN, {})
        if "seconds" not in plan or not _fits(plan) or not hands:
            why = "it does not fit" if "seconds" in plan and not _fits(plan) else plan.get("failed", "").replace("|", "/")
            lines.append(f"| {name} | {ROWS[name].shape} | {why} | | | | | | | | |")
            failed += 1
            continue
        best = min(hands, key=lambda p: hands[p]["seconds"])
        theirs = hands[best]
        ratios.append(plan["seconds"] / theirs["seconds"])
        if theirs["exposed_s"] > 0.1 * theirs["seconds"]:
            exposing.append(ratios[-1])
        by_xla.append(plan["xla_seconds"] / min(r["xla_seconds"] for r in hands.values()))
        sides = f"{_times_and_peak(plan)} | {best}, {theirs['flags']} flags | {_times_and_peak(theirs)}"
        cluster = f"{ROWS[name].shape}{', 100 Gb/s' * ROWS[name].slow}"
        lines.append(f"| {name} | {cluster} | {sides} | {ratios[-1]:.3f} | {by_xla[-1]:.3f} |")
    lines.append("")
    for which, column in (("", ratios), (" by XLA's model", by_xla)) if ratios else ():
        median, worst, over = statistics.median(column), max(column), sum(r > 1.01 for r in column)
        lines.append(f"{len(column)} rows{which}: median {median:.3f}, largest {worst:.3f}, {over} over 1.01.")
    if failed:
        lines.append(f"{failed} rows have no plan, or no program by hand, that fits.")
    if exposing:
        median = statistics.median(exposing)
        lines.append(f"Where the best by hand exposes over a tenth of its time ({len(exposing)} rows): median {median:.3f}.")
    return lines


SHOWN = ("vit-large", "gpt-1.3b", "moe", "gpt-7b-scan", "llama-8b", "wresnet-50-2")
"""The rows that *fsdp* lists: a model of each kind, whose gains are no larger than those of all rows."""


def fsdp(kept: Kept) -> list[str]:
    """Milliseconds of FSDP by hand, of the fastest program by hand and of the plan for `SHOWN`, and the gains over all rows."""
    lines = ["| train step | nodes x GPUs | FSDP by hand | fastest by hand | plan |", "|---|---|---:|---:|---:|"]
    beside_fsdp, beside_fastest = list[float](), list[float]()
    for name in [*SHOWN, *(name for name in kept if name not in SHOWN)]:
        found, row = kept.get(name, {}), ROWS[name]
        by_hand_s = {p: r["seconds"] for p, r in found.items() if p in HANDS and "seconds" in r and _fits(r)}
        if "FSDP" not in by_hand_s or "seconds" not in found.get(PLAN, {}) or not _fits(found[PLAN]):
            continue
        seconds = (by_hand_s["FSDP"], min(by_hand_s.values()), found[PLAN]["seconds"])
        beside_fsdp.append(seconds[2] / seconds[0])
        beside_fastest.append(seconds[2] / seconds[1])
        if name in SHOWN:
            layers = f", {row.options['layers']} layers" if "layers" in row.options else ""
            times = " | ".join(f"{s * 1e3:.1f} ms" for s in seconds)
            lines.append(f"| {name}{layers} | {row.sizes[0]} x {row.sizes[1]} | {times} |")
    beside = (("FSDP", beside_fsdp), ("the fastest", beside_fastest)) if beside_fsdp else ()
    totals = (f"{1 - statistics.median(r):.1%} below {which} ({1 - max(r):.1%} to {1 - min(r):.1%})" for which, r in beside)
    return [*lines, "", f"Over {len(beside_fsdp)} steps, the plan's time is a median of {' and '.join(totals)}."]


def ours(kept: Kept) -> list[str]:
    """The programs that shardplan emits for the shardings by hand, over those by hand: ratios of each row, and their medians.

    Ratios beyond `AIMS` are bold.
    """
    lines = ["| row | sharding | step | compute | bytes | temporary |", "|---|---|---:|---:|---:|---:|"]
    all_ratios: list[list[float]] = []
    for name, found in kept.items():
        for hand in OURS:
            mine, theirs = found.get(f"our {hand}", {}), found.get(hand, {})
            if "seconds" in mine and "seconds" in theirs:
                ratios = [mine[k] / theirs[k] if theirs[k] else 1.0 for k in AIMS]
                cells = [f"**{r:.3f}**" if r > 1 + aim else f"{r:.3f}" for r, aim in zip(ratios, AIMS.values(), strict=True)]
                lines.append(f"| {name} | {hand} | {' | '.join(cells)} |")
                all_ratios.append(ratios)
            elif mine or theirs:
                why = mine.get("failed") or theirs.get("failed") or ("not measured" if not mine else "not written by hand")
                lines.append(f"| {name} | {hand} | {why.replace('|', '/')} | | | |")
    medians = [statistics.median(column) for column in zip(*all_ratios, strict=True)]
    return [*lines, *([f"| median | | {' | '.join(f'{r:.3f}' for r in medians)} |"] if medians else [])]


_PREDICTED = (
    ("bytes", "predicted_bytes", 1e-6, 1),
    ("compute_s", "predicted_compute_s", 1e3, 2),
    ("seconds", "predicted_s", 1e3, 2),
    ("peak", "predicted_peak", 2**-30, 2),
)
"""What is predicted: the key of the compiled figure, that of the predicted one, the printed unit, and its decimals."""


def planned(kept: Kept) -> list[str]:
    """The bytes, compute, step and peak that are compiled of each plan, each with its ratio to what the plan predicts. Below, the
    part of what overlap could save that compiled plans save.
    """
    from shardplan.cost.overlap import contended

    lines = [
        "| row | MB sent | ratio | compute ms | ratio | step ms | ratio | peak GiB | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    errors: list[list[float]] = []
    saved: list[float] = []
    for name, found in kept.items():
        plan = found.get(PLAN, {})
        if "predicted_bytes" not in plan:
            continue
        ratios = [plan[key] / plan[of] if plan[of] else 1.0 for key, of, _, _ in _PREDICTED]
        values = [f"{plan[key] * unit:,.{digits}f}" for key, _, unit, digits in _PREDICTED]
        lines.append(f"| {name} | {' | '.join(f'{v} | {r:.3f}' for v, r in zip(values, ratios, strict=True))} |")
        errors.append([abs(r - 1) for r in ratios])
        if could_s := (1 - contended(ROWS[name].cluster().device.contention)) * min(plan["compute_s"], plan["communication_s"]):
            saved.append((plan["compute_s"] + plan["communication_s"] - plan["seconds"]) / could_s)
    medians = [statistics.median(column) for column in zip(*errors, strict=True)]
    lines += [f"| median error | {' | '.join(f'| {error:.1%}' for error in medians)} |"] if medians else []
    if saved:
        part = f"{statistics.median(saved):.0%} of the time that full overlap would save ({min(saved):.0%} to {max(saved):.0%})"
        lines += ["", f"Compiled plans save a median of {part}."]
    return lines


TABLES: Mapping[str, Callable[[Kept], list[str]]] = {"judge": judge, "fsdp": fsdp, "ours": ours, "planned": planned}


def _times_and_peak(found: Mapping[str, float]) -> str:
    """Milliseconds of the step, exposed milliseconds, and GiB at the peak, as three cells."""
    return f"{found['seconds'] * 1e3:.2f} | {found['exposed_s'] * 1e3:.2f} | {found['peak'] / 2**30:.2f}"


if __name__ == "__main__":
    sys.exit(main())
