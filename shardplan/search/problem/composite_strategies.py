"""Composite strategies: a loop (or none) for every factor, with the layouts that they need and give, and their compute.

A factor that cuts no loop runs the op whole on each of its devices, or hands partial sums on where the op is linear in them. Two
factors may cut the same loop; two loops may not split the same dim. A loop whose extent does not divide may still be cut if
every operand is read at the loop's own index: the last block is padded, and its empty part is paid for. A strategy that pads a
tensor by more than `Resharder.legal` admits is left out, because no resharding leads to its layouts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.layouts import LayoutSpace
from shardplan.collectives.reshard import Resharder, split_dims
from shardplan.graph.nodes import Signature
from shardplan.ir import PAIRS, Collective, Manual, Partial, Placement, Replicated, Split
from shardplan.mesh import Device
from shardplan.search.problem.compute_prices import compute_s, nbytes
from shardplan.tdl import Call, Strategy, cut_in_step, in_step, linear_sets


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """The composite strategies of one signature, a row each.

    ``loops[s, f]`` is the loop that factor f cuts (-1: none; -2 - j: partial sums of the j-th linear set of operands are handed
    on). ``needs[s, i]`` is the state that operand i must be in, ``gives[s, r]`` the one that result r is in. ``compute_s[s]`` is
    compute, ``halo_s[s]`` the exchanges inside the op. ``terms[s]``: whether the terms of its sums may stay apart: its cuts
    divide evenly and have no halo (`_terms_apart`).
    """

    loops: NDArray[np.int64]
    needs: NDArray[np.int64]
    gives: NDArray[np.int64]
    compute_s: NDArray[np.float64]
    halo_s: NDArray[np.float64]
    terms: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Late:
    """The operands without a layout of an op that reads or makes a tensor that may stay partial.

    ``free`` are the operands that are literals or depend on no input. ``nonzero`` are the ones among them that are not known to
    be zero: only one term of a sum could contain them.
    """

    free: frozenset[int]
    nonzero: frozenset[int]


Cuts = tuple[frozenset[int], ...]
"""For each factor, the loops that it may cut (-1: none). Baselines say with these how an op runs."""


def limited(rows: Options, cuts: Cuts) -> Options:
    """Only the strategies that obey ``cuts`` on the most factors. A factor that hands partial sums on always obeys.

    The best strategies that hand none on are kept too, because there may be no partial sums to hand on.
    """
    handed = rows.loops < -1
    columns = [h | np.any([loops == v for v in may], axis=0) for h, loops, may in zip(handed.T, rows.loops.T, cuts, strict=True)]
    obeyed = np.sum(columns, axis=0) if columns else np.zeros(len(rows.loops), np.int64)
    alone = ~handed.any(axis=1)
    return _picked(rows, (obeyed == obeyed.max()) | (alone & (obeyed == obeyed[alone].max(initial=-1))))


Groups = tuple[tuple[int, ...], ...]
"""Groups of factors that are treated alike."""


def treated_alike(rows: Options, groups: Groups) -> Options:
    """Only the strategies that do the same with all factors of a group."""
    pairs = [(f, g[0]) for g in groups for f in g[1:]]
    return _picked(rows, (rows.loops[:, [f for f, _ in pairs]] == rows.loops[:, [g for _, g in pairs]]).all(axis=1))


def _picked(rows: Options, keep: NDArray[np.bool_]) -> Options:
    if keep.all():
        return rows
    return Options(
        rows.loops[keep], rows.needs[keep], rows.gives[keep], rows.compute_s[keep], rows.halo_s[keep], rows.terms[keep]
    )


def options(
    signature: Signature, resharder: Resharder, device: Device | None, *, late: Late | None = None, memo: Memo | None = None
) -> Options:
    """All composite strategies of a signature; with ``late``, also those that hand partial sums on.

    Rows are ordered like the digits of a number: the fastest factor's loop changes first. Without a device, compute is 0.
    ``memo`` holds the rows that signatures with equal cuts share on this resharder.
    """
    if signature.manual is not None:
        return _held(signature, signature.manual, resharder, device)
    call = signature.call
    cuts = _Cuts(signature, resharder, late)
    cut_info = [cuts.cut_info(code, ways) for code, ways in cuts.tried.cuts]
    shapes = (*call.operands, *call.results)
    spaces = [resharder.space(s) for s in shapes]
    key = cuts.tried, tuple(space.rank for space in spaces), tuple((m.legal, m.places, m.divides, m.fenced) for m in cut_info)
    memo = {} if memo is None else memo
    if key not in memo:
        memo[key] = _combined(cuts.tried, spaces, cut_info)
    combined = memo[key]
    holdable = _holdable(resharder, shapes, combined.states)
    at, over, codes, first = combined.at[holdable], combined.over[holdable], combined.codes[holdable], combined.first[holdable]
    needs, gives = np.split(combined.states[holdable], [len(call.operands)], axis=1)
    halo_s = np.zeros(len(at))
    if any(m.halos for m in cut_info):
        halo_s += np.sum(_halos_s(call, resharder, cut_info)[at, over], axis=1, where=first)
    if any(m.pairs for m in cut_info):
        halo_s += [_pairs_s(call, resharder, [(m, o) for m, o, f in rows if f]) for rows in _rows(cut_info, at, over, first)]
    part = np.prod(_numbers(m.part for m in cut_info)[at], axis=1, where=first)
    loops = cuts.loops[codes]
    return Options(
        loops,
        needs,
        gives,
        compute_s(signature, resharder, device, loops, needs, gives, part),
        halo_s,
        _terms(cut_info, at),
    )


def _held(signature: Signature, manual: Manual, resharder: Resharder, device: Device | None) -> Options:
    """The one way to run an op that the step itself runs on each device: its blocks, with nothing cut by the plan."""
    layouts = manual.layouts(resharder.network.names)
    shapes = signature.call.operands, signature.call.results
    needs, gives = (
        np.array([[resharder.state(s, at) for s, at in zip(own, ats, strict=True)]], np.int64).reshape(1, len(own))
        for own, ats in zip(shapes, layouts, strict=True)
    )
    whole = np.full((1, len(resharder.sizes)), -1, np.int64)
    seconds = compute_s(signature, resharder, device, whole, needs, gives, np.ones(1))
    return Options(whole, needs, gives, seconds, np.zeros(1), np.zeros(1, np.bool_))


@dataclass(frozen=True, slots=True, eq=False)
class _Combined:
    """Composite strategies, a row each: the fields of `_Tried`, whether each factor is the slowest of its loop (``first``
    [strategies, factors]), and the states of all operands and results [strategies, tensors].
    """

    codes: NDArray[np.int64]
    over: NDArray[np.int64]
    at: NDArray[np.int64]
    first: NDArray[np.bool_]
    states: NDArray[np.int64]


def _combined(tried: _Tried, spaces: Sequence[LayoutSpace], cut_info: Sequence[_CutInfo]) -> _Combined:
    """The assignments of loops to factors in which every cut is legal and no two loops split the same dim of a tensor."""
    places = np.array([m.places for m in cut_info], np.int64).reshape(len(cut_info), len(spaces))
    legal = np.all(np.array([m.legal for m in cut_info], np.bool_)[tried.at], axis=1) & ~_clash(tried.codes, places[tried.at])
    # a fenced loop makes the op run on shares, which are never padded along any loop
    legal &= ~(
        _flags(m.fenced for m in cut_info)[tried.at].any(axis=1) & _flags(not m.divides for m in cut_info)[tried.at].any(axis=1)
    )
    at, over, codes = tried.at[legal], tried.over[legal], tried.codes[legal]
    bits = _bits(over.shape[1])
    first = (over & (2 * bits - 1)) == bits  # each loop's slowest factor stands for all of its factors
    return _Combined(codes, over, at, first, _states(spaces, places, at))


def _flags(values: Iterable[bool]) -> NDArray[np.bool_]:
    return np.array(list(values), np.bool_)


def _numbers(values: Iterable[float]) -> NDArray[np.float64]:
    return np.array(list(values), np.float64)


def _terms(cut_info: Sequence[_CutInfo], at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[strategies]: `Options.terms`. If a cut makes terms, each device makes its own term, so all cuts must divide."""
    even, divides = _flags(m.even for m in cut_info)[at], _flags(m.divides for m in cut_info)[at]
    adds = _flags(-2 in m.places and m.strategy is not None and m.strategy.loop >= 0 for m in cut_info)[at]
    return np.all(even, axis=1) & (np.all(divides, axis=1) | ~np.any(adds, axis=1))


