"""Stand-ins on simulated CPU devices for kernels that the devices of a verification lack.

cuDNN's kernels are computed by their formulas. Pallas kernels for GPUs run in Pallas's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax

from shardplan import _jax
from shardplan.ir import Op, Program
from shardplan.tdl.proof import cudnn_reference, interpreted


@contextmanager
def stand_ins(program: Program, devices: Sequence[Any] | None = None, platform: str | None = None) -> Iterator[tuple[str, ...]]:
    """While this lasts, CPUs run stand-ins for the kernels of a program that they lack; yields the kernels' names.

    On other devices, and for programs without such kernels, nothing changes and the names are empty. The program is for
    ``devices``, or for a ``platform`` where no device is needed; by default for JAX's own devices.
    """
    ops = list(_ops_on_cpu(program))
    formulas = {op.primitive.removesuffix("_wrapper") for op in ops}.intersection(cudnn_reference.FUNCTIONS)
    kernels = {op.primitive for op in ops if _is_compiled_kernel(op)}
    if not (formulas or kernels) or (platform or (devices[0].platform if devices else jax.default_backend())) != "cpu":
        yield ()
        return
    functions: dict[str, Callable[..., Any]] = dict(cudnn_reference.FUNCTIONS) if formulas else {}
    if kernels:
        functions |= interpreted.functions()
    with _jax.cudnn_assumed(), _jax.run_on_cpu(functions):
        yield tuple(sorted(formulas | kernels))


def _is_compiled_kernel(op: Op) -> bool:
    """Whether this is a Pallas kernel that is to be compiled, but that an interpreter could run."""
    return _jax.KERNEL_GRID in op.params and not op.params["interpret"]


def _ops_on_cpu(program: Program) -> Iterator[Op]:
    """The ops of a program and of all bodies, without branches for other platforms."""
    waiting: list[Op] = list(program.ops)
    while waiting:
        op = waiting.pop()
        yield op
        platforms: Sequence[Any] = op.params.get("branches_platforms") or (("cpu",),) * len(op.bodies)
        on_cpu = [body for body, names in zip(op.bodies, platforms, strict=True) if "cpu" in (names or ())]
        others = [body for body, names in zip(op.bodies, platforms, strict=True) if not names]
        waiting += [inner for body in on_cpu or others for inner in body.ops]
