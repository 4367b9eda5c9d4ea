"""How good plans are: against the integer program, a lower bound, and every baseline. Each row in a process of its own.

``python benchmarks/quality.py [--part ilp bound models] [--quick] [--limit 600] [--json FILE] [--markdown FILE]``

- ``ilp``: small models over one to three factors. The integer program (HiGHS) is asked for the joint optimum over all factors;
  where its tables would be large, over the states that may be part of a plan as good as ours (reduced costs of the dual ascent
  rule the others out), which leaves every optimum in. ``gap`` is by how much our plan is above the optimum that it proves.
- ``bound``: larger models, where the gap is to `Plan.lower_bound_s`.
- ``models``: every model of models/ on three clusters with much memory and with little (midway between the smallest that any
  plan needs and what the fastest plan holds), beside the best baseline that fits: predicted seconds and, on eight devices, bytes
  on the wire counted in the compiled program.

A row that takes over ``--limit`` seconds is stopped and says so.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ROOMY = "1000TiB"
LARGEST = 400_000
"""Entries of all tables up to which the integer program gets every state."""

Row = dict[str, Any]

_LAYER = {"width": 1024, "sequence": 512, "batch": 64, "heads": 16, "vocabulary": 4096}
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
_IMAGES = {"image": 64, "batch": 96}

SMALL: Sequence[tuple[str, Mapping[str, Any], tuple[str, ...]]] = [
    ("mlp", {"width": 2048, "batch": 1536}, ("8", "2x4", "2x2x2", "3x2x2", "4x4x4")),
    ("gpt", {**_LAYER, "layers": 1}, ("8", "2x4", "2x2x2")),
    ("gpt", {"layers": 1}, ("2x4", "2x2x2")),
    ("gpt_linen", {**_LAYER, "layers": 1}, ("2x4",)),
    ("vit", {"layers": 1, "width": 512, **_IMAGES}, ("2x4", "2x2x2")),
    ("wresnet", {"blocks": (1, 1), "width": 4, **_IMAGES}, ("2x4", "2x2x2")),
    ("llama", _LLAMA, ("2x4", "2x2x2")),
    ("moe", _LLAMA, ("2x4", "2x2x2")),
    ("rnn", {"layers": 2, "hidden": 1024, "steps": 4, "batch": 256}, ("2x4", "2x2x2")),
    ("unet", {"levels": 2, "channels": 64, **_IMAGES}, ("2x4", "2x2x2")),
]
LARGE: Sequence[tuple[str, Mapping[str, Any], tuple[str, ...]]] = [
    ("gpt", {**_LAYER, "layers": 12}, ("2x2x2", "3x2x2")),
    ("gpt", {**_LAYER, "layers": 4, "batch": 256}, ("4x4x4",)),
    ("wresnet", {"depth": 50, "width": 4, "image": 224, "batch": 64}, ("2x2x2", "4x4x4")),
    ("llama", {**_LLAMA, "layers": 4}, ("2x2x2",)),
    ("moe", {**_LLAMA, "layers": 2}, ("2x2x2",)),
    ("rnn", {"layers": 4, "hidden": 4096, "batch": 512, "vocabulary": 4096}, ("2x2x2",)),
    ("unet", {"channels": 64, **_IMAGES}, ("2x2x2",)),
    ("vit", {"layers": 6, "width": 512, **_IMAGES}, ("2x2x2",)),
]
MODELS: Mapping[str, Mapping[str, Any]] = {
    "mlp": {"width": 4096, "batch": 1024},
    "gpt": {**_LAYER, "layers": 4},
    "gpt_linen": {**_LAYER, "layers": 2},
    "wresnet": {"depth": 14, "width": 4, "image": 64, "batch": 64},
    "rnn": {"layers": 2, "hidden": 2048, "steps": 4, "batch": 256, "vocabulary": 4096},
    "llama": _LLAMA,
    "moe": _LLAMA,
    "unet": {"levels": 2, "channels": 128, "image": 64, "batch": 64},
    "vit": {"layers": 2, "width": 1024, "image": 64, "batch": 128},
}
CLUSTERS = ("dgx-h100:1", "dgx-h100:4", "gcp-a100:4")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the rows, prints the tables and what is aimed at. 1 where a plan is worse than a baseline that fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("ilp", "bound", "models"), default=["ilp", "bound", "models"])
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="only these models")
    parser.add_argument("--quick", action="store_true", help="the first cluster of each row alone")
    parser.add_argument("--limit", type=float, default=600.0, metavar="SECONDS", help="of each row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(_measure(json.loads(given.one))))
        return 0
    rows: dict[str, list[Row]] = {}
    pages: list[str] = []
    for part in given.part:
        print(f"\n{part}\n{_line(_HEADS[part])}", flush=True)
        for task in _tasks(part, quick=given.quick):
            if given.models and task["model"] not in given.models:
                continue
            row = {**task, **_fresh({**task, "limit": given.limit}, given.limit)}
            rows.setdefault(part, []).append(row)
            print(_line(_CELLS[part](row)), flush=True)
            if given.json:
                given.json.write_text(json.dumps(rows, indent=1))
        said = _SAYS[part](rows.get(part, []))
        print(said)
        pages += [_markdown(_HEADS[part], [_CELLS[part](r) for r in rows.get(part, [])]), said]
        if given.markdown:
            given.markdown.write_text("\n\n".join(pages) + "\n")
    return int(any(r.get("worse") for r in rows.get("models", ())))


def _tasks(part: str, *, quick: bool) -> list[Row]:
    if part == "models":
        return [
            {"part": part, "model": m, "options": o, "cluster": c}
            for m, o in MODELS.items()
            for c in (CLUSTERS[:1] if quick else CLUSTERS)
        ]
    cases = SMALL if part == "ilp" else LARGE
    return [{"part": part, "model": m, "options": o, "cluster": c} for m, o, cs in cases for c in (cs[:1] if quick else cs)]


def _fresh(task: Row, limit: float) -> Row:
    """One row in a new interpreter."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps(task)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=limit * 1.5)
    except subprocess.TimeoutExpired:
        return {"status": f"stopped after {limit * 1.5:.0f} s"}
    if done.returncode:
        return {"status": f"failed: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def _measure(task: Row) -> Row:
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in task["options"].items()}
    made = importlib.import_module(f"models.{task['model']}").train_step(**options)
    return _beside_baselines(made, task) if task["part"] == "models" else _beside_optimum(made, task)


