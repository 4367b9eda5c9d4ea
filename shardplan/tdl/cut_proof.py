# pyright: basic
"""Tests descriptions against their primitives: partition-n-reduce on NumPy regions (Tofu calls this open, section 9).

A call's operands are drawn. The real primitive runs each legal cut on the regions that the analysis gives. The workers' results
are concatenated or reduced and compared with those of the uncut primitive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.ir import Partial, Placement, Reducer, Replicated, Split
from shardplan.tdl import language as lang
from shardplan.tdl.describe import describe
from shardplan.tdl.description import Call, Description, children
from shardplan.tdl.localize import Edge, Local, edge_value, evaluate, localize, plain
from shardplan.tdl.strategies import Strategy, cuts, linear_sets

# The change that another order of summation may cause, relative to the largest number in the sums.
_TOLERANCE = {"bfloat16": 4e-2, "float16": 5e-3, "float32": 2e-5, "complex64": 2e-5, "float64": 1e-12, "complex128": 1e-12}


def tolerance_of(dtypes: Iterable[str]) -> float:
    """The change that another order of summation may cause where these dtypes occur, relative to the largest number in the sums.
    Zero for dtypes that do not round.
    """
    return max((_TOLERANCE.get(t, 0.0) for t in dtypes), default=0.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """A cut whose result differs from the uncut one. ``strategies`` has two entries for a nested cut, none for a linear set."""

    call: Call
    strategies: tuple[Strategy, ...]
    result: int
    message: str

    def __str__(self) -> str:
        cuts_made = [f"loop {s.loop} {s.ways} ways ({s.operands} -> {s.results})" for s in self.strategies]
        cut = ", then ".join(cuts_made) or "linearity"
        return f"{self.call.primitive} {self.call.operands} -> {self.call.results}, {cut}: result {self.result} {self.message}"


@dataclass(frozen=True, slots=True)
class ProofCounts:
    """How many checks were run (``cuts``, ``nested`` cuts of cuts, ``linear`` sets of partial operands), and their faults."""

    cuts: int
    nested: int
    linear: int
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True)
class Expected:
    """The uncut results of a call, and how near its cuts must come.

    ``sizes`` are the largest numbers in each result's sums. ``close`` tells which results only move data and so must be equal to
    the last bit.
    """

    whole: tuple[Any, ...]
    tolerance: float
    sizes: tuple[float, ...]
    close: tuple[bool, ...]

    def differences(self, results: Sequence[Any], *, exact: bool = True) -> list[tuple[int, str]]:
        """(result, how it differs) for each result that differs; ``exact`` is false where terms were summed."""
        rows = zip(results, self.whole, self.sizes, self.close, strict=True)
        found = [difference(got, want, 0.0 if same and exact else self.tolerance, size) for got, want, size, same in rows]
        return [(n, message) for n, message in enumerate(found) if message]


def expected(call: Call, operands: Sequence[Any], description: Description) -> Expected:
    """Runs the call uncut on these operands."""
    whole = tuple(_host(x) for x in evaluate(call, operands))
    tolerance = tolerance_of((*call.dtypes, *call.result_dtypes))
    sums = any(linear_sets(description)) or any(loop.reducer == "sum" for loop in description.loops)
    close = tuple(_moves_data(tree) for tree in description.trees)
    return Expected(whole, tolerance, tuple(_sizes(call, operands, whole, sums)), close)


def verify(
    call: Call,
    operands: Sequence[Any],
    *,
    ways: Sequence[int] = (2, 3),
    nested: int = 4,
    seed: int = 0,
    description: Description | None = None,
) -> ProofCounts:
    """Compares every legal cut of ``call``, ``nested`` cuts of cuts and every linear set with the uncut call on these operands.

    ``description`` replaces the registered one (a mutation, or a description that is being registered).
    """
    description = description or describe(call)
    assert description is not None, f"{call.primitive} is not described"
    rng = np.random.default_rng(seed)
    operands = [_host(x) for x in operands]
    whole = expected(call, operands, description)
    sets = [s for s in linear_sets(description) if s]
    faults: list[Fault] = []

    def check(results: Sequence[Any], strategies: tuple[Strategy, ...], exact: bool = True) -> None:
        faults.extend(Fault(call, strategies, n, message) for n, message in whole.differences(results, exact=exact))

    legal = [s for k in ways for s in cuts(description, k)]
    for strategy in legal:
        check(_partition_n_reduce(localize(call, strategy), operands, rng, _evaluated), (strategy,), _no_partial(strategy))
    pairs = _pairs(call, legal, rng, nested)
    for outer, inner in pairs:

        def second_cuts(local: Local, local_operands: Sequence[Any], inner: Strategy = inner) -> list[Any]:
            return _partition_n_reduce(localize(local.call, inner), local_operands, rng, _evaluated)

        strategies = (outer, inner)
        check(
            _partition_n_reduce(localize(call, outer), operands, rng, second_cuts), strategies, all(map(_no_partial, strategies))
        )
    for members in sets:
        check(_linear(call, operands, members, rng), (), False)
    return ProofCounts(len(legal), len(pairs), len(sets), tuple(faults))


def draw(call: Call, rng: np.random.Generator, *, low: int = -4, high: int = 5) -> list[Any]:
    """Operands of the call's shapes and dtypes: small integers, floats of unit size, keys."""
    return [draw_array(shape, dtype, rng, low=low, high=high) for shape, dtype in zip(call.operands, call.dtypes, strict=True)]


