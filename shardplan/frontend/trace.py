"""Traces a step and its arguments into a `Program`.

The step is traced by ``jax.jit(step).trace`` on shapes alone. Call-like primitives (``jit``, ``custom_jvp_call``,
``custom_vjp_call``, ``custom_vmap_call``) are inlined, so that the program is flat, unless a description is registered for the
function: then the call is one op. ``scan``, ``while``, ``cond`` and ``remat2`` stay ops with bodies. Dead ops are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from shardplan import _jax
from shardplan.errors import TraceError
from shardplan.frontend.collectives import over_dims
from shardplan.frontend.constraints import asked_shardings, constraint_of, handed_on, manual_of, without_sharding
from shardplan.ir import HOST_COPY, Constant, Op, Operand, Program, Tensor, itemsize
from shardplan.tdl import named_call
from shardplan.user_code import users_code

# Result i is operand i. Each pair becomes an op of its own, so that each may be cut in its own way.
_APART = ("optimization_barrier",)
_BODIES: dict[str, tuple[str, ...]] = {
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
}


@dataclass(frozen=True, slots=True)
class Traced:
    """A step's `Program`, with the trees and shapes of its arguments and of its result."""

    program: Program
    in_tree: Any
    out_tree: Any
    in_shapes: tuple[Any, ...]
    out_shapes: tuple[jax.ShapeDtypeStruct, ...]


def trace(step: Callable[..., Any], *args: Any, donate_argnums: Sequence[int] = ()) -> Traced:
    """Traces ``step(*args)``; leaves of ``args`` are arrays, `jax.ShapeDtypeStruct` or Python scalars. Nothing is allocated.

    Raises:
        TraceError: if the step fails on these shapes; the step's own error is its cause.
    """
    names = _jax.argument_names(step, len(args))
    flat, in_tree = jax.tree_util.tree_flatten_with_path(args)
    with _jax.cudnn_assumed(), users_code(_untraceable):
        traced = jax.jit(step).trace(*jax.tree.map(_abstract, args))
    closed = traced.jaxpr
    out_flat, out_tree = jax.tree_util.tree_flatten_with_path(traced.out_info)
    input_paths = numbered(_path(path, names) for path, _ in flat)
    output_paths = numbered(_path(path, ()) for path, _ in out_flat)
    builder = _Builder()
    program = builder.program(closed.jaxpr, closed.consts)
    shapes = tuple(jax.ShapeDtypeStruct(info.shape, info.dtype, weak_type=info.weak_type) for _, info in out_flat)
    program = Program(
        tensors=program.tensors,
        ops=program.ops,
        inputs=program.inputs,
        outputs=program.outputs,
        constants=program.constants,
        input_paths=input_paths,
        output_paths=output_paths,
        feedback=_feedback(program, [p for p, _ in flat], [p for p, _ in out_flat], frozenset(donate_argnums)),
    )
    return Traced(program, in_tree, out_tree, tuple(_abstract(leaf) for _, leaf in flat), shapes)


def _untraceable(error: BaseException) -> TraceError:
    place = _jax.raised_at(error)
    return TraceError(
        f"the step could not be traced on these shapes: {type(error).__name__}: {_first_line(error)}"
        f"{f', at {place}' if place else ''}; jax.eval_shape(step, *args) fails in the same way and shows the full traceback"
    )


def _abstract(leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct) or not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"


def _path(path: Sequence[Any], names: Sequence[str]) -> str:
    """``params/layers/0/kernel``: the argument's name, then the keys; a variable's own ``.value`` is left out."""
    words = path_words(path)
    if names and words:
        words[0] = names[int(words[0])]
    return "/".join(words) or "result"


def numbered(paths: Iterable[str]) -> tuple[str, ...]:
    """The paths, with a number appended to each repeated one.

    >>> numbered(["a", "b", "a"])
    ('a', 'b', 'a#2')
    """
    found: dict[str, None] = {}
    for path in paths:
        name, count = path, 1
        while name in found:
            count += 1
            name = f"{path}#{count}"
        found[name] = None
    return tuple(found)


def path_words(path: Sequence[Any]) -> list[str]:
    """The keys of a path as text. The attribute at its end in which a variable keeps its value is left out, and `HIDDEN`."""
    ends = (jax.tree_util.GetAttrKey("value"), jax.tree_util.GetAttrKey("raw_value"))
    keys = path[:-1] if path and path[-1] in ends else path  # a module may have a layer called "value"
    return [jax.tree_util.keystr((key,), simple=True) for key in keys if key != HIDDEN]


HIDDEN = jax.tree_util.GetAttrKey("arrays of an object")
"""A key that paths of arguments leave out."""


