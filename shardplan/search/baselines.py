"""Baselines: the shardings that people use today, as restrictions of the same problem.

A baseline says how arguments lie and how weights and activations are computed with: activations split along the batch over its
data factors and along no dim that comes with the data over its tensor factors, weights split over these by the rule of Megatron,
every op cut where its operands are. What it does not say is completed optimally, in the same tables, so that a plan is compared
with the best version of each, and each moves the bytes that its name stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

from shardplan.search.coarsen import FREE, Variable
from shardplan.search.examples import Examples, follow
from shardplan.search.graph import Node
from shardplan.search.megatron import sides
from shardplan.search.options import Cuts
from shardplan.search.pricing import Domain, Limits
from shardplan.search.problem import Problem
from shardplan.tdl import Description, cut
from shardplan.tdl.index import loops_of

Dims = tuple[tuple[int, ...], ...]
Sides = Mapping[int, frozenset[int]]

_NONE = frozenset[int]()


@dataclass(frozen=True, slots=True)
class Restriction:
    """A named restriction: a domain for each variable, and for each op the loops that it may cut.

    ``regather``: no forward copy of a weight is kept for the backward pass. ``parts`` are the groups of factors that it treats
    alike, one after the other.
    """

    name: str
    domains: tuple[Domain, ...]
    limits: Limits
    regather: bool = False
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Batch split over ``data``; optimizer state over ``zero``; all state over ``shard``; matrix weights over ``tensor``.

    ``sequence``: between the products activations may be split over ``tensor`` along the dims that come with the data, as in
    Megatron's sequence parallelism.
    """

    name: str
    data: tuple[int, ...] = ()
    zero: tuple[int, ...] = ()
    shard: tuple[int, ...] = ()
    tensor: tuple[int, ...] = ()
    sequence: bool = False

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """The groups of factors that are treated alike."""
        roles: dict[tuple[bool, ...], list[int]] = {}
        for f in sorted({*self.data, *self.zero, *self.shard, *self.tensor}):
            roles.setdefault(tuple(f in of for of in (self.data, self.zero, self.shard, self.tensor)), []).append(f)
        return tuple(map(tuple, roles.values()))


