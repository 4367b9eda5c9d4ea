"""Pins: arguments that must lie as the user says, as restrictions of the problem's domains."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence

from shardplan.errors import PinError, nearest
from shardplan.ir import Entry, Layout, spec_text
from shardplan.search import memory
from shardplan.search.coarsen import FREE
from shardplan.search.problem import Domain, Problem

Pins = Mapping[str, Sequence[Entry]]
"""Glob of argument paths -> the entries of the PartitionSpec that they must have, over the names of the factors."""


def pinned_domains(problem: Problem, pins: Pins) -> tuple[Domain, ...]:
    """The problem's domains with the pins in them.

    Raises:
        PinError: for a pin that matches nothing, names no axis, does not divide, or contradicts another.
    """
    domains = list(problem.domains)
    for pattern, entries in pins.items():
        for i in _matched(problem, pattern):
            _pin(problem, domains, i, _named(pattern, entries), entries)
    return tuple(domains)


def held_by_pins(problem: Problem, pins: Pins) -> dict[str, float]:
    """For each pin the bytes of a device that it holds beyond the smallest layout of what it matches; none that hold nothing."""
    found: dict[str, float] = {}
    for pattern, entries in pins.items():
        for i in _matched(problem, pattern):
            t = problem.graph.inputs[i]
            v = problem.coarse.of[t]
            if v == FREE:
                continue
            tensor = problem.graph.tensors[t]
            layout = _layout(problem, problem.graph.input_paths[i], tensor.shape, _named(pattern, entries), entries)
            own = memory.local_bytes(problem, v, problem.resharder.space(len(tensor.shape)).of(layout))
            least = min(memory.local_bytes(problem, v, s) for s in problem.domains[v])
            found[pattern] = found.get(pattern, 0.0) + (own - least) * tensor.nbytes
    return {pattern: held for pattern, held in found.items() if held > 0}


def _matched(problem: Problem, pattern: str) -> list[int]:
    paths = problem.graph.input_paths
    hits = [i for i, path in enumerate(paths) if fnmatch.fnmatchcase(path, pattern)]
    if not hits:
        raise PinError(f"the pin {pattern!r} matches no argument{nearest(pattern, paths)}")
    return hits


def _named(pattern: str, entries: Sequence[Entry]) -> str:
    return f"the pin {pattern!r} = {spec_text(entries)}"


def _pin(problem: Problem, domains: list[Domain], i: int, pin: str, entries: Sequence[Entry]) -> None:
    """Restricts the domain of argument ``i``."""
    t, path = problem.graph.inputs[i], problem.graph.input_paths[i]
    shape = problem.graph.tensors[t].shape
    layout = _layout(problem, path, shape, pin, entries)
    v = problem.coarse.of[t]
    if v == FREE:
        if any(layout.dims):
            raise PinError(f"{pin} splits {path}, a scalar")
        return
    space = problem.resharder.space(len(shape))
    state = space.of(layout)
    for d, (n, parts) in enumerate(zip(shape, space.splits[state], strict=False)):
        if n % int(parts):
            up = -(-n // int(parts)) * int(parts)
            raise PinError(f"{pin} cuts dim {d} of {path} {shape} {parts} ways, which does not divide {n}; {up} would")
    if state not in domains[v]:
        raise PinError(f"{pin} on {path} contradicts another pin on an array that shares its layout")
    domains[v] = (state,)


def _layout(problem: Problem, path: str, shape: tuple[int, ...], pin: str, entries: Sequence[Entry]) -> Layout:
    names = {f.name: i for i, f in enumerate(problem.factors)}
    idle = {level.name for level in problem.cluster.levels if level.size == 1}  # nothing is cut over them
    if len(entries) > len(shape):
        raise PinError(f"{pin} has {len(entries)} entries, {path} has rank {len(shape)}")
    dims: list[tuple[int, ...]] = []
    for entry in (*entries, *[None] * (len(shape) - len(entries))):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        for axis in axes:
            if axis not in names and axis not in idle:
                known = ", ".join(names)
                raise PinError(f"{pin} names the axis {axis!r}; the plan's axes are {known}{nearest(axis, list(names))}")
        dims.append(tuple(names[a] for a in axes if a not in idle))
    for axes in dims:
        if list(axes) != sorted(axes):
            right = tuple(problem.factors[f].name for f in sorted(axes))
            raise PinError(f"{pin} has the axes of one dim in an order that is not planned: slowest first, {right!r}")
    flat = [f for d in dims for f in d]
    if len(set(flat)) != len(flat):
        raise PinError(f"{pin} uses an axis twice")
    return Layout(tuple(dims))
