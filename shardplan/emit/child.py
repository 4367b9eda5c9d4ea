"""Compiles a program in a process of its own first, where the compiler may end its process instead of raising."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from shardplan import _jax
from shardplan.errors import CompilerDiedError
from shardplan.ir import Program
from shardplan.tdl.xla_quirks import may_die

_CHILD = "from shardplan.emit.child import main; main()"


def outlive(program: Program, lower: Callable[[], Any], count: int, backend: str) -> None:
    """Compiles a step for ``count`` simulated CPU devices in a child process, if the compiler may die of its ``program``.

    Whatever else happens to the child is not looked at: it happens here again. ``lower`` lowers the step.

    Raises:
        CompilerDiedError: if a signal ends the child.
    """
    reason = may_die(_sizes(program), backend)
    if reason is None or jax.default_backend() != "cpu":
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _CHILD, str(count)]
    child = subprocess.run(command, input=lower().as_text(), text=True, capture_output=True, env=environment)
    if child.returncode < 0:
        raise CompilerDiedError(signal.Signals(-child.returncode).name, reason)


def _sizes(program: Program) -> Iterator[tuple[str, list[int]]]:
    """Every op of a program and of its bodies, with the numbers of elements of its operands."""
    for op in program.ops:
        yield op.primitive, [program.tensors[t].size for t in op.tensors]
        for body in op.bodies:
            yield from _sizes(body)


def main() -> None:
    """The child: compiles the text on standard input for as many devices as the argument says."""
    count = int(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    _jax.compile_text(sys.stdin.read(), count)
