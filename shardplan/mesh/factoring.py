"""Factors: the levels of a cluster, or divisors of their sizes where a level must be split."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ClusterError
from ..ir import Factor
from .machine import Machine


def factors(cluster: Machine, splits: Mapping[str, Sequence[int]] | None = None) -> tuple[Factor, ...]:
    """One factor a level, slowest first; ``splits`` names levels to split into several, major first.

    A level of one child gives no factor: nothing can be cut over it. A level split as (4, 2) gives ``gpu0`` of 4 and ``gpu1``
    of 2, the latter varying fastest; ``gpu_0`` and ``gpu_1`` where other levels have such names.

    >>> from shardplan.mesh import Cluster
    >>> [(f.name, f.size, f.stride) for f in factors(Cluster.load("2x8"), {"gpu": (4, 2)})]
    [('node', 2, 1), ('gpu0', 4, 2), ('gpu1', 2, 1)]
    """
    splits = splits or {}
    for name, sizes in splits.items():
        size = cluster.levels[cluster.level_index(name)].size
        if math.prod(sizes) != size or min(sizes, default=0) < 1:
            product = " * ".join(map(str, sizes)) or "()"
            raise ClusterError(f"the split {product} of level {name!r} makes {math.prod(sizes)}, the level has {size}")
    result: list[Factor] = []
    names = {level.name for level in cluster.levels}
    for index, level in enumerate(cluster.levels):
        sizes = tuple(splits.get(level.name, (level.size,)))
        stride, stem = level.size, level.name
        while any(f"{stem}{part}" in names for part in range(len(sizes))):
            stem += "_"
        for part, size in enumerate(sizes):
            stride //= size
            if size > 1:
                result.append(Factor(level.name if len(sizes) == 1 else f"{stem}{part}", size, index, stride))
    return tuple(result)


def joined(cluster: Machine, of: Sequence[Factor], runs: Sequence[Sequence[int]]) -> tuple[Factor, ...]:
    """One factor for each run of neighbouring factors of one level.

    >>> from shardplan.mesh import Cluster
    >>> cluster = Cluster.load("2x8")
    >>> [f.name for f in joined(cluster, factors(cluster, {"gpu": (2, 2, 2)}), ((0,), (1,), (2, 3)))]
    ['node', 'gpu0', 'gpu1']
    """
    sizes: dict[str, list[int]] = {}
    for run in runs:
        name = cluster.levels[of[run[0]].level].name
        sizes.setdefault(name, []).append(math.prod(of[i].size for i in run))
    return factors(cluster, sizes)


def coordinates(cluster: Machine, of: Sequence[Factor]) -> NDArray[np.int64]:
    """The coordinate of every device along every factor.  # [devices, factors]"""
    levels = np.stack(np.unravel_index(np.arange(cluster.size), cluster.shape), axis=1)
    columns = [levels[:, f.level] // f.stride % f.size for f in of]
    return np.stack(columns, axis=1) if columns else np.zeros((cluster.size, 0), np.int64)


def device_order(cluster: Machine, factors: Sequence[Factor], groups: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """The cluster's device numbers with one array axis for each group of factors, major first within a group."""
    by_device = sorted(range(len(factors)), key=lambda i: (factors[i].level, -factors[i].stride))
    grid = np.arange(cluster.size).reshape([factors[i].size for i in by_device])
    axes = [by_device.index(i) for group in groups for i in group]
    return grid.transpose(axes).reshape([math.prod(factors[i].size for i in group) for group in groups])


def check_cover(cluster: Machine, of: Sequence[Factor]) -> None:
    """Refuse factors that do not cover the cluster exactly: every device needs coordinates of its own."""
    product = math.prod(f.size for f in of)
    if product != cluster.size:
        raise ClusterError(f"the factors {_product(of)} make {product} devices, {cluster.name!r} has {cluster.size}")
    for level, tier in enumerate(cluster.levels):
        members = sorted((f for f in of if f.level == level), key=lambda f: f.stride)
        stride = 1
        for f in members:
            if f.stride != stride:
                raise ClusterError(f"factor {f.name!r} of level {tier.name!r} has stride {f.stride}, {stride} is next")
            stride *= f.size
        if stride != tier.size:
            raise ClusterError(f"the factors {_product(members)} make {stride} of level {tier.name!r}, which has {tier.size}")


def _product(of: Sequence[Factor]) -> str:
    return " * ".join(f"{f.name}={f.size}" for f in of) or "()"


def read_order(cluster: Machine, order: NDArray[np.int64]) -> tuple[tuple[Factor, ...], tuple[tuple[int, ...], ...]]:
    """The factors of a device array, and for each array axis the indices of its factors, major first.

    The inverse of `device_order`. Raises `ClusterError` if an axis does not follow the levels.
    """
    refusal = ClusterError(
        f"the mesh does not lay its axes on the levels of {cluster.name!r} ({'x'.join(map(str, cluster.shape))}): build it as "
        "Mesh(np.array(jax.devices())[cluster.device_order(matrix)], names) from a matrix of `shardplan mesh matrices`"
    )
    if sorted(order.ravel().tolist()) != list(range(cluster.size)):
        raise refusal
    by_axis: list[Factor] = []
    groups: list[tuple[int, ...]] = []
    for axis in range(order.ndim):
        line = np.moveaxis(order, axis, 0).reshape(order.shape[axis], -1)[:, 0]
        members = _parts(cluster, [int(d - line[0]) for d in line])
        if members is None:
            raise refusal
        groups.append(tuple(range(len(by_axis), len(by_axis) + len(members))))
        by_axis += members
    if not np.array_equal(device_order(cluster, by_axis, groups), order):
        raise refusal
    by_device = sorted(range(len(by_axis)), key=lambda i: (by_axis[i].level, -by_axis[i].stride))
    place = {old: new for new, old in enumerate(by_device)}
    return tuple(by_axis[i] for i in by_device), tuple(tuple(place[i] for i in group) for group in groups)


def _parts(cluster: Machine, line: list[int]) -> list[Factor] | None:
    """The factors, major first, of an axis whose devices have these numbers relative to the first device; None if none fit."""
    result: list[Factor] = []
    while len(line) > 1:
        step = line[1]
        level, stride = _level_of(cluster, step)
        run = 1
        while run < len(line) and run * stride < cluster.shape[level] and line[run] == run * step:
            run += 1
        while run > 1 and (len(line) % run or cluster.shape[level] % (stride * run)):
            run -= 1
        if run == 1:
            return None
        name = cluster.level_names[level]
        result.insert(0, Factor(name if run == cluster.shape[level] else f"{name}_{stride}", run, level, stride))
        line = line[::run]
    return result


def factors_of(cluster: Machine, group: Sequence[int]) -> tuple[tuple[Factor, ...], tuple[int, ...]] | None:
    """(factors of the cluster, the indices of those along which the devices of this group differ); None where there are none.

    >>> from shardplan.mesh import Cluster
    >>> factors, over = factors_of(Cluster.load("2x8"), [1, 3, 9, 11])
    >>> [(f.name, f.size, f.stride) for f in factors], over
    ([('node', 2, 1), ('gpu_4', 2, 4), ('gpu_2', 2, 2), ('gpu_1', 2, 1)], (0, 2))
    """
    parts = _parts(cluster, [device - group[0] for device in group])
    if parts is None:
        return None
    result = list[Factor]()
    for index, level in enumerate(cluster.levels):
        stride, own = 1, list[Factor]()
        for part in sorted((f for f in parts if f.level == index), key=lambda f: f.stride):
            if part.stride % stride:
                return None
            own += [Factor(f"{level.name}_{stride}", part.stride // stride, index, stride), part]
            stride = part.stride * part.size
        own.append(Factor(f"{level.name}_{stride}", level.size // stride, index, stride))
        result += [f for f in reversed(own) if f.size > 1]
    return tuple(result), tuple(i for i, f in enumerate(result) if f in parts)


def _level_of(cluster: Machine, step: int) -> tuple[int, int]:
    """The slowest level whose whole children make up ``step`` devices, and the number of these children."""
    below = cluster.size
    for level, size in enumerate(cluster.shape):
        below //= size
        if size > 1 and step % below == 0:
            return level, step // below
    return len(cluster.shape) - 1, 1
