"""A step evaluated op by op: each op is a program of its own, so the compiler has nothing to merge it with.

Calls (``jit``, ``custom_jvp_call`` and others) are laid open, and loops, branches and ``remat`` run their bodies op by op too.
Ops on which no result depends are left out, even those with effects, such as a `jax.debug.print`: they acted when the compiled
step ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.ir import CONTROL, itemsize
from shardplan.verify.on_host import Key, as_array, on_host
from shardplan.verify.perturb import perturbed_op

MOST_OPS_OF_LOOPS = 100_000
"""Once so many ops of bodies have run, loops run as one program, and so does a scan that would run more. JAX dispatches an op in
10 to 100 us, so an evaluation takes at most 10 s longer."""


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """An equation whose operands and results are numbered values; an operand may also be a literal. ``callers`` are the calls
    around it, innermost first.
    """

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[int, ...]
    callers: tuple[Any, ...] = ()

    @property
    def primitive(self) -> str:
        """The name of its primitive."""
        return self.eqn.primitive.name

    @property
    def source(self) -> str:
        """The user's line, or that of the innermost call that has one."""
        return next((s for s in map(_jax.source_line, (self.eqn, *self.callers)) if s != "?"), "?")

    @property
    def reads(self) -> set[int]:
        """The numbered values that it reads."""
        return {x for x in self.inputs if isinstance(x, int)}


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)  # jax.jit refers weakly to what it compiles
class Lines:
    """A jaxpr with its calls laid open; an output is the number of a value, or a literal. ``last_reads`` has, for each line,
    the values that no later line and no output needs.
    """

    inputs: tuple[int, ...]
    constants: Mapping[int, Any]
    lines: tuple[Line, ...]
    outputs: tuple[Any, ...]
    last_reads: tuple[frozenset[int], ...] = field(init=False)

    def __post_init__(self) -> None:
        needed, found = {x for x in self.outputs if isinstance(x, int)}, list[frozenset[int]]()
        for line in reversed(self.lines):
            found.append(frozenset((line.reads | set(line.outputs)) - needed))
            needed |= line.reads
        object.__setattr__(self, "last_reads", tuple(reversed(found)))

    def for_outputs(self, numbers: Sequence[int]) -> Lines:
        """The part on which these outputs depend."""
        return replace(self, outputs=tuple(self.outputs[n] for n in numbers)).living()

    def living(self) -> Lines:
        """The part on which any output depends."""
        needed, kept = {x for x in self.outputs if isinstance(x, int)}, list[Line]()
        for line in reversed(self.lines):
            if needed.intersection(line.outputs):
                kept.append(line)
                needed |= line.reads
        return replace(self, lines=tuple(reversed(kept)), constants={n: x for n, x in self.constants.items() if n in needed})

    def first(self, count: int) -> Lines:
        """The first lines; the outputs are all their values that later lines or the outputs read."""
        made = {n for line in self.lines[:count] for n in line.outputs}
        read = {x for x in self.outputs if isinstance(x, int)}.union(*(line.reads for line in self.lines[count:]))
        return replace(self, lines=self.lines[:count], outputs=tuple(sorted(made & read)))

    def __call__(self, *args: Any) -> list[Any]:
        """The outputs, each line applied whole: for `jax.jit`."""
        return evaluated(self, args, applied)


def laid_open(jaxpr: Any, consts: Sequence[Any]) -> Lines:
    """The lines of a jaxpr on which its results depend."""
    return _LayingOpen().all(jaxpr, consts).living()


class _LayingOpen:
    def __init__(self) -> None:
        self.count = 0
        self.constants: dict[int, Any] = {}
        self.lines: list[Line] = []

    def all(self, jaxpr: Any, consts: Sequence[Any]) -> Lines:
        """The jaxpr's lines, dead ones included."""
        inputs = tuple(self.number() for _ in jaxpr.invars)
        outputs = self.body(jaxpr, consts, inputs, ())
        return Lines(inputs, self.constants, tuple(self.lines), tuple(outputs))

    def number(self) -> int:
        """A new value."""
        self.count += 1
        return self.count - 1

    def body(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], callers: tuple[Any, ...]) -> list[Any]:
        """Adds the lines of a jaxpr on these operands, and returns its outputs."""
        values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
        for var, x in zip(jaxpr.constvars, consts, strict=True):
            values[var] = self.number()
            self.constants[values[var]] = x
        for eqn in jaxpr.eqns:
            inputs = tuple(a if isinstance(a, _jax.Literal) else values[a] for a in eqn.invars)
            called = _jax.called(eqn)
            if called is not None:
                outputs: Sequence[Any] = self.body(*_jax.jaxpr_and_consts(called), inputs, (eqn, *callers))
            else:
                outputs = tuple(self.number() for _ in eqn.outvars)
                self.lines.append(Line(eqn, inputs, tuple(outputs), callers))
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [a if isinstance(a, _jax.Literal) else values[a] for a in jaxpr.outvars]


