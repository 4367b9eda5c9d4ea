"""Strategies: the legal ways to cut an op, by interval analysis (Tofu, section 4.2, partition-n-reduce).

Case 1 cuts a parallel loop: each worker computes a block of the result. Case 2 cuts a reduction loop: each worker computes a
whole result that is one term of the reduction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from shardplan.ir import Partial, Placement, Reducer, Replicated, Split
from shardplan.tdl import language as lang
from shardplan.tdl.description import Description, Monomials, children, products
from shardplan.tdl.index import Affine, IndexExpr, Interval, interval, loops_of

Regions = Mapping[int, Placement]
"""The placement required of each operand that a loop splits."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One loop cut ``ways`` ways: the placement that each operand must have, and the one that each result gets.

    An operand that is never read is `Replicated`.
    """

    loop: int
    ways: int
    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]

    @property
    def has_halo(self) -> bool:
        """Whether a worker needs elements of its neighbours' blocks."""
        return any(isinstance(p, Split) and p.halo != (0, 0) for p in self.operands)


def cut(description: Description, loop: int, ways: int, *, pad: bool = False) -> Strategy | None:
    """The strategy that cuts ``loop`` ``ways`` ways, or None where the cut is not legal.

    A cut is legal if the extent divides, if every operand is needed whole or as one even block of one dim (with a constant halo),
    and if a reduction over ``loop`` can come last. With ``pad``, an extent that does not divide may be cut too, its last block
    padded, if everything is read at the loop's own index.
    """
    info = description.loops[loop]
    if info.whole or ways < 2 or info.extent < ways:
        return None
    uneven = bool(info.extent % ways)
    if uneven and not pad:
        return None
    alone = uneven or description.elementwise
    regions = _regions_alone(description, loop) if alone else _regions(description, loop, ways)
    return None if regions is None else _placed(description, loop, ways, regions)


def in_step(description: Description, loop: int) -> Regions | None:
    """The placements that any cut of a loop requires if it is read at its own index alone (for `cut_in_step`); else None.

    Cuts of such a loop differ only in ``ways``, except that fewer are legal where the extent does not divide.
    """
    if description.loops[loop].whole or _is_shared(description, loop):
        return None
    return _regions_alone(description, loop)


def cut_in_step(description: Description, loop: int, ways: int, regions: Regions) -> Strategy | None:
    """`cut` with ``pad``, for a loop and the regions that `in_step` gives for it; None where the cut is not legal."""
    return _placed(description, loop, ways, regions) if 1 < ways <= description.loops[loop].extent else None


def _placed(description: Description, loop: int, ways: int, regions: Regions) -> Strategy | None:
    """The strategy that reads these regions, with the placements of all other operands and of the results."""
    info = description.loops[loop]
    if info.extent % ways and info.reducer is not None and not _maskable(description, loop, regions):
        return None
    operands: list[Placement] = [Replicated() for _ in description.call.operands]
    for operand, placement in regions.items():
        operands[operand] = placement
    results: list[Placement] = []
    for dims, tree in zip(description.results, description.trees, strict=True):
        if info.reducer is None and not _contains(tree, loop):
            results.append(Split(dims.index(loop)) if loop in dims else Replicated())
            continue
        even = info.reducer is not None or info.extent % ways == 0  # a shared sum has no room for padding
        siblings = _terms_beside(tree, loop) if even and _contains(tree, loop) else None
        reducer = info.reducer or "sum"
        if siblings is None:
            return None
        for operand in siblings:
            if operands[operand] != Replicated() or reducer != "sum":
                return None
            operands[operand] = Partial("sum")
        results.append(Partial(reducer))
    return Strategy(loop, ways, tuple(operands), tuple(results))


def _is_shared(description: Description, loop: int) -> bool:
    """Whether a parallel loop is summed over in some other result."""
    parallel = len(description.trees) > 1 and description.loops[loop].reducer is None
    return parallel and any(_contains(tree, loop) for tree in description.trees)


def cuts(description: Description, ways: int) -> tuple[Strategy, ...]:
    """Every legal strategy for a cut by ``ways``, in the order of the loops."""
    found = (cut(description, loop, ways) for loop in range(len(description.loops)))
    return tuple(s for s in found if s is not None)


def linear_sets(description: Description) -> tuple[tuple[int, ...], ...]:
    """The sets of operands that may be partial sums together: the results are jointly linear in each set.

    The results are then partial sums too. An op with several results must be linear in all of them. The empty set means that the
    results are zero for any operands: they may be called partial at no cost.
    """
    return _linear_sets(description.monomials)


@lru_cache(maxsize=1 << 12)
def _linear_sets(results: tuple[Monomials, ...]) -> tuple[tuple[int, ...], ...]:
    monomials = sorted(m for result in results for m in result)
    if not monomials:
        return ((),)
    if not all(results):
        return ()
    nonlinear = frozenset(o for m in monomials for o in m if m.count(o) > 1)
    return tuple(sorted(_one_of_each(monomials, frozenset(), nonlinear)))


def _one_of_each(monomials: list[tuple[int, ...]], chosen: frozenset[int], barred: frozenset[int]) -> set[tuple[int, ...]]:
    """The sets that hold exactly one factor of each product."""
    for m in monomials:
        if chosen.isdisjoint(m):
            found: set[tuple[int, ...]] = set()
            for o in m:
                if o not in barred:
                    others = {other for n in monomials if o in n for other in n if other != o}
                    if chosen.isdisjoint(others):
                        found |= _one_of_each(monomials, chosen | {o}, barred | others)
            return found
    return {tuple(sorted(chosen))}


