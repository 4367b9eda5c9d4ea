"""`shardplan.place`: where the operators of a step run, and when."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from shardplan.errors import PlacementError
from shardplan.frontend.argnums import positions
from shardplan.frontend.keywords import as_positional
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph import flatten
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.placement.configurations import Strategy
from shardplan.placement.device_groups import Region, used_groups
from shardplan.placement.device_topology import DeviceTopology, machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.held_bytes import Memory, check_memory
from shardplan.placement.mcmc import ChainLimits, Observer
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.region_search import region_search
from shardplan.placement.search import STARTS, BestStrategy, check_limits, check_names, search, starts_of
from shardplan.placement.simulation import Simulation
from shardplan.placement.starts import data_parallel, expert, from_plan
from shardplan.placement.strategy_files import fingerprint, read_strategy_file, strategy_json
from shardplan.placement.whole_operators import SCHEDULERS, scheduled
from shardplan.plans.files import write_whole
from shardplan.regions.assignment import Assignment
from shardplan.report.placement_text import placement_text
from shardplan.report.placement_timeline import PlacementTimeline, placement_timeline
from shardplan.search.inference import anytime
from shardplan.shell.api import checked_observer, plan, warn_of_graph
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.memory_default import memory_limit as read_limit
from shardplan.shell.placements import assignment_of

_log = logging.getLogger("shardplan")

_NO_LIMIT = 1 << 60
"""Bytes that no device has: strategies are searched without a memory limit, so the plan is too."""


@dataclass(frozen=True)
class Placement:
    """Where operators run. Made by `shardplan.place`.

    ``strategy`` has a configuration for each operator of ``problem``. ``data_parallel_s``, ``expert_s`` and ``plan_s`` are the
    seconds of a step under data parallelism, the experts' strategy and the plan on all devices (None: not asked for), all
    simulated the same way. ``plan_priced_s`` is the step time of that plan as the planner prices it. ``schedule_s`` is the step
    time of the schedule that "fd-dps" or "heft" made, even if a faster start is the answer. ``origin`` says what found the
    strategy. ``simulations_per_s`` counts the proposals that one core decides. ``regions`` are those that the method "regions"
    made: connected operators on one group of devices. ``replicate`` are the primitives that may run whole on every device.
    """

    problem: PlacementProblem
    strategy: Strategy
    step_time_s: float
    data_parallel_s: float
    expert_s: float
    plan_s: float | None
    origin: str
    proposals: int
    simulations_per_s: float
    regions: tuple[Region, ...] = ()
    plan_priced_s: float | None = None
    schedule_s: float | None = None
    interrupted: bool = False
    replicate: tuple[str, ...] = ()

    def __repr__(self) -> str:
        count = len(self.strategy)
        return f"<Placement of {count} operators on {self.problem.machine.cluster.name}: {self.step_time_s:.3g} s a step>"

    @property
    def assignment(self) -> dict[str, tuple[int, ...]]:
        """The devices of each operator's parts, by its name."""
        return {name: c.devices for name, c in zip(self.problem.graph.names, self.strategy, strict=True)}

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each operator, ascending: those of its region, else those of its parts."""
        found = list(used_groups(self.strategy))
        for region in self.regions:
            for i in region.operators:
                found[i] = region.devices
        return tuple(found)

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """The group of devices of each op of a traced step, as `shardplan.plan` needs it.

        Raises:
            PlacementError: for another step, other shapes, or another cluster.
        """
        own = self.problem.machine.cluster
        if own.fingerprint() != cluster.fingerprint():
            raise PlacementError(f"the placement is for {own.name}, not for {cluster.name}: place the step there")
        graph = operator_graph(flatten(program, replicate=self.replicate), program)
        if fingerprint(graph) != fingerprint(self.problem.graph):
            raise PlacementError("the placement is for another step, or for other shapes: place this step")
        return assignment_of(program, graph, self.groups)

    @cached_property
    def _simulation(self) -> Simulation:
        simulation = self.problem.simulation()
        simulation.full(self.strategy)
        return simulation

    @cached_property
    def timeline(self) -> PlacementTimeline:
        """When each task runs, with a row for each device and connection; it can be saved and drawn."""
        return placement_timeline(self._simulation)

    @cached_property
    def gains(self) -> tuple[float | None, ...]:
        """For each operator, the extra seconds of a step if it alone ran data parallel (None: it already does)."""
        simulation, gains = self._simulation, list[float | None]()
        for i, (own, other) in enumerate(zip(self.strategy, data_parallel(self.problem), strict=True)):
            if own == other:
                gains.append(None)
                continue
            simulation.change({i: other})
            gains.append(simulation.seconds - self.step_time_s)
            simulation.undo()
        return tuple(gains)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the strategy as JSON: degrees and devices of each operator. `place` takes the file as a start.

        Raises:
            ShardplanError: if the file cannot be written.
        """
        write_whole(Path(file), json.dumps(strategy_json(self.problem, self.strategy, self.step_time_s), indent=1) + "\n")

    @cached_property
    def held_bytes(self) -> tuple[int, ...]:
        """The bytes that each device holds, as `shardplan.placement.held_bytes` counts them."""
        return tuple(Memory(self.problem, self.strategy).bytes.tolist())

    @property
    def json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        names = self.problem.graph.names
        return {
            "step_time_s": self.step_time_s,
            "data_parallel_s": self.data_parallel_s,
            "expert_s": self.expert_s,
            "plan_s": self.plan_s,
            "plan_priced_s": self.plan_priced_s,
            "schedule_s": self.schedule_s,
            "assignment": {name: list(devices) for name, devices in self.assignment.items()},
            "held_bytes": list(self.held_bytes),
            "proposals": self.proposals,
            "simulations_per_s": self.simulations_per_s,
            "origin": self.origin,
            "interrupted": self.interrupted,
            "regions": [
                {"devices": list(r.devices), "operators": [names[i] for i in r.operators], "seconds": r.seconds}
                for r in self.regions
            ],
            "degrees": {name: list(c.degrees) for name, c in zip(names, self.strategy, strict=True)},
            "data_parallel_more_s": dict(zip(names, self.gains, strict=True)),
        }

    @property
    def _effort(self) -> str:
        if not self.proposals:
            return "no proposals"
        text = f"{self.proposals:,} proposals, {self.simulations_per_s:,.0f} a second and core"
        return f"{text}; interrupted: this is the best so far" if self.interrupted else text

    def text(self, title: str = "the step") -> str:
        """A report for people: the step beside its baselines, and where each operator runs."""
        known = {
            "data parallel": self.data_parallel_s,
            "expert": self.expert_s,
            "the plan on all devices": self.plan_s,
            "scheduled whole operators": self.schedule_s,
        }
        return placement_text(
            self.step_time_s,
            {name: s for name, s in known.items() if s is not None},
            self.problem.graph.operators,
            self.strategy,
            self.gains,
            regions=self.regions,
            plan_priced_s=self.plan_priced_s,
            speeds={d: float(self.problem.machine.speed[d]) for d in self.problem.machine.present},
            title=title,
            origin=self.origin,
            searched=self._effort,
        )


