"""Several chains from several starts, one after the other or each in a process of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Strategy
from shardplan.placement.mcmc import Chain, Limits, Observer, anneal
from shardplan.placement.problem import PlacementProblem
from shardplan.placement.simulation import Engine


@dataclass(frozen=True, slots=True)
class Task:
    """One chain to run: where it starts, its seed and its limits."""

    problem: PlacementProblem
    start: str
    strategy: Strategy
    seed: tuple[int, int]
    limits: Limits
    engine: Engine = "auto"

    def run(self, observer: Observer | None = None) -> Chain:
        """Runs it."""
        return anneal(
            self.problem, self.strategy, np.random.default_rng(self.seed), self.limits, observer=observer, engine=self.engine
        )


def tasks_of(
    problem: PlacementProblem,
    starts: Mapping[str, Strategy],
    limits: Limits,
    *,
    chains: int | None,
    seed: int,
    workers: int,
    engine: Engine = "auto",
) -> list[Task]:
    """``chains`` tasks (None: one for each start), which begin at the starts in turn and share the budget."""
    count = len(starts) if chains is None else chains
    each = replace(limits, budget_s=limits.budget_s * min(workers, count) / count)
    names = list(starts)
    bare = problem.bare()
    return [Task(bare, names[c % len(names)], starts[names[c % len(names)]], (seed, c), each, engine) for c in range(count)]


def run_all(tasks: Sequence[Task], *, workers: int = 1, observer: Observer | None = None) -> list[Chain]:
    """The chains of tasks, at most ``workers`` at once. With one worker they run here, and the observer hears of each."""
    if workers <= 1 or len(tasks) <= 1:
        best = float("inf")
        found: list[Chain] = []
        for n, task in enumerate(tasks):

            def heard(seconds: float, done: float, n: int = n, best: float = best) -> None:
                if observer is not None:
                    observer(min(best, seconds), (n + done) / len(tasks))

            found.append(task.run(heard))
            best = min(best, found[-1].seconds)
        return found
    return _in_processes(tasks, workers, observer)


def _in_processes(tasks: Sequence[Task], workers: int, observer: Observer | None) -> list[Chain]:
    found: list[Chain] = []
    for n in range(0, len(tasks), workers):
        running = [_begun(task) for task in tasks[n : n + workers]]
        try:
            for process in running:
                assert process.stdout is not None, "its output is piped"
                output = process.stdout.read()
                if process.wait() != 0:
                    raise PlacementError("a process of the search ended early: run the search with --chains 1")
                found.append(pickle.loads(output))
                if observer is not None:
                    observer(min(c.seconds for c in found), len(found) / len(tasks))
        finally:
            for process in running:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()
    return found


def _begun(task: Task) -> subprocess.Popen[bytes]:
    """A process that has read its task and runs it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardplan.placement.chains"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None, "its input is piped"
    process.stdin.write(pickle.dumps(task))
    process.stdin.close()
    return process


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    from shardplan.placement.chains import Task as _Task  # the class by which the parent knows it

    given = pickle.loads(sys.stdin.buffer.read())
    assert isinstance(given, _Task), "the parent sends a task"
    sys.stdout.buffer.write(pickle.dumps(given.run()))