@dataclass(frozen=True, slots=True)
class _Loops:
    """Of one op the loops over the batch, over any dim that comes with the data, and over the cut side of its weight."""

    batch: frozenset[int]
    data: frozenset[int]
    weight: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Habits:
    """What people look at: which dims come with the data, and which side of a matrix to cut."""

    examples: Examples
    sides: Sides
    loops: Mapping[int, _Loops]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A baseline that does not exist for a step on these factors, and why."""

    name: str
    reason: str


def baselines(problem: Problem) -> tuple[Restriction, ...]:
    """All baselines that exist on these factors; one whose batch or weights do not divide is left out."""
    return tuple(f for f in examined(problem) if isinstance(f, Restriction))


def examined(problem: Problem, *, parts: int = 0, limited: bool = True) -> tuple[Restriction | LeftOut, ...]:
    """Every baseline of at least so many parts, or why there is none; if not ``limited``, for its layouts alone."""
    recipes = [r for r in _recipes(problem.sizes) if len(r.parts) >= parts]
    graph = problem.graph
    state = {i for i in graph.feedback if i is not None}
    given = [t for i, t in enumerate(graph.inputs) if i not in state and problem.coarse.of[t] != FREE]
    examples, known = follow(graph, given), sides(graph, problem.coarse)
    habits = _Habits(examples, known, _loops(problem, examples, known))
    return tuple(_make(problem, habits, recipe, limited=limited) for recipe in recipes)


def _recipes(sizes: Sequence[int]) -> list[_Recipe]:
    every = tuple(range(len(sizes)))
    found = [
        _Recipe("replicated"),
        _Recipe("data parallel", data=every),
        _Recipe("ZeRO-1", data=every, zero=every),
        _Recipe("FSDP", data=every, shard=every),
        _Recipe("tensor parallel", tensor=every),
    ]
    for i in range(1, len(sizes)):
        slow, fast = every[:i], every[i:]
        suffix = _parts(sizes, slow, fast)
        found.append(_Recipe(f"data x FSDP{suffix}", data=every, shard=fast))
        found.append(_Recipe(f"data x tensor parallel{suffix}", data=slow, tensor=fast))
        found.append(_Recipe(f"FSDP x tensor parallel{suffix}", data=slow, shard=slow, tensor=fast))
        for j in range(i + 1, len(sizes)):
            middle, last = every[i:j], every[j:]
            name = f"data x FSDP x tensor parallel{_parts(sizes, slow, middle, last)}"
            found.append(_Recipe(name, data=every[:j], shard=middle, tensor=last))
    sequenced = [replace(r, name=f"{r.name} + sequence", sequence=True) for r in found if r.tensor]
    return [*found, *sequenced]


def _parts(sizes: Sequence[int], *groups: tuple[int, ...]) -> str:
    """Which factors each part of a product has, where there is more than one way."""
    if len(sizes) == len(groups):
        return ""
    return f" ({' | '.join('x'.join(str(sizes[f]) for f in part) for part in groups)})"


def _make(problem: Problem, habits: _Habits, recipe: _Recipe, *, limited: bool) -> Restriction | LeftOut:
    graph, coarse = problem.graph, problem.coarse
    domains = list(problem.domains)
    state = {i for i in graph.feedback if i is not None}
    said: set[int] = set()
    split_batch = False
    for i, t in enumerate(graph.inputs):
        v = coarse.of[t]
        if v == FREE:
            continue
        said.add(v)
        if i in state:
            found = _state(problem, v, domains[v], recipe, habits.sides.get(t), parameter=t in coarse.parameters)
            if not found:
                ways, path = math.prod(problem.sizes[f] for f in recipe.tensor), graph.input_paths[i]
                return LeftOut(recipe.name, f"{path} {graph.tensors[t].shape} divides by {ways} along no dim that it may")
            domains[v] = found
        else:
            batch = _keep(problem, v, domains[v], lambda dims: _batch(dims, recipe.data))
            split_batch = split_batch or bool(batch and recipe.data)
            domains[v] = batch or _keep(problem, v, domains[v], lambda dims: not any(dims))
    if recipe.data and not split_batch:
        ways = math.prod(problem.sizes[f] for f in recipe.data)
        return LeftOut(recipe.name, f"no leading dim of the data divides by {ways}")
    memo: dict[tuple[int, Domain, _Rule], Domain] = {}
    for variable in coarse.variables:
        if variable.id not in said:
            domain, rule = domains[variable.id], _rule(problem, habits, recipe, variable)
            key = (len(variable.shape), domain, rule)
            if key not in memo:
                memo[key] = _keep(problem, variable.id, domain, rule.allows) or domain
            domains[variable.id] = memo[key]
    limits = _limits(problem, habits, recipe) if limited else Limits()
    return Restriction(recipe.name, tuple(domains), limits, bool(recipe.shard), recipe.parts)


def _limits(problem: Problem, habits: _Habits, recipe: _Recipe) -> Limits:
    """Over a data factor an op cuts its batch; over a tensor factor its weight, or loops that are not the data's."""
    memo: dict[tuple[int, _Loops], Cuts] = {}
    found: dict[int, Cuts] = {}
    for n, loops in habits.loops.items():
        signature = problem.graph.nodes[n].signature
        key = (signature.id, loops)
        if key not in memo:
            assert signature.description is not None
            memo[key] = _cuts(signature.description, loops, recipe, problem.sizes)
        found[n] = memo[key]
    return Limits(found)


def _cuts(description: Description, loops: _Loops, recipe: _Recipe, sizes: Sequence[int]) -> Cuts:
    every = frozenset(range(len(description.loops))) | {-1}

    def legal(of: frozenset[int], ways: int) -> frozenset[int]:
        return frozenset(v for v in of if cut(description, v, ways, pad=True) is not None)

    def may(f: int, ways: int) -> frozenset[int]:
        if f in recipe.data:
            return (legal(loops.batch, ways) or frozenset({-1})) if loops.batch else every
        if f in recipe.tensor:
            return legal(loops.weight, ways) or every - (loops.batch if recipe.sequence else loops.data)
        return frozenset({-1})

    return tuple(may(f, ways) for f, ways in enumerate(sizes))


def _loops(problem: Problem, examples: Examples, sides: Sides) -> Mapping[int, _Loops]:
    """The loops of every op that has a table."""
    found: dict[int, _Loops] = {}
    for n in problem.coarse.joins:
        node = problem.graph.nodes[n]
        if node.signature.description is not None:
            found[n] = _Loops(*examples.loops(node), _weight_loops(node, sides))
    return found


def _weight_loops(node: Node, sides: Sides) -> frozenset[int]:
    """The loops that index the dims of a product's weight that Megatron cuts; none where the op reads no such weight."""
    description = node.signature.description
    if description is None or not node.signature.contracts or not any(t in sides for t in node.inputs):
        return frozenset()
    loops: set[int] = set()
    for operand, indices in description.accesses:
        for dim in sides.get(node.inputs[operand], _NONE):
            loops |= loops_of(indices[dim])
    return frozenset(loops)