def _regions(description: Description, loop: int, ways: int) -> Regions | None:
    """The placement required of each operand that the loop splits; None if no placement describes some region."""
    extents = {i: info.extent for i, info in enumerate(description.loops)}
    own_index = Affine(((loop, 1),))
    along = interval(own_index, extents, loop, ways)
    swept: dict[tuple[int, int], Interval] = {}
    whole: set[tuple[int, int]] = set()
    for operand, indices in description.accesses:
        shape = description.call.operands[operand]
        for dim, ix in enumerate(indices):
            if not _reads(ix, loop):
                if shape[dim] != 1:
                    whole.add((operand, dim))
                continue
            alone = ix == own_index
            if shape[dim] == 1:
                if not alone:
                    return None  # not broadcast: its one element lies somewhere inside the worker's range
                continue
            at = along if alone else interval(ix, extents, loop, ways)
            if at is None:
                return None
            if at.step == 0:
                whole.add((operand, dim))
                continue
            if shape[dim] % ways or at.step != shape[dim] // ways:
                return None
            old = swept.get((operand, dim))
            swept[operand, dim] = Interval(at.step, min(at.lo, old.lo), max(at.hi, old.hi)) if old else at
    placements: dict[int, Placement] = {}
    for (operand, dim), at in sorted(swept.items()):
        if (operand, dim) in whole:
            return None  # another access reads all of it: given all of it, the op would compute the whole result
        if operand in placements:
            return None  # two dims at once: a diagonal
        halo = (max(0, -at.lo), max(0, at.hi - (at.step - 1)))
        if max(halo) >= at.step:
            return None  # the neighbours' blocks do not reach that far
        placements[operand] = Split(dim, halo)
    return placements


def _regions_alone(description: Description, loop: int) -> Regions | None:
    """The placements for a loop that indexes dims only alone and in step, so that its extent need not divide; else None."""
    own_index, extent = Affine(((loop, 1),)), description.loops[loop].extent
    placements: dict[int, Placement] = {}
    for operand, indices in description.accesses:
        shape = description.call.operands[operand]
        read = [dim for dim, ix in enumerate(indices) if _reads(ix, loop)]
        dims = [dim for dim in read if shape[dim] != 1]
        if any(shape[dim] != extent for dim in dims) or len(dims) > 1:
            return None
        # one element that is not broadcast lies somewhere inside the worker's range
        if any(indices[dim] != own_index for dim in (dims if description.elementwise else read)):
            return None
        here = Split(dims[0]) if dims else Replicated()
        if placements.setdefault(operand, here) != here:
            return None  # another access reads another dim, or all of it
    return {operand: place for operand, place in placements.items() if isinstance(place, Split)}


def _reads(index: IndexExpr, loop: int) -> bool:
    return loop in [v for v, _ in index.terms] if type(index) is Affine else loop in loops_of(index)


def _maskable(description: Description, loop: int, regions: Regions) -> bool:
    """Whether the terms beyond the end of a padded reduction vanish when its operands there are the reducer's identity."""
    if description.loops[loop].reducer != "sum":
        return len(description.call.operands) == 1
    return all(any(o in regions and m.count(o) == 1 for o in m) for result in description.monomials for m in result)


_IDEMPOTENT = ("max", "min", "and", "or")


def _contains(tree: lang.Scalar, loop: int) -> bool:
    if isinstance(tree, lang.Reduce) and loop in tree.loops:
        return True
    return any(_contains(child, loop) for child in children(tree))


def _terms_beside(tree: lang.Scalar, loop: int) -> tuple[int, ...] | None:
    """The operands that are added to the reduction over ``loop`` and so must be partial too.

    None if the expression around the reduction cannot be applied to the workers' terms before they are reduced.
    """
    match tree:
        case lang.Reduce(outer, loops, body):
            if loop in loops:
                return ()
            inner = _terms_beside(body, loop)
            return inner if inner == () and _reducer_of(body, loop) == outer else None
        case lang.Apply("add", args, _):
            addends: list[int] = []
            for arg in args:
                if _contains(arg, loop):
                    nested = _terms_beside(arg, loop)
                    if nested is None:
                        return None
                    addends += nested
                else:
                    terms = products(arg)
                    if not all(len(term) == 1 for term in terms):
                        return None
                    addends += [term[0] for term in sorted(terms)]
            return tuple(addends)
        case lang.Apply("apply", args, name) if name in _IDEMPOTENT:
            over = [arg for arg in args if _contains(arg, loop)]
            # max(x, partial maximum): every worker may include x, since repeating x does not change a maximum
            return _terms_beside(over[0], loop) if len(over) == 1 and _reducer_of(over[0], loop) == name else None
        case lang.Apply("where", (condition, value, lang.Number(0.0)), _) if not _contains(condition, loop):
            return _terms_beside(value, loop) if _reducer_of(value, loop) == "sum" else None
        case lang.Apply("neg", (arg,), _):
            return _terms_beside(arg, loop) if _reducer_of(arg, loop) == "sum" else None
        case _:
            return None


def _reducer_of(tree: lang.Scalar, loop: int) -> Reducer | None:
    if isinstance(tree, lang.Reduce) and loop in tree.loops:
        return tree.reducer
    for child in children(tree):
        found = _reducer_of(child, loop)
        if found:
            return found
    return None
