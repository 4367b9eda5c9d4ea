"""A user's tables to a `Dag`, or one clear line on what is wrong with them."""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardplan.errors import ScheduleError

from .graph import Dag, Transfer


def checked(
    times: ArrayLike,
    edges: Mapping[tuple[int, int], ArrayLike],
    *,
    memory: ArrayLike | None = None,
    sizes: Sequence[float] | None = None,
) -> Dag:
    """A `Dag` of tables: ``times`` [tasks][devices] in seconds, ``edges`` (task, task) to seconds between devices.

    The seconds of an edge are one number for any two devices, or [from][to] for each pair; on one device a transfer takes no
    time, so the diagonal is not read. ``memory`` is one number for all devices, or [devices] (`math.inf` for no limit);
    ``sizes`` [tasks] is what each task holds. Raises `ScheduleError`.
    """
    seconds = _times(times)
    tasks, devices = seconds.shape
    transfers = {pair: _transfer(pair, s, devices) for pair, s in sorted(_pairs(edges, tasks).items())}
    _refuse_overflow(seconds, transfers)
    order = _order(tasks, transfers)
    held, limits = _memory(memory, sizes, tasks, devices)
    parents: list[list[tuple[int, Transfer]]] = [[] for _ in range(tasks)]
    children: list[list[tuple[int, Transfer]]] = [[] for _ in range(tasks)]
    for (i, j), transfer in transfers.items():
        parents[j].append((i, transfer))
        children[i].append((j, transfer))
    return Dag(
        times_s=_rows(seconds),
        parents=tuple(map(tuple, parents)),
        children=tuple(map(tuple, children)),
        order=order,
        sizes=held,
        memory=limits,
        ready_s=((0.0,) * devices,) * tasks,
    )


def _times(times: ArrayLike) -> NDArray[np.float64]:
    table = _numbers(times, "times")
    if table.ndim != 2 or table.shape[1] == 0:
        raise ScheduleError(f"times has the shape {table.shape}: give [tasks][devices], a row of seconds for each task")
    _refuse(table, "times", "seconds that are finite and not negative")
    return table


def _pairs(edges: Mapping[tuple[int, int], ArrayLike], tasks: int) -> dict[tuple[int, int], ArrayLike]:
    """The edges by pairs of plain integers, each a task."""
    known: dict[tuple[int, int], ArrayLike] = {}
    for key, seconds in _items(edges):
        try:
            i, j = (operator.index(end) for end in key)
        except (TypeError, ValueError):
            raise ScheduleError(f"edge {key!r} is no pair of tasks: give {{(task, task): seconds}}") from None
        for end in (i, j):
            if not 0 <= end < tasks:
                raise ScheduleError(f"edge {(i, j)} names task {end}: the {tasks} tasks are 0 to {tasks - 1}", tasks=(i, j))
        known[i, j] = seconds
    return known


def _refuse_overflow(seconds: NDArray[np.float64], transfers: Mapping[tuple[int, int], Transfer]) -> None:
    """No schedule is longer than all tasks and transfers in turn, each where it takes longest: that sum must be a number."""
    slowest = [*seconds.max(axis=1).tolist(), *(float(np.max(t)) for t in transfers.values())]
    if not math.isfinite(sum(slowest)):
        raise ScheduleError("the seconds of times and edges add up to more than a float holds: give them in a larger unit")


