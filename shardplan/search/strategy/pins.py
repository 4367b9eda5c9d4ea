"""Pins: layouts that the user sets, as restrictions of the domains; and the fewest pins that conflict.

The user pins arguments for a plan, by their paths, and values inside the step, by sharding constraints.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardplan.errors import PinError, nearest
from shardplan.graph import Graph, Node
from shardplan.ir import Entry, Layout, spec_text
from shardplan.search.coarsening.coarsen import FREE, Coarse, coarsen
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.problem import Domain, Problem

Pins = Mapping[str, Sequence[Entry]]
"""Glob of argument paths -> the PartitionSpec entries of these arguments, over the names of the factors or levels."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The states that one pin allows a variable: the variable of the argument at ``path``, or of a value inside the step.

    ``pin`` is its glob, or the text of a constraint; ``said`` is the pin as the user wrote it.
    """

    pin: str
    said: str
    path: str
    tensor: int
    variable: int
    states: Domain


def pinned_domains(problem: Problem, pins: Pins) -> tuple[Domain, ...]:
    """The problem's domains, restricted by the pins and by the step's own constraints.

    Raises:
        PinError: for a pin that matches nothing, names no axis or does not divide, and for pins that contradict each other; the
            error names the fewest pins in conflict.
    """
    claims = _all_claims(problem, pins)
    known = tuple(dict.fromkeys((*pins, *(c.pin for c in claims))))
    fewest = smallest_conflict(known, lambda some: _agree([c for c in claims if c.pin in some]))
    if fewest:
        raise _contradiction(problem, [c for c in claims if c.pin in fewest], fewest)
    domains = list(problem.domains)
    for claim in claims:
        domains[claim.variable] = tuple(s for s in domains[claim.variable] if s in claim.states)
    return tuple(domains)


def all_or_none_pinned(graph: Graph, coarse: Coarse, pins: Pins) -> bool:
    """Whether all arguments of each variable match the same pins."""
    matched: dict[int, frozenset[str]] = {}
    for t, path in zip(graph.inputs, graph.input_paths, strict=True):
        own = frozenset(pattern for pattern in pins if fnmatch.fnmatchcase(path, pattern))
        if coarse.of[t] != FREE and matched.setdefault(coarse.of[t], own) != own:
            return False
    return True


def for_pins(problem: Problem, pins: Pins) -> Problem:
    """The problem itself; or, if arguments that share a layout are pinned differently, a problem in which each has a layout of
    its own.

    In that problem the readers of these arguments read a copy or have a layout of their own.

    Raises:
        PinError: for a pin that matches nothing, names no axis or does not divide.
    """
    claimed: dict[int, set[Domain]] = {}
    claims = _all_claims(problem, pins)
    for claim in claims:
        claimed.setdefault(claim.variable, set()).add(claim.states)
    alone = frozenset(claim.tensor for claim in claims if len(claimed[claim.variable]) > 1)
    if not alone:
        return problem
    coarse = coarsen(problem.graph, problem.coarse.one_choice, alone, problem.coarse.kinds)
    own = problem.graph, coarse, problem.cluster, problem.factors
    return Problem(*own, objective=problem.objective, like=problem, company=problem.company)


def _all_claims(problem: Problem, pins: Pins) -> list[Claim]:
    claims = [claim for pattern, entries in pins.items() for claim in _claims(problem, pattern, entries)]
    _check_manual(problem)
    constrained = [_constrained(problem, node) for node in problem.graph.placed.values()]
    return claims + [claim for claim in constrained if claim is not None]


def smallest_conflict(items: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A minimal set of items that cannot all hold: without any one of them, the others can. Empty where all items hold.

    A deletion filter: one call of ``holds`` per item. ``holds`` must stay true when items are left out.

    >>> smallest_conflict("abcd", lambda some: not {"b", "d"} <= set(some))
    ('b', 'd')
    """
    if holds(items):
        return ()
    kept = tuple(items)
    for item in items:
        fewer = tuple(i for i in kept if i != item)
        if not holds(fewer):
            kept = fewer
    return kept


def _agree(claims: Sequence[Claim]) -> bool:
    left: dict[int, set[int]] = {}
    for claim in claims:
        left[claim.variable] = left.get(claim.variable, set(claim.states)) & set(claim.states)
    return all(left.values())


