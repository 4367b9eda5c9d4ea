"""Baselines: the shardings that people use today, as restrictions of the same problem.

A baseline gives the layouts of arguments, and the layouts in which ops use weights and activations. Its data factors split
activations along the batch. Its tensor factors split activations along no data dim, and weights by the rule of Megatron. Every
op is cut where its operands are. All else is completed optimally, in the same tables, so that a plan is compared with the best
version of each baseline, and each baseline moves the bytes that its name stands for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.reshard import split_dims
from shardplan.graph.nodes import Node, Signature
from shardplan.search.baselines.batch_dims import Examples, follow
from shardplan.search.baselines.megatron import sides
from shardplan.search.coarsening.coarsen import FREE, Variable
from shardplan.search.problem.composite_strategies import Cuts, Groups
from shardplan.search.problem.pricing import Domain, Limits
from shardplan.search.problem.problem import Problem
from shardplan.tdl.index import loops_of

Sides = Mapping[int, frozenset[int]]

_NONE = frozenset[int]()


@dataclass(frozen=True, slots=True)
class Restriction:
    """A named restriction: a domain for each variable, and for each op the loops that it may cut.

    ``regather``: no forward copy of a weight is kept for the backward pass. ``parts`` are the groups of factors that the
    restriction treats alike.
    """

    name: str
    domains: tuple[Domain, ...]
    limits: Limits
    regather: bool = False
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Batch split over ``data``; optimizer state over ``zero``; all state over ``shard``; matrix weights over ``tensor``.

    The reduced gradient lies as the optimizer state does (they share a variable), so ``zero`` says ZeRO-1 and ZeRO-2.

    ``sequence``: between products, ``tensor`` may split activations along data dims other than the batch, as in Megatron's
    sequence parallelism.
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
    """The loops of one op over the batch, over any data dim, and over the cut side of its weight."""

    batch: frozenset[int]
    data: frozenset[int]
    weight: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Facts:
    """The facts that recipes read: each argument's number, variable and role (None: data); all other variables, grouped by rank,
    domain and role; each op's loops.
    """

    arguments: Sequence[tuple[int, int, _StateRole | None]]
    values: Mapping[tuple[int, Domain, _ValueRole], Sequence[int]]
    loops: Mapping[int, _Loops]
    batch: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A baseline that does not exist for a step on these factors, and why."""

    name: str
    reason: str


def baselines(problem: Problem) -> tuple[Restriction, ...]:
    """The baselines by recipe that exist on these factors (`heuristics` has others); what does not divide is left out."""
    return tuple(f for f in examined(problem) if isinstance(f, Restriction))


def written(
    problem: Problem,
    name: str,
    *,
    data: Sequence[int] = (),
    zero: Sequence[int] = (),
    shard: Sequence[int] = (),
    tensor: Sequence[int] = (),
    sequence: bool = False,
) -> Restriction | LeftOut:
    """The sharding that one would write by hand with each factor (by number) in these roles, or why it does not exist.

    The batch is split over ``data``, optimizer state over ``zero`` (ZeRO-1 and ZeRO-2), all state over ``shard`` (ZeRO-3, FSDP),
    matrices over ``tensor``. ``zero`` and ``shard`` are among ``data``. With ``sequence``, ``tensor`` splits activations between
    products too (Korthikanti et al. 2022, sequence parallelism).
    """
    recipe = _Recipe(name, tuple(data), tuple(zero), tuple(shard), tuple(tensor), sequence)
    return _make(problem, _facts(problem, limited=True), recipe, limited=True)


def groupings(count: int) -> tuple[Groups, ...]:
    """The ways to split the factors into a slower and a faster group."""
    every = tuple(range(count))
    return tuple((every[:i], every[i:]) for i in range(1, count))


def alike(parts: Groups, count: int) -> Groups:
    """The groups of factors that a baseline with these parts treats alike; with one part or none, all but the last factor."""
    return parts if len(parts) > 1 else groupings(count)[-1]