def _beside_optimum(made: tuple[Callable[..., Any], tuple[Any, ...]], task: Row) -> Row:
    import shardplan

    step, args = made
    plan = shardplan.plan(step, *args, cluster=task["cluster"], donate_argnums=0, memory_limit=ROOMY)
    began = time.perf_counter()
    bound_s = plan.lower_bound_s
    found = {
        "operators": plan.operators,
        "factors": "x".join(str(f.size) for f in plan.factors),
        "search_s": plan.search_s,
        "step_time_s": plan.step_time_s,
        "exact": plan.exact,
        "lower_bound_s": bound_s,
        "bound_took_s": time.perf_counter() - began,
        "bound_gap": plan.gap,
        "status": "exact" if plan.exact else "not proved",
    }
    return {**found, **_integer_program(plan, task["limit"])} if task["part"] == "ilp" else found


def _integer_program(plan: Any, limit: float) -> Row:
    """The joint optimum by HiGHS, over all states or those that reduced costs leave."""
    from shardplan.search.inference.bound import Ascent, ascend, narrowed, stars
    from tests.oracles import ilp

    problem = plan.session.problem
    began = time.perf_counter()
    own, which = problem.domains, "all"
    if _entries(problem, own) > LARGEST:
        ascent = Ascent(stars(problem, own, worst_s=4 * plan.step_time_s))
        ascend(ascent, known_s=plan.step_time_s, work=2e10, enough=1e-7)
        own, which = narrowed(ascent, own, plan.step_time_s * (1 + 1e-9) + 2 * problem.rounding_s), "narrowed"
    size = _entries(problem, own)
    found: Row = {"states": which, "entries": size, "ilp_status": "too large"}
    if size <= 50 * LARGEST:
        answer = ilp.solve(problem, own, time_limit_s=limit)
        found["ilp_status"] = {0: "optimal", 1: "time limit"}.get(answer.status, answer.message)
        if answer.status == 0 and answer.picoseconds is not None:
            found["ilp_step_time_s"] = answer.picoseconds / 1e12
            found["ilp_gap"] = plan.step_time_s / found["ilp_step_time_s"] - 1
    return {**found, "ilp_s": time.perf_counter() - began}


