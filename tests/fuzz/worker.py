"""A process that examines programs one after another, and may die of one.

A task is a program, the answer to it a `Finding`.
"""

from __future__ import annotations

import os
from typing import Any

import jax

from tests.fuzz.check import Finding, examine
from tests.fuzz.program import Program, make
from tests.processes import outcome, serve

KEPT = 12
"""Programs until compiled code is thrown away."""


def judged(made: Program) -> Finding:
    """What becomes of a program in this process; an error is a finding as well."""
    error = outcome(lambda: examined(made))
    if not isinstance(error, BaseException):
        return error
    broken = outcome(lambda: jax.block_until_ready(_plain(made)))
    return Finding("invalid", _named(broken)) if isinstance(broken, BaseException) else Finding("crashed", _named(error))


def examined(made: Program) -> Finding:
    """What becomes of a program where nothing raises."""
    step, args = make(made)
    return examine(step, args, **made.options, noisy=lambda seed: make(made, seed)[0])


def _plain(made: Program) -> Any:
    step, args = make(made)
    return jax.jit(step)(*args)


def _named(error: BaseException) -> str:
    """The error's type and first line, and the innermost line of the planner that it passed."""
    where = ""
    trace = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if f"{os.sep}shardplan{os.sep}" in file:
            where = f" ({file.rsplit(f'{os.sep}shardplan{os.sep}', 1)[1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}{where}"


def main() -> None:
    """Answers tasks until there are no more."""
    serve(judged, kept=KEPT)


if __name__ == "__main__":
    main()