@dataclass(frozen=True, slots=True)
class _Rule:
    """Which layouts a value inside the step may have.

    None of ``barred``'s dims over ``tensor``; ``data`` on dim ``batch`` alone, where it has one. Of a weight's copy (``weight``)
    a matrix lies over all of ``tensor`` on one of its ``side``'s dims, anything else over ``tensor`` at most.
    """

    data: frozenset[int]
    tensor: frozenset[int]
    batch: int | None = None
    barred: frozenset[int] = frozenset()
    weight: Literal["", "matrix", "other"] = ""
    side: frozenset[int] | None = None

    def allows(self, dims: Dims) -> bool:
        """Whether a value may lie so."""
        used = _used(dims)
        if not self.data and not self.tensor:
            return not used
        if self.weight == "matrix":
            return used == self.tensor and _along(dims, self.tensor, self.side)
        if self.weight:
            return used <= self.tensor
        if any(self.tensor & set(dims[d]) for d in self.barred):
            return False
        if self.batch is None:
            return True
        return all(self.data & set(fs) == (self.data if d == self.batch else _NONE) for d, fs in enumerate(dims))


def _rule(problem: Problem, habits: _Habits, recipe: _Recipe, variable: Variable) -> _Rule:
    data, tensor = frozenset(recipe.data), frozenset(recipe.tensor)
    first = variable.tensors[0]
    if variable.kind != "stored" and first in problem.coarse.weights and not habits.examples.data[first]:
        matrix = bool(tensor) and _is_matrix(problem, variable.of)
        return _Rule(data, tensor, weight="matrix" if matrix else "other", side=habits.sides.get(first) if matrix else None)
    examples = habits.examples
    batch = next((examples.batch[t] for t in variable.tensors if examples.batch[t] is not None), None)
    barred = frozenset[int]().union(*(examples.data[t] for t in variable.tensors))
    if recipe.sequence:
        barred &= frozenset({batch})
    return _Rule(data, tensor, batch, barred)


def _keep(problem: Problem, v: int, domain: Domain, wanted: Callable[[Dims], bool]) -> Domain:
    space = problem.resharder.space(len(problem.coarse.variables[v].shape))
    return tuple(s for s in domain if wanted(space.states[s][0][:-1]))


def _batch(dims: Dims, over: tuple[int, ...]) -> bool:
    return dims[0] == over and not any(dims[1:])


def _is_matrix(problem: Problem, v: int) -> bool:
    return len([d for d in problem.coarse.variables[v].shape if d > 1]) >= 2


def _state(problem: Problem, v: int, domain: Domain, recipe: _Recipe, side: frozenset[int] | None, *, parameter: bool) -> Domain:
    """Layouts of a parameter or of optimizer state: over ``shard`` (and ``zero``) and, a matrix in use, ``tensor``.

    Exactly that, each of the two groups along one dim, as one would write it by hand; else the nearest that divides. Vectors, and
    the moments of a matrix, may be split over ``tensor`` or not. Empty where a matrix divides by no tensor factor.
    """
    space = problem.resharder.space(len(problem.coarse.variables[v].shape))
    over = {*recipe.shard, *(recipe.zero if not parameter else ())}
    along = set(recipe.tensor) if parameter and _is_matrix(problem, v) else set[int]()
    loose = set(recipe.tensor) - along

    def used(s: int) -> set[int]:
        return set(_used(space.states[s][0]))

    def sided(s: int) -> bool:
        return not along or _along(space.states[s][0], along, side)

    def by_hand(s: int) -> bool:
        return sided(s) and (not over or _along(space.states[s][0], over, None))

    exact = tuple(s for s in domain if used(s) - loose == over | along and by_hand(s))
    if exact or along:
        return exact or tuple(s for s in domain if used(s) - loose == along and sided(s))
    parts = {s: math.prod(problem.sizes[f] for f in used(s) & over) for s in domain if used(s) <= over | loose}
    most = max(parts.values(), default=1)
    return tuple(s for s, n in parts.items() if n == most)


def _used(dims: Dims) -> Set[int]:
    return {f for d in dims for f in d}


def _along(dims: Dims, factors: Set[int], side: frozenset[int] | None) -> bool:
    """Whether one dim (of ``side``, where that is known) is split over all these factors."""
    return any(factors <= set(fs) and (side is None or d in side) for d, fs in enumerate(dims))
