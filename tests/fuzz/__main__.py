"""Random programs under plans beside plain `jax.jit`: ``python -m tests.fuzz FIRST COUNT``.

Prints failures as they come, then counts, then each failure as a small test. The exit code is 1 where anything failed.
"""

from __future__ import annotations

import argparse
import sys
import time

from shardplan.emit.backends import BACKENDS
from tests.fuzz.check import Finding
from tests.fuzz.generate import program
from tests.fuzz.report import as_test, counts, line
from tests.fuzz.run import Failure, examined, reduced, templates_of

EVERY = 50
"""Programs between two lines of progress."""


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("first", type=int, nargs="?", default=0, help="the first seed")
    parser.add_argument("count", type=int, nargs="?", default=24, help="how many seeds")
    parser.add_argument(
        "--backend",
        choices=(*BACKENDS, "regions", "microbatches"),
        default="specs",
        help="what runs the plans (regions: each op on random devices; microbatches: one argument cut in two)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--only", type=int, metavar="SEED", help="this seed alone; prints its program first")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they are")
    parser.add_argument("--most", type=int, default=8, help="how many failures are printed as tests")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.first + asked.count) if asked.only is None else range(asked.only, asked.only + 1)
    began = time.monotonic()
    programs = {seed: program(seed, asked.backend) for seed in seeds}
    if asked.only is not None:
        print(as_test(programs[asked.only], f"seed_{asked.only}"), flush=True)
    findings = examined(programs, asked.jobs, lambda done, seed, found: _tell(done, len(seeds), seed, found, began))
    failures = [Failure(seed, found, programs[seed]) for seed, found in sorted(findings.items()) if found.failed]
    print("\n".join(line(failure.seed, failure.finding) for failure in failures) or "no failures")
    print(counts(findings, templates_of(programs.values())))
    print(f"{(time.monotonic() - began) * asked.jobs / max(len(findings), 1):.1f} s a program and process", flush=True)
    for small in reduced(failures[: asked.most], asked.jobs, shrink=not asked.no_shrink):
        print(f"\n# seed {small.seed}: {small.finding.status} {small.finding.detail}")
        print(as_test(small.program, f"seed_{small.seed}"), flush=True)
    return int(bool(failures))


def _tell(done: int, total: int, seed: int, found: Finding, began: float) -> None:
    if found.failed:
        print(f"  {line(seed, found)}", flush=True)
    if done % EVERY == 0:
        print(f"{done} of {total} after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
