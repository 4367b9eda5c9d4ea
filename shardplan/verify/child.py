"""Compiles a program in a child process first, where the compiler may crash instead of raising."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from shardplan import _jax
from shardplan.errors import CompilerDiedError
from shardplan.ir import Program
from shardplan.tdl.xla_quirks import may_die

BEGUN = "compiling"
"""The child's output once it is ready to compile."""
_CHILD = "from shardplan.verify.child import main; main()"


LIMIT_S = 600.0
"""A compiler that takes longer than this in the child counts as dead."""


def compile_in_child_first(
    program: Program, lower: Callable[[], Any], devices: Sequence[Any], backend: str, sizes: Sequence[int] = ()
) -> None:
    """Compiles a step for simulated CPU devices in a child process, if the compiler may die of its ``program``.

    On other devices it does nothing: a child cannot have them too. ``lower`` lowers the step; ``sizes`` are those of the axes
    of a plan's mesh. The child's compile errors are ignored: the compiler raises them again in this process.

    Raises:
        CompilerDiedError: if a signal ends the child, or it takes longer than `LIMIT_S`.
    """
    reason = may_die(_sizes(program), backend, sizes)
    if reason is None or devices[0].platform != "cpu":
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", _CHILD, str(len(devices))]
    try:
        child = subprocess.run(command, input=lower().as_text(), text=True, capture_output=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise CompilerDiedError(f"no answer in {LIMIT_S:.0f} s", reason) from error
    if child.returncode < 0:
        raise CompilerDiedError(signal.Signals(-child.returncode).name, reason)
    if BEGUN not in child.stdout:
        warnings.warn(f"{reason}, and a child process could not try to compile it: {_last_line(child.stderr)}", stacklevel=2)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _sizes(program: Program) -> Iterator[tuple[str, list[int]]]:
    """Every op of a program and of its bodies, with the element counts of its operands."""
    for op in program.ops:
        yield op.primitive, [program.tensors[t].size for t in op.tensors]
        for body in op.bodies:
            yield from _sizes(body)


def main() -> None:
    """The child: compiles the text on standard input for the number of devices in its argument."""
    count = int(sys.argv[1])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
    compile_text = _jax.text_compiler(count)
    sys.stdout.write(BEGUN)
    sys.stdout.flush()
    compile_text(sys.stdin.read())