def examined(problem: Problem, *, beside: Collection[Groups] = (), limited: bool = True) -> tuple[Restriction | LeftOut, ...]:
    """Every baseline, or why it does not exist; baselines whose groups of factors (`alike`) are in ``beside`` are left out.

    Unless ``limited``, the baselines restrict layouts alone, not ops.
    """
    count = len(problem.sizes)
    recipes = [r for r in _recipes(problem.sizes) if not beside or alike(r.parts, count) not in beside]
    facts = _facts(problem, limited=limited)
    return tuple(_make(problem, facts, recipe, limited=limited) for recipe in recipes)


def _facts(problem: Problem, *, limited: bool) -> _Facts:
    graph, coarse = problem.graph, problem.coarse
    state = {i for i in graph.feedback if i is not None}
    given = [(i, t) for i, t in enumerate(graph.inputs) if coarse.of[t] != FREE]
    examples, known = coarse.once(
        "batch dims and sides", lambda: (follow(graph, [t for i, t in given if i not in state]), sides(graph, coarse))
    )
    cut_sides = {t: _split(problem, t, dims) for t, dims in known.items()}
    arguments: list[tuple[int, int, _StateRole | None]] = []
    for i, t in given:
        role = _StateRole(_is_matrix(problem, coarse.of[t]), t in coarse.parameters, cut_sides.get(t)) if i in state else None
        arguments.append((i, coarse.of[t], role))
    argument_variables = {v for _, v, _ in arguments}
    values: dict[tuple[int, Domain, _ValueRole], list[int]] = {}
    for variable, domain in zip(coarse.variables, problem.domains, strict=True):
        if variable.id not in argument_variables:
            key = problem.space(variable.id).rank, domain, _value(problem, examples, cut_sides, variable)
            values.setdefault(key, []).append(variable.id)
    loops = dict[int, _Loops]()
    if limited:
        loops = coarse.once("loops", lambda: _loops(problem, examples, known))
    return _Facts(arguments, values, loops, examples.batch)


def _recipes(sizes: Sequence[int]) -> list[_Recipe]:
    every = tuple(range(len(sizes)))
    result = [
        _Recipe("replicated"),
        _Recipe("data parallel", data=every),
        _Recipe("ZeRO-1", data=every, zero=every),
        _Recipe("FSDP", data=every, shard=every),
        _Recipe("tensor parallel", tensor=every),
    ]
    for i in range(1, len(sizes)):
        slow, fast = every[:i], every[i:]
        suffix = _parts(sizes, slow, fast)
        result.append(_Recipe(f"data x FSDP{suffix}", data=every, shard=fast))
        result.append(_Recipe(f"data x tensor parallel{suffix}", data=slow, tensor=fast))
        result.append(_Recipe(f"FSDP x tensor parallel{suffix}", data=slow, shard=slow, tensor=fast))
        for j in range(i + 1, len(sizes)):
            middle, last = every[i:j], every[j:]
            name = f"data x FSDP x tensor parallel{_parts(sizes, slow, middle, last)}"
            result.append(_Recipe(name, data=every[:j], shard=middle, tensor=last))
    sequenced = [replace(r, name=f"{r.name} + sequence", sequence=True) for r in result if r.tensor]
    return [*result, *sequenced]


def _parts(sizes: Sequence[int], *groups: tuple[int, ...]) -> str:
    """The suffix of a name that tells which factors each part has; empty where there is only one way."""
    if len(sizes) == len(groups):
        return ""
    return f" ({' | '.join('x'.join(str(sizes[f]) for f in part) for part in groups)})"


