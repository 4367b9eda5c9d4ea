"""The layouts of a tensor and the single collectives between them: the graph in which reshardings are paths.

A *buffer* dim, which no stored layout has, stands for the flattened and padded tensor: any tensor can be reduce-scattered over
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.moves import (
    BUFFER,
    Name,
    State,
    moves_from,
    name_of,
    orders,
)
from shardplan.ir import Layout


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Collectives between states, in ascending order of (source, target); all arrays are [E].

    ``which`` is a collective's index in ``names``, ``fraction`` the part of the tensor's bytes that an edge moves.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    which: NDArray[np.int64]
    fraction: NDArray[np.float64]
    names: tuple[Name, ...]


class LayoutSpace:
    """All layouts of a tensor of one rank over factors of given sizes, and the single collectives between them.

    ``levels`` are those of the factors, by default a level for each (see `moves.orders`).
    """

    def __init__(self, sizes: Sequence[int], rank: int, levels: Sequence[int] | None = None) -> None:
        self.sizes = tuple(sizes)
        self.rank = rank
        self.levels = tuple(range(len(self.sizes)) if levels is None else levels)
        # [S, factors]: the dim that each factor splits in each state (-1 for none, -2 for partial, rank for the buffer), and the
        # factor's place among those of its dim, 0 where it splits none
        self.roles, self.places = _all_states(self.levels, rank)
        self._layouts: dict[int, Layout] = {}
        self._numbers: dict[State, int] = {}
        self._renamed: dict[tuple[int, ...], NDArray[np.int64]] = {}
        self._leaders: dict[tuple[int, ...], tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        self.local = 1.0 / self.splits.prod(axis=1)

    def __len__(self) -> int:
        return len(self.roles)

    def state(self, number: int) -> State:
        """The state with a number: the factors that split each dim (the buffer last), in order, and those of partial sums."""
        dims: list[list[int]] = [[] for _ in range(self.rank + 1)]
        partial: list[int] = []
        roles: list[int] = self.roles[number].tolist()
        order: list[int] = np.argsort(self.places[number], kind="stable").tolist()
        for f in order:
            if roles[f] >= 0:
                dims[roles[f]].append(f)
            elif roles[f] == -2:
                partial.append(f)
        return tuple(map(tuple, dims)), tuple(partial)

    def number(self, state: State) -> int:
        """The number of a state.

        Raises:
            KeyError: if there is no such state.
        """
        result = self._numbers.get(state)
        if result is None:
            if not {f for factors in (*state[0], state[1]) for f in factors} <= set(range(len(self.sizes))):
                raise KeyError(state)
            roles, places = np.full(len(self.sizes), -1), np.zeros(len(self.sizes), np.int64)
            for d, factors in enumerate(state[0]):
                roles[list(factors)], places[list(factors)] = d, range(len(factors))
            roles[list(state[1])] = -2
            codes, states = self._codes
            result = int(states.take(np.searchsorted(codes, self._code(roles, places)), mode="clip"))
            if self.state(result) != state:
                raise KeyError(state)
            self._numbers[state] = result
        return result

    @cached_property
    def partial(self) -> NDArray[np.bool_]:
        """[S]: whether any factor is partial."""
        return (self.roles == -2).any(axis=1)

    @cached_property
    def splits(self) -> NDArray[np.int64]:
        """[S, rank + 1]: the number of parts that each state splits each dim into (the buffer last)."""
        sizes = np.array(self.sizes, np.int64)
        return np.stack([np.where(self.roles == d, sizes, 1).prod(axis=1) for d in range(self.rank + 1)], axis=1)

    def of(self, layout: Layout) -> int:
        """The state of a layout.

        Raises:
            KeyError: if there is no such state.
        """
        return self.number(((*layout.dims, ()), tuple(sorted(layout.partial))))

    def layout(self, state: int) -> Layout:
        """The layout of a state; a buffer that is split appears as an extra last dim."""
        result = self._layouts.get(state)
        if result is None:
            dims, partial = self.state(state)
            result = self._layouts[state] = Layout(dims if dims[-1] else dims[:-1], partial)
        return result

    def of_roles(self, roles: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N]: the states with these roles [N, factors] (a dim, -1 none, -2 partial), each dim's factors in ascending order."""
        code = np.zeros(len(roles), np.int64)
        for column in roles.T:
            code = code * (self.rank + 2) + column + 2
        return self._by_roles[code]

    def alike(self, groups: Sequence[Sequence[int]]) -> NDArray[np.bool_]:
        """[S]: whether the factors of each group all split the same dim, all split none, or are all partial."""
        return np.all([self.roles[:, f] == self.roles[:, g[0]] for g in groups for f in g], axis=0)

    @cached_property
    def _by_roles(self) -> NDArray[np.int64]:
        """[(rank + 2) ** factors]: the state of every combination of roles; the first factor is the major digit."""
        count = len(self.sizes)
        roles = np.indices((self.rank + 2,) * count, np.int64).reshape(count, (self.rank + 2) ** count).T - 2
        places = np.zeros_like(roles)
        for f in range(count):
            places[:, f] = ((roles[:, :f] == roles[:, f : f + 1]) & (roles[:, f : f + 1] >= 0)).sum(axis=1)
        return self._lookup(roles, places)

    @cached_property
    def _storable(self) -> NDArray[np.bool_]:
        """[S]: whether the buffer is not split, and each dim's factors are slowest first."""
        result = (self.roles != self.rank).all(axis=1)
        for f, g in itertools.combinations(range(len(self.sizes)), 2):
            result &= (self.roles[:, f] != self.roles[:, g]) | (self.places[:, f] <= self.places[:, g])
        return result

    @cached_property
    def stored(self) -> tuple[int, ...]:
        """The states that a tensor may be stored in: nothing partial, no buffer, each dim's factors slowest first."""
        return tuple(np.flatnonzero(self._storable & ~self.partial).tolist())

    @cached_property
    def deferred(self) -> tuple[int, ...]:
        """The states of a tensor that may stay partial: `stored`, then the partial ones without buffer, factors slowest first."""
        return (*self.stored, *np.flatnonzero(self._storable & self.partial).tolist())

    def edge(self, before: int, after: int) -> tuple[Name, float]:
        """The collective of an edge, and the part of the tensor's bytes that it moves."""
        edges = self.edges
        at = int(np.flatnonzero((edges.source == before) & (edges.target == after))[0])
        return edges.names[int(edges.which[at])], float(edges.fraction[at])

    @cached_property
    def edges(self) -> Edges:
        """The collectives between states; of several between the same two, the one over the fewest factors.

        They are computed once for all source states that differ only in the names of dims.
        """
        leader_of, new_roles = self.leaders((0,) * self.rank)
        unique_leaders: list[int] = sorted(set(leader_of.tolist()))
        at = np.searchsorted(unique_leaders, leader_of)
        roles, places, codes, fraction, of = self._moves([self.state(leader) for leader in unique_leaders])
        counts = np.bincount(of, minlength=len(unique_leaders))
        source, row = _repeat(np.arange(len(leader_of)), counts[at])
        row += (np.cumsum(counts) - counts)[at][source]
        # [S, rank + 3]: for each role in a state's leader, the role in the state
        new_roles = np.hstack([np.tile([-2, -1], (len(leader_of), 1)), new_roles, np.full((len(leader_of), 1), self.rank)])
        target = self._lookup(new_roles[source[:, None], roles[row] + 2], places[row])
        order = np.argsort(source * len(leader_of) + target)
        row = row[order]
        codes = codes[row]
        known = np.flatnonzero(np.bincount(codes))
        names = tuple(name_of(code, len(self.sizes)) for code in known.tolist())
        return Edges(source, target[order], np.searchsorted(known, codes), fraction[row], names)

    def _moves(self, leaders: Sequence[State]) -> tuple[NDArray[Any], ...]:
        """The collectives from leaders: roles and places [M, factors] of their targets, codes, fractions, and the index of each
        one's leader, ascending.
        """
        split = [tuple(d for d in dims[:-1] if d) for dims, _ in leaders]
        result = [
            moves_from(self.sizes, ((*own, dims[-1]), left), self.levels)
            for own, (dims, left) in zip(split, leaders, strict=True)
        ]
        of, _ = _repeat(np.arange(len(result)), np.array([len(m.codes) for m in result], np.int64))
        roles, places, fresh, codes, fraction = (
            np.concatenate([getattr(m, name) for m in result]) for name in ("roles", "places", "fresh", "codes", "fraction")
        )
        first = np.array([len(own) for own in split], np.int64)[of]  # the dim that stands for all unsplit dims
        row, offset = _repeat(np.arange(len(of)), np.where(fresh, self.rank - first, 1))
        roles = roles[row]
        roles += np.where(fresh[row, None] & (roles == first[row, None]), offset[:, None], 0)
        roles[roles == BUFFER] = self.rank
        return roles, places[row], codes[row], fraction[row], of[row]

    # -- renaming dims ---------------------------------------------------------------------------------------------

    def leaders(self, classes: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """([S]: each state's leader, [S, rank]: the state's name for each dim of its leader).

        A leader stands for all states that differ from it only in the names of dims. Dims ``d`` with equal ``classes[d]`` may
        exchange names.
        """
        result = self._leaders.get(classes)
        if result is None:
            keys = _sort_keys(self.roles, self.places, self.rank)[:, : self.rank]
            own = np.broadcast_to(np.array(classes, np.int64), keys.shape)
            names = np.empty_like(keys)
            names[:, np.argsort(classes, kind="stable")] = np.lexsort((-keys, own))
            new_roles = np.tile([*range(self.rank + 1), -2, -1], (len(keys), 1))
            np.put_along_axis(new_roles, names, np.arange(self.rank)[None, :], axis=1)
            result = self._lookup(np.take_along_axis(new_roles, self.roles, axis=1), self.places), names
            self._leaders[classes] = result
        return result

    def renamed(self, names: tuple[int, ...]) -> NDArray[np.int64]:
        """[S]: the state that each becomes when its dim d is renamed ``names[d]``."""
        result = self._renamed.get(names)
        if result is None:
            new = np.array((-2, -1, *names, self.rank), np.int64)
            result = self._lookup(new[self.roles + 2], self.places)
            result.setflags(write=False)
            self._renamed[names] = result
        return result

    @cached_property
    def _codes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(codes that identify states by roles and places, ascending; the state of each code)."""
        codes = self._code(self.roles, self.places)
        order = np.argsort(codes)
        return codes[order], order

    def _code(self, roles: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        count = len(self.sizes)
        return ((roles + 2) * count + places) @ ((self.rank + 3) * count) ** np.arange(count, dtype=np.int64)

    def numbers(self, roles: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """[...]: the states with these roles and places, [..., factors]; -1 where there is none."""
        codes, states = self._codes
        wanted = self._code(roles, places)
        at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        return np.where(codes[at] == wanted, states[at], -1)

    def _lookup(self, roles: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
        """[...]: the states with these roles and places, [..., factors]."""
        codes, states = self._codes
        return states[np.searchsorted(codes, self._code(roles, places))]


def _repeat(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(each value, repeated as often as its count says; the number of each copy among the copies of its value)."""
    result = np.repeat(values, counts)
    return result, np.arange(len(result)) - np.repeat(np.cumsum(counts) - counts, counts)


def _sort_keys(roles: NDArray[np.int64], places: NDArray[np.int64], rank: int) -> NDArray[np.int64]:
    """[S, rank + 3]: sort keys by the factors that split each dim, then the buffer, then by the partial and the unused ones."""
    count = roles.shape[1]
    keys = np.zeros((len(roles), rank + 3), np.int64)
    for f, (role, place) in enumerate(zip(roles.T, places.T, strict=True)):
        keys[np.arange(len(keys)), role] += (f + 1) * (count + 1) ** (count - 1 - place)
    return keys


def _all_states(levels: tuple[int, ...], rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """([S, factors], [S, factors]): the roles and places of all states, sorted by the factors of each dim, then by partial ones.

    The factors of a dim are in one of the `moves.orders` of their levels.
    """
    factors = len(levels)
    roles = np.indices((rank + 3,) * factors, np.int64).reshape(factors, (rank + 3) ** factors).T - 2
    same = roles[:, :, None] == roles[:, None, :]
    own, dims = np.arange(factors), (roles >= 0) & (roles < rank)
    result: list[NDArray[np.int64]] = []
    for order in map(np.array, orders(levels)):
        position = np.argsort(order)  # each factor's rank in this order; roles other than dims have no order
        before = np.where(dims[:, :, None], position[:, None] > position, own[:, None] > own)
        result.append((same & before).sum(axis=2))
    places = np.concatenate(result)
    roles = np.tile(roles, (len(result), 1))
    keys = _sort_keys(roles, places, rank)[:, : rank + 2]
    order = np.lexsort(keys.T[::-1])
    fresh = np.append(True, (keys[order[1:]] != keys[order[:-1]]).any(axis=1))  # several orders give the same state
    places[roles < 0] = 0
    return roles[order[fresh]], places[order[fresh]]