Apply = Callable[[Line, Sequence[Any]], Sequence[Any]]
"""The results of a line on the values of its operands."""


def evaluated(lines: Lines, args: Sequence[Any], apply: Apply) -> list[Any]:
    """The outputs of lines; each value is dropped after the last line that reads it."""
    values = {**lines.constants, **dict(zip(lines.inputs, args, strict=True))}
    del args

    def read(x: Any) -> Any:
        return values[x] if isinstance(x, int) else x.val

    for line, done in zip(lines.lines, lines.last_reads, strict=True):
        values.update(zip(line.outputs, apply(line, [read(x) for x in line.inputs]), strict=True))
        for n in done:
            values.pop(n, None)
    return [read(x) if isinstance(x, int) else np.asarray(x.val, x.aval.dtype) for x in lines.outputs]


def applied(line: Line, inputs: Sequence[Any]) -> list[Any]:
    """The results of a line as one op, whatever bodies it has."""
    with _jax.settings_of(line.eqn):
        return _jax.bound(line.eqn, inputs)


class Prepared:
    """The bodies that were laid open and the ops that were compiled, for more evaluations of the same lines. Each is kept with
    its jaxpr or equation, so that no other object takes its id.
    """

    def __init__(self) -> None:
        self._bodies: dict[int, tuple[Any, Lines]] = {}
        self._programs: dict[int, tuple[Any, Callable[..., list[Any]]]] = {}

    def body(self, jaxpr: Any) -> Lines:
        """The lines of a body."""
        if id(jaxpr) not in self._bodies:
            self._bodies[id(jaxpr)] = jaxpr, laid_open(*_jax.jaxpr_and_consts(jaxpr))
        return self._bodies[id(jaxpr)][1]

    def program(self, line: Line) -> Callable[..., list[Any]]:
        """A line's op by itself: JAX keeps a program of most primitives, and the others are jitted once for each equation."""
        if _jax.runs_by_itself(line.eqn):
            return lambda *inputs: applied(line, inputs)
        if id(line.eqn) not in self._programs:
            self._programs[id(line.eqn)] = line.eqn, jax.jit(lambda *inputs: applied(line, inputs))
        return self._programs[id(line.eqn)][1]


