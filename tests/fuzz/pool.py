"""Worker processes that judge programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tests import processes
from tests.fuzz.check import Finding
from tests.fuzz.program import Program
from tests.processes import Lost, run_all

LIMIT_S = 120.0
"""Seconds that a program may take, before it counts as hung."""
LIFE = 150
"""Programs until a process is replaced."""
T = TypeVar("T")


class Worker(processes.Worker):
    """A process that judges programs one after another."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        super().__init__("tests.fuzz.worker", limit_s=limit_s, life=LIFE)

    def judge(self, task: Program) -> Finding:
        """What becomes of a program."""
        answer = self.ask(task)
        return Finding("hung" if answer.hung else "aborted", answer.detail) if isinstance(answer, Lost) else answer


def judge_all(tasks: Iterable[T], run: Callable[[Worker, T], None], jobs: int) -> None:
    """Runs each task with one of so many workers."""
    run_all(tasks, run, Worker, jobs)