class _Roles(NamedTuple):
    """The effect of a cut: ``places``, the role of its factors in each operand and result (-2: partial, -1: none, else the dim of
    its space); ``halos``, the operands read beyond their blocks; ``pairs``, whether a reduction of pairs remains.
    """

    places: tuple[int, ...]
    halos: tuple[tuple[int, Split], ...]
    pairs: bool


class _CutInfo(NamedTuple):
    """One loop cut a number of ways: whether that is legal, the fields of `_Roles`, the cut itself, and whether it divides.

    ``part`` is the fraction of the arithmetic left to a device, ``even`` whether the cut's terms may stay apart, ``fenced``
    whether the cut must run on shares.
    """

    legal: bool
    places: tuple[int, ...]
    part: float = 1.0
    even: bool = True
    strategy: Strategy | None = None
    halos: tuple[tuple[int, Split], ...] = ()
    pairs: bool = False
    divides: bool = True
    fenced: bool = False


class _Cuts:
    """The ways to cut a signature's loops. ``loops[code]`` is -1, a loop, or -2 - j for the j-th linear set; ``tried`` are the
    assignments of codes to factors.
    """

    def __init__(self, signature: Signature, resharder: Resharder, late: Late | None) -> None:
        self.signature, self.resharder, self.late = signature, resharder, late
        self.call, self.description = signature.call, signature.description
        self.dims = [split_dims(shape) for shape in (*self.call.operands, *self.call.results)]
        known = self.description
        cuttable = () if known is None else tuple(v for v, info in enumerate(known.loops) if not info.whole)
        self.handed = linear_sets(known) if late is not None and known is not None else ()
        passed = [-2 - j for j, operands in enumerate(self.handed) if late is not None and _may_pass(frozenset(operands), late)]
        self.loops: NDArray[np.int64] = np.array([-1, *cuttable, *passed])
        self._strategies: dict[tuple[int, int], Strategy | None] = {}
        # for loops whose cuts differ only in their number of ways
        self._by_loop: dict[tuple[int, bool], Strategy | None] = {}
        self._cut_roles: dict[tuple[int, int], _Roles] = {}
        loops: list[int] = self.loops.tolist()
        usable = {
            k: tuple([code for code, v in enumerate(loops) if v < 0 or self._strategy(v, k) is not None])
            for k in dict.fromkeys(resharder.sizes)
        }
        self.tried = _tried(tuple([usable[k] for k in resharder.sizes]), resharder.sizes)

    def cut_info(self, code: int, ways: int) -> _CutInfo:
        """The cut of a loop over factors that have ``ways`` ways in total."""
        call, loop = self.call, int(self.loops[code])
        count = len(call.operands) + len(call.results)
        if loop == -1:
            return _CutInfo(True, (-1,) * count)
        found = self._strategy(loop, ways)
        if found is None:
            return _CutInfo(False, (-1,) * count)
        part, even, divides = 1.0, True, True
        if loop >= 0:
            assert self.description is not None
            extent = self.description.loops[loop].extent
            divides = extent % ways == 0
            part, even = -(-extent // ways) / extent, _terms_apart(call, found, ways, self.late)
        key = loop, 0 if any(v == loop for v, _ in self._by_loop) else ways
        if key not in self._cut_roles:
            self._cut_roles[key] = self._roles(found)
        cut_roles = self._cut_roles[key]
        return _CutInfo(
            True, cut_roles.places, part, even, found, cut_roles.halos, cut_roles.pairs, divides, loop in self.signature.fenced
        )

    def _roles(self, found: Strategy) -> _Roles:
        placed = zip((*found.operands, *found.results), self.dims, strict=True)
        halos = [(i, p) for i, p in enumerate(found.operands) if isinstance(p, Split) and p.halo != (0, 0)]
        pairs = any(isinstance(p, Partial) and p.reducer in PAIRS for p in found.results)
        return _Roles(tuple([_role(place, dims) for place, dims in placed]), tuple(halos), pairs)

    def _strategy(self, loop: int, ways: int) -> Strategy | None:
        if (loop, ways) not in self._strategies:
            self._strategies[loop, ways] = self._cut_loop(loop, ways)
        return self._strategies[loop, ways]

    def _cut_loop(self, loop: int, ways: int) -> Strategy | None:
        assert self.description is not None
        if loop < -1:
            return _handed_on(self.call, self.handed[-2 - loop], ways)
        extent = self.description.loops[loop].extent
        if extent < ways or (extent % ways and loop in self.signature.fenced):
            return None
        key = loop, extent % ways == 0  # where a last block would be padded, fewer cuts are legal
        if key not in self._by_loop:
            regions = in_step(self.description, loop)
            if regions is None:
                return self.signature.cut(loop, ways)
            self._by_loop[key] = cut_in_step(self.description, loop, ways, regions)
        found = self._by_loop[key]
        return None if found is None else Strategy(loop, ways, found.operands, found.results)


def _role(place: Placement, dims: Sequence[int]) -> int:
    if isinstance(place, Split):
        return dims.index(place.dim)
    return -2 if isinstance(place, Partial) else -1


Memo = dict[tuple["_Tried", tuple[int, ...], tuple[tuple[bool, tuple[int, ...], bool, bool], ...]], "_Combined"]
"""Composite strategies by assignments tried, ranks of the tensors, and (legal, places, divides, fenced) of each cut."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """Every assignment of loops, by code, to factors: [assignments, factors], one empty row where there are no factors.

    ``over`` is the mask of the factors that cut the same loop, ``cuts[at]`` is (that loop's code, its number of ways).
    """

    codes: NDArray[np.int64]
    over: NDArray[np.int64]
    at: NDArray[np.int64]
    cuts: tuple[tuple[int, int], ...]


@lru_cache(maxsize=64)
def _tried(usable: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> _Tried:
    codes = np.array(list(itertools.product(*usable)), np.int64)
    over = (codes[:, :, None] == codes[:, None, :]).astype(np.int64) @ _bits(codes.shape[1])
    ways = [math.prod(k for f, k in enumerate(sizes) if mask >> f & 1) for mask in range(1 << len(sizes))]
    most = max(ways) + 1
    which, at = np.unique(codes * most + np.array(ways, np.int64)[over], return_inverse=True)
    found = _Tried(codes, over, at.reshape(over.shape), tuple((int(w) // most, int(w) % most) for w in which))
    for numbers in (found.codes, found.over, found.at):
        numbers.setflags(write=False)
    return found


def _halos_s(call: Call, resharder: Resharder, cut_info: Sequence[_CutInfo]) -> NDArray[np.float64]:
    """[cuts, masks]: seconds of a cut's halo exchange over the factors of a mask, where their sizes multiply to its ways."""
    found = np.zeros((len(cut_info), 1 << len(resharder.sizes)))
    for row, m in zip(found, cut_info, strict=True):
        for i, place in m.halos:
            for mask in range(1, len(row)):
                over = tuple(f for f in range(len(resharder.sizes)) if mask >> f & 1)
                if m.strategy is not None and math.prod(resharder.sizes[f] for f in over) == m.strategy.ways:
                    row[mask] += sum(resharder.seconds(Collective.SHIFT, over, side) for side in halo_bytes(call, i, place))
    return found


def _bits(count: int) -> NDArray[np.int64]:
    return np.array([1 << f for f in range(count)], np.int64)


def _clash(codes: NDArray[np.int64], roles: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[assignments]: whether two loops split the same dim of some tensor."""
    found = np.zeros(len(codes), np.bool_)
    for f, g in itertools.combinations(range(codes.shape[1]), 2):
        same = (roles[:, f] == roles[:, g]) & (roles[:, f] >= 0)
        found |= same.any(axis=1) & (codes[:, f] != codes[:, g])
    return found


def _states(spaces: Sequence[LayoutSpace], places: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """[strategies, tensors]: the states in which each factor has the role of its cut, ``at`` [strategies, factors]."""
    found: dict[tuple[int, bytes], NDArray[np.int64]] = {}
    columns: list[NDArray[np.int64]] = []
    for space, roles in zip(spaces, places.T, strict=True):
        key = space.rank, roles.tobytes()
        if key not in found:
            found[key] = space.of_roles(roles[at])
        columns.append(found[key])
    return np.stack(columns, axis=1) if columns else np.zeros((len(at), 0), np.int64)


def _holdable(resharder: Resharder, shapes: Sequence[tuple[int, ...]], states: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[strategies]: whether no tensor is padded by more than is legal. It holds where the op runs whole."""
    legal = [resharder.legal(shape, pad=True)[states[:, i]] for i, shape in enumerate(shapes)]
    return np.all(np.array(legal, np.bool_).reshape(len(shapes), len(states)), axis=0)


def _rows(
    cut_info: Sequence[_CutInfo], at: NDArray[np.int64], over: NDArray[np.int64], first: NDArray[np.bool_]
) -> Iterator[list[tuple[_CutInfo, int, bool]]]:
    for row in zip(at.tolist(), over.tolist(), first.tolist(), strict=True):
        yield [(cut_info[m], o, f) for m, o, f in zip(*row, strict=True)]


def _pairs_s(call: Call, resharder: Resharder, cuts: Sequence[tuple[_CutInfo, int]]) -> float:
    """Seconds to all-reduce the extremes of a reduction of pairs."""
    over = [tuple(f for f in range(len(resharder.sizes)) if mask >> f & 1) for _, mask in cuts]
    cut_info = [(o, m.strategy) for o, (m, _) in zip(over, cuts, strict=True) if m.strategy is not None]
    return sum(resharder.seconds(Collective.ALL_REDUCE, o, extra) for o, extra in pair_bytes(call, cut_info))


def _may_pass(operands: frozenset[int], late: Late) -> bool:
    return not operands & late.nonzero and not operands <= late.free


def _terms_apart(call: Call, strategy: Strategy | None, ways: int, late: Late | None) -> bool:
    """Whether a cut's terms can be made one by one.

    Every reduction must be a sum, and every split operand must fall into even blocks without halo. An operand without a layout
    may not be split, and may be partial only if it is zero.
    """
    assert strategy is not None
    if late is None:
        return True
    if any(isinstance(place, Partial) and place.reducer != "sum" for place in strategy.results):
        return False
    for i, place in enumerate(strategy.operands):
        if isinstance(place, Partial) and i in late.nonzero:
            return False
        if isinstance(place, Split) and (i in late.free or place.halo != (0, 0) or call.operands[i][place.dim] % ways):
            return False
    return True


def _handed_on(call: Call, operands: tuple[int, ...], ways: int) -> Strategy:
    """Partial sums in, partial sums out: every worker runs the whole op on its terms."""
    needs = tuple(Partial("sum") if i in operands else Replicated() for i in range(len(call.operands)))
    return Strategy(-2, ways, needs, tuple(Partial("sum") for _ in call.results))


def pair_bytes(call: Call, cut_info: Sequence[tuple[tuple[int, ...], Strategy]]) -> list[tuple[tuple[int, ...], float]]:
    """(factors, bytes) of the extremes that a reduction of pairs (argmax, argmin) sends beside the indices."""
    found: list[tuple[tuple[int, ...], float]] = []
    for over, strategy in cut_info:
        for r, place in enumerate(strategy.results):
            if isinstance(place, Partial) and place.reducer in PAIRS:
                split = math.prod(s.ways for _, s in cut_info if isinstance(s.results[r], Split))
                found.append((over, nbytes(call.results[r], call.dtypes[0]) / split))
    return found


def halo_bytes(call: Call, operand: int, place: Split) -> tuple[float, ...]:
    """Bytes that a device receives from each neighbour along a split dim, all other dims whole: each comes by its own permute."""
    shape = call.operands[operand]
    row = nbytes(shape, call.dtypes[operand]) / shape[place.dim]
    return tuple(row * n for n in place.halo if n)
