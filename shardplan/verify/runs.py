"""Runs of a step, on one device and under a plan, and the judgement of one by the other.

Arguments are on the host between runs, so that donation deletes nothing that a later run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from shardplan import _jax
from shardplan.frontend.nnx_state import Pure
from shardplan.frontend.trace import Traced
from shardplan.verify.judge import Judged, Sensitivity, judge
from shardplan.verify.on_host import as_array, as_numbers, nudged, on_host
from shardplan.verify.op_by_op import Lines, laid_open
from shardplan.verify.perturb import narrowed, narrows

PERTURBATIONS = 5
"""The number of perturbations drawn first, and again as long as a leaf is unequal (`Noise`)."""
MOST_PERTURBATIONS = 30
"""The most that are drawn. Five underestimate the change by a unit in the last place where it is chaotic, as in Adam's update
for a gradient near zero, whose sign decides. In bfloat16 on eight devices, a bias of the tests' GPT needed fifteen: with fewer
it was off by 3,000 times its tolerance."""


class Runnable(Protocol):
    """The parts of a plan that a run beside one device needs (`shardplan.Plan`)."""

    traced: Traced
    step: Callable[..., Any]

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The arguments that are donated to the step."""
        ...

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """The leaves of the donated arguments."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds at once."""
        ...

    @property
    def memory_limit(self) -> int:
        """The bytes that a device may hold."""
        ...

    def mesh(self, devices: Sequence[Any] | None = None) -> Any:
        """The mesh on these devices."""
        ...

    def in_shardings(self, mesh: Any) -> Any:
        """A sharding for each leaf of the arguments."""
        ...


@dataclass(frozen=True, slots=True)
class StateFeedback:
    """How a step's results become its next arguments. ``weak`` marks the argument leaves that are weakly typed, as Python
    numbers are, in the first step, ``weak_later`` those in later steps.
    """

    tree: Any
    feedback: tuple[int | None, ...]
    weak: Sequence[bool]
    weak_later: Sequence[bool]
    steps: int

    def put(self, leaf: int, x: Any, where: Any, *, later: bool = False) -> Any:
        """A leaf on a device or in a sharding, weakly typed where it is so in the step."""
        placed = jax.device_put(as_array(x), where)
        return _jax.weakly_typed(placed) if (self.weak_later if later else self.weak)[leaf] else placed


def loop_of(traced: Traced, tree: Any, steps: int) -> StateFeedback:
    """The state feedback of a traced step."""
    weak = [shape.weak_type for shape in traced.in_shapes]
    later = weak.copy()
    for shape, i in zip(traced.out_shapes, traced.program.feedback, strict=True):
        if i is not None:
            later[i] = shape.weak_type
    return StateFeedback(tree, traced.program.feedback, weak, later, steps)


class Single:
    """The step as it is, compiled for one device; ``recompiles`` counts compilations after the latest run's first step."""

    def __init__(self, run: Callable[..., Any], device: Any, loop: StateFeedback) -> None:
        self._run, self.device, self._loop = run, device, loop
        self.recompiles = 0

    def run(self, host: Sequence[Any], seed: int = 0) -> list[list[np.ndarray]]:
        """The results after each step of the loop, on one device."""
        flat = self.arguments(host)
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
        """The results of one step on one device: the first, or, with ``later``, a later one."""
        flat = self.arguments(host, later=later)
        return [as_numbers(x) for x in jax.tree.leaves(self._step(seed, *jax.tree.unflatten(self._loop.tree, flat)))]

    def again(self, step: int, start: Sequence[Any], seed: int) -> list[np.ndarray]:
        """The results of the step of this number, counted from zero, on other arguments."""
        return self.once(start, seed, later=step > 0)

    def lowered(self, host: Sequence[Any]) -> Any:
        """The step lowered for its arguments."""
        return self._run.lower(*jax.tree.unflatten(self._loop.tree, self.arguments(host)))

    def arguments(self, host: Sequence[Any], *, later: bool = False) -> list[Any]:
        """The leaves of the arguments on the device."""
        return [self._loop.put(i, x, self.device, later=later) for i, x in enumerate(host)]

    def lines(self, host: Sequence[Any], *, later: bool = False) -> Lines:
        """The step's ops."""
        closed = self._run.trace(*jax.tree.unflatten(self._loop.tree, self.arguments(host, later=later))).jaxpr
        return laid_open(closed.jaxpr, closed.consts)

    def put(self, x: Any) -> Any:
        """A value from the host on the device, strongly typed."""
        return jax.device_put(as_array(x), self.device)

    def alone(self) -> AbstractContextManager[Any]:
        """While this lasts, ops without operands run on the device too."""
        return jax.default_device(self.device) if isinstance(self.device, jax.Device) else nullcontext()

    def peak_bytes(self, shapes: Sequence[Any]) -> int:
        """The most bytes that the step holds on a device, as compiled for arguments of these types."""
        on = self.device if isinstance(self.device, jax.sharding.Sharding) else SingleDeviceSharding(self.device)
        flat = [jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type, sharding=on) for x in shapes]
        return peak_bytes(self._run.lower(*jax.tree.unflatten(self._loop.tree, flat)).compile())

    def _step(self, seed: int, *args: Any) -> Any:
        """The results of one step; only `Perturbed` uses ``seed``."""
        return self._run(*args)


