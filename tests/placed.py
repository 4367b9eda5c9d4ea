"""Placements: each op of a step on a group of devices that a seed draws, or on one of two halves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.regions.assignment import Assignment, Group, on_devices


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """Draws up to ``most`` groups, which may overlap, and for each op of a step one of them; ops in a row often share it."""

    seed: int
    most: int = 4

    def groups(self, cluster: Cluster, draw: np.random.Generator) -> tuple[Group, ...]:
        """The groups that ops are drawn from."""
        found: list[Group] = []
        for _ in range(int(draw.integers(1, self.most + 1))):
            size = int(draw.integers(1, cluster.size + 1))
            if draw.random() < 0.6:  # most groups follow the levels
                size = int(draw.choice([n for n in range(1, cluster.size + 1) if cluster.size % n == 0]))
                first = size * int(draw.integers(0, cluster.size // size))
                found.append(tuple(range(first, first + size)))
            else:
                found.append(tuple(sorted(draw.choice(cluster.size, size, replace=False).tolist())))
        return tuple(dict.fromkeys(found))

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """A group for each op."""
        draw = np.random.default_rng(self.seed)
        groups = self.groups(cluster, draw)
        stays, at, devices = float(draw.choice([0.0, 0.7, 0.95])), 0, dict[int, Group]()
        for op in program.ops:
            at = at if draw.random() < stays else int(draw.integers(0, len(groups)))
            devices[op.id] = groups[at]
        return on_devices(program, devices)


class Halves:
    """The first half of the ops on the first devices, the rest on the last ones; ``shared`` devices belong to both."""

    def __init__(self, shared: int = 0) -> None:
        self.shared = shared

    def __repr__(self) -> str:
        return f"Halves({self.shared})"

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """Each op's group."""
        middle, half = len(program.ops) // 2, cluster.size // 2
        first, last = tuple(range(half + self.shared)), tuple(range(half - self.shared, cluster.size))
        return on_devices(program, {op.id: first if n < middle else last for n, op in enumerate(program.ops)})
