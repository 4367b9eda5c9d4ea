"""The proof of a plan: compares the sharded step with the single-device step, and the prediction with the compiled program.

The sharded step runs a few times with its state fed back, and each time the single-device step from the same state: if each step
is right, so are all. (Two runs from one start drift apart where a unit in the last place decides what a max pool takes.)
`shardplan.verify.judge` says what equal means, given seeded perturbations of the state and the other arguments by one unit in the
last place (of the type that the step reads them in, see `shardplan.verify.perturb`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.collectives.issued import PlannedCollective, Send
from shardplan.errors import ShardplanError
from shardplan.frontend.nnx_state import Pure, apart
from shardplan.frontend.trace import Traced
from shardplan.hlo.meter import Measured, joined, measure
from shardplan.ir import Collective
from shardplan.verify.child import compile_in_child_first
from shardplan.verify.emitted import Call, emitted
from shardplan.verify.judge import Change, Judged, Largest, Worst, judge
from shardplan.verify.on_host import as_array, as_numbers, drawn, drawn_as_zero, nudged, on_host
from shardplan.verify.one_for_one import UNTOUCHED, Pair, folded, one_for_one
from shardplan.verify.perturb import narrowed, narrows
from shardplan.verify.stand_ins import stand_ins

PERTURBATIONS = 5
"""So many perturbations are drawn first, and as many again while they may decide (`_judged`)."""
MOST_PERTURBATIONS = 30
"""The most that are drawn. The largest change of five underestimates what a unit in the last place causes where it is chaotic: an
update by Adam of a gradient near zero. One leaf of the tests' U-Net in bfloat16 on eight devices needed ten."""
DECIDED = 10.0
"""A leaf that is beyond this multiple of its tolerance is unequal, and no more perturbations are drawn. Choice."""


