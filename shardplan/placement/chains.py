"""Several chains from several starts, one after the other or each in a process of its own.

A process sends each improvement of its chain, as the observer hears it, and the chain when it ends. An interrupt ends the chains
that run, and no other begins.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import numpy as np

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Strategy
from shardplan.placement.mcmc import Chain, ChainLimits, Observer, anneal
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine

Sent = tuple[float, float] | Chain
"""The seconds of the best step of a chain and the fraction of its budget that has passed, or the chain when it has ended."""


@dataclass(frozen=True, slots=True)
class ChainTask:
    """One chain to run: where it starts, its seed and its limits."""

    problem: PlacementProblem
    start: str
    strategy: Strategy
    seed: tuple[int, int]
    limits: ChainLimits
    engine: Engine = "auto"

    def run(self, observer: Observer | None = None) -> Chain:
        """Runs it."""
        return anneal(
            self.problem, self.strategy, np.random.default_rng(self.seed), self.limits, observer=observer, engine=self.engine
        )


def tasks_of(
    problem: PlacementProblem,
    starts: Mapping[str, Strategy],
    limits: ChainLimits,
    *,
    chains: int | None,
    seed: int,
    workers: int,
    engine: Engine = "auto",
) -> list[ChainTask]:
    """``chains`` tasks (None: one for each start), which begin at the starts in turn and share the budget."""
    count = len(starts) if chains is None else chains
    each = replace(limits, budget_s=limits.budget_s * min(workers, count) / count)
    names = list(starts)
    bare = problem.bare()
    return [ChainTask(bare, names[c % len(names)], starts[names[c % len(names)]], (seed, c), each, engine) for c in range(count)]


def run_all(tasks: Sequence[ChainTask], *, workers: int = 1, observer: Observer | None = None) -> dict[int, Chain]:
    """The chains by task, at most ``workers`` at once. With one worker they run here, and the observer hears of each."""
    if workers <= 1 or len(tasks) <= 1:
        best = float("inf")
        found: dict[int, Chain] = {}
        for n, task in enumerate(tasks):

            def heard(seconds: float, done: float, n: int = n, best: float = best) -> None:
                if observer is not None:
                    observer(min(best, seconds), (n + done) / len(tasks))

            try:
                found[n] = task.run(heard)
            except KeyboardInterrupt:  # before it began
                if not found:
                    raise
                found[n - 1] = replace(found[n - 1], interrupted=True)
                break
            best = min(best, found[n].seconds)
            if found[n].interrupted:
                break
        return found
    return _in_processes(tasks, workers, observer)


def _in_processes(tasks: Sequence[ChainTask], workers: int, observer: Observer | None) -> dict[int, Chain]:
    """The chains of tasks, which the workers take in turn. The observer hears of improvements as they are sent."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for n in range(min(workers, len(tasks))):
            running.append(_begun(tasks[n::workers]))
        return _gathered(running, len(tasks), observer)
    finally:
        for process in running:
            with process:  # closes its pipes and waits for it
                process.kill()


def _gathered(running: Sequence[subprocess.Popen[bytes]], count: int, observer: Observer | None) -> dict[int, Chain]:
    """The chains that processes send, by task. Process n runs task n first, and then the next that it has."""
    found: dict[int, Chain] = {}
    best, done = float("inf"), [0.0] * count
    with contextlib.ExitStack() as stack:
        current = {stack.enter_context(_results(process)): n for n, process in enumerate(running)}
        try:
            while current:
                for pipe in cast("list[Connection[Any, Sent]]", wait(list(current))):
                    task, sent = current[pipe], _received(pipe)
                    seconds, done[task] = (sent.seconds, 1.0) if isinstance(sent, Chain) else sent
                    best = min(best, seconds)
                    if isinstance(sent, Chain):
                        found[task] = sent
                        current[pipe] += len(running)
                        if current[pipe] >= count:
                            del current[pipe]
                    if observer is not None:
                        observer(best, sum(done) / count)
        except KeyboardInterrupt:
            found |= _interrupted(running, current)
            if not found:
                raise
    return found


def _interrupted(running: Sequence[subprocess.Popen[bytes]], current: Mapping[Connection[Any, Sent], int]) -> dict[int, Chain]:
    """The chains that the processes end with when they are interrupted, by task; those that come in time."""
    for process in running:
        process.send_signal(signal.SIGINT)
    found: dict[int, Chain] = {}
    left, until_s = dict(current), time.monotonic() + _PATIENCE_S
    while left and (ready := wait(list(left), max(0.0, until_s - time.monotonic()))):
        for pipe in cast("list[Connection[Any, Sent]]", ready):
            try:
                sent = _received(pipe)
            except PlacementError:  # it was between two chains
                del left[pipe]
                continue
            if isinstance(sent, Chain):
                found[left.pop(pipe)] = sent
    return found


_PATIENCE_S = 5.0
"""How long processes may take to end their chains after an interrupt: a proposal takes milliseconds."""


def _begun(tasks: Sequence[ChainTask]) -> subprocess.Popen[bytes]:
    """A process that has read its tasks and runs them. Ctrl-C reaches this process alone, which ends the other."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None, "its input is piped"
    with contextlib.suppress(BrokenPipeError), process.stdin:  # a process that has ended is noticed when it sends nothing
        pickle.dump(tasks, process.stdin)
    return process


def _results(process: subprocess.Popen[bytes]) -> Connection[Any, Sent]:
    assert process.stdout is not None, "its output is piped"
    return Connection(os.dup(process.stdout.fileno()), writable=False)


def _received(pipe: Connection[Any, Sent]) -> Sent:
    """The next message of a process."""
    try:
        return pipe.recv()
    except (EOFError, OSError, pickle.UnpicklingError) as error:
        raise PlacementError("a process of the search ended early: run the search with --chains 1") from error


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PROCESS = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit())  # while it imports
from shardplan.placement.chains import run_tasks
run_tasks()
"""


def run_tasks() -> None:
    """Runs the tasks that come over standard input, in a process of its own."""
    with contextlib.suppress(KeyboardInterrupt), Connection(os.dup(sys.stdout.fileno()), readable=False) as results:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for given in pickle.load(sys.stdin.buffer):
            results.send(chain := given.run(lambda seconds, done: results.send((seconds, done))))
            if chain.interrupted:
                break
