"""Runs of many programs, and their failures made small."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.fuzz.check import Finding
from tests.fuzz.pool import Worker, judge_all
from tests.fuzz.program import Program
from tests.fuzz.shrink import shrunk

Told = Callable[[int, int, Finding], None]
"""Is told how many programs are done, and of the latest its seed and what became of it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong with the program of a seed."""

    seed: int
    finding: Finding
    program: Program


@dataclass(frozen=True, slots=True)
class Reduced:
    """A failure with the program that is left of it."""

    seed: int
    finding: Finding
    program: Program


def examined(programs: Mapping[int, Program], jobs: int, told: Told = lambda _done, _seed, _found: None) -> dict[int, Finding]:
    """What became of the program of each seed."""
    found: dict[int, Finding] = {}
    lock = threading.Lock()

    def run(worker: Worker, seed: int) -> None:
        finding = worker.judge(programs[seed])
        with lock:
            found[seed] = finding
            told(len(found), seed, finding)

    judge_all(programs, run, jobs)
    return found


def reduced(failures: Sequence[Failure], jobs: int, *, shrink: bool = True) -> list[Reduced]:
    """Each failure with its program, made small unless it hangs."""
    found: dict[int, Reduced] = {}

    def run(worker: Worker, failure: Failure) -> None:
        whole = failure.program
        last = failure.finding

        def fails(candidate: Program) -> bool:
            nonlocal last
            finding = worker.judge(candidate)
            alike = _kind(finding) == _kind(failure.finding)
            last = finding if alike else last
            return alike

        small = shrunk(whole, fails) if shrink and failure.finding.status != "hung" else whole
        found[failure.seed] = Reduced(failure.seed, last, small)

    judge_all(failures, run, jobs)
    return [found[failure.seed] for failure in failures]


def _kind(finding: Finding) -> tuple[str, str]:
    """What must stay the same while a failure shrinks: its status, and of an error the type."""
    return finding.status, finding.detail.split(":")[0] if finding.status in ("crashed", "invalid") else ""


def templates_of(programs: Iterable[Program]) -> Counter[str]:
    """How many of the programs have each template."""
    found: Counter[str] = Counter()
    for made in programs:
        found.update({x.template for x in made.instructions})
    return found