def _make(problem: Problem, facts: _Facts, recipe: _Recipe, *, limited: bool) -> Restriction | LeftOut:
    domains = list(problem.domains)
    split_batch = False
    memo: dict[tuple[int, Domain, _StateRole], Domain] = {}
    for i, v, role in facts.arguments:
        shape, domain, space = problem.coarse.variables[v].shape, domains[v], problem.space(v)
        if role is None:
            roles = space.roles[list(domain)]
            t = problem.graph.inputs[i]
            leading = next(iter(_split(problem, t, {facts.batch[t] or 0})), None)
            at = np.where(_mask(recipe.data, roles), -1 if leading is None else leading, -1)
            batch = _picked(domain, np.all(roles == at, axis=1)) if leading is not None or not recipe.data else ()
            split_batch = split_batch or bool(batch and recipe.data)
            domains[v] = batch or _picked(domain, np.all(roles < 0, axis=1))
            if not domains[v]:
                return LeftOut(
                    recipe.name,
                    f"{problem.graph.input_paths[i]} {shape} shares its layout with state, which this splits in another way",
                )
            continue
        key = space.rank, domain, role
        if key not in memo:
            memo[key] = _picked(domain, role.allows(space.roles[list(domain)], recipe, problem.sizes))
        if not memo[key]:
            ways, path = math.prod(problem.sizes[f] for f in recipe.tensor), problem.graph.input_paths[i]
            return LeftOut(recipe.name, f"{path} {shape} divides by {ways} along no dim that it may")
        domains[v] = memo[key]
    if recipe.data and not split_batch:
        ways = math.prod(problem.sizes[f] for f in recipe.data)
        return LeftOut(recipe.name, f"no leading dim of the data divides by {ways}")
    for (_, domain, value), own in facts.values.items():
        roles = problem.space(own[0]).roles[list(domain)]
        result = _picked(domain, value.allows(roles, recipe)) or domain
        for v in own:
            domains[v] = result
    limits = _limits(problem, facts, recipe) if limited else Limits()
    return Restriction(recipe.name, tuple(domains), limits, bool(recipe.shard), recipe.parts)


def _limits(problem: Problem, facts: _Facts, recipe: _Recipe) -> Limits:
    """The loops that ops may cut: the batch over data factors; the weight's, or else no data dim, over tensor factors."""
    memo: dict[tuple[int, _Loops], Cuts] = {}
    result: dict[int, Cuts] = {}
    for n, loops in facts.loops.items():
        signature = problem.graph.nodes[n].signature
        key = (signature.id, loops)
        if key not in memo:
            memo[key] = _cuts(signature, loops, recipe, problem.sizes)
        result[n] = memo[key]
    return Limits(result)


def _cuts(signature: Signature, loops: _Loops, recipe: _Recipe, sizes: Sequence[int]) -> Cuts:
    assert signature.description is not None
    every = frozenset(range(len(signature.description.loops))) | {-1}

    def legal(of: frozenset[int], ways: int) -> frozenset[int]:
        return frozenset(v for v in of if signature.cut(v, ways) is not None)

    def may(f: int, ways: int) -> frozenset[int]:
        if f in recipe.data:
            if loops.batch:
                return legal(loops.batch, ways) or frozenset({-1})
            return every if f in recipe.shard or f in recipe.zero else frozenset({-1})
        if f in recipe.tensor:
            return legal(loops.weight, ways) or every - (loops.batch if recipe.sequence else loops.data)
        return frozenset({-1})

    return tuple(may(f, ways) for f, ways in enumerate(sizes))


def _loops(problem: Problem, examples: Examples, sides: Sides) -> dict[int, _Loops]:
    """The loops of every op that has a table."""
    result: dict[int, _Loops] = {}
    for n in problem.coarse.joins:
        node = problem.graph.nodes[n]
        if node.signature.description is not None:
            result[n] = _Loops(*examples.loops(node), _weight_loops(node, sides))
    return result


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
class _ValueRole:
    """The role of a value inside the step: its batch dim and data dims, whether it is a copy of a weight, whether that is a
    matrix, and the side of the matrix that may be cut; whether it is made of weights alone, as a cast is.
    """

    batch: int | None = None
    data: frozenset[int] = frozenset()
    weight: bool = False
    matrix: bool = False
    side: frozenset[int] | None = None
    of_weights: bool = False

    def allows(self, roles: NDArray[np.int64], recipe: _Recipe) -> NDArray[np.bool_]:
        """[S]: whether the value may have each layout, from `LayoutSpace.roles` [S, factors].

        ``tensor`` splits no data dim; with ``sequence``, it may split data dims other than the batch. ``data`` splits the batch
        dim, where there is one; other values only as far as it shards what they are made of: parameters, or in the update of the
        optimizer its state. A weight's copy is split over ``tensor`` alone: a matrix over all of it along its side, others
        freely.
        """
        split = roles >= 0
        tensor, data = _mask(recipe.tensor, roles), _mask(recipe.data, roles)
        if not recipe.data and not recipe.tensor:
            return np.all(~split, axis=1)
        if self.weight:
            result = np.all(~split[:, ~tensor], axis=1)
            return result & _along(roles, tensor, self.side) if self.matrix and recipe.tensor else result
        result = np.ones(len(roles), np.bool_)
        for d in self.data & {self.batch} if recipe.sequence else self.data:
            result &= np.all(roles[:, tensor] != d, axis=1)
        if self.batch is not None:
            return result & np.all(roles[:, data] == self.batch, axis=1)
        sharded = _mask(recipe.shard if self.of_weights else (*recipe.shard, *recipe.zero), roles)
        return result & np.all(~split[:, data & ~sharded], axis=1)


