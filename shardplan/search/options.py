"""Composite strategies: a loop (or none) for every factor, with the layouts that they need and give, and their compute.

A factor that cuts no loop runs the op whole on each of its devices, or hands partial sums on where the op is linear in them. Two
factors may cut the same loop; two loops may not split the same dim. A loop whose extent does not divide may still be cut where
every operand is read at the loop's own index: the last block is padded, at the price of its empty part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.reshard import Resharder
from shardplan.cost import compute
from shardplan.ir import Partial, Replicated, Split
from shardplan.mesh import Device
from shardplan.search.graph import Signature
from shardplan.tdl import Call, Strategy, cut, linear_sets

Roles = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]
"""For each dim the factors that split it, and the factors over which the tensor is partial."""


@dataclass(frozen=True, slots=True)
class Options:
    """The composite strategies of one signature, a row each.

    ``loops[s][f]`` is the loop that factor f cuts (-1: none; -2 - j: partial sums of the j-th linear set of operands are handed
    on). ``needs[s, i]`` is the state that operand i must be in, ``gives[s, r]`` the one that result r is in; ``compute_s[s]`` is
    compute, ``halo_s[s]`` the exchange with neighbours. ``terms[s]``: each factor's terms are made of even blocks, so that they
    may stay apart.
    """

    loops: tuple[tuple[int, ...], ...]
    needs: NDArray[np.int64]
    gives: NDArray[np.int64]
    compute_s: NDArray[np.float64]
    halo_s: NDArray[np.float64]
    terms: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Late:
    """That an op reads or makes what may stay partial, and which of its operands have no layout.

    ``free`` are the operands that are numbers or depend on no input, ``nonzero`` those of them that are not known to be zero: of
    a sum's terms only one could have them.
    """

    free: frozenset[int]
    nonzero: frozenset[int]


Cuts = tuple[frozenset[int], ...]
"""For each factor the loops that it may cut, -1 for none: how a baseline says which way an op runs."""


def limited(rows: Options, cuts: Cuts) -> Options:
    """Only the strategies that cut as they may on the most factors; partial sums are handed on as they like."""
    obeyed = [sum(v < -1 or v in may for v, may in zip(loops, cuts, strict=True)) for loops in rows.loops]
    keep = [i for i, n in enumerate(obeyed) if n == max(obeyed)]
    if len(keep) == len(obeyed):
        return rows
    loops = tuple(rows.loops[i] for i in keep)
    return Options(loops, rows.needs[keep], rows.gives[keep], rows.compute_s[keep], rows.halo_s[keep], rows.terms[keep])


_SIZES = {"": 0, "bool": 1, "bfloat16": 2, "int4": 1, "uint4": 1, "int2": 1, "uint2": 1}


def itemsize(dtype: str) -> int:
    """Bytes of one element of a dtype by name; none of a literal."""
    if dtype in _SIZES:
        return _SIZES[dtype]
    if dtype.startswith("key"):
        return 8
    if dtype.startswith("float8"):
        return 1
    return np.dtype(dtype).itemsize


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a whole tensor."""
    return math.prod(shape) * itemsize(dtype)


def options(signature: Signature, resharder: Resharder, device: Device | None, *, late: Late | None = None) -> Options:
    """All composite strategies of a signature; if it is ``late``, those too that hand partial sums on. No device: no compute."""
    call, description = signature.call, signature.description
    inside = [resharder.space(len(s)) for s in call.operands]
    outside = [resharder.space(len(s)) for s in call.results]
    loops = () if description is None else tuple(v for v, info in enumerate(description.loops) if not info.whole)
    memo: dict[tuple[int, int], Strategy | None] = {}

    handed = linear_sets(description) if late is not None and description is not None else ()
    through = [-2 - j for j, operands in enumerate(handed) if late is not None and _may_pass(frozenset(operands), late)]

    def strategy(loop: int, ways: int) -> Strategy | None:
        assert description is not None
        if loop < -1:
            return _handed_on(call, handed[-2 - loop], ways)
        if (loop, ways) not in memo:
            memo[loop, ways] = cut(description, loop, ways, pad=True)
        return memo[loop, ways]

    usable = [[-1, *(v for v in loops if strategy(v, k) is not None), *through] for k in resharder.sizes]
    rows: list[tuple[tuple[int, ...], list[int], list[int], float, float, bool]] = []
    work = _work(signature)
    for assignment in itertools.product(*usable):
        row = _composite(call, resharder, assignment, strategy)
        if row is None:
            continue
        operands, results, halo = row
        needs = [space.index[(*dims, ()), partial] for space, (dims, partial) in zip(inside, operands, strict=True)]
        gives = [space.index[(*dims, ()), partial] for space, (dims, partial) in zip(outside, results, strict=True)]
        seconds = 0.0
        if work.counts and device is not None:
            moved = sum(b * s.local[i] for b, s, i in zip(work.operand_bytes, inside, needs, strict=True))
            moved += sum(b * s.local[i] for b, s, i in zip(work.result_bytes, outside, gives, strict=True))
            part = _part(signature, resharder, assignment)
            seconds = compute.seconds(device, work.flops * part, float(moved), work.dtype, matrix=work.matrix)
        even = all(v < 0 or _terms_apart(call, strategy(v, k), k, late) for v, k in _cut_loops(assignment, resharder.sizes))
        rows.append((assignment, needs, gives, seconds, halo, even))
    return Options(
        tuple(r[0] for r in rows),
        np.array([r[1] for r in rows], np.int64).reshape(len(rows), len(call.operands)),
        np.array([r[2] for r in rows], np.int64).reshape(len(rows), len(call.results)),
        np.array([r[3] for r in rows]),
        np.array([r[4] for r in rows]),
        np.array([r[5] for r in rows]),
    )