def _contradiction(problem: Problem, claims: Sequence[Claim], pins: tuple[str, ...]) -> PinError:
    """The error for pins that contradict each other; it names the first two arguments on which they do."""
    first, second = next(
        (a, b) for a in claims for b in claims if a.pin != b.pin and a.variable == b.variable and a.states != b.states
    )
    if first.path == second.path:
        where = f"both match {first.path}"
    else:
        where = f"the first matches {first.path}, the second {second.path}, and these two share one layout"
    return PinError(
        f"{first.said} contradicts {second.said}: {where}; drop one of them, or narrow its glob", pins=(first.pin, second.pin)
    )


def held_by_pins(problem: Problem, pins: Pins) -> dict[str, float]:
    """For each pin the bytes per device beyond the smallest layouts of its arguments; pins that add none are left out."""
    result: dict[str, float] = {}
    for pattern, entries in pins.items():
        for i in _matched(problem, pattern):
            t = problem.graph.inputs[i]
            v = problem.coarse.of[t]
            if v == FREE:
                continue
            tensor = problem.graph.tensors[t]
            layout = _layout(problem, problem.graph.input_paths[i], tensor.shape, pattern, entries)
            fraction = memory.local_part(problem, v, problem.resharder.state(tensor.shape, layout))
            least = float(problem.local(v, problem.domains[v]).min())
            result[pattern] = result.get(pattern, 0.0) + (fraction - least) * tensor.nbytes
    return {pattern: held for pattern, held in result.items() if held > 0}


def _matched(problem: Problem, pattern: str) -> list[int]:
    paths = problem.graph.input_paths
    hits = [i for i, path in enumerate(paths) if fnmatch.fnmatchcase(path, pattern)]
    if not hits:
        some = nearest(pattern, paths) or f"; the arguments are {', '.join(paths[:3])}{', ...' if len(paths) > 3 else ''}"
        raise PinError(f"the pin {pattern!r} matches no argument{some}", pins=(pattern,))
    return hits


def _named(pattern: str, entries: Sequence[Entry]) -> str:
    return f"the pin {pattern!r} = {spec_text(entries)}"


def _refusal(pattern: str, entries: Sequence[Entry], why: str) -> PinError:
    return PinError(f"{_named(pattern, entries)} {why}", pins=(pattern,), reason=f"{spec_text(entries)} {why}")


def _claims(problem: Problem, pattern: str, entries: Sequence[Entry]) -> list[Claim]:
    """The claims of a pin, one for each argument that it matches and that has a layout."""
    result = [_claim(problem, pattern, entries, i) for i in _matched(problem, pattern)]
    return [claim for claim in result if claim is not None]


