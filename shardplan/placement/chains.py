"""Several chains from several starts, one after the other or each in a process of its own."""

from __future__ import annotations

import contextlib
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
from shardplan.placement.placement_problem import PlacementProblem
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
    """The chains of tasks, which the workers take in turn."""
    running: list[subprocess.Popen[bytes]] = []
    found: list[Chain] = []
    try:
        for n in range(workers):
            running.append(_begun(tasks[n::workers]))
        for n in range(len(tasks)):
            found.append(_received(running[n % workers]))
            if observer is not None:
                observer(min(c.seconds for c in found), len(found) / len(tasks))
    finally:
        for process in running:
            with process:  # closes its pipes and waits for it
                process.kill()
    return found


def _begun(tasks: Sequence[Task]) -> subprocess.Popen[bytes]:
    """A process that has read its tasks and runs them. Ctrl-C reaches this process alone, which ends the other."""
    process = subprocess.Popen(
        [sys.executable, "-m", "shardplan.placement.chains"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None, "its input is piped"
    with contextlib.suppress(BrokenPipeError), process.stdin:  # a process that has ended is noticed when it sends nothing
        pickle.dump(tasks, process.stdin)
    return process


def _received(process: subprocess.Popen[bytes]) -> Chain:
    """The next chain that a process sends."""
    assert process.stdout is not None, "its output is piped"
    try:
        return pickle.load(process.stdout)
    except (EOFError, pickle.UnpicklingError) as error:
        raise PlacementError("a process of the search ended early: run the search with --chains 1") from error


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    for given in pickle.load(sys.stdin.buffer):
        pickle.dump(given.run(), sys.stdout.buffer)
        sys.stdout.buffer.flush()