def _cut_loops(assignment: tuple[int, ...], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(loop, into how many blocks) of the loops that an assignment cuts."""
    return [(v, math.prod(k for k, at in zip(sizes, assignment, strict=True) if at == v)) for v in sorted(set(assignment) - {-1})]


def _may_pass(operands: frozenset[int], late: Late) -> bool:
    return not operands & late.nonzero and not operands <= late.free


def _terms_apart(call: Call, strategy: Strategy | None, ways: int, late: Late | None) -> bool:
    """Whether a cut's terms can be made one by one.

    Every operand that it splits falls into even blocks without halo, and none that has no layout is split or is itself a term.
    """
    assert strategy is not None
    if late is None:
        return True
    for i, place in enumerate(strategy.operands):
        if isinstance(place, Partial) and i in late.nonzero:
            return False
        if isinstance(place, Split) and (i in late.free or place.halo != (0, 0) or call.operands[i][place.dim] % ways):
            return False
    return True


def _handed_on(call: Call, operands: tuple[int, ...], ways: int) -> Strategy:
    """Partial sums in, partial sums out: every worker does the whole op on its terms."""
    needs = tuple(Partial("sum") if i in operands else Replicated() for i in range(len(call.operands)))
    return Strategy(-2, ways, needs, tuple(Partial("sum") for _ in call.results))


def _part(signature: Signature, resharder: Resharder, assignment: tuple[int, ...]) -> float:
    """The part of the op's arithmetic that one device does, padding included."""
    part = 1.0
    if signature.description is not None:
        for v, ways in _cut_loops(assignment, resharder.sizes):
            if v >= 0:
                extent = signature.description.loops[v].extent
                part *= -(-extent // ways) / extent
    return part


def _composite(
    call: Call, resharder: Resharder, assignment: tuple[int, ...], strategy: Callable[[int, int], Strategy | None]
) -> tuple[list[Roles], list[Roles], float] | None:
    """Operand and result layouts and halo seconds of one assignment of loops to factors; None if two loops clash."""
    chosen: dict[int, tuple[int, ...]] = {}
    for f, v in enumerate(assignment):
        if v != -1:
            chosen[v] = (*chosen.get(v, ()), f)
    operands: list[dict[int, tuple[int, ...]]] = [{} for _ in call.operands]
    results: list[dict[int, tuple[int, ...]]] = [{} for _ in call.results]
    partial_in: list[tuple[int, ...]] = [() for _ in call.operands]
    partial_out: list[tuple[int, ...]] = [() for _ in call.results]
    halo_s = 0.0
    made: list[tuple[tuple[int, ...], Strategy]] = []
    for v, over in chosen.items():
        found = strategy(v, math.prod(resharder.sizes[f] for f in over))
        if found is None:
            return None
        made.append((over, found))
        for places, dims, partial in ((found.operands, operands, partial_in), (found.results, results, partial_out)):
            for i, place in enumerate(places):
                match place:
                    case Split(dim, halo):
                        if dim in dims[i]:
                            return None
                        dims[i][dim] = over
                        if halo != (0, 0):
                            halo_s += resharder.seconds("permute", over, halo_bytes(call, i, place))
                    case Partial():
                        partial[i] = tuple(sorted((*partial[i], *over)))
                    case _:
                        pass
    halo_s += sum(resharder.seconds("all_reduce", over, extra) for over, extra in pair_bytes(call, made))
    return _roles(operands, partial_in, call.operands), _roles(results, partial_out, call.results), halo_s


def _roles(
    dims: list[dict[int, tuple[int, ...]]], partial: list[tuple[int, ...]], shapes: tuple[tuple[int, ...], ...]
) -> list[Roles]:
    return [(tuple(d.get(n, ()) for n in range(len(s))), p) for d, p, s in zip(dims, partial, shapes, strict=True)]


def pair_bytes(call: Call, made: Sequence[tuple[tuple[int, ...], Strategy]]) -> list[tuple[tuple[int, ...], float]]:
    """What a reduction of pairs sends beside the places: the extremes, and over which factors."""
    found: list[tuple[tuple[int, ...], float]] = []
    for over, strategy in made:
        for r, place in enumerate(strategy.results):
            if isinstance(place, Partial) and place.reducer in ("argmax", "argmin"):
                split = math.prod(s.ways for _, s in made if isinstance(s.results[r], Split))
                found.append((over, nbytes(call.results[r], call.dtypes[0]) / split))
    return found


def halo_bytes(call: Call, operand: int, place: Split) -> float:
    """Bytes that a device receives from its neighbours along a split dim, all other dims whole."""
    shape = call.operands[operand]
    return nbytes(shape, call.dtypes[operand]) / shape[place.dim] * sum(place.halo)


@dataclass(frozen=True, slots=True)
class _Work:
    """Arithmetic and memory traffic of a whole op; ``counts`` is false for what is fused into its reader."""

    flops: float
    operand_bytes: tuple[int, ...]
    result_bytes: tuple[int, ...]
    dtype: str
    matrix: bool
    counts: bool


def _work(signature: Signature) -> _Work:
    call, description = signature.call, signature.description
    size = tuple(nbytes(s, d) for s, d in zip(call.operands, call.dtypes, strict=True))
    out = tuple(nbytes(s, d) for s, d in zip(call.results, call.result_dtypes, strict=True))
    dtype = next((d for d in call.dtypes if d), "float32")
    if description is None:
        return _Work(0.0, size, out, dtype, False, True)
    # moving the same elements about, or spreading a smaller tensor, is fused into the reader
    moves = all(info.reducer is None for info in description.loops) and len([s for s in size if s > 8]) <= 1
    return _Work(compute.flops(description), size, out, dtype, compute.is_contraction(description), not moves)