def _entries(problem: Any, domains: Sequence[Sequence[int]]) -> int:
    total = 0
    for scope in set(problem.scopes):
        entries = 1
        for v in scope:
            entries *= len(domains[v])
        total += entries
    return total


def _beside_baselines(made: tuple[Callable[..., Any], tuple[Any, ...]], task: Row) -> Row:
    import jax

    import shardplan

    jax.config.update("jax_num_cpu_devices", 8)
    step, args = made

    def planned(limit: Any) -> Any:
        return shardplan.plan(step, *args, cluster=task["cluster"], donate_argnums=0, memory_limit=limit)

    loose = planned(ROOMY)
    try:
        smallest = planned(1).peak_bytes
    except shardplan.MemoryLimitError as error:
        smallest = error.smallest_bytes
    tight = planned((smallest + loose.peak_bytes) // 2)
    rows = {"loose": _against(loose, step), "tight": _against(tight, step)}
    return {"devices": loose.cluster.size, "status": "done", "worse": any(r["worse"] for r in rows.values()), **rows}


def _against(plan: Any, step: Callable[..., Any]) -> Row:
    """A plan beside the best baseline that fits: seconds, and bytes compiled where eight devices are enough."""
    fitting = [b for b in plan.baselines if b.fits]
    best = min(fitting, key=lambda b: b.step_time_s, default=None)
    found: Row = {
        "memory_limit": plan.memory_limit,
        "peak_bytes": plan.peak_bytes,
        "step_time_s": plan.step_time_s,
        "bound_gap": plan.gap,
        "search_s": plan.search_s,
        "fitting": len(fitting),
        "baselines": len(plan.baselines),
        "best": best and best.name,
        "best_s": best and best.step_time_s,
        "worse": best is not None and plan.step_time_s > best.step_time_s * (1 + 1e-9),
        "bytes": plan.communication_bytes,
        "best_bytes": best and best.communication_bytes,
    }
    if plan.cluster.size <= 8:
        found["measured_bytes"] = _compiled_bytes(plan, step)
        if best is not None:
            found["best_measured_bytes"] = _compiled_bytes(plan.as_baseline(best.name), step)
    return found


def _compiled_bytes(plan: Any, step: Callable[..., Any]) -> float:
    import jax

    from shardplan.verify.verify import measured_program

    return float(measured_program(plan, step, devices=jax.devices()[: plan.cluster.size])[0].wire_bytes)


# -- tables ------------------------------------------------------------------------------------------------------------

_HEADS = {
    "ilp": "case | cluster | search s | step ms | optimum ms | gap | states | ILP s | ILP | bound gap | bound s".split(" | "),
    "bound": "case | cluster | operators | search s | step ms | bound gap | bound s | status".split(" | "),
    "models": (
        "model | cluster | memory | limit GiB | step ms | best baseline that fits | ms | faster by | of bytes | measured |"
        " bound gap | search s"
    ).split(" | "),
}


def _case(r: Row) -> str:
    layers = r["options"].get("layers") or r["options"].get("depth") or r["options"].get("blocks") or r["options"].get("levels")
    width = next((f", width {r['options'][k]}" for k in ("width", "hidden", "channels") if k in r["options"]), "")
    return f"{r['model']}{f' {layers}' if layers else ''}{width}"


def _ilp_cells(r: Row) -> list[str]:
    if "step_time_s" not in r:
        return [_case(r), r["cluster"], r["status"], *[""] * 8]
    optimum = r.get("ilp_step_time_s")
    return [
        _case(r),
        r["cluster"],
        f"{r['search_s']:.2f}",
        f"{r['step_time_s'] * 1e3:.4f}",
        "" if optimum is None else f"{optimum * 1e3:.4f}",
        "" if optimum is None else f"{r['ilp_gap']:.3%}",
        r["states"],
        f"{r['ilp_s']:.1f}",
        r["ilp_status"],
        f"{r['bound_gap']:.3%}",
        f"{r['bound_took_s']:.1f}",
    ]


def _bound_cells(r: Row) -> list[str]:
    if "step_time_s" not in r:
        return [_case(r), r["cluster"], *[""] * 5, r["status"]]
    return [
        _case(r),
        r["cluster"],
        f"{r['operators']:,}",
        f"{r['search_s']:.2f}",
        f"{r['step_time_s'] * 1e3:.4f}",
        f"{r['bound_gap']:.3%}",
        f"{r['bound_took_s']:.1f}",
        r["status"],
    ]


def _model_cells(r: Row) -> list[str]:
    if "loose" not in r:
        return [_case(r), r["cluster"], r["status"], *[""] * 9]
    lines: list[list[str]] = []
    for memory in ("loose", "tight"):
        m = r[memory]
        limit = "" if memory == "loose" else f"{m['memory_limit'] / 2**30:.2f}"
        ratio = "" if m["best_s"] is None else f"{m['best_s'] / m['step_time_s'] - 1:.1%}"
        lines.append(
            [
                _case(r) if memory == "loose" else "",
                r["cluster"] if memory == "loose" else "",
                memory,
                limit,
                f"{m['step_time_s'] * 1e3:.3f}",
                m["best"] or "none",
                "" if m["best_s"] is None else f"{m['best_s'] * 1e3:.3f}",
                ratio,
                _part(m["bytes"], m["best_bytes"]),
                _part(m.get("measured_bytes"), m.get("best_measured_bytes")),
                f"{m['bound_gap']:.1%}",
                f"{m['search_s']:.2f}",
            ]
        )
    return [f"{a}\n{b}" for a, b in zip(*lines, strict=True)]


def _part(ours: float | None, theirs: float | None) -> str:
    """Our bytes as a part of theirs."""
    if ours is None or theirs is None:
        return ""
    return f"{ours / theirs:.2f}" if theirs else ("both none" if not ours else "they none")


_CELLS: Mapping[str, Callable[[Row], list[str]]] = {"ilp": _ilp_cells, "bound": _bound_cells, "models": _model_cells}


def _line(cells: Sequence[str]) -> str:
    return "\n".join(" | ".join(row) for row in zip(*(c.split("\n") for c in _even(cells)), strict=True))


def _even(cells: Sequence[str]) -> list[str]:
    most = max(c.count("\n") for c in cells)
    return [c + "\n" * (most - c.count("\n")) for c in cells]


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for cells in rows:
        lines += [f"| {' | '.join(row)} |" for row in zip(*(c.split("\n") for c in _even(cells)), strict=True)]
    return "\n".join(lines)


def _ilp_says(rows: Sequence[Row]) -> str:
    gaps = [r["ilp_gap"] for r in rows if "ilp_gap" in r]
    three = sum("ilp_gap" in r and r["factors"].count("x") == 2 for r in rows)
    if not gaps:
        return "no optimum proved"
    return (
        f"{len(gaps)} of {len(rows)} optima proved, {three} over three factors: median gap {statistics.median(gaps):.3%} "
        f"(at most 1% is aimed at), worst {max(gaps):.3%} (5%)."
    )


def _bound_says(rows: Sequence[Row]) -> str:
    gaps = [r["bound_gap"] for r in rows if "bound_gap" in r]
    if not gaps:
        return "no bound found"
    return f"{len(gaps)} bounds: median gap {statistics.median(gaps):.3%} (at most 15% is aimed at), worst {max(gaps):.3%}."


def _models_say(rows: Sequence[Row]) -> str:
    each = [(r, r[m]) for r in rows if "loose" in r for m in ("loose", "tight")]
    faster = [m["best_s"] / m["step_time_s"] - 1 for _, m in each if m["best_s"] is not None]
    worse = [f"{_case(r)} on {r['cluster']}" for r, m in each if m["worse"]]
    if not faster:
        return "no row was measured"
    said = f"worse than a baseline that fits: {', '.join(worse)}" if worse else "never worse than a baseline that fits"
    alone = sum(m["best_s"] is None for _, m in each)
    return (
        f"{len(each)} plans, {said}; faster than the best of them by {statistics.median(faster):.1%} in the median, at most "
        f"{max(faster):.1%}; in {alone} no baseline fits."
    )


_SAYS: Mapping[str, Callable[[Sequence[Row]], str]] = {"ilp": _ilp_says, "bound": _bound_says, "models": _models_say}


if __name__ == "__main__":
    sys.exit(main())