class Perturbed(Single):
    """The step with the narrow copies of its arguments perturbed, compiled once for all seeds."""

    def __init__(self, step: Callable[..., Any], device: Any, loop: StateFeedback) -> None:
        super().__init__(jax.jit(lambda seed, *args: narrowed(step, seed)(*args)), device, loop)

    def _step(self, seed: int, *args: Any) -> Any:
        return self._run(np.uint32(seed), *args)


class Sharded:
    """The step ``jitted`` under a plan.

    Three fields describe the latest run: ``recompiles`` counts compilations after the first step, ``moved`` lists the results
    that came back in another sharding, and ``states`` has the arguments of each step but the first, on the host.
    """

    def __init__(self, plan: Runnable, jitted: Any, devices: Sequence[Any] | None, loop: StateFeedback) -> None:
        self.jitted, self._loop, self._paths = jitted, loop, plan.traced.program.output_paths
        self._shardings = jax.tree.leaves(plan.in_shardings(plan.mesh(devices)))
        self._donated = set(plan.donated_leaves)
        self.recompiles = 0
        self.moved: list[str] = []
        self.states: list[list[Any]] = []

    def put(self, host: Sequence[Any]) -> list[Any]:
        """The arguments in the shardings of the plan."""
        return [self._loop.put(i, x, self._shardings[i]) for i, x in enumerate(host)]

    def arguments(self, host: Sequence[Any]) -> Any:
        """The arguments in the shardings of the plan, in the step's tree."""
        return jax.tree.unflatten(self._loop.tree, self.put(host))

    def run(self, host: Sequence[Any]) -> list[list[np.ndarray]]:
        """The results after each step of the loop, sharded."""
        flat = self.put(host)
        self.recompiles, self.moved, self.states = 0, [], []
        after: list[list[np.ndarray]] = []
        fed = {i for i in self._loop.feedback if i is not None}
        for n in range(self._loop.steps):
            before = _jax.programs_compiled()
            outs = jax.tree.leaves(self.jitted.run(flat, self._loop.tree)[0])
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
        return self.jitted.lower(*self.arguments(host))


def alone(plan: Runnable, step: Callable[..., Any], devices: Sequence[Any] | None, loop: StateFeedback) -> tuple[Single, Single]:
    """(the step as it is, the step perturbed) on the first of these devices.

    A step that names axes of a mesh cannot run on one device: it runs by `jax.jit` on all of them, with its arguments whole.
    """
    first = devices[0] if devices is not None else plan.mesh().devices.flat[0]
    pure, program = Pure(step, plan.donate_argnums), plan.traced.program
    if program.meshed:
        first = NamedSharding(plan.mesh(devices), PartitionSpec())
    one = Single(jax.jit(pure, out_shardings=None if isinstance(first, jax.Device) else first), first, loop)
    return one, Perturbed(pure, first, loop) if narrows(program) else one


class Noise:
    """The changes that perturbations of ``starts`` cause in the ``single`` results after each step. They are drawn on demand:
    more before a leaf counts as unequal. ``again`` gives the results of a step on nudged arguments, for a seed. With
    ``integers``, integers that change are not compared.
    """

    def __init__(
        self,
        again: Callable[[int, Sequence[Any], int], Sequence[np.ndarray]],
        starts: Sequence[Sequence[Any]],
        single: Sequence[Sequence[np.ndarray]],
        tell: Callable[[str, float], None] = lambda _what, _part: None,
        *,
        integers: bool = False,
        at_once: int = PERTURBATIONS,
    ) -> None:
        self._again, self.starts, self.single, self._tell, self._integers = again, starts, single, tell, integers
        self._changes = [[Sensitivity()] * len(leaves) for leaves in single]
        self._drawn, self._at_once = 0, at_once

    def judged(
        self, paths: Sequence[str], wanted: Sequence[Sequence[np.ndarray]], results: Sequence[Sequence[np.ndarray]]
    ) -> Judged:
        """Judges the results after each step by these changes."""
        while True:
            if self._drawn:
                judged = judge(paths, wanted, results, self._changes)
                if not judged.unequal or self._drawn >= MOST_PERTURBATIONS:
                    return judged
            for _ in range(self._at_once):
                self._draw()

    def _draw(self) -> None:
        self._tell("perturbed steps", 0.6 + 0.25 * self._drawn / MOST_PERTURBATIONS)
        for step, (start, single) in enumerate(zip(self.starts, self.single, strict=True)):
            after = self._again(step, nudged(start, self._drawn), self._drawn)
            changes = zip(self._changes[step], single, after, strict=True)
            self._changes[step] = [c.with_run(a, b, integers=self._integers) for c, a, b in changes]
        self._drawn += 1


def peak_bytes(compiled: Any) -> int:
    """The most bytes that a compiled program holds on one device."""
    held = compiled.memory_analysis()
    return int(held.argument_size_in_bytes + held.output_size_in_bytes - held.alias_size_in_bytes + held.temp_size_in_bytes)