def _feedback(program: Program, ins: Sequence[Any], outs: Sequence[Any], donated: frozenset[int]) -> tuple[int | None, ...]:
    """For each output the input whose state it replaces: one with the same path below its argument, shape and dtype."""
    below: dict[tuple[str, ...], list[int]] = {}
    for i, path in enumerate(ins):
        below.setdefault(_relative(path, 1), []).append(i)
    taken: set[int] = set()
    result: list[int | None] = []
    for o, path in enumerate(outs):
        tensor = program.outputs[o]
        match: int | None = None
        if isinstance(tensor, int):
            kind = (program.tensors[tensor].shape, program.tensors[tensor].dtype)
            for strip in (1, 2, 0):
                if strip > len(path):
                    continue
                relative = _relative(path, strip)
                fits = [
                    i
                    for i in below.get(relative, ())
                    if i not in taken
                    and (program.tensors[program.inputs[i]].shape, program.tensors[program.inputs[i]].dtype) == kind
                ]
                if not relative:  # a bare array matches only a donated argument, or the argument of the same position
                    fits = [i for i in fits if ins[i][0].idx in donated or (strip and path[0] == _key(ins[i][0].idx))]
                fits.sort(key=lambda i: (ins[i][0].idx not in donated, bool(strip) and path[0] != _key(ins[i][0].idx), i))
                if fits:
                    match = fits[0]
                    taken.add(match)
                    break
        result.append(match)
    return tuple(result)


def _key(index: int) -> Any:
    return jax.tree_util.SequenceKey(index)


def _relative(path: Sequence[Any], strip: int) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path[strip:])


class _Source:
    """A source line, looked up when it is printed; where JAX knows none, the line of the call around it."""

    __slots__ = ("caller", "eqn")

    def __init__(self, eqn: Any, caller: _Source | None) -> None:
        self.eqn, self.caller = eqn, caller

    def __str__(self) -> str:
        line = _jax.source_line(self.eqn)
        return line if line != "?" or self.caller is None else str(self.caller)