def _items(edges: Mapping[Any, ArrayLike]) -> list[tuple[Any, ArrayLike]]:
    if not isinstance(edges, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no types
        raise ScheduleError(f"edges is of type {type(edges).__name__}: give a dict {{(task, task): seconds}}")
    return list(edges.items())


def _transfer(pair: tuple[int, int], seconds: ArrayLike, devices: int) -> Transfer:
    table = _numbers(seconds, f"edge {pair}")
    if table.ndim and table.shape != (devices, devices):
        raise ScheduleError(
            f"edge {pair} has seconds of the shape {table.shape}: give one number, or {devices} x {devices} of them, "
            "[from][to] for each pair of devices",
            tasks=pair,
        )
    if table.ndim:
        table = table.copy()
        np.fill_diagonal(table, 0.0)
    _refuse(table, f"edge {pair}", "seconds that are finite and not negative", tasks=pair)
    return _rows(table) if table.ndim else float(table)


def _memory(
    memory: ArrayLike | None, sizes: Sequence[float] | None, tasks: int, devices: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The bytes that each task holds and each device has; no limit without ``memory``."""
    held = _vector(sizes, "sizes", tasks, "task") if sizes is not None else np.zeros(tasks)
    _refuse(held, "sizes", "a number that is finite and not negative")
    if memory is None:
        return tuple(held.tolist()), (np.inf,) * devices
    if sizes is None:
        raise ScheduleError("memory is given without sizes: give sizes=, what each task holds in the same unit")
    limits = _numbers(memory, "memory")
    limits = np.full(devices, float(limits)) if limits.ndim == 0 else _vector(memory, "memory", devices, "device")
    bad = np.flatnonzero(~(limits >= 0))
    if len(bad):
        raise ScheduleError(f"memory[{bad[0]}] is {limits[bad[0]]:g}: give a number that is not negative")
    _refuse_small(held, limits)
    return tuple(held.tolist()), tuple(limits.tolist())


def _refuse_small(held: NDArray[np.float64], limits: NDArray[np.float64]) -> None:
    """Tasks that fit nowhere, and devices that no task fits on."""
    if not len(held):
        return
    large, roomiest = int(held.argmax()), int(limits.argmax())
    if held[large] > limits[roomiest]:
        raise ScheduleError(
            f"task {large} holds {held[large]:.17g} and fits on no device: the largest, device {roomiest}, has "
            f"{limits[roomiest]:.17g}: split the task or give a device more memory",
            tasks=(large,),
        )
    tight, small = int(limits.argmin()), int(held.argmin())
    if held[small] > limits[tight]:
        raise ScheduleError(
            f"device {tight} has a memory of {limits[tight]:.17g} and is too small for any task: the smallest, task {small}, "
            f"holds {held[small]:.17g}: leave the device out or give it more memory",
            tasks=(small,),
        )


def _vector(values: ArrayLike, name: str, length: int, of: str) -> NDArray[np.float64]:
    table = _numbers(values, name)
    if table.shape != (length,):
        raise ScheduleError(f"{name} has the shape {table.shape}: give {length} numbers, one for each {of}")
    return table


def _numbers(values: ArrayLike, name: str) -> NDArray[np.float64]:
    try:
        return np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ScheduleError(f"{name} is no table of numbers: rows may differ in length, or hold something else") from None


def _refuse(table: NDArray[np.float64], name: str, wanted: str, *, tasks: Sequence[int] = ()) -> None:
    bad = np.argwhere(~(np.isfinite(table) & (table >= 0)))
    if len(bad):
        place = "".join(f"[{k}]" for k in bad[0])
        named = tasks or ((int(bad[0][0]),) if table.ndim else ())
        raise ScheduleError(f"{name}{place} is {table[tuple(bad[0])]:g}: give {wanted}", tasks=named)


def _order(tasks: int, transfers: Mapping[tuple[int, int], Transfer]) -> tuple[int, ...]:
    """The tasks in a topological order, smaller ids first among those that are ready; `ScheduleError` for a cycle."""
    following: list[list[int]] = [[] for _ in range(tasks)]
    left = [0] * tasks
    for i, j in transfers:
        following[i].append(j)
        left[j] += 1
    ready = [i for i in range(tasks) if not left[i]]  # sorted, and so a heap
    order: list[int] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in following[i]:
            left[j] -= 1
            if not left[j]:
                heapq.heappush(ready, j)
    if len(order) < tasks:
        raise _cycle({j: i for i, j in transfers if left[i] and left[j]})
    return tuple(order)


def _cycle(parent: Mapping[int, int]) -> ScheduleError:
    """The error for a cycle, found by walking from parent to parent; each task in ``parent`` has a parent there."""
    walk = [min(parent)]
    while parent[walk[-1]] not in walk:
        walk.append(parent[walk[-1]])
    circle = walk[walk.index(parent[walk[-1]]) :][::-1]
    first = circle.index(min(circle))
    around = [*circle[first:], *circle[:first]]
    shown = [*map(str, around[:8]), *(["..."] if len(around) > 8 else []), str(around[0])]
    return ScheduleError(
        f"the edges have a cycle of {len(around)} task{'s' * (len(around) > 1)}: {' -> '.join(shown)}: remove one of these edges",
        tasks=around,
    )


def _rows(table: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(map(tuple, table.tolist()))
