"""A process that runs strategies of draws, and may die of one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from shardplan.tdl import xla_quirks
from tests.emit.proof.runs import Emitted, Tally, Task, run
from tests.processes import serve


def main() -> None:
    """Answers tasks until there are no more."""
    serve(answered, kept=4)


def answered(task: Task) -> Tally:
    """What came of a task. The name of a strategy that runs alone is the last thing written before it may end the process."""

    def tell(about: Emitted) -> None:
        sys.stderr.write(f"\nalone: {about.name}\n")
        sys.stderr.flush()

    with lifted(task.without):
        return run(task, tell)


@contextmanager
def lifted(name: str) -> Iterator[None]:
    """While this lasts, the fence of this name does not apply; ``""`` is none."""
    before = xla_quirks.FENCES
    xla_quirks.FENCES = tuple(fence for fence in before if fence.name != name)
    assert len(before) - len(xla_quirks.FENCES) == bool(name), f"there is no fence {name!r}"
    try:
        yield
    finally:
        xla_quirks.FENCES = before


if __name__ == "__main__":
    main()