def _value(problem: Problem, examples: Examples, known: Sides, variable: Variable) -> _ValueRole:
    first = variable.tensors[0]
    if variable.kind != "stored" and first in problem.coarse.weights and not examples.data[first]:
        return _ValueRole(weight=True, matrix=_is_matrix(problem, variable.of), side=known.get(first))
    batch: frozenset[int] = frozenset()
    data: frozenset[int] = frozenset()
    for t in variable.tensors:
        batch_dim = examples.batch[t]
        batch = batch or _split(problem, t, frozenset() if batch_dim is None else {batch_dim})
        data |= _split(problem, t, examples.data[t])
    of_weights = first in problem.coarse.weights and not examples.data[first]
    return _ValueRole(next(iter(batch), None), data, of_weights=of_weights)


def _split(problem: Problem, t: int, dims: Set[int]) -> frozenset[int]:
    """Dims of a tensor as dims of its layout space, which has no dims that cannot be split."""
    return frozenset(i for i, d in enumerate(split_dims(problem.graph.tensors[t].shape)) if d in dims)


def _picked(domain: Domain, wanted: NDArray[np.bool_]) -> Domain:
    return tuple(itertools.compress(domain, wanted.tolist()))


def _is_matrix(problem: Problem, v: int) -> bool:
    return len([d for d in problem.coarse.variables[v].shape if d > 1]) >= 2


@dataclass(frozen=True, slots=True)
class _StateRole:
    """The role of a parameter or optimizer state: whether it is a matrix, whether a parameter, and which side may be cut."""

    matrix: bool
    parameter: bool
    side: frozenset[int] | None

    def allows(self, roles: NDArray[np.int64], recipe: _Recipe, sizes: Sequence[int]) -> NDArray[np.bool_]:
        """[S]: whether it may have each layout, given the factors that must split it.

        These are ``shard``, for moments also ``zero``, and for a matrix parameter also ``tensor``. The split is exactly that,
        with each of the two groups along one dim, as one would write it by hand; else the nearest that divides. Vectors, and the
        moments of a matrix, may be split over ``tensor`` or not. No layout is allowed where no side of a matrix parameter divides
        by the tensor factors.
        """
        split = roles >= 0
        tensor = _mask(recipe.tensor, roles)
        over = _mask(recipe.shard if self.parameter else (*recipe.shard, *recipe.zero), roles)
        along = tensor if self.parameter and self.matrix else np.zeros_like(tensor)
        loose = tensor & ~along
        sided = _along(roles, along, self.side) if along.any() else np.ones(len(roles), np.bool_)
        exact = sided & ((split & ~loose) == over | along).all(axis=1)
        if over.any():
            exact &= _along(roles, over, None)
        if along.any() and not exact.any():
            return sided & ((split & ~loose) == along).all(axis=1)
        if exact.any() or along.any():
            return exact
        possible = ~(split & ~(over | loose)).any(axis=1)
        parts = np.where(split & over, np.array(sizes), 1).prod(axis=1)
        return possible & (parts == parts[possible].max(initial=1))


def _mask(of: Sequence[int] | Set[int], roles: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[factors]: whether each factor is one of these."""
    return np.array([f in of for f in range(roles.shape[1])], np.bool_)


def _along(roles: NDArray[np.int64], factors: NDArray[np.bool_], side: frozenset[int] | None) -> NDArray[np.bool_]:
    """[S]: whether one dim (of ``side``, where that is known) is split over all of these factors, at least one."""
    own = roles[:, factors]
    result = (own == own[:, :1]).all(axis=1) & (own[:, 0] >= 0)
    return result if side is None else result & np.any([own[:, 0] == d for d in side], axis=0)