class Runs(Protocol):
    """The parts of a plan that a verification needs (`shardplan.Plan`)."""

    traced: Traced

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The arguments that are donated to the step."""
        ...

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """The leaves of the donated arguments."""
        ...

    def collectives_under(self, backend: Literal["explicit", "specs"]) -> Sequence[PlannedCollective]:
        """All collectives of a step under a backend."""
        ...

    @property
    def program_sends(self) -> Sequence[Sequence[Send]]:
        """What each collective sends that is planned, for each program that runs."""
        ...

    @property
    def program_runs(self) -> Sequence[int]:
        """How often each program runs in a step."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds at once."""
        ...

    def mesh(self, devices: Sequence[Any] | None = None) -> Any:
        """The mesh on these devices."""
        ...

    def in_shardings(self, mesh: Any) -> Any:
        """A sharding for each leaf of the arguments."""
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

    ``compared`` counts the numbers of the single-device step that are neither infinite nor NaN. If there are ``numbers`` but none
    of them is compared, nothing is proven and ``equal`` is false. ``largest`` is the leaf with the largest error, ``worst`` the
    one nearest to its tolerance. ``recompiles`` counts compilations after the first step, ``single_recompiles`` those of the step
    under plain `jax.jit`, which the plan does not cause. ``retyped`` lists the arguments that make both compile again, because
    they go in weakly typed and come back strongly typed, or the other way round. ``moved`` lists the state that comes back in
    another sharding than it went in. ``zeros`` lists the integer and boolean arguments that were only shapes: they were all
    zero, so a fault that moves integers cannot show in them. ``stand_ins`` lists the kernels that these devices cannot run: their
    formulas were computed, or Pallas's interpreter ran them. Bytes are per device and step, of a plan with groups of devices the
    sums of one device of each group; ``measured_bytes`` undoes what only
    the CPU compiler does (see `shardplan.hlo.meter.measure`).
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
    predicted_bytes: float
    measured_bytes: float
    raw_measured_bytes: float
    predicted_peak_bytes: int
    measured_peak_bytes: int
    collectives: Mapping[str, Bytes]
    pairs: tuple[Pair, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest error of any leaf as a part of that leaf's maximum."""
        return self.largest.error

    @property
    def explicit(self) -> bool:
        """Whether the plan's own collectives were compared with the compiled ones, one for one."""
        return self.backend != "specs"

    @property
    def unmatched(self) -> tuple[Pair, ...]:
        """The collectives of the plan or of the program that the other does not have."""
        return tuple(pair for pair in self.pairs if not pair.matched)

    @property
    def folded(self) -> tuple[Pair, ...]:
        """The collectives that were handed to XLA as planned, and of which it left some out as equal to others or not needed."""
        return tuple(pair for pair in self.pairs if pair.folded)

    @property
    def passed(self) -> bool:
        """Equal, compiled no more often than the single-device step, no state moved between steps, and one for one."""
        return self.equal and self.recompiles <= self.single_recompiles and not self.moved and not self.unmatched

    @property
    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        rows = [pair.json for pair in self.pairs]
        fields = {name: value for name, value in asdict(self).items() if name != "pairs"}
        own = {"one_for_one": rows, "unmatched": [p.json for p in self.unmatched], "folded": [p.json for p in self.folded]}
        return fields | {"passed": self.passed, "max_error": self.max_error} | (own if self.explicit else {})


def verify(
    plan: Runs,
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    steps: int = 3,
    backend: str = "auto",
    devices: Sequence[Any] | None = None,
    drop: int | None = None,
    observer: Callable[[str, float], None] | None = None,
) -> Verified:
    """Runs ``step`` on one device and under ``plan``, and compares the results; ``args`` may be shapes (see `drawn`).

    A step that names axes of a mesh cannot run on one device: it runs by `jax.jit` on all of them, with its arguments whole.
    ``drop`` leaves out the exchange of that number (see `shardplan.verify.mutate`); the results should then differ.

    Raises:
        DeviceError: if there are fewer devices than the plan needs.
        CompilerDiedError: if XLA's compiler crashes where that is known or possible (`shardplan.verify.child`).
        ShardplanError: for a step count under one.
    """
    if steps < 1:
        raise ShardplanError(f"unsupported steps={steps}: give at least 1")
    with stand_ins(plan.traced.program, devices) as names:
        return _verify(plan, step, args, steps, plan.backend_for(backend), devices, drop, observer, names)


def _verify(
    plan: Runs,
    step: Callable[..., Any],
    args: Sequence[Any],
    steps: int,
    backend: str,
    devices: Sequence[Any] | None,
    drop: int | None,
    observer: Callable[[str, float], None] | None,
    stand_in_names: tuple[str, ...],
) -> Verified:
    """`verify`, once every kernel can run."""
    tell = observer or (lambda _what, _part: None)
    leaves, tree = jax.tree.flatten(apart(tuple(args)))
    host = [on_host(x) for x in drawn(leaves)]
    loop = _loop(plan.traced, tree, steps)
    tell("the single-device step", 0.1)
    first = devices[0] if devices is not None else jax.devices()[0]
    pure = Pure(step, plan.donate_argnums)
    if plan.traced.program.meshed:
        first = NamedSharding(plan.mesh(devices), PartitionSpec())
    one = _Single(jax.jit(pure, out_shardings=None if isinstance(first, jax.Device) else first), first, loop)
    program, on = plan.traced.program, plan.mesh(devices).devices.flatten().tolist()
    compile_in_child_first(program, lambda: one.lowered(host), on if program.meshed else on[:1], "specs")
    single = one.run(host)
    tell("the sharded step", 0.3)
    sharded = _Sharded(plan, step, devices, backend, drop, loop)
    compile_in_child_first(program, lambda: sharded.lowered(host), on, backend, tuple(plan.mesh(devices).shape.values()))
    results = sharded.run(host)
    single[1:] = [one.once(state, later=True) for state in sharded.states]
    perturbed = _Perturbed(pure, first, loop) if narrows(plan.traced.program) else one
    judged = _judged(perturbed, [host, *sharded.states], plan.traced.program.output_paths, single, results, tell)
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
        predicted_peak_bytes=int(plan.peak_bytes),
        **_bytes(plan, sharded, host, explicit=backend != "specs"),
    )


def _bytes(plan: Runs, sharded: _Sharded, host: Sequence[Any], *, explicit: bool) -> dict[str, Any]:
    """The fields of `Verified` about what is sent; under the explicit backend each collective beside its instruction."""
    measured, peak = sharded.compiled(host, plan.program_runs)
    common = {"raw_measured_bytes": float(measured.raw_wire_bytes), "measured_peak_bytes": peak}
    if not explicit:
        planned = plan.collectives_under("specs")
        sent = {
            "predicted_bytes": float(sum(c.wire_bytes * c.times for c in planned)),
            "measured_bytes": float(measured.wire_bytes),
        }
        return {**common, **sent, "collectives": by_kind(planned, measured)}
    pairs: tuple[Pair, ...] = ()
    for sends, runs, (text, handed) in zip(plan.program_sends, plan.program_runs, sharded.untouched(host), strict=True):
        pairs += tuple(replace(p, times=p.times * runs) for p in folded(one_for_one(sends, text), handed))
    return {
        **common,
        "predicted_bytes": sum(p.planned_bytes for p in pairs),
        "measured_bytes": sum(p.wire_bytes for p in pairs),
        "collectives": _pairs_by_kind(pairs),
        "pairs": pairs,
    }


