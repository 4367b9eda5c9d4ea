"""The proof of a plan: compares the sharded step with the single-device step, and the prediction with the compiled program.

The sharded step runs a few times with its state fed back, and each time the single-device step runs from the same state: if
each step is right, so are all. (Two runs from one start drift apart where a unit in the last place decides what a max pool
takes.) `shardplan.verify.judge` says what equal means, given seeded perturbations of the state and the other arguments by one
unit in the last place (of the type that the step reads them in, see `shardplan.verify.perturb`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import jax

from shardplan.collectives.issued import PlannedCollective, Send
from shardplan.errors import ShardplanError
from shardplan.frontend.deleted import refuse_deleted
from shardplan.frontend.nnx_state import apart
from shardplan.frontend.trace import Traced
from shardplan.hlo.meter import Measured, joined, measure
from shardplan.ir import Collective
from shardplan.verify.child import compile_in_child_first
from shardplan.verify.emitted import emitted
from shardplan.verify.judge import Largest, ReferenceFault, Worst, require_results
from shardplan.verify.on_host import drawn, drawn_as_zero, on_host
from shardplan.verify.one_for_one import UNTOUCHED, MatchedCollective, folded, one_for_one
from shardplan.verify.reference import by_reference
from shardplan.verify.runs import Noise, Runnable, Sharded, alone, loop_of, peak_bytes
from shardplan.verify.stand_ins import stand_ins


class VerifiablePlan(Runnable, Protocol):
    """The parts of a plan that a verification needs (`shardplan.Plan`)."""

    def collectives_under(self, backend: Literal["explicit", "specs"]) -> Sequence[PlannedCollective]:
        """All collectives of a step under a backend."""
        ...

    @property
    def uncut(self) -> bool:
        """Whether no array is cut."""
        ...

    @property
    def program_sends(self) -> Sequence[Sequence[Send]]:
        """The sends of the planned collectives, for each program that runs."""
        ...

    @property
    def program_runs(self) -> Sequence[int]:
        """How often each program runs in a step."""
        ...

    def backend_for(self, backend: str = "auto") -> str:
        """The backend that this name stands for."""
        ...

    def jit(
        self, step: Callable[..., Any], devices: Sequence[Any] | None = None, backend: str = "auto", *, drop: int | None = None
    ) -> Any:
        """The step, jitted."""
        ...


@dataclass(frozen=True, slots=True)
class Bytes:
    """Wire bytes of one kind of collective in a step, per device, and how often it runs."""

    predicted: float
    measured: float
    predicted_count: float
    measured_count: float


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of a verification.

    ``compared`` counts the numbers of the single-device step that are neither infinite nor NaN. If there are ``numbers`` but
    none of them is compared, nothing is proven and ``equal`` is false. ``largest`` is the leaf with the largest error,
    ``worst`` the one nearest to its tolerance. ``recompiles`` counts compilations after the first step, ``single_recompiles``
    those of the step under plain `jax.jit`, which the plan does not cause. ``retyped`` lists the arguments that make both
    compile again, because they go in weakly typed and come back strongly typed, or the other way round. ``moved`` lists the
    state that comes back in another sharding than it went in. ``zeros`` lists the integer and boolean arguments that were only
    shapes: they were all zero, so a fault that moves integers cannot show in them. ``stand_ins`` lists the kernels that these
    devices cannot run: their formulas were computed, or Pallas's interpreter ran them. ``uncut``: the plan cuts no array, so
    each of its ``devices`` did what the one device did. If the step compiled for one device is
    wrong, ``reference`` says where, and ``equal`` and the errors refer to the step op by op: a right plan is then ``equal``,
    but not ``passed``. Bytes are per device and step; for a plan with groups of devices they are sums over one device of each
    group. ``measured_bytes`` undoes what only the CPU compiler does (see `shardplan.hlo.meter.measure`).
    """

    backend: str
    equal: bool
    compared: int
    numbers: int
    steps: int
    largest: Largest
    worst: Worst
    unequal: tuple[str, ...]
    recompiles: int
    single_recompiles: int
    retyped: tuple[str, ...]
    moved: tuple[str, ...]
    zeros: tuple[str, ...]
    stand_ins: tuple[str, ...]
    devices: int
    uncut: bool
    reference: ReferenceFault | None
    predicted_bytes: float
    measured_bytes: float
    raw_measured_bytes: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    collectives: Mapping[str, Bytes]
    pairs: tuple[MatchedCollective, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest error of any leaf, relative to that leaf's maximum."""
        return self.largest.error

    @property
    def explicit(self) -> bool:
        """Whether the plan's own collectives were compared with the compiled ones, one for one."""
        return self.backend != "specs"

    @property
    def unmatched(self) -> tuple[MatchedCollective, ...]:
        """The collectives of the plan or of the program that the other does not have."""
        return tuple(pair for pair in self.pairs if not pair.matched)

    @property
    def folded(self) -> tuple[MatchedCollective, ...]:
        """The collectives that were handed to XLA as planned, some of which it left out as equal to others or not needed."""
        return tuple(pair for pair in self.pairs if pair.folded)

    @property
    def passed(self) -> bool:
        """Equal to a right reference, compiled no more often than it, no state moved between steps, and one for one."""
        return (
            self.equal
            and self.reference is None
            and self.recompiles <= self.single_recompiles
            and not self.moved
            and not self.unmatched
        )

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        rows = [pair.json for pair in self.pairs]
        fields = {name: value for name, value in asdict(self).items() if name != "pairs"}
        own = {"one_for_one": rows, "unmatched": [p.json for p in self.unmatched], "folded": [p.json for p in self.folded]}
        reference = {"reference": self.reference and self.reference.json}
        return fields | reference | {"passed": self.passed, "max_error": self.max_error} | (own if self.explicit else {})


def verify(
    plan: VerifiablePlan,
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    steps: int = 3,
    backend: str = "auto",
    devices: Sequence[Any] | None = None,
    drop: int | None = None,
    reference: Literal["always", "unequal"] = "always",
    observer: Callable[[str, float], None] | None = None,
) -> Verified:
    """Runs ``step`` on one device and under ``plan``, and compares the results; ``args`` may be shapes (see `drawn`).

    A step that names axes of a mesh cannot run on one device: it runs by `jax.jit` on all of them, with its arguments whole.
    ``drop`` leaves out the exchange of that number (see `shardplan.verify.mutate`); the results should then differ.
    ``reference`` says when the step also runs op by op, to check the step compiled for one device: ``"always"``, or only where
    the sharded step is ``"unequal"`` to it, which is faster but misses a fault that both have.

    Raises:
        DeviceError: if there are fewer devices than the plan needs.
        CompilerDiedError: if XLA's compiler crashes where that is known or possible (`shardplan.verify.child`).
        ShardplanError: for a step count under one, another word for ``reference``, a step that returns no array, or a deleted
            argument.
    """
    if reference not in ("always", "unequal"):
        raise ShardplanError(f"unsupported reference={reference!r}: use 'always' or 'unequal'")
    if steps < 1:
        raise ShardplanError(f"unsupported steps={steps}: give at least 1")
    require_results(plan.traced.program)
    refuse_deleted(plan.traced.program.input_paths, jax.tree.leaves(apart(tuple(args))))
    with stand_ins(plan.traced.program, devices) as names:
        tell = _forward(observer or (lambda _what, _part: None))
        return _verify(plan, step, args, steps, plan.backend_for(backend), devices, drop, reference, tell, names)


def _verify(
    plan: VerifiablePlan,
    step: Callable[..., Any],
    args: Sequence[Any],
    steps: int,
    backend: str,
    devices: Sequence[Any] | None,
    drop: int | None,
    reference: str,
    tell: Callable[[str, float], None],
    stand_in_names: tuple[str, ...],
) -> Verified:
    """`verify`, once every kernel can run."""
    leaves, tree = jax.tree.flatten(apart(tuple(args)))
    host = [on_host(x) for x in drawn(leaves)]
    loop = loop_of(plan.traced, tree, steps)
    tell("the single-device step", 0.1)
    one, perturbed = alone(plan, step, devices, loop)
    program, on = plan.traced.program, plan.mesh(devices).devices.flatten().tolist()
    compile_in_child_first(program, lambda: one.lowered(host), on if program.meshed else on[:1], "specs")
    single = one.run(host)
    tell("the sharded step", 0.3)
    sharded = Sharded(plan, plan.jit(step, devices, backend, drop=drop), devices, loop)
    compile_in_child_first(program, lambda: sharded.lowered(host), on, backend, tuple(plan.mesh(devices).shape.values()))
    results = sharded.run(host)
    single[1:] = [one.once(state, later=True) for state in sharded.states]
    noise, paths = Noise(perturbed.again, [host, *sharded.states], single, tell), program.output_paths
    judged = noise.judged(paths, single, results)
    if reference == "always" or judged.unequal:
        judged, _ = by_reference(one, noise, paths, results, judged, tell)
    tell("bytes", 0.9)
    return Verified(
        backend=backend,
        equal=not judged.unequal and (judged.compared > 0 or not judged.numbers),
        compared=judged.compared,
        numbers=judged.numbers,
        steps=steps,
        largest=judged.largest,
        worst=judged.worst,
        unequal=judged.unequal,
        recompiles=sharded.recompiles,
        single_recompiles=one.recompiles,
        retyped=tuple(_retyped(plan.traced)),
        moved=tuple(sharded.moved),
        zeros=tuple(p for p, x in zip(plan.traced.program.input_paths, leaves, strict=True) if drawn_as_zero(x)),
        stand_ins=stand_in_names,
        devices=len(on),
        uncut=plan.uncut,
        reference=judged.reference,
        **_bytes(plan, sharded, host, explicit=backend != "specs"),
    )


def _forward(observer: Callable[[str, float], None]) -> Callable[[str, float], None]:
    """An observer whose progress never goes back, whatever runs again."""
    told = 0.0

    def tell(what: str, part: float) -> None:
        nonlocal told
        told = max(told, part)
        observer(what, told)

    return tell


def _bytes(plan: VerifiablePlan, sharded: Sharded, host: Sequence[Any], *, explicit: bool) -> dict[str, Any]:
    """The fields of `Verified` on bytes; under the explicit backend, each collective is matched to its instruction."""
    programs = _programs(sharded.jitted, sharded.arguments(host))
    measured = joined([measure(p.text) for p in programs], plan.program_runs)
    peak = max(p.peak_bytes for p in programs)
    common = {
        "raw_measured_bytes": float(measured.raw_wire_bytes),
        "predicted_peak_bytes": int(plan.peak_bytes),
        "measured_peak_bytes": peak,
    }
    if not explicit:
        planned = plan.collectives_under("specs")
        sent = {
            "predicted_bytes": float(sum(c.wire_bytes * c.times for c in planned)),
            "measured_bytes": float(measured.wire_bytes),
        }
        return {**common, **sent, "collectives": by_kind(planned, measured)}
    pairs: tuple[MatchedCollective, ...] = ()
    for sends, runs, program in zip(plan.program_sends, plan.program_runs, programs, strict=True):
        pairs += tuple(replace(p, times=p.times * runs) for p in _paired(sends, program))
    return {
        **common,
        "predicted_bytes": sum(p.planned_bytes for p in pairs),
        "measured_bytes": sum(p.wire_bytes for p in pairs),
        "collectives": _pairs_by_kind(pairs),
        "pairs": pairs,
    }


def measured_program(
    plan: VerifiablePlan, step: Callable[..., Any], *, devices: Sequence[Any] | None = None, backend: str = "auto"
) -> tuple[Measured, int]:
    """The collectives of the compiled step and its peak bytes on one device; nothing is run."""
    with stand_ins(plan.traced.program, devices):
        args = jax.tree.unflatten(plan.traced.in_tree, plan.traced.in_shapes)
        programs = _programs(plan.jit(step, devices, backend), args)
    return joined([measure(p.text) for p in programs], plan.program_runs), max(p.peak_bytes for p in programs)


def by_kind(planned: Sequence[PlannedCollective], measured: Measured) -> dict[str, Bytes]:
    """Predicted and measured bytes, for every kind of collective that either has."""
    predicted: dict[Collective, tuple[float, float]] = {}
    for c in planned:
        nbytes, count = predicted.get(c.kind, (0.0, 0.0))
        predicted[c.kind] = nbytes + c.wire_bytes * c.times, count + c.times
    rows: dict[str, Bytes] = {}
    for kind in sorted({*predicted, *measured.kinds}):
        nbytes, count = predicted.get(kind, (0.0, 0.0))
        total = measured.kinds.get(kind)
        rows[kind] = Bytes(nbytes, float(total.wire_bytes) if total else 0.0, count, float(total.count) if total else 0.0)
    return rows


def _pairs_by_kind(pairs: Sequence[MatchedCollective]) -> dict[str, Bytes]:
    """Planned and compiled bytes, for every kind of collective."""
    rows: dict[str, Bytes] = {}
    for kind in sorted({p.kind for p in pairs}):
        own = [p for p in pairs if p.kind == kind]
        planned = sum(p.planned_bytes for p in own), sum(p.planned * p.times for p in own)
        compiled = sum(p.wire_bytes for p in own), sum(p.compiled * p.times for p in own)
        rows[kind] = Bytes(planned[0], compiled[0], planned[1], compiled[1])
    return rows


def _retyped(traced: Traced) -> list[str]:
    """The arguments whose weak typing changes over a step, with the change: ``lr (weak to strong)``."""
    pairs = zip(traced.out_shapes, traced.program.feedback, strict=True)
    changed = sorted({i for out, i in pairs if i is not None and out.weak_type != traced.in_shapes[i].weak_type})
    ways = {True: "weak to strong", False: "strong to weak"}
    return [f"{traced.program.input_paths[i]} ({ways[traced.in_shapes[i].weak_type]})" for i in changed]


@dataclass(frozen=True, slots=True)
class _Program:
    """A program of a step: its trace, its compiled text, and the most bytes that it holds on a device."""

    traced: Any
    text: str
    peak_bytes: int


def _programs(jitted: Any, args: Sequence[Any]) -> list[_Program]:
    """The programs of a step. One that has run for such arguments is not compiled again."""
    found: list[_Program] = []
    for traced in jitted.traced_programs(*args):
        compiled = traced.lower().compile()
        found.append(_Program(traced, compiled.as_text(), peak_bytes(compiled)))
    return found


def _paired(sends: Sequence[Send], program: _Program) -> tuple[MatchedCollective, ...]:
    """The planned collectives of a program beside the compiled ones. If they differ, it is compiled once more, without the passes
    that merge or move collectives.
    """
    pairs = one_for_one(sends, program.text)
    if all(p.planned == p.compiled for p in pairs):
        return pairs
    untouched = program.traced.lower().compile(compiler_options=UNTOUCHED).as_text()
    return folded(one_for_one(sends, untouched), emitted(program.traced.jaxpr.jaxpr))
