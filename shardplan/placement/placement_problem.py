"""The input of a search of strategies: operators, devices and seconds. It holds no traced step: chains can run elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import TICK_S, DeviceTopology
from shardplan.placement.operators import OperatorGraph, OpWork
from shardplan.placement.prices import PartPrices
from shardplan.placement.simulation import Engine, Simulation
from shardplan.placement.task_graph import Table


@dataclass(frozen=True, slots=True)
class PlacementProblem:
    """A graph of operators on a machine. ``tables[i]`` has the ticks of the parts of operator i, by degrees."""

    graph: OperatorGraph
    machine: DeviceTopology
    tables: tuple[Table, ...]

    def simulation(self, engine: Engine = "auto") -> Simulation:
        """A simulation that has no strategy yet."""
        return Simulation(self.graph, self.machine, self.tables, engine)

    def seconds(self, strategy: Sequence[Configuration], engine: Engine = "auto") -> float:
        """The seconds of a step under a strategy, by a full simulation."""
        simulation = self.simulation(engine)
        simulation.full(strategy)
        return simulation.seconds

    def bare(self) -> PlacementProblem:
        """The problem without the ops inside of operators, which a search does not read."""
        operators = tuple(
            replace(o, works=tuple((_NOTHING,) if works else () for works in o.works)) for o in self.graph.operators
        )
        return replace(self, graph=replace(self.graph, operators=operators))

    def check(self, strategy: Sequence[Configuration], what: str) -> None:
        """Refuses a strategy that does not fit the operators or the devices.

        Raises:
            PlacementError: naming the operator.
        """
        if len(strategy) != len(self.graph.operators):
            raise PlacementError(f"{what} has {len(strategy)} operators, the step has {len(self.graph.operators)}")
        for operator, table, chosen in zip(self.graph.operators, self.tables, strategy, strict=True):
            if chosen.degrees not in table:
                raise PlacementError(
                    f"{what} cuts {operator.name} into {chosen.degrees} parts, which its loops "
                    f"{tuple(loop.extent for loop in operator.loops)} or the {self.machine.count} devices do not allow"
                )
            if not all(0 <= d < self.machine.count for d in chosen.devices):
                raise PlacementError(f"{what} places {operator.name} on {chosen.devices}: there are {self.machine.count} devices")
            if not self.machine.absent.isdisjoint(chosen.devices):
                raise PlacementError(f"{what} places {operator.name} on {chosen.devices}, of which some are absent: search again")


_NOTHING = OpWork(None, 0.0, (), ())  # type: ignore[arg-type]


def problem_of(graph: OperatorGraph, machine: DeviceTopology) -> PlacementProblem:
    """The problem of placing these operators; prices every way to cut each of them.

    Raises:
        PlacementError: if a device or a connection is so slow that the simulator cannot count the time of a step.
    """
    _refuse_slow_links(graph, machine)
    prices = PartPrices(machine)
    problem = PlacementProblem(graph, machine, tuple(prices.table(o) for o in graph.operators))
    _refuse_slow_devices(problem)
    return problem


def _refuse_slow_links(graph: OperatorGraph, machine: DeviceTopology) -> None:
    """Every tensor, there and back over the slowest connection, must take fewer ticks than `LARGEST_TICKS`."""
    nbytes = 2 * sum(math.prod(x.shape) * x.itemsize for x in (*graph.edges, *graph.weights))
    least = float(machine.bytes_per_s.min())
    if nbytes / TICK_S > LARGEST_TICKS * least:
        raise PlacementError(
            f"a connection of {machine.cluster.name} has {least:g} bytes per second, so few that the time of a step cannot be "
            "counted: correct its bandwidth_bytes_per_s"
        )


def _refuse_slow_devices(problem: PlacementProblem) -> None:
    """Every operator, whole on the slowest device, must take fewer ticks than `LARGEST_TICKS`."""
    machine = problem.machine
    work = sum(max(sum(row) for row in table.values()) for table in problem.tables)
    slowest = min(machine.present, key=lambda d: machine.speed[d])
    if work > LARGEST_TICKS * machine.speed[slowest]:
        raise PlacementError(
            f"device {slowest} has the speed {machine.speed[slowest]:g}, so slow that the time of a step cannot be counted: "
            "correct its speed, or leave the device out (absent = true in [[single_devices]])"
        )


LARGEST_TICKS = 1 << 60
"""Twelve days. Sums of several times fit in 64 bits."""
