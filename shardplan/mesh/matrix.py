"""Parallelism matrices: how parallelism axes are laid on the levels of a cluster (P2, section 3.1).

Entry ``x[i][j]`` is how many ways axis ``i`` cuts level ``j``. The product of a column is the size of its level (the paper's
equation 1), and the product of a row the size of its axis (equation 2).

>>> [str(m) for m in matrices((2, 4), (4, 2))]
['1 4 / 2 1', '2 2 / 1 2']
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ClusterError
from ..ir import Factor
from .factoring import device_order
from .machine import Machine

_REMEDY = "`shardplan mesh matrices` lists those that fit"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows are axes, columns levels, slowest first.  # rows [axes, levels]"""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        hint = "write rows of whole numbers above 0, one entry a level, like ((1, 4), (4, 4))"
        for i, row in enumerate(self.rows):
            for entry in row:
                if not isinstance(entry, int) or isinstance(entry, bool) or entry < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise ClusterError(f"row {i} of a parallelism matrix holds {entry!r}: {hint}")
        lengths = [len(row) for row in self.rows]
        if len(set(lengths)) != 1 or not lengths[0]:
            wrong_shape = f"rows of {', '.join(map(str, lengths))} entries" if lengths else "no rows"
            raise ClusterError(f"a parallelism matrix has {wrong_shape}: {hint}")

    def __str__(self) -> str:
        return " / ".join(" ".join(map(str, row)) for row in self.rows)

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return tuple(math.prod(row) for row in self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the levels."""
        return tuple(math.prod(column) for column in zip(*self.rows, strict=True))

    def check(self, cluster: Machine, axes: Sequence[int] | None = None) -> None:
        """Refuse a matrix that does not fit a cluster (equation 1) or these axes (equation 2)."""
        for i, row in enumerate(self.rows):
            if len(row) != len(cluster.levels):
                have = f"{len(cluster.levels)} levels ({', '.join(cluster.level_names)})"
                raise ClusterError(
                    f"row {i} of the matrix {self} has {len(row)} entries, {cluster.name!r} has {have}: one entry each"
                )
        for level, column in zip(cluster.levels, zip(*self.rows, strict=True), strict=True):
            if math.prod(column) != level.size:
                product = f"{' * '.join(map(str, column))} = {math.prod(column)}"
                why = f"breaks equation 1: {product}, the level has {level.size}"
                raise ClusterError(f"column {level.name!r} of the matrix {self} {why}; {_REMEDY}")
        if axes is None:
            return
        if len(axes) != len(self.rows):
            raise ClusterError(f"the matrix {self} has {len(self.rows)} rows for {len(axes)} axes: one row each")
        for i, (row, size) in enumerate(zip(self.rows, axes, strict=True)):
            if math.prod(row) != size:
                product = " * ".join(map(str, row))
                why = f"breaks equation 2: {product} = {math.prod(row)}, the axis has {size}"
                raise ClusterError(f"row {i} of the matrix {self} {why}; {_REMEDY}")

    def factors(self, cluster: Machine) -> tuple[tuple[Factor, ...], tuple[tuple[int, ...], ...]]:
        """The entries above one as factors in device order, and for each axis the indices of its factors, slowest first.

        Within a level the factors are in the order of the axes, the first one major.
        """
        self.check(cluster)
        result: list[Factor] = []
        axes: list[list[int]] = [[] for _ in self.rows]
        for j, level in enumerate(cluster.levels):
            stride = level.size
            for i, row in enumerate(self.rows):
                stride //= row[j]
                if row[j] > 1:
                    axes[i].append(len(result))
                    result.append(Factor(level.name if row[j] == level.size else f"{level.name}{i}", row[j], j, stride))
        return tuple(result), tuple(tuple(axis) for axis in axes)

    def device_order(self, cluster: Machine) -> NDArray[np.int64]:
        """The cluster's device numbers, one array axis for each parallelism axis.

        >>> from shardplan.mesh import Cluster
        >>> Matrix(((1, 2), (2, 2))).device_order(Cluster.load("2x4")).tolist()
        [[0, 1, 4, 5], [2, 3, 6, 7]]
        """
        factors, axes = self.factors(cluster)
        return device_order(cluster, factors, axes)


def parse(text: str) -> Matrix:
    """The matrix of a text like ``1 4 / 4 4``: rows are axes, columns levels."""
    rows = [row.split() for row in text.strip().split("/")]
    if not all(entry.isdecimal() and int(entry) > 0 for row in rows for entry in row) or not all(rows):
        raise ClusterError(f"not a parallelism matrix: {text!r}; write rows of whole numbers above 0 like '1 4 / 4 4'")
    if len({len(row) for row in rows}) > 1:
        raise ClusterError(
            f"the rows of the matrix {text!r} have {', '.join(str(len(row)) for row in rows)} entries, not the same number"
        )
    return Matrix(tuple(tuple(int(entry) for entry in row) for row in rows))


def matrices(shape: Sequence[int], axes: Sequence[int]) -> Iterator[Matrix]:
    """Every parallelism matrix of these axes on levels of these sizes, lazily, in ascending order of the columns."""
    if not shape or not axes:
        raise ClusterError(f"no parallelism matrix has {len(axes)} axes on {len(shape)} levels: give at least one of each")
    if math.prod(shape) != math.prod(axes) or min((*shape, *axes), default=1) < 1:
        sizes, levels = (" * ".join(map(str, n)) or "1" for n in (axes, shape))
        raise ClusterError(
            f"the axes {sizes} make {math.prod(axes)} devices, the levels {levels} make {math.prod(shape)}: "
            "change the axes, or the number of nodes (NAME:NODES)"
        )
    for columns in _columns(tuple(shape), tuple(axes)):
        yield Matrix(tuple(zip(*columns, strict=True)))


def _columns(shape: tuple[int, ...], left: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The lists of columns for these levels; ``left`` is what remains of each axis."""
    if not shape:
        yield ()  # the products agree, so nothing is left
        return
    for column in _cuts(shape[0], left):
        rest = tuple(a // x for a, x in zip(left, column, strict=True))
        for columns in _columns(shape[1:], rest):
            yield (column, *columns)


def _cuts(size: int, left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The ways to write ``size`` as a product of one divisor of each entry of ``left``."""
    if not left:
        if size == 1:
            yield ()
        return
    for x in range(1, min(size, left[0]) + 1):
        if size % x == 0 and left[0] % x == 0 and math.prod(left[1:]) % (size // x) == 0:
            for rest in _cuts(size // x, left[1:]):
                yield (x, *rest)