def measured_program(
    plan: Runs, step: Callable[..., Any], *, devices: Sequence[Any] | None = None, backend: str = "auto"
) -> tuple[Measured, int]:
    """The collectives of the compiled step and its peak bytes on one device; nothing is run."""
    with stand_ins(plan.traced.program, devices):
        args = jax.tree.unflatten(plan.traced.in_tree, plan.traced.in_shapes)
        return _measured(plan.jit(step, devices, backend), args, plan.program_runs)


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


def _pairs_by_kind(pairs: Sequence[Pair]) -> dict[str, Bytes]:
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


# -- runs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Loop:
    """How a step's results become its next arguments. ``weak`` marks the argument leaves typed weakly, as Python numbers are,
    ``weak_later`` those of every step but the first.
    """

    tree: Any
    feedback: tuple[int | None, ...]
    weak: Sequence[bool]
    weak_later: Sequence[bool]
    steps: int

    def put(self, leaf: int, x: Any, where: Any, *, later: bool = False) -> Any:
        """A leaf on a device or in a sharding, as weakly typed as the step has it."""
        placed = jax.device_put(as_array(x), where)
        return _jax.weakly_typed(placed) if (self.weak_later if later else self.weak)[leaf] else placed


def _loop(traced: Traced, tree: Any, steps: int) -> _Loop:
    """The loop of a traced step."""
    weak = [shape.weak_type for shape in traced.in_shapes]
    later = weak.copy()
    for shape, i in zip(traced.out_shapes, traced.program.feedback, strict=True):
        if i is not None:
            later[i] = shape.weak_type
    return _Loop(tree, traced.program.feedback, weak, later, steps)


class _Single:
    """The step as it is, compiled for one device; ``recompiles`` counts compilations after the latest run's first step."""

    def __init__(self, run: Callable[..., Any], device: Any, loop: _Loop) -> None:
        self._run, self._device, self._loop = run, device, loop
        self.recompiles = 0

    def run(self, host: Sequence[Any], seed: int = 0) -> list[list[np.ndarray]]:
        """The results after each step of the loop, on one device."""
        flat = [self._loop.put(i, x, self._device) for i, x in enumerate(host)]
        after: list[list[np.ndarray]] = []
        self.recompiles = 0
        for n in range(self._loop.steps):
            before = _jax.programs_compiled()
            outs = jax.tree.leaves(self._step(seed, *jax.tree.unflatten(self._loop.tree, flat)))
            self.recompiles += (_jax.programs_compiled() - before) if n else 0
            after.append([as_numbers(x) for x in outs])
            for x, i in zip(outs, self._loop.feedback, strict=True):
                if i is not None:
                    flat[i] = x
        return after

    def once(self, host: Sequence[Any], seed: int = 0, *, later: bool = False) -> list[np.ndarray]:
        """The results of one step, on one device; ``later``: of one that is not the first."""
        flat = [self._loop.put(i, x, self._device, later=later) for i, x in enumerate(host)]
        return [as_numbers(x) for x in jax.tree.leaves(self._step(seed, *jax.tree.unflatten(self._loop.tree, flat)))]

    def lowered(self, host: Sequence[Any]) -> Any:
        """The step lowered for its arguments."""
        flat = [self._loop.put(i, x, self._device) for i, x in enumerate(host)]
        return self._run.lower(*jax.tree.unflatten(self._loop.tree, flat))

    def _step(self, seed: int, *args: Any) -> Any:
        """The results of one step; only `_Perturbed` uses ``seed``."""
        return self._run(*args)


class _Perturbed(_Single):
    """The step with the narrow copies of its arguments perturbed, compiled once for all seeds."""

    def __init__(self, step: Callable[..., Any], device: Any, loop: _Loop) -> None:
        super().__init__(jax.jit(lambda seed, *args: narrowed(step, seed)(*args)), device, loop)

    def _step(self, seed: int, *args: Any) -> Any:
        return self._run(np.uint32(seed), *args)


