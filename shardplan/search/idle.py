"""Factors that divide no dim of any argument, such as a prime number of devices: what is kept is whole over them."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.ir import Tensor
from shardplan.search.problem import Problem


@dataclass(frozen=True, slots=True)
class Idle:
    """A factor over which no argument can be split.

    ``path`` and ``shape`` are the largest argument; ``counts`` the sizes of the level next to ``level_size``, below and above,
    that divide one of its dims.
    """

    name: str
    size: int
    level: str
    level_size: int
    path: str
    shape: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def text(self) -> str:
        """What it means, and what to do."""
        of = "" if self.size == self.level_size else f" (a part of {self.level}={self.level_size})"
        other = f"; {' or '.join(map(str, self.counts))} in place of {self.level_size} divide it" if self.counts else ""
        return (
            f"no dim of any argument divides by {self.name}={self.size}{of}: each is whole on all devices along it, and ops "
            f"are cut only where a padded copy pays. The largest is {self.path} {list(self.shape)}{other}, or pad a dim of it "
            f"to a multiple of {self.size}"
        )


def idle(problem: Problem) -> tuple[Idle, ...]:
    """The idle factors of a problem; none where there are no arrays to split."""
    graph = problem.graph
    arrays = [(graph.tensors[t], path) for t, path in zip(graph.inputs, graph.input_paths, strict=True)]
    arrays = [(tensor, path) for tensor, path in arrays if tensor.size > 1]
    if not arrays:
        return ()
    largest, path = max(arrays, key=lambda row: row[0].nbytes)
    found: list[Idle] = []
    for factor in problem.factors:
        if not any(_divides(factor.size, tensor) for tensor, _ in arrays):
            level = problem.cluster.levels[factor.level]
            found.append(Idle(factor.name, factor.size, level.name, level.size, path, largest.shape, _near(level.size, largest)))
    return tuple(found)


def _divides(count: int, tensor: Tensor) -> bool:
    return any(n % count == 0 for n in tensor.shape)


def _near(count: int, tensor: Tensor) -> tuple[int, ...]:
    """The next count below and the next above (up to twice as many) that divide a dim."""
    below = next((k for k in range(count - 1, 1, -1) if _divides(k, tensor)), None)
    above = next((k for k in range(count + 1, 2 * count + 1) if _divides(k, tensor)), None)
    return tuple(k for k in (below, above) if k is not None)
