"""Whether two traced steps are the same, and where they first differ."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from shardplan.frontend.trace import Traced
from shardplan.ir import Constant, Op, Program
from shardplan.plans.canonical import Tokens, array_token, context


def fingerprint(traced: Traced, *, numbers: bool = True) -> str:
    """A hash of everything in the program that changes its results; it is the same in every process.

    The hash covers ops with their parameters, shapes, dtypes and wiring; the arrays that it closes over; and the argument paths.
    Without ``numbers``, it covers only what changes a plan: single floats, such as a learning rate, are left out, except for
    those that ops treat in a way of their own (`_OWN_WAY`).
    """
    hasher = hashlib.blake2b(digest_size=16)
    for line in _lines(traced.program, Tokens(), numbers):
        hasher.update(line.encode())
    return hasher.hexdigest()


def marks(traced: Traced, *, numbers: bool = False) -> tuple[str, ...]:
    """A mark for each op, with the ops of bodies behind their op: its primitive, and a hash of all its properties that change a
    plan, or, with ``numbers``, its results.
    """
    return tuple(mark for mark, _ in _marked(traced.program, Tokens(), numbers))


def first_difference(planned: Sequence[str], traced: Traced, *, numbers: bool = False) -> str:
    """The first op whose mark is not the planned one, as text with its source line; ``""`` if all agree."""
    for was, now in itertools.zip_longest(planned, _marked(traced.program, Tokens(), numbers)):
        before = "" if was is None else was.partition(" ")[0]
        if now is None:
            return f"the planned {before} and all after it are gone"
        mark, op = now
        if mark != was:
            same_kind = mark.startswith(f"{before} ")
            how = "new" if not before else "another one than was planned" if same_kind else f"where {before} was"
            return f"{op.primitive} at {op.source} is {how}"
    return ""


def _marked(program: Program, tokens: Tokens, numbers: bool) -> Iterator[tuple[str, Op]]:
    for op in program.ops:
        text = hashlib.blake2b(_op_line(program, op, tokens, numbers=numbers).encode(), digest_size=4).hexdigest()
        yield f"{op.primitive} {text}", op
        for body in op.bodies:
            yield from _marked(body, tokens, numbers)


def arguments(traced: Traced) -> dict[str, str]:
    """The type of each argument, by path: ``{"params/up": "float32[512, 2048]"}``."""
    program = traced.program
    tensors = [program.tensors[t] for t in program.inputs]
    return {path: f"{t.dtype}{list(t.shape)}" for path, t in zip(program.input_paths, tensors, strict=True)}


def different_arguments(planned: dict[str, str], found: dict[str, str]) -> str:
    """The first argument in which two steps differ, as text; ``""`` if all agree."""
    for path in dict.fromkeys([*planned, *found]):
        if path not in found:
            return f"{path}, {planned[path]}, is missing"
        if path not in planned:
            return f"{path}, {found[path]}, is new"
        if planned[path] != found[path]:
            return f"{path} was {planned[path]} and is {found[path]}"
    return ""


def difference(planned: Traced, found: Traced) -> str:
    """The first difference between two steps and the arrays that they close over, as text; ``""`` if they are the same."""
    text = different_arguments(arguments(planned), arguments(found))
    if text or fingerprint(planned) == fingerprint(found):
        return text
    tokens = Tokens()
    op_difference = _first_op(planned.program, found.program, tokens)
    same = list(_constants(planned.program, tokens)) == list(_constants(found.program, tokens))
    return op_difference or ("its results" if same else "an array that the step closes over")


def _first_op(planned: Program, found: Program, tokens: Tokens) -> str:
    """The first op in which two programs differ, as text with both versions; bodies are searched too."""
    for a, b in itertools.zip_longest(planned.ops, found.ops):
        if a is None or b is None or _op_line(planned, a, tokens) != _op_line(found, b, tokens):
            return " and ".join(f"{op.primitive} at {op.source}" for op in (a, b) if op is not None)
        inner = (_first_op(p, q, tokens) for p, q in zip(a.bodies, b.bodies, strict=False))
        op_difference = next(filter(None, inner), "")
        if op_difference:
            return op_difference
    return ""


def _constants(program: Program, tokens: Tokens) -> Iterator[str]:
    for _, value in program.constants:
        yield tokens.of(value)
    for op in program.ops:
        for body in op.bodies:
            yield from _constants(body, tokens)


def _lines(program: Program, tokens: Tokens, numbers: bool) -> Iterator[str]:
    yield repr([(t, tokens.of(value) if numbers else _but_number(tokens.of(value), value)) for t, value in program.constants])
    for op in program.ops:
        yield _op_line(program, op, tokens, numbers=numbers)
        for body in op.bodies:
            yield from _lines(body, tokens, numbers)
    outputs = [o if isinstance(o, int) else _scalar(o, numbers) for o in program.outputs]
    input_types = [(t, program.tensors[t].shape, program.tensors[t].dtype) for t in program.inputs]
    yield repr((input_types, outputs, program.input_paths, program.feedback))


def _op_line(program: Program, op: Op, tokens: Tokens, *, numbers: bool = True) -> str:
    shapes = [(program.tensors[t].shape, program.tensors[t].dtype) for t in (*op.tensors, *op.outputs)]
    wires = [i if isinstance(i, int) else _scalar(i, numbers) for i in op.inputs]
    # bodies are compared as programs: pruned, and with calls inlined
    bodies = [k for k, v in op.params.items() if op.bodies and _is_program(v)]
    return repr((op.primitive, wires, op.outputs, shapes, op.trips, tokens.params(op.params, but=bodies), context(op.handle)))


def _scalar(constant: Constant, numbers: bool) -> str:
    token = f"{constant.dtype} {array_token(constant.value)}"
    return token if numbers else _but_number(token, constant.value)


_OWN_WAY = frozenset({0.0, 1.0, -1.0, math.inf, -math.inf})
"""Numbers that change how an op is planned: adding zero or multiplying by one changes nothing, and reductions start from these
numbers.
"""


def _but_number(token: str, value: Any) -> str:
    """The token of a value; all single floats have the same token, except for those of `_OWN_WAY`."""
    plain = isinstance(value, float) or (getattr(value, "shape", None) == () and jnp.issubdtype(value.dtype, np.floating))
    return f"{type(value).__name__} {getattr(value, 'dtype', '')}" if plain and _is_plain(float(value)) else token


def _is_plain(number: float) -> bool:
    return not (math.isnan(number) or number in _OWN_WAY)


def _is_program(value: Any) -> bool:
    items = value if isinstance(value, tuple) else (value,)
    return any(hasattr(v, "eqns") or hasattr(v, "jaxpr") for v in items)