class _Sharded:
    """The step under a plan; ``moved`` lists the results that came back in another sharding, ``states`` the arguments of each
    step but the first, on the host.
    """

    def __init__(
        self, plan: Runs, step: Callable[..., Any], devices: Sequence[Any] | None, backend: str, drop: int | None, loop: _Loop
    ) -> None:
        self._loop, self._paths = loop, plan.traced.program.output_paths
        self._mesh = plan.mesh(devices)
        self._shardings = jax.tree.leaves(plan.in_shardings(self._mesh))
        self._jitted = plan.jit(step, devices, backend, drop=drop)
        self._donated = set(plan.donated_leaves)
        self.recompiles = 0
        self.moved: list[str] = []
        self.states: list[list[Any]] = []

    def put(self, host: Sequence[Any]) -> list[Any]:
        """The arguments in the shardings of the plan."""
        return [self._loop.put(i, x, self._shardings[i]) for i, x in enumerate(host)]

    def run(self, host: Sequence[Any]) -> list[list[np.ndarray]]:
        """The results after each step of the loop, sharded."""
        flat = self.put(host)
        after: list[list[np.ndarray]] = []
        fed = {i for i in self._loop.feedback if i is not None}
        for n in range(self._loop.steps):
            args = jax.tree.unflatten(self._loop.tree, flat)
            before = _jax.programs_compiled()
            outs = jax.tree.leaves(self._jitted(*args))
            self.recompiles += (_jax.programs_compiled() - before) if n else 0
            after.append([as_numbers(x) for x in outs])
            for path, x, i in zip(self._paths, outs, self._loop.feedback, strict=True):
                if i is None:
                    continue
                if n == 0 and not x.sharding.is_equivalent_to(self._shardings[i], x.ndim):
                    self.moved.append(path)
                flat[i] = x
            for i in self._donated - fed:
                flat[i] = self._loop.put(i, host[i], self._shardings[i])
            if n + 1 < self._loop.steps:
                self.states.append([on_host(x) if i in fed else host[i] for i, x in enumerate(flat)])
        return after

    def lowered(self, host: Sequence[Any]) -> Any:
        """The step lowered for its arguments."""
        return self._jitted.lower(*jax.tree.unflatten(self._loop.tree, self.put(host)))

    def compiled(self, host: Sequence[Any], runs: Sequence[int]) -> tuple[Measured, int]:
        """The collectives of the compiled step, whose programs run so often, and its peak bytes on one device."""
        return _measured(self._jitted, jax.tree.unflatten(self._loop.tree, self.put(host)), runs)

    def untouched(self, host: Sequence[Any]) -> Iterator[tuple[str, Counter[Call]]]:
        """For each program, its compiled text without the passes that merge or move collectives, and the collectives that XLA was
        handed.
        """
        for traced in self._jitted.traced_programs(*jax.tree.unflatten(self._loop.tree, self.put(host))):
            yield traced.lower().compile(compiler_options=UNTOUCHED).as_text(), emitted(traced.jaxpr.jaxpr)


def _judged(
    perturbed: _Single,
    starts: Sequence[Sequence[Any]],
    paths: Sequence[str],
    single: Sequence[Sequence[np.ndarray]],
    results: Sequence[Sequence[np.ndarray]],
    tell: Callable[[str, float], None],
) -> Judged:
    """Judges the leaves after each step by the changes that perturbations of its ``starts`` cause, as many as decide."""
    changes = [[Change()] * len(leaf) for leaf in single]
    for n in range(MOST_PERTURBATIONS):
        tell("perturbed steps", 0.6 + 0.3 * n / MOST_PERTURBATIONS)
        after = [perturbed.once(nudged(start, n), n, later=step > 0) for step, start in enumerate(starts)]
        changes = [[c.with_run(a, b) for c, a, b in zip(*row, strict=True)] for row in zip(changes, single, after, strict=True)]
        if (n + 1) % PERTURBATIONS == 0:
            judged = judge(paths, single, results, changes)
            if not judged.unequal or judged.worst.error > DECIDED * judged.worst.tolerance:
                break
    return judged


def _measured(jitted: Any, args: Sequence[Any], runs: Sequence[int]) -> tuple[Measured, int]:
    """The collectives of all programs of a step, by how often each runs, and the peak bytes of the largest."""
    measured: list[Measured] = []
    peaks: list[int] = []
    for traced in jitted.traced_programs(*args):
        compiled = traced.lower().compile()
        held = compiled.memory_analysis()
        peak = held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes
        measured.append(measure(compiled.as_text()))
        peaks.append(int(peak))
    return joined(measured, runs), max(peaks)
