"""``python -m tests.emit.proof.fences``: what XLA's partitioner does with each fenced cut, by the installed release of JAX.

Each fence is opened in turn, and its primitives are proven without it. A fence whose cuts are all right may be opened for that
release (`shardplan.tdl.xla_quirks`).
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

import jaxlib

from shardplan.tdl.xla_quirks import FENCES, Fence
from tests.emit.proof.runs import Tally
from tests.emit.proof.sweep import primitives, sweep, tasks


def main() -> int:
    """Prints a row for each fence: how many strategies ran, how many were wrong, refused or ended the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.emit.proof.fences", description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="draws of each primitive")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="the fences whose names contain this")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    print(f"jaxlib {jaxlib.version.__version__}, {options.rounds} rounds from seed {options.first}")
    print("| fence, opened | strategies | wrong | refused | died |\n|---|---:|---:|---:|---:|")
    for fence in FENCES:
        if options.only not in fence.name:
            continue
        found = opened(fence, options.first, options.rounds, options.jobs)
        counts = Counter(map(outcome, found.faults))
        print(f"| {fence.name} | {found.cases} | {counts['wrong']} | {counts['refused']} | {counts['died']} |", flush=True)
        for kind in ("wrong", "refused", "died"):
            example = next((fault for fault in found.faults if outcome(fault) == kind), None)
            if example is not None:
                print(f"  {kind}: {example[:200]}")
    return 0


def opened(fence: Fence, first: int, rounds: int, jobs: int) -> Tally:
    """The proof of a fence's primitives while it is open."""
    names = [name for name in fence.primitives if name in primitives()]
    return sweep([replace(task, without=fence.name) for task in tasks(names, first, rounds)], jobs=jobs, budget_s=1800.0)


def outcome(fault: str) -> str:
    """``wrong``, ``refused`` (the compiler raises) or ``died`` (it ends the process)."""
    if ": aborted" in fault or ": hung" in fault:
        return "died"
    return "refused" if "Error: " in fault else "wrong"


if __name__ == "__main__":
    raise SystemExit(main())
