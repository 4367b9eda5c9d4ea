"""``python -m tests.emit.proof.fences``: what XLA's partitioner does with each fenced cut, by the installed release of JAX.

Each fence is lifted in turn, and its primitives are proven without it. A fence whose cuts are all right need not apply to that
release (`shardplan.tdl.xla_quirks`). Counts are kept in ``fences.json`` by release, and ``--table`` prints those of all.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import jaxlib

from shardplan.tdl.xla_quirks import FENCES, Fence
from shardplan.versions import TESTED
from tests.emit.proof.runs import Tally
from tests.emit.proof.sweep import primitives, sweep, tasks

RECORD = Path(__file__).with_name("fences.json")
KINDS = ("wrong", "refused", "died")
Counts = dict[str, int]


def main() -> int:
    """Prints a row for each fence: how many strategies ran, how many were wrong, refused or ended the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.emit.proof.fences", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="draws of each primitive")
    parser.add_argument("--only", default="", help="the fences whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="prints what is recorded of each release, and runs nothing")
    options = parser.parse_args()
    if options.table:
        print("\n".join(table(json.loads(RECORD.read_text()))))
        return 0
    print(f"jaxlib {jaxlib.version.__version__}, {options.rounds} rounds")
    print("| without the fence | strategies | wrong | refused | died |\n|---|---:|---:|---:|---:|")
    for fence in FENCES:
        if options.only not in fence.name:
            continue
        found = without(fence, options.rounds, options.jobs)
        counts = Counter(map(outcome, found.faults))
        print(f"| {fence.name} | {found.cases} | {counts['wrong']} | {counts['refused']} | {counts['died']} |", flush=True)
        record(fence, {"strategies": found.cases, "rounds": options.rounds, **{kind: counts[kind] for kind in KINDS}})
        for kind in KINDS:
            example = next((fault for fault in found.faults if outcome(fault) == kind), None)
            if example is not None:
                print(f"  {kind}: {example[:200]}")
    return 0


def record(fence: Fence, counts: Counts) -> None:
    """Keeps the counts of the installed release, unless they are of fewer rounds than those that it has."""
    known: dict[str, dict[str, Counts]] = json.loads(RECORD.read_text())
    of_fence = known.setdefault(fence.name, {})
    before = of_fence.get(jaxlib.version.__version__)
    if before is not None and before["rounds"] > counts["rounds"]:
        return  # more draws are recorded
    of_fence[jaxlib.version.__version__] = counts
    part = RECORD.with_suffix(".part")
    part.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    part.replace(RECORD)


def table(known: dict[str, dict[str, Counts]]) -> list[str]:
    """A row for each fence, a column for each tested release."""
    lines = [f"| without the fence | {' | '.join(TESTED)} |", "|---|" + "---:|" * len(TESTED)]
    for fence in FENCES:
        cells = [_cell(known.get(fence.name, {}).get(release)) for release in TESTED]
        lines.append(f"| {fence.name} | {' | '.join(cells)} |")
    return lines


def _cell(counts: Counts | None) -> str:
    if counts is None:
        return "not measured"
    faults = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    return f"{faults or '0'} of {counts['strategies']:,} ({counts['rounds']} round{'s' * (counts['rounds'] > 1)})"


def without(fence: Fence, rounds: int, jobs: int) -> Tally:
    """The proof of a fence's primitives without it, from the first seed that finds its fault."""
    names = [name for name in fence.primitives if name in primitives()]
    found = sweep([replace(t, without=fence.name) for t in tasks(names, fence.seed, rounds)], jobs=jobs, budget_s=1800.0)
    assert not found.skipped, f"{fence.name}: no time for {found.skipped} tasks"
    return found


def outcome(fault: str) -> str:
    """``wrong``, ``refused`` (the compiler raises) or ``died`` (it ends the process)."""
    if ": aborted" in fault or ": hung" in fault:
        return "died"
    return "refused" if "Error: " in fault else "wrong"


if __name__ == "__main__":
    raise SystemExit(main())