def draw_array(shape: tuple[int, ...], dtype: str, rng: np.random.Generator, *, low: int = -4, high: int = 5) -> Any:
    """One random operand."""
    if dtype.startswith("key"):
        impl, words = _KEYS[dtype]
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*shape, words), np.uint32)), impl=impl)
    kind = jnp.dtype(dtype)
    if kind == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if jnp.issubdtype(kind, jnp.integer):
        return rng.integers(max(low, jnp.iinfo(kind).min), high, shape).astype(kind)
    if jnp.issubdtype(kind, jnp.complexfloating):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def _host(x: Any) -> Any:
    return x if _is_key(x) else np.asarray(x)


_KEYS = {"key<fry>": ("threefry2x32", 2), "key<rbg>": ("rbg", 4), "key<urbg>": ("unsafe_rbg", 4)}
"""The generator of keys and the number of words of a key, by the dtype of keys."""


def _is_key(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _evaluated(local: Local, operands: Sequence[Any]) -> list[Any]:
    return list(evaluate(local.call, operands))


def _no_partial(strategy: Strategy) -> bool:
    return not any(isinstance(p, Partial) and p.reducer in ("sum", "prod") for p in (*strategy.operands, *strategy.results))


def _partition_n_reduce(local: Local, operands: Sequence[Any], rng: np.random.Generator, evaluator: Any) -> list[Any]:
    """Runs all workers and joins their results. ``evaluator(local, operands)`` applies the primitive, or cuts it again."""
    strategy, ways = local.strategy, local.strategy.ways
    shares = [
        regions(x, placement, ways, edge, operands, rng)
        for x, placement, edge in zip(operands, strategy.operands, local.edges, strict=False)
    ]
    outs = [
        [_host(x) for x in local.run(lambda ops: tuple(evaluator(local, [_host(x) for x in ops])), [g[w] for g in shares], w)]
        for w in range(ways)
    ]
    return [
        _join_pairs([out[n] for out in outs], [out[len(strategy.results) + n] for out in outs], placement.reducer)
        if isinstance(placement, Partial) and placement.reducer in ("argmax", "argmin")
        else join([out[n] for out in outs], placement)
        for n, placement in enumerate(strategy.results)
    ]


def regions(x: Any, placement: Placement, ways: int, edge: Edge, operands: Sequence[Any], rng: np.random.Generator) -> list[Any]:
    """Each worker's part of an operand: its block with its halo, the whole, or a random term of a sum."""
    match placement:
        case Split(dim, (lo, hi)):
            size = x.shape[dim] // ways
            if lo or hi:
                widths = [(lo, hi) if d == dim else (0, 0) for d in range(x.ndim)]
                x = np.pad(x, widths, constant_values=edge_value(edge, x.dtype, operands))
            return [x[(slice(None),) * dim + (slice(w * size, (w + 1) * size + lo + hi),)] for w in range(ways)]
        case Replicated():
            return [x] * ways
        case Partial():
            return terms(x, ways, rng)


def terms(x: Any, ways: int, rng: np.random.Generator) -> list[Any]:
    """Terms that sum to ``x`` exactly: random integers, or for floats ``2x`` on one worker and ``-x`` in all on the others."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        terms = [draw_array(x.shape, str(x.dtype), rng) for _ in range(ways - 1)]
        return [np.asarray(x - sum(terms, np.zeros_like(x)), x.dtype), *terms]
    zero = np.zeros_like(x)
    if ways == 2:
        return [x + x, -x]
    return [x + x, *([zero] * (ways - 3)), -x / 2, -x / 2]


_JOIN = {
    "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip


def join(parts: Sequence[Any], placement: Placement) -> Any:
    """Joins the workers' parts of a result."""
    match placement:
        case Split(dim, _):
            return jnp.concatenate(parts, dim) if _is_key(parts[0]) else np.concatenate(parts, dim)
        case Replicated():
            return parts[0]
        case Partial(reducer):
            return _reduce(parts, reducer)


def _join_pairs(places: Sequence[Any], extremes: Sequence[Any], reducer: Reducer) -> Any:
    """The position that belongs to the first of the extremes."""
    first = (jnp.argmax if reducer == "argmax" else jnp.argmin)(jnp.stack(extremes), axis=0)
    return np.take_along_axis(np.stack(places), np.asarray(first)[None], 0)[0]


def _reduce(parts: Sequence[Any], reducer: Reducer) -> Any:
    dtype = parts[0].dtype
    if reducer in ("and", "or") and dtype == np.bool_:
        return (np.all if reducer == "and" else np.any)(parts, axis=0)
    total = parts[0]
    for part in parts[1:]:
        total = _JOIN[reducer](total, part)
    return total.astype(dtype)


def _pairs(call: Call, legal: list[Strategy], rng: np.random.Generator, count: int) -> list[tuple[Strategy, Strategy]]:
    """Up to ``count`` random pairs: a cut, and a cut of the call that it leaves to each worker."""
    found: list[tuple[Strategy, Strategy]] = []
    for n in rng.permutation(len(legal)):
        local = localize(call, legal[n]).call
        inner = describe(local)
        if inner is not None and (second_cuts := cuts(inner, 2)):
            found.append((legal[n], second_cuts[int(rng.integers(len(second_cuts)))]))
        if len(found) == count:
            break
    return found


def _linear(call: Call, operands: Sequence[Any], members: tuple[int, ...], rng: np.random.Generator) -> list[Any]:
    """The results summed over two workers; the operands in ``members`` are terms of sums, the others whole."""
    terms = {m: regions(operands[m], Partial(), 2, "zero", operands, rng) for m in members}
    outs = [evaluate(call, [terms[i][w] if i in terms else x for i, x in enumerate(operands)]) for w in range(2)]
    return [np.asarray(np.asarray(a) + np.asarray(b)) for a, b in zip(*outs, strict=True)]


def _moves_data(tree: lang.Scalar) -> bool:
    """Whether the result only moves data, so that it must be equal to the last bit."""
    match tree:
        case lang.Access() | lang.Number():
            return True
        case lang.Apply("where", (_, *branches), name):
            return name != "transformed" and all(map(_moves_data, branches))
        case lang.Apply("neg", (arg,), _):
            return _moves_data(arg)
        case lang.Reduce("max" | "min" | "and" | "or", _, body):
            return _moves_data(body)
        case lang.Reduce("sum", _, lang.Apply("where", _, "given")):
            return all(map(_moves_data, children(tree)))
        case _:
            return False


def _sizes(call: Call, operands: Sequence[Any], whole: Sequence[Any], sums: bool) -> list[float]:
    """The largest number in each result's sums: rounding errors grow with the terms, even where these cancel."""
    sizes = [_magnitude(x) for x in whole]
    if not sums:
        return sizes
    unsigned = [np.abs(x) if not _is_key(x) and jnp.issubdtype(x.dtype, jnp.floating) else x for x in operands]
    return [max(n, _magnitude(_host(x))) for n, x in zip(sizes, evaluate(call, unsigned), strict=True)]


def _magnitude(x: Any) -> float:
    """The largest finite absolute value in an array of floats; 0 for other dtypes."""
    if _is_key(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0.0
    wide = np.abs(x.astype(np.complex128))
    return float(wide[np.isfinite(wide)].max(initial=0.0))


def difference(got: Any, want: Any, tolerance: float, size: float) -> str:
    """How an array differs from the wanted one; ``""`` if it does not. Numbers that may round differ if they are over
    ``tolerance`` times (1 + ``size``) apart, others if they are unequal.
    """
    if _is_key(want):
        got, want = np.asarray(jax.random.key_data(got)), np.asarray(jax.random.key_data(want))
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        return f"has shape {got.shape}, not {want.shape}"
    if got.dtype != want.dtype:
        return f"has dtype {got.dtype}, not {want.dtype}"
    inexact = jnp.issubdtype(want.dtype, jnp.inexact)
    if not inexact or not tolerance:
        same = (got == want) | ((got != got) & (want != want))
        return "" if same.all() else f"differs in {int((~same).sum())} of {same.size} elements"
    wide = np.complex128 if jnp.issubdtype(want.dtype, jnp.complexfloating) else np.float64
    got, want_wide = got.astype(wide), want.astype(wide)
    finite = np.isfinite(want_wide)
    if not np.array_equal(np.isnan(got), np.isnan(want_wide)) or not np.array_equal(
        got[~finite & ~np.isnan(got)], want_wide[~finite & ~np.isnan(want_wide)]
    ):
        return "differs in its non-finite elements"
    error = float(np.abs(got[finite] - want_wide[finite]).max(initial=0.0))
    bound = tolerance * (1.0 + size)
    return "" if error <= bound else f"is off by {error:.3g} (largest number met {size:.3g})"


def same_everywhere(call: Call, strategy: Strategy) -> bool:
    """Whether every worker runs the same program on its share, whichever share it is."""
    return localize(call, strategy).run is plain
