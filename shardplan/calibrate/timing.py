"""Seconds of functions that run on all devices of a mesh at once, repeated inside one program and interleaved with one another.

The compiled program of a function executes it in a loop, so many times that a run takes `TARGET_S`. The programs run in rounds,
one run of each per round, so that a disturbance affects all of them alike. The seconds of a function are the median over the
rounds, less those of an empty program; its spread is the distance between the quartiles over the median.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.calibrate.measured_kernels import KernelArgument

TARGET_S = 0.02
"""The seconds of one run: a hundred times what it costs to start a program on eight simulated devices."""
_MOST_TIMES = 1 << 16
_OPTIONS = {
    # every iteration of the timed loop does the same: these passes would do it once, before the loop
    "xla_disable_hlo_passes": "while-loop-invariant-code-motion,while-loop-expensive-invariant-code-motion,"
    "while-loop-all-reduce-code-motion"
}


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of one execution on every device, and the spread of the rounds (distance of the quartiles over the median)."""

    seconds: float
    spread: float


@dataclass(frozen=True, slots=True)
class TimedFunction:
    """A function of local arrays, for use inside a `shard_map` over the whole mesh, and its arguments on one device."""

    function: Callable[..., Any]
    arguments: tuple[KernelArgument, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class _Program:
    """A compiled program that executes a task ``times`` times, with its placed arguments."""

    run: Callable[..., Any]
    placed: tuple[Any, ...]
    times: int

    def seconds(self) -> float:
        """The seconds of one run."""
        began = time.perf_counter()
        jax.block_until_ready(self.run(*self.placed))
        return time.perf_counter() - began


def timed(tasks: Sequence[TimedFunction], mesh: Mesh, *, rounds: int, done: Callable[[float], None]) -> list[Timed]:
    """Seconds of one execution of each task, by ``rounds`` interleaved runs; ``done`` is told the fraction of the work done."""
    empty = _prepared(TimedFunction(lambda x: x + 1, (KernelArgument((8,), "float32"),)), mesh, 0.0)
    overhead_s = min(empty.seconds() for _ in range(5))
    programs: list[_Program] = []
    for number, task in enumerate(tasks):
        programs.append(_prepared(task, mesh, overhead_s))
        done(0.5 * (number + 1) / len(tasks))
    runs: list[list[float]] = [[] for _ in programs]
    empties: list[float] = []
    for number in range(rounds):
        empties.append(empty.seconds())
        for program, seconds in zip(programs, runs, strict=True):
            seconds.append(program.seconds())
        done(0.5 + 0.5 * (number + 1) / rounds)
    started_s = statistics.median(empties)
    return [timed_of(per_execution(seconds, started_s, p.times)) for p, seconds in zip(programs, runs, strict=True)]


def per_execution(seconds: Sequence[float], started_s: float, times: int) -> list[float]:
    """The seconds of one execution, from the seconds of runs of a program with ``times`` executions, less those of an empty
    program.

    A hundredth of a run always counts, as noise may make an empty run the longer one.

    >>> per_execution([5.0, 9.0], 1.0, 4), per_execution([1.0], 2.0, 1)
    ([1.0, 2.0], [0.01])
    """
    return [max(s - started_s, 0.01 * s) / times for s in seconds]


def timed_of(seconds: Sequence[float]) -> Timed:
    """The median of measured seconds, and their spread: the distance between the quartiles over the median."""
    low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75))
    return Timed(float(middle), float((high - low) / middle))


def _prepared(task: TimedFunction, mesh: Mesh, overhead_s: float) -> _Program:
    """The task's program, with as many executions as take `TARGET_S`; an empty overhead asks for one."""
    arguments, times = placed(task, mesh), 1
    while True:
        program = _Program(compiled(task, mesh, arguments, times), arguments, times)
        program.seconds()  # the first run allocates
        seconds = min(program.seconds() for _ in range(2))
        if not overhead_s or seconds >= TARGET_S / 2 or times >= _MOST_TIMES:
            return program
        known = seconds > 3 * overhead_s
        wanted = TARGET_S / ((seconds - overhead_s) / times) if known else times * 32
        times = max(times + 1, min(int(wanted), _MOST_TIMES))


def placed(task: TimedFunction, mesh: Mesh) -> tuple[Any, ...]:
    """The arguments of a task, the same on every device, stacked along a leading dim."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    result: list[Any] = []
    for seed, argument in enumerate(task.arguments):
        one = argument.values(seed)
        whole = (mesh.size, *one.shape)
        with _wide(task):
            result.append(jax.make_array_from_callback(whole, sharding, lambda _, one=one: one[None]))
    return tuple(result)


def compiled(task: TimedFunction, mesh: Mesh, arguments: Sequence[Any], times: int) -> Any:
    """The program that executes a task ``times`` times on placed arguments, and returns every device's last result."""
    spec = PartitionSpec(mesh.axis_names)

    def local(*blocks: Any) -> Any:
        """One device's executions, on blocks with a leading dim of 1."""
        own = [block[0] for block in blocks]
        if times == 1:
            made = task.function(*own)
        else:
            shapes = jax.eval_shape(task.function, *own)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
            made = lax.fori_loop(0, times, lambda _, last: task.function(*own), zeros)
        return jax.tree.map(lambda x: x[None], made)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(arguments), out_specs=spec, check_vma=False)
    with _wide(task):
        return jax.jit(mapped).lower(*arguments).compile({**_OPTIONS, **dict(task.options)})


def _wide(task: TimedFunction) -> contextlib.AbstractContextManager[Any]:
    """JAX makes float64 arrays only where the user has asked for them: a task that has them asks."""
    return jax.enable_x64(True) if any(a.dtype == "float64" for a in task.arguments) else contextlib.nullcontext()


def spread_of(spreads: Mapping[str, float]) -> tuple[float, float, str]:
    """(median, largest, name of the largest) of the spreads of several tasks."""
    worst = max(spreads, key=lambda name: spreads[name])
    return statistics.median(spreads.values()), spreads[worst], worst
