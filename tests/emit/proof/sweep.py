"""The proof of emission over all primitives: which draws there are, and running them in processes that may die."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from shardplan.tdl.coverage import sort_primitives
from shardplan.tdl.xla_quirks import UNCOMPILED
from tests.emit.proof.cuts import MESHES
from tests.emit.proof.runs import Draw, Tally, Task
from tests.processes import Lost, Worker, run_all

FENCED = (
    "conv_general_dilated dot_general gather pad reduce_and reduce_or reduce_sum reshape scatter scatter-add scatter-max slice"
).split()
"""What was found wrong once, has many kinds of parameters, or is in every step."""
STRATEGIES = 12
"""At most so many strategies of each op that is drawn."""
LIMIT_S = 400.0


def primitives() -> tuple[str, ...]:
    """Those that are described, or opaque with a batch, and that XLA compiles for several devices."""
    return tuple(sorted(e.name for e in sort_primitives() if e.kind in ("described", "opaque") and e.name not in UNCOMPILED))


def tasks(names: Sequence[str], first: int, rounds: int, backend: str = "specs") -> Iterator[Task]:
    """A task for each primitive and round: even and odd dims, the op and the ops of its gradient, on one mesh after another."""
    for seed in range(first, first + rounds):
        for n, name in enumerate(names):
            mesh = MESHES[(seed + n) % len(MESHES)]
            draws = [Draw(name, seed, mesh, odd, gradient) for odd in (False, True) for gradient in (False, True)]
            yield Task(tuple(draws), STRATEGIES, backend=backend)


def whole(names: Sequence[str], first: int, rounds: int, backend: str = "specs") -> Iterator[Task]:
    """The tasks of the whole proof: so many rounds, of what is `FENCED` four times as many."""
    yield from tasks(names, first, rounds, backend)
    yield from tasks([name for name in names if name in FENCED], first + rounds, 3 * rounds, backend)


def sweep(
    work: Iterator[Task] | Sequence[Task], *, jobs: int, budget_s: float, tell: Callable[[Tally], None] | None = None
) -> Tally:
    """What all tasks gave that could be begun within the budget."""
    total, lock, end = Tally(), threading.Lock(), time.monotonic() + budget_s

    def run(worker: Worker, task: Task) -> None:
        found = Tally(skipped=1) if time.monotonic() > end else _answer(worker, task)
        with lock:
            total.add(found)
            if tell is not None:
                tell(found)

    run_all(work, run, lambda: Worker("tests.emit.proof.worker", limit_s=LIMIT_S, life=40), jobs)
    return total


def _answer(worker: Worker, task: Task) -> Tally:
    """What a task gave; where it ends its process, each draw alone, then strategy by strategy."""
    found = worker.ask(task)
    if not isinstance(found, Lost):
        return found
    total = Tally()
    if len(task.draws) > 1:
        for draw in task.draws:
            total.add(_answer(worker, replace(task, draws=(draw,))))
        return total
    for n in itertools.count():
        alone = worker.ask(replace(task, only=n))
        if isinstance(alone, Lost):
            end = "hung" if alone.hung else "aborted"
            total.add(Tally(cases=1, faults=[f"{', '.join(map(str, task.draws))} strategy {n}: {end}, {alone.detail}"]))
        elif not alone.cases:
            break
        else:
            total.add(alone)
    return total