def place(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    budget_s: float = 60,
    chains: int | None = None,
    seed: int = 0,
    start: str | Sequence[str] = STARTS,
    method: str = "mcmc",
    speed: Sequence[float] | None = None,
    proposals: int | None = None,
    memory_limit: int | float | str | None = None,
    donate_argnums: Sequence[int] | int = (),
    replicate: Sequence[str] = (),
    observer: anytime.Observer | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Placement:
    """Searches for the devices and the cut of each operator of ``step(*args)`` (FlexFlow).

    Args:
        step: The function to place.
        args: Its arguments: trees of arrays or `jax.ShapeDtypeStruct`. Nothing is allocated.
        cluster: As in `shardplan.plan`. Single devices may differ in speed and links. They may be absent too; then "plan" is no
            start.
        budget_s: Seconds for the search itself; each chain may end earlier by the paper's rule (section 6.2).
        chains: The number of chains, which begin at the starts in turn; by default one for each start.
        seed: Equal seeds draw equal proposals. How many fit in the budget depends on the machine; ``proposals`` limits them.
        start: Some of "dp" (data parallel), "expert", "random", "plan" (`shardplan.plan`), and files that `Placement.save` wrote.
        method: "mcmc"; "regions" for connected operators on one group of devices, planned inside; or "fd-dps" or "heft", which
            schedule whole operators on single devices (then a faster start is the answer in their place).
        speed: A factor on the speed of each device of the cluster. Parts are equal, so a slower device takes longer.
        proposals: The most proposals of each chain.
        memory_limit: Bytes per device, or "auto", as in `shardplan.plan`; by default all of the device's memory. A single device
            with less memory than the others keeps its own limit.
        donate_argnums, replicate: As in `shardplan.plan`. A plan with this placement takes the same ones.
        observer: Called with the current activity and the fraction done.
        kwargs: The arguments that the step takes by name alone.

    Raises:
        PlacementMemoryError: if no start fits in the memory of the devices.
        PlacementError: for a budget, start, method or speed that cannot be used, or a file of another step or cluster.
        UndescribedPrimitiveError: for a primitive without a description.
    """
    names, files = _named(start)
    check_limits(budget_s, chains=chains, proposals=proposals, seed=seed)
    if method not in ("mcmc", "regions", *SCHEDULERS):
        raise PlacementError(f"the method {method!r} does not exist: use mcmc, regions, fd-dps or heft")
    tell = checked_observer(observer)
    donated = positions(donate_argnums, len(args), "donate_argnums")
    resolved, _ = resolve_cluster(cluster, unequal=True)
    machine = _within(machine_of(resolved, speed), memory_limit)
    positional, values = as_positional(step, args, kwargs)
    tell("tracing", 0.0)
    program = trace_step(positional, values, donated).program
    graph = flatten(program, replicate=replicate)
    problem = problem_of(operator_graph(graph, program), machine)
    if method == "regions" and problem.machine.absent:
        raise PlacementError("method 'regions' makes groups of all devices, and some are absent here: use mcmc, fd-dps or heft")
    known = {file: read_strategy_file(file, problem) for file in files}
    if problem.machine.absent and "plan" in names:
        names = _without_plan(names, files)
    if "plan" not in names:
        warn_of_graph(graph, resolved.device)  # planning warns by itself
    options = {"donate_argnums": donate_argnums, "replicate": replicate, "kwargs": kwargs}
    planned, priced_s = _planned(problem, step, args, resolved, options, tell) if "plan" in names else (None, None)
    tell("simulating the starts", 0.0)
    starts, limits = known | starts_of(problem, names, seed, planned), ChainLimits(budget_s, proposals)
    found, regions = _searched(problem, method, starts, limits, chains, seed, _heard(tell, method))
    return replace(_placement(problem, method, found, regions, priced_s), replicate=tuple(replicate))


def _within(machine: DeviceTopology, limit: int | float | str | None) -> DeviceTopology:
    """The machine in which no device holds more than a limit; None: as much as its memory."""
    if limit is None:
        return machine
    device = machine.cluster.device
    sizes = {
        int(n): read_limit(limit, replace(device, memory_bytes=int(n)), os.environ).nbytes for n in set(machine.memory_bytes)
    }
    least = [min(sizes[n], n) if n < device.memory_bytes else sizes[n] for n in machine.memory_bytes.tolist()]
    return replace(machine, memory_bytes=np.array(least))


def _placement(
    problem: PlacementProblem, method: str, found: BestStrategy, regions: tuple[Region, ...], priced_s: float | None
) -> Placement:
    """The strategy that was found, beside data parallelism and the experts' strategy."""
    return Placement(
        problem,
        found.strategy,
        found.seconds,
        problem.seconds(data_parallel(problem)),
        problem.seconds(expert(problem)),
        found.starts.get("plan"),
        found.origin,
        found.proposals,
        found.simulations_per_s,
        regions,
        priced_s,
        found.starts.get(method),
        found.interrupted,
    )


def _heard(tell: anytime.Observer, method: str) -> Observer:
    """An observer of a search for a strategy, for which no lower bound is known."""
    best = anytime.best_of(tell)

    def hear(seconds: float, done: float) -> None:
        best(seconds, 0.0)
        tell(f"searching by {method}", done)

    return hear


def _searched(
    problem: PlacementProblem,
    method: str,
    starts: Mapping[str, Strategy],
    limits: ChainLimits,
    chains: int | None,
    seed: int,
    observer: Observer,
) -> tuple[BestStrategy, tuple[Region, ...]]:
    """The best strategy that a method finds, and its regions, if it makes any."""
    if method in SCHEDULERS:
        return _best({method: scheduled(problem, method), **starts}, problem), ()
    if method == "regions":
        return region_search(problem, starts, limits, chains=chains, seed=seed, observer=observer)
    return search(problem, starts, limits, chains=chains, seed=seed, observer=observer), ()


def _best(strategies: Mapping[str, Strategy], problem: PlacementProblem) -> BestStrategy:
    """The best of some strategies, without a search."""
    for name, strategy in strategies.items():
        problem.check(strategy, f"the strategy {name!r}")
    seconds = {name: problem.seconds(strategy) for name, strategy in strategies.items()}
    name = min(check_memory(problem, strategies), key=lambda s: seconds[s])
    return BestStrategy(strategies[name], seconds[name], name, seconds, ())


def _planned(
    problem: PlacementProblem,
    step: Callable[..., Any],
    args: Sequence[Any],
    cluster: Cluster,
    options: Mapping[str, Any],
    tell: anytime.Observer,
) -> tuple[Strategy, float]:
    """(the plan on all devices, taken as equal, as a strategy; the step time that the planner prices)."""
    cluster = replace(cluster, single_devices=(), single_links=())
    observer = anytime.Part(tell, 0.0, 1.0, "the plan on all devices")
    made = plan(step, *args, cluster=cluster, memory_limit=_NO_LIMIT, observer=observer, **options)
    if made.stopped == "interrupted":  # a search from an interrupted plan would go on against the user's wish
        raise KeyboardInterrupt
    return from_plan(problem, made._data.choices, made.factors), made.step_time_s


def _named(start: str | Sequence[str]) -> tuple[list[str], list[str]]:
    """The named starts, and the files: entries that exist as files or end in .json."""
    if not isinstance(start, Iterable):
        raise PlacementError(f"start={start!r} is no start: use some of {', '.join(STARTS)}, or files of strategies")
    given = [start] if isinstance(start, str) else [str(name) for name in start]
    files = [name for name in given if name not in STARTS and (name.endswith(".json") or Path(name).is_file())]
    names = [name for name in given if name not in files]
    check_names(names, files)
    return names, files


def _without_plan(names: Sequence[str], files: Sequence[str]) -> list[str]:
    """The starts that a cluster with absent devices allows."""
    if not files and set(names) == {"plan"}:
        raise PlacementError("the start 'plan' uses all devices, and some are absent here: use some of dp, expert, random")
    _log.warning("the start 'plan' is left out: it uses all devices, and some are absent here")
    return [name for name in names if name != "plan"]
