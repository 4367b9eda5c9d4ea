"""What makes two traced steps the same, and where two of them first differ."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from shardplan.ir import Op, Program
from shardplan.trace import Traced

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(traced: Traced) -> str:
    """A hash of the program: ops with their parameters, shapes, dtypes, how they are wired, and the argument paths."""
    hasher = hashlib.blake2b(digest_size=16)
    for line in _lines(traced.program):
        hasher.update(line.encode())
    return hasher.hexdigest()


def arguments(traced: Traced) -> dict[str, str]:
    """Each argument's path and what it is: ``{"params/up": "float32[512, 2048]"}``."""
    program = traced.program
    tensors = [program.tensors[t] for t in program.inputs]
    return {path: f"{t.dtype}{list(t.shape)}" for path, t in zip(program.input_paths, tensors, strict=True)}


def different_arguments(planned: dict[str, str], found: dict[str, str]) -> str:
    """The first argument in which two steps differ, as a sentence; ``""`` where all agree."""
    for path in dict.fromkeys([*planned, *found]):
        if path not in found:
            return f"{path}, {planned[path]}, is not there"
        if path not in planned:
            return f"{path}, {found[path]}, was not there"
        if planned[path] != found[path]:
            return f"{path} was {planned[path]} and is {found[path]}"
    return ""


def difference(planned: Traced, found: Traced) -> str:
    """Where two steps first differ, arrays that they close over included, as words; ``""`` where they are the same."""
    said = different_arguments(arguments(planned), arguments(found))
    if said or fingerprint(planned) == fingerprint(found):
        return said or ("" if _same_constants(planned.program, found.program) else "an array that the step closes over")
    return _first_op(planned.program, found.program) or "its results"


def _first_op(planned: Program, found: Program) -> str:
    """The first op in which two programs differ, bodies included, as it is in both."""
    for a, b in itertools.zip_longest(planned.ops, found.ops):
        if a is None or b is None or _op_line(planned, a) != _op_line(found, b):
            return " and ".join(f"{op.primitive} at {op.source}" for op in (a, b) if op is not None)
        inner = next(filter(None, map(_first_op, a.bodies, b.bodies)), "")
        if inner:
            return inner
    return ""


def _lines(program: Program) -> Iterator[str]:
    for op in program.ops:
        yield _op_line(program, op)
        for body in op.bodies:
            yield from _lines(body)
    yield repr((program.inputs, [o if isinstance(o, int) else repr(o.value) for o in program.outputs], program.input_paths))


def _op_line(program: Program, op: Op) -> str:
    shapes = [(program.tensors[t].shape, program.tensors[t].dtype) for t in (*op.tensors, *op.outputs)]
    wires = [i if isinstance(i, int) else repr(i.value) for i in op.inputs]
    params = [f"{k}={_param(v, bool(op.bodies))}" for k, v in sorted(op.params.items())]
    return repr((op.primitive, wires, op.outputs, shapes, op.trips, params))


def _param(value: Any, bodies: bool) -> str:
    """A parameter as text that is the same in every process: functions by their names, programs as printed.

    Those of an op with ``bodies`` are hashed as such.
    """
    items = value if isinstance(value, tuple) else (value,)
    if any(hasattr(v, "eqns") or hasattr(v, "jaxpr") for v in items):
        return "program" if bodies else _ADDRESS.sub("", str(value))
    if isinstance(value, jax.Array | np.ndarray):
        return repr(np.asarray(value).tolist())
    return getattr(value, "__qualname__", "function") if callable(value) else _ADDRESS.sub("", repr(value))


def _same_constants(a: Program, b: Program) -> bool:
    pairs = list(zip(a.constants, b.constants, strict=False))
    if len(a.constants) != len(b.constants) or not all(_same(x, y) for (_, x), (_, y) in pairs):
        return False
    bodies = ((p, q) for one, other in zip(a.ops, b.ops, strict=True) for p, q in zip(one.bodies, other.bodies, strict=True))
    return all(_same_constants(p, q) for p, q in bodies)


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if jax.numpy.issubdtype(getattr(x, "dtype", np.dtype(object)), jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return np.array_equal(np.asarray(x), np.asarray(y), equal_nan=np.issubdtype(np.asarray(x).dtype, np.inexact))