class OpByOp:
    """Evaluates lines op by op. ``whole`` lists the loops that ran as one program. ``watch`` is called with each body that
    runs, its operands and its results. With a ``seed``, each op is perturbed (`shardplan.verify.perturb.perturbed_op`).
    """

    def __init__(
        self,
        watch: Callable[[Lines, Sequence[Any], Sequence[Any]], None] | None = None,
        *,
        seed: int | None = None,
        prepared: Prepared | None = None,
    ) -> None:
        self.whole: list[Line] = []
        self._watch, self._seed, self._left = watch, seed, MOST_OPS_OF_LOOPS
        self._prepared = Prepared() if prepared is None else prepared

    def __call__(self, lines: Lines, args: Sequence[Any]) -> list[Any]:
        """The outputs."""
        return evaluated(lines, args, self.line)

    def line(self, line: Line, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of a line."""
        params = _jax.params_of(line.eqn)
        match CONTROL.get(line.primitive):
            case "scan":
                return self._scan(line, params, inputs)
            case "while":
                return self._while(line, params, inputs)
            case "cond":
                number = int(np.clip(int(inputs[0]), 0, len(params["branches"]) - 1))
                return self._body(params["branches"][number], inputs[1:])
            case "remat":
                return self._body(params["jaxpr"], inputs)
            case None:
                return self._op(line, inputs)

    def _op(self, line: Line, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of a line by a program of its own."""
        run = self._prepared.program(line)
        return run(*inputs) if self._seed is None else perturbed_op(line.eqn, run, inputs, self._seed)

    def _body(self, jaxpr: Any, args: Sequence[Any]) -> list[Any]:
        lines = self._prepared.body(jaxpr)
        self._left -= len(lines.lines)
        results = self(lines, args)
        if self._watch is not None:
            self._watch(lines, args, results)
        return results

    def _as_one(self, line: Line, inputs: Sequence[Any]) -> Sequence[Any]:
        """A loop as one program, which is noted."""
        self.whole += [line] if line not in self.whole else []
        return self._op(line, inputs)

    def _scan(self, line: Line, params: Mapping[str, Any], inputs: Sequence[Any]) -> Sequence[Any]:
        fixed, carries, length = params["num_consts"], params["num_carry"], params["length"]
        if length * _count(params["jaxpr"].jaxpr) > self._left:
            return self._as_one(line, inputs)
        constants, carry, stacked = inputs[:fixed], list(inputs[fixed : fixed + carries]), inputs[fixed + carries :]
        rows: list[Sequence[Any]] = [()] * length
        for t in reversed(range(length)) if params["reverse"] else range(length):
            slices = [lax.dynamic_index_in_dim(x, np.int32(t), keepdims=False) for x in stacked]
            results = self._body(params["jaxpr"], [*constants, *carry, *slices])
            carry, rows[t] = results[:carries], results[carries:]
        shapes = [v.aval for v in line.eqn.outvars[carries:]]
        return [*carry, *(_stacked([row[i] for row in rows], shape) for i, shape in enumerate(shapes))]

    def _while(self, line: Line, params: Mapping[str, Any], inputs: Sequence[Any]) -> Sequence[Any]:
        counts = params["cond_nconsts"], params["body_nconsts"]
        for_cond, for_body, carry = inputs[: counts[0]], inputs[counts[0] : sum(counts)], inputs[sum(counts) :]
        while self._left > 0:
            (on,) = self._body(params["cond_jaxpr"], [*for_cond, *carry])
            if not np.any(on):
                return carry
            after = self._body(params["body_jaxpr"], [*for_body, *carry])
            carry = [_where(on, x, old) for x, old in zip(after, carry, strict=True)] if np.ndim(on) else after
        return self._as_one(line, [*for_cond, *for_body, *carry])


def _count(jaxpr: Any) -> int:
    """The ops that a body runs: those of a ``while`` count once, and so do those of all branches."""
    return sum(1 + int(eqn.params.get("length", 1)) * sum(map(_count, _jax.bodies(eqn))) for eqn in jaxpr.eqns)


def _where(on: Any, x: Any, old: Any) -> Any:
    """The new value of a carry in the rows of a `jax.vmap` whose loop goes on."""
    return lax.select(jnp.broadcast_to(on.reshape(on.shape + (1,) * (x.ndim - on.ndim)), x.shape), x, old)


def _stacked(rows: Sequence[Any], aval: Any) -> Any:
    """Rows along a new first dim, stacked on the host: one program would have all of them as operands."""
    if not rows:
        return lax.full(aval.shape, 0, aval.dtype) if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else _no_keys(aval)
    host = [on_host(x) for x in rows]
    if isinstance(host[0], Key):
        return as_array(Key(np.stack([x.data for x in host]), host[0].impl))
    return jnp.asarray(np.stack(host))


def _no_keys(aval: Any) -> Any:
    """An empty array of random keys."""
    return jax.random.split(jax.random.key(0, impl=_jax.key_impl(aval.dtype)), aval.shape)


def unmerged_bytes(lines: Lines) -> int:
    """The most bytes that values take in program order if no ops are merged."""
    return max(_held(lines), default=0)


def _held(lines: Lines) -> Iterator[int]:
    sizes: dict[int, int] = {n: int(getattr(x, "nbytes", 0)) for n, x in lines.constants.items()}
    for line, done in zip(lines.lines, lines.last_reads, strict=True):
        for x, v in zip((*line.inputs, *line.outputs), (*line.eqn.invars, *line.eqn.outvars), strict=True):
            if isinstance(x, int):
                sizes[x] = _nbytes(v.aval)
        inside = max((unmerged_bytes(laid_open(b, b.constvars)) for b in _jax.bodies(line.eqn)), default=0)
        yield sum(sizes.values()) + inside
        for n in done:
            sizes.pop(n, None)


def _nbytes(aval: Any) -> int:
    return int(np.prod(aval.shape, dtype=np.int64)) * itemsize(aval.dtype.name)
