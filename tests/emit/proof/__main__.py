"""``python -m tests.emit.proof``: the proof of emission, whole or of some primitives."""

from __future__ import annotations

import argparse
import time

import jaxlib

from shardplan.emit.backends import BACKENDS
from tests.emit.proof.runs import Tally
from tests.emit.proof.sweep import primitives, sweep, whole


def main() -> int:
    """Runs the proof and prints what it covered; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.emit.proof", description=__doc__)
    parser.add_argument("--only", default="", help="primitives, separated by commas")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rounds", type=int, default=6, help="draws of each primitive; four times as many of what is fenced")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which nothing more is begun")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--backend", choices=BACKENDS, default="specs")
    options = parser.parse_args()
    names = tuple(options.only.split(",")) if options.only else primitives()
    began = time.monotonic()

    def tell(found: Tally) -> None:
        for fault in found.faults:
            print("WRONG", fault, flush=True)

    total = sweep(
        whole(names, options.first, options.rounds, options.backend), jobs=options.jobs, budget_s=options.budget, tell=tell
    )
    print(
        f"jaxlib {jaxlib.version.__version__}: {len(total.primitives)} primitives, {total.cases} cases: {total.cuts} with one "
        f"loop cut, {total.pairs} with several, {total.idle} of them with an idle axis; {total.uneven} uneven, "
        f"{total.partial} with partial sums kept or handed on; {len(total.faults)} wrong, {total.skipped} tasks left out; "
        f"{time.monotonic() - began:.0f} s"
    )
    for what, counts in (("classes of parameters", total.classes), ("draws that gave no call", total.undrawn)):
        print(f"{what}: {', '.join(f'{name} {n}' for name, n in sorted(counts.items()))}")
    return int(bool(total.faults))


if __name__ == "__main__":
    raise SystemExit(main())
