"""What a search of strategies needs: operators, devices and seconds. It holds no traced step: chains can run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Configuration
from shardplan.placement.device_topology import DeviceTopology
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
    """The problem of placing these operators; prices every way to cut each of them."""
    prices = PartPrices(machine)
    return PlacementProblem(graph, machine, tuple(prices.table(o) for o in graph.operators))
