"""Formulas in place of kernels that the devices of a verification cannot run: those of cuDNN on simulated CPU devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from shardplan import _jax
from shardplan.ir import Op, Program
from shardplan.tdl.proof import cudnn_reference


@contextmanager
def stand_ins(program: Program, devices: Sequence[Any] | None = None) -> Iterator[tuple[str, ...]]:
    """While this lasts, CPUs run by their formulas the kernels of a program that they lack; yields the kernels' names.

    On other devices, and for programs without such kernels, nothing changes and the names are empty.
    """
    wanted = {name.removesuffix("_wrapper") for name in _primitives(program)}.intersection(cudnn_reference.FUNCTIONS)
    on = devices[0].platform if devices else jax.default_backend()
    if not wanted or on != "cpu":
        yield ()
        return
    with _jax.cudnn_assumed(), _jax.run_on_cpu(cudnn_reference.FUNCTIONS):
        yield tuple(sorted(wanted))


def _primitives(program: Program) -> Iterator[str]:
    waiting: list[Op] = list(program.ops)
    while waiting:
        op = waiting.pop()
        yield op.primitive
        waiting += [inner for body in op.bodies for inner in body.ops]