def _claim(problem: Problem, pattern: str, entries: Sequence[Entry], i: int) -> Claim | None:
    t, path = problem.graph.inputs[i], problem.graph.input_paths[i]
    shape = problem.graph.tensors[t].shape
    layout = _layout(problem, path, shape, pattern, entries)
    v = problem.coarse.of[t]
    if v == FREE:
        if any(layout.dims):
            raise _refusal(pattern, entries, f"splits {path}, a scalar")
        return None
    if 0 in shape and any(layout.dims):
        raise _refusal(pattern, entries, f"splits {path} {shape}, which has no elements")
    for d, (n, over) in enumerate(zip(shape, layout.dims, strict=True)):
        parts = math.prod(problem.sizes[f] for f in over)
        if n % parts:
            rounded_up = -(-n // parts) * parts
            cut = f"cuts dim {d} of {path} {shape} {parts} ways"
            raise _refusal(pattern, entries, f"{cut}, which does not divide {n}; pad it to {rounded_up}, or leave it whole")
    state = problem.resharder.state(shape, layout)
    assert state in problem.domains[v], "a layout that divides is in the domain"
    return Claim(pattern, _named(pattern, entries), path, t, v, (state,))


def _check_manual(problem: Problem) -> None:
    """Refuses a mesh without the axes over which the step itself runs a function on each device."""
    names = [f.name for f in problem.factors]
    have = ", ".join(f"{f.name}={f.size}" for f in problem.factors)
    for node in problem.graph.nodes:
        manual = node.signature.manual
        if manual is None:
            continue
        for name, size in manual.axes:
            if name not in names or problem.sizes[names.index(name)] != size:
                raise PinError(
                    f"the jax.shard_map at {node.op.source} is over a mesh with the axis {name!r} of size {size}, and the plan's "
                    f"mesh has {have}: plan with cluster= that mesh"
                )
        wrong = next((d for own in (*manual.ins, *manual.outs) for d in own if [*d] != sorted(d, key=names.index)), None)
        if wrong is not None:
            right = tuple(sorted(wrong, key=names.index))
            raise PinError(
                f"the jax.shard_map at {node.op.source} has the axes of one dim in an unsupported order, {wrong!r}: use slowest "
                f"first, {right!r}"
            )


def _constrained(problem: Problem, node: Node) -> Claim | None:
    """The claim of a sharding constraint inside the step; None for a value that depends on no input, which lies everywhere.

    Raises:
        PinError: for axes that the plan's mesh lacks, or has with other sizes, and for a layout that the value cannot have.
    """
    constraint, t = node.signature.constraint, node.outputs[0]
    assert constraint is not None, "a placed tensor has a constraint"
    v, shape, axes = problem.coarse.of[t], problem.graph.tensors[t].shape, _axes(problem)
    said = f"the sharding constraint {constraint} at {node.op.source}"
    have = ", ".join(f"{f.name}={f.size}" for f in problem.factors)
    for name, size in constraint.axes:
        if name not in axes or math.prod(problem.sizes[f] for f in axes[name]) != size:
            raise PinError(
                f"{said} is over a mesh with the axis {name!r} of size {size}, and the plan's mesh has {have}: "
                "plan with cluster= that mesh, or leave the constraint out"
            )
    if v == FREE or 0 in shape:
        return None
    wanted = [None if dim is None else tuple(f for name in dim for f in axes[name]) for dim in constraint.dims]
    unsorted = next((dim for dim in wanted if dim is not None and list(dim) != sorted(dim)), None)
    if unsorted is not None:
        right = tuple(problem.factors[f].name for f in sorted(unsorted))
        raise PinError(f"{said} has the axes of one dim in an unsupported order: use slowest first, {right!r}")
    space = problem.space(v)
    states = tuple(
        s for s in problem.domains[v] if all(w is None or w == d for w, d in zip((*wanted, ()), space.state(s)[0], strict=True))
    )
    if not states:
        raise PinError(f"{said} cuts a value of shape {shape} in a way that it cannot be: cut dims that the axes divide")
    return Claim(said, said, f"the value at {node.op.source}", t, v, states)


def _layout(problem: Problem, path: str, shape: tuple[int, ...], pattern: str, entries: Sequence[Entry]) -> Layout:
    names = _axes(problem)
    idle = {level.name for level in problem.cluster.levels if level.size == 1}  # nothing is cut over them
    if len(entries) > len(shape):
        raise _refusal(pattern, entries, f"has {len(entries)} entries, but {path} has rank {len(shape)}")
    dims: list[tuple[int, ...]] = []
    for entry in (*entries, *[None] * (len(shape) - len(entries))):
        axes = () if entry is None else (entry,) if isinstance(entry, str) else entry
        for axis in axes:
            if axis not in names and axis not in idle:
                known = ", ".join(names)
                whole = [f.name for f in problem.factors if f.name in problem.cluster.level_names]
                level = next((n for n in whole if re.fullmatch(rf"{re.escape(n)}\d+", axis)), None)
                size = 1 if level is None else problem.cluster.levels[problem.cluster.level_index(level)].size
                part = next((n for n in range(2, size) if size % n == 0), None)
                remedy = nearest(axis, list(names))
                if part is not None:
                    parts = f"factors={{{level!r}: ({part}, {size // part})}}"
                    remedy = f": parts of {level!r} have names where factors= fixes them, as in {parts}"
                raise _refusal(pattern, entries, f"names an unknown axis {axis!r}; the plan's axes are {known}{remedy}")
        dims.append(tuple(f for a in axes if a not in idle for f in names[a]))
    flat = [f for d in dims for f in d]
    twice = next((problem.factors[f].name for f in flat if flat.count(f) > 1), None)
    if twice is not None:
        raise _refusal(pattern, entries, f"uses the axis {twice!r} twice")
    for axes in dims:
        if list(axes) != sorted(axes):
            right = tuple(problem.factors[f].name for f in sorted(axes))
            raise _refusal(pattern, entries, f"has the axes of one dim in an unsupported order: use slowest first, {right!r}")
    return Layout(tuple(dims))


def _axes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The factors that each name stands for: a factor's name itself, a level's name all factors of the level, major first."""
    result: dict[str, tuple[int, ...]] = {}
    for i, factor in enumerate(problem.factors):
        level = problem.cluster.levels[factor.level].name
        result[level] = (*result.get(level, ()), i)
    return result | {factor.name: (i,) for i, factor in enumerate(problem.factors)}
