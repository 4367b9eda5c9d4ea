"""Parallelism matrices ranked by the time of the requested reductions (P2, sections 3.1 and 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..cost.network import Algorithm, Network
from ..errors import ClusterError
from ..ir import Collective
from ..mesh.cluster import Cluster
from ..mesh.matrix import Matrix, matrices
from .dsl import Reduction
from .ranking import table


@dataclass(frozen=True, slots=True)
class Request:
    """A reduction of ``nbytes`` per device over some axes (by number), with its weight: how often or how much it counts."""

    over: tuple[int, ...]
    nbytes: float
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("nbytes", self.nbytes), ("weight", self.weight)):
            if not isinstance(value, int | float) or not math.isfinite(value) or value < 0:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ClusterError(
                    f"{name} of a reduction over {self.over} has to be a finite number of at least 0, got {value!r}"
                )


@dataclass(frozen=True, slots=True)
class RankedMatrix:
    """A matrix with the weighted sums of its requests' seconds: by one AllReduce each, and by the best program of each."""

    matrix: Matrix
    all_reduce_s: float
    best_s: float
    best: tuple[Reduction, ...]


def place(
    cluster: Cluster, matrix: Matrix, requests: Sequence[Request], *, algorithm: Algorithm = "auto", max_size: int = 5
) -> RankedMatrix:
    """The seconds and best programs of the requests with axes placed by ``matrix``."""
    factors, axes = matrix.factors(cluster)
    network = Network(cluster, factors)
    flat = best = 0.0
    programs: list[Reduction] = []
    for request in requests:
        check_over(request.over, len(axes))
        over = tuple(i for axis in request.over for i in axes[axis])
        seconds, program = table(network, over, algorithm=algorithm, max_size=max_size).best(request.nbytes)
        flat += request.weight * float(network.seconds(Collective.ALL_REDUCE, over, request.nbytes, algorithm=algorithm))
        best += request.weight * seconds
        programs.append(program)
    return RankedMatrix(matrix, flat, best, tuple(programs))


def check_over(over: Sequence[int], axes: int) -> None:
    """Refuse axes to reduce over that do not exist or are named twice, and an empty selection."""
    for axis in over:
        if not 0 <= axis < axes:
            raise ClusterError(f"no axis {axis} to reduce over: there are {axes}, counted from 0")
        if list(over).count(axis) > 1:
            raise ClusterError(
                f"axis {axis} is named twice among the axes to reduce over, {' '.join(map(str, over))}: once is enough"
            )
    if not over:
        raise ClusterError(f"no axis to reduce over is named: there are {axes}, counted from 0")


def rank_matrices(
    cluster: Cluster, axes: Sequence[int], requests: Sequence[Request], *, algorithm: Algorithm = "auto", max_size: int = 5
) -> tuple[RankedMatrix, ...]:
    """Every matrix of these axes, best first: by seconds of its best programs, then of its all-reduces, then by its text.

    Raises `ClusterError` if there is no request to rank by.
    """
    if not requests:
        raise ClusterError("no reduction is given to rank matrices by: give Requests, or list them with matrices()")
    placed = [place(cluster, m, requests, algorithm=algorithm, max_size=max_size) for m in matrices(cluster.shape, axes)]
    return tuple(sorted(placed, key=lambda p: (p.best_s, p.all_reduce_s, str(p.matrix))))