class _Builder:
    """Flattens one jaxpr (a body has a builder of its own)."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.constants: list[tuple[int, Any]] = []

    def tensor(self, aval: Any) -> int:
        """The number of a new tensor."""
        name = aval.dtype.name
        self.tensors.append(Tensor(len(self.tensors), tuple(aval.shape), name, itemsize(name), _jax.in_host_memory(aval)))
        return len(self.tensors) - 1

    def program(self, jaxpr: Any, consts: Sequence[Any]) -> Program:
        """A jaxpr as a program."""
        env: dict[Any, Operand] = {}
        inputs = []
        for var in jaxpr.invars:
            env[var] = self.tensor(var.aval)
            inputs.append(env[var])
        self.bind_constants(env, jaxpr, consts)
        self.run(jaxpr, env, "")
        outputs = tuple(self.read(env, v) for v in jaxpr.outvars)
        return _prune(Program(tuple(self.tensors), tuple(self.ops), tuple(inputs), outputs, tuple(self.constants)))

    def bind_constants(self, env: dict[Any, Operand], jaxpr: Any, consts: Sequence[Any]) -> None:
        """Adds closed-over arrays as tensors.

        Raises:
            TraceError: for one that is cut over Explicit axes, which no other mesh takes.
        """
        for var, value in zip(jaxpr.constvars, consts, strict=True):
            cut_over = _jax.explicit_axes(value)
            if cut_over:
                raise TraceError(
                    f"the step closes over an array {var.aval.str_short()} that is cut over the Explicit axes "
                    f"{', '.join(cut_over)}: pass it as an argument, or make its mesh with "
                    "axis_types=(jax.sharding.AxisType.Auto, ...)"
                )
            t = self.tensor(var.aval)
            env[var] = t
            self.constants.append((t, value))

    def read(self, env: Mapping[Any, Operand], atom: Any) -> Operand:
        """The operand for an atom of a jaxpr: a tensor's number or a scalar."""
        if isinstance(atom, _jax.Literal):
            value = atom.val
            if np.ndim(value):
                t = self.tensor(atom.aval)
                self.constants.append((t, value))
                return t
            return Constant(value, cast(Any, atom.aval).dtype.name)
        return env[atom]

    def run(self, jaxpr: Any, env: dict[Any, Operand], scope: str, caller: _Source | None = None) -> None:
        """Adds the equations of a jaxpr, with calls inlined."""
        for eqn in map(over_dims, jaxpr.eqns):
            name = eqn.primitive.name
            inputs = tuple(self.read(env, a) for a in eqn.invars)
            if name == "check":
                raise TraceError(
                    f"the checkify.check at {_Source(eqn, caller)} is not functionalized: put jax.experimental.checkify.checkify "
                    "around the function that checks, and return its error"
                )
            if name in _jax.REFERENCES:
                raise TraceError(
                    f"{name} at {_Source(eqn, caller)} makes or uses a mutable reference (jax.new_ref), which plans do not "
                    "support: return the new value, as x.at[...].set does"
                )
            named = named_call(name, eqn.params, [a.aval for a in eqn.invars])
            body = _jax.called(eqn) if named is None else None
            if body is not None:
                self.inline(eqn, body, inputs, env, scope, caller)
                continue
            if named is None and name == "custom_linear_solve":  # differentiation is done already: only its solver is left to run
                lengths, solver = eqn.params["const_lengths"], eqn.params["jaxprs"].solve
                first = lengths.matvec + lengths.vecmat
                self.inline(eqn, solver, inputs[first : first + lengths.solve] + inputs[sum(lengths) :], env, scope, caller)
                continue
            if name in _APART:
                for operand, var in zip(inputs, eqn.outvars, strict=True):
                    self.op(eqn, name, (operand,), (var,), env, scope, caller)
                continue
            if name == "device_put" and any(map(_jax.moves_memory, eqn.invars, eqn.outvars)):
                for own, operand, var in zip(eqn.invars, inputs, eqn.outvars, strict=True):
                    if _jax.moves_memory(own, var):
                        self.op(eqn, HOST_COPY, (operand,), (var,), env, scope, caller, {})
                    else:
                        env[var] = operand
                continue
            asked = asked_shardings(eqn)
            if asked is not None:
                self.constrain(eqn, asked, inputs, env, scope, caller)
                continue
            if name == "shard_map":
                own = {"manual": manual_of(eqn, _Source(eqn, caller)), "body": eqn.params["jaxpr"]}
                self.op(eqn, name, inputs, eqn.outvars, env, scope, caller, own)
                continue
            eqn = without_sharding(eqn, _Source(eqn, caller))
            self.op(eqn, named or name, inputs, eqn.outvars, env, scope, caller)

    def op(
        self,
        eqn: Any,
        name: str,
        inputs: tuple[Operand, ...],
        results: Sequence[Any],
        env: dict[Any, Operand],
        scope: str,
        caller: _Source | None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        """Adds one application of a primitive."""
        outputs = []
        for var in results:
            t = self.tensor(var.aval)
            env[var] = t
            outputs.append(t)
        stack = str(eqn.source_info.name_stack)
        self.ops.append(
            Op(
                id=len(self.ops),
                primitive=name,
                inputs=inputs,
                outputs=tuple(outputs),
                params=_params(eqn, name) if params is None else params,
                source=cast(str, _Source(eqn, caller)),
                scope=f"{scope}/{stack}" if scope and stack else scope or stack,
                bodies=_bodies(eqn),
                trips=_trips(eqn),
                handle=eqn,
            )
        )

    def constrain(
        self,
        eqn: Any,
        asked: Sequence[Any],
        inputs: tuple[Operand, ...],
        env: dict[Any, Operand],
        scope: str,
        caller: _Source | None,
    ) -> None:
        """Adds an op for each operand that is to lie somewhere; others are handed on as they are."""
        for n, (sharding, var) in enumerate(zip(asked, eqn.outvars, strict=True)):
            constraint = constraint_of(eqn, n, sharding, _Source(eqn, caller))
            if constraint is None:
                env[var] = inputs[n]
            else:
                self.op(handed_on(eqn, n), "placed", (inputs[n],), (var,), env, scope, caller, {"constraint": constraint})

    def inline(
        self,
        eqn: Any,
        inner: Any,
        inputs: tuple[Operand, ...],
        env: dict[Any, Operand],
        scope: str,
        caller: _Source | None,
    ) -> None:
        """Adds the equations of the called jaxpr in place of the call."""
        inner, consts = _jax.jaxpr_and_consts(inner)
        below: dict[Any, Operand] = dict(zip(inner.invars, inputs, strict=True))
        self.bind_constants(below, inner, consts)
        stack = str(eqn.source_info.name_stack)
        self.run(inner, below, f"{scope}/{stack}" if scope and stack else scope or stack, _Source(eqn, caller))
        for var, atom in zip(eqn.outvars, inner.outvars, strict=True):
            env[var] = self.read(below, atom)


def _params(eqn: Any, name: str) -> Mapping[str, Any]:
    """The parameters of an equation; what draws bits that depend on the whole shape says so."""
    whole = name in ("random_bits", "random_split") and not _jax.threefry_partitionable(eqn)
    return _jax.params_of(eqn, **({_jax.WHOLE_SHAPE: True} if whole else _jax.own_params(eqn)))


def _bodies(eqn: Any) -> tuple[Program, ...]:
    name, params = eqn.primitive.name, _jax.params_of(eqn)
    if name == "cond":
        jaxprs = params["branches"]
    elif name in _BODIES:
        jaxprs = tuple(params[k] for k in _BODIES[name])
    else:
        return ()
    return tuple(_Builder().program(b.jaxpr, b.consts) if hasattr(b, "consts") else _Builder().program(b, ()) for b in jaxprs)


def _trips(eqn: Any) -> int | None:
    if eqn.primitive.name == "scan":
        return int(_jax.params_of(eqn)["length"])
    return None if eqn.primitive.name == "while" else 1


def _prune(program: Program) -> Program:
    """The program without the ops that nothing depends on; ops with effects stay."""
    live = {t for t in program.outputs if isinstance(t, int)}
    kept: list[Op] = []
    for op in reversed(program.ops):
        if any(t in live for t in op.outputs) or op.handle.effects:
            kept.append(op)
            live.update(op.tensors)
    kept.reverse()
    constants = tuple((t, v) for t, v in program.constants if t in live)
    return Program(program.tensors, tuple(kept), program.inputs, program.outputs, constants)
