"""No valid cut is missed: brute force over (operand splits, result split or partial) finds none that the analysis does not offer.

``incomplete.txt`` beside this file lists the exceptions, each with a reason from a closed list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan.ir import Partial, Placement, Replicated, Split
from shardplan.tdl import Call, Strategy, cuts, describe, shrink
from shardplan.tdl.coverage import sort_primitives
from shardplan.tdl.cut_proof import draw_array, join, regions
from shardplan.tdl.localize import evaluate
from shardplan.tdl.proof import CASES, Drawn

REASONS = ("data-dependent region", "non-affine index", "strided placement")
FOUND = Path(__file__).parent / "incomplete.txt"
WAYS = 2

PROVEN = [entry.name for entry in sort_primitives() if entry.kind in ("described", "opaque")]
# JAX does not check the shapes of their operands against each other: wrong ones crash in LAPACK, or fail in MLIR.
UNCHECKED = ("fft", "geqp3", "ormqr")
QUICK = (
    "add argmax broadcast_in_dim clamp concatenate conv_general_dilated cumsum dot_general dynamic_slice "
    "dynamic_update_slice gather pad ragged_dot_general reduce_max reduce_sum reduce_window_max reshape rev scatter "
    "scatter-add scatter-max select_and_scatter_add select_n slice sort split stack top_k transpose "
    "triangular_solve"
).split()


def listed() -> dict[str, str]:
    """The exceptions: primitive and cut, and why."""
    lines = [line for line in FOUND.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {what.strip(): why.strip() for what, why in (line.rsplit(";", 1) for line in lines)}


def splits(shape: Sequence[int]) -> list[Placement]:
    return [Replicated(), *(Split(d) for d, n in enumerate(shape) if n % WAYS == 0)]


def joins(shape: Sequence[int], dtype: str) -> list[Placement]:
    reducers = ("and", "or") if dtype == "bool" else ("sum", "prod", "max", "min")
    partial = [] if dtype.startswith("key") else [Partial(r) for r in reducers]
    return [*(Split(d) for d, n in enumerate(shape) if n % WAYS == 0), *partial]


def candidates(call: Call) -> Iterator[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    """All pairs with some operand split; several results are joined alike."""
    each = [joins(s, t) for s, t in zip(call.results, call.result_dtypes, strict=True)]
    shared = [p for p in each[0] if all(p in other for other in each)]
    for operands in product(*map(splits, call.operands)):
        if any(isinstance(p, Split) for p in operands):
            yield from ((operands, (p,) * len(call.results)) for p in shared)


def holds(call: Call, operands: Sequence[Any], whole: Sequence[Any], strategy: Strategy) -> bool:
    """Whether the primitive on the plain blocks gives the whole; what it refuses does not."""
    rng = np.random.default_rng(0)
    local = shrink(call, strategy)
    given = [regions(x, p, WAYS, "zero", operands, rng) for x, p in zip(operands, strategy.operands, strict=True)]
    try:
        shaped = jax.eval_shape(lambda *ops: evaluate(local, ops), *(g[0] for g in given))
        if tuple(tuple(s.shape) for s in shaped) != local.results:
            return False
        parts = [evaluate(local, [g[w] for g in given]) for w in range(WAYS)]
    except (
        TypeError,
        ValueError,
        AssertionError,
        ZeroDivisionError,
        NotImplementedError,
        IndexError,
        jax.errors.JaxRuntimeError,
    ):
        return False
    if all(close(np.asarray(x), np.asarray(want)) for part in parts for x, want in zip(part, whole, strict=True)):
        return False  # each worker has the whole: nothing was cut
    return all(
        close(join([np.asarray(part[n]) for part in parts], placement), np.asarray(want))
        for n, (placement, want) in enumerate(zip(strategy.results, whole, strict=True))
    )


def close(got: Any, want: Any) -> bool:
    if got.shape != want.shape:
        return False
    if not jnp.issubdtype(want.dtype, jnp.inexact):
        return bool(np.array_equal(got, want))
    return bool(np.allclose(got.astype(np.complex128), want.astype(np.complex128), rtol=3e-2, atol=1e-3, equal_nan=True))


def unoffered(name: str, seed: int) -> list[str]:
    """The valid cuts of one case that the analysis does not offer."""
    case = CASES[name](Drawn(seed))
    call, operands = case.call, [x if str(x.dtype).startswith("key") else np.asarray(x) for x in case.operands]
    if name in UNCHECKED or any(t.startswith("key") for t in (*call.dtypes, *call.result_dtypes)) or not call.operands:
        return []
    if np.prod([len(splits(s)) for s in call.operands]) > 70:
        return []
    description = describe(call)
    assert description is not None
    offered = {(plain(s.operands), s.results) for s in cuts(description, WAYS)}
    whole = evaluate(call, operands)
    if all(np.asarray(w).size < 2 or np.unique(np.asarray(w)).size == 1 for w in whole):
        return []  # too little of a result to tell cuts apart
    found: list[str] = []
    for places, results in candidates(call):
        if (places, results) in offered or weaker(places, results, offered):
            continue
        if holds(call, operands, whole, Strategy(0, WAYS, places, results)) and lasting(call, operands, places, results):
            found.append(f"{name}: {shown(places)} -> {shown(results)}")
    return found


def plain(places: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(Split(p.dim) if isinstance(p, Split) else Replicated() if isinstance(p, Partial) else p for p in places)


def weaker(places: Sequence[Placement], results: Sequence[Placement], offered: set[Any]) -> bool:
    """Whether an offered cut gives the same and asks no operand to be split that this one has whole.

    Results that have loops of their own may each be cut by a strategy of their own.
    """
    apart = [
        any(r[n] == result and all(a in (b, Replicated()) for a, b in zip(o, places, strict=True)) for o, r in offered)
        for n, result in enumerate(results)
    ]
    return all(apart) or any(
        r == results and all(a in (b, Replicated()) for a, b in zip(o, places, strict=True)) for o, r in offered
    )


def lasting(call: Call, operands: Sequence[Any], places: tuple[Placement, ...], results: tuple[Placement, ...]) -> bool:
    """Whether the cut holds for other operands too: one draw may agree by accident."""
    rng = np.random.default_rng(1)
    for n in range(6):
        drawn = [_other(x, rng, free=len(operands) == 1, shuffled=n % 2 == 0) for x in operands]
        if not holds(call, drawn, evaluate(call, drawn), Strategy(0, WAYS, places, results)):
            return False
    return True


def _other(x: Any, rng: np.random.Generator, *, free: bool, shuffled: bool) -> Any:
    """Another operand of the kind; integers that may be indices keep to the values or at least to the range that they have."""
    if x.dtype.kind not in "iu" or free or not x.size:
        return draw_array(x.shape, str(x.dtype), rng, low=-100, high=100)
    if shuffled:
        return rng.permutation(x.ravel()).reshape(x.shape)
    return rng.integers(x.min(), int(x.max()) + 1, x.shape).astype(x.dtype)


def shown(places: Sequence[Placement]) -> str:
    def one(p: Placement) -> str:
        match p:
            case Split(dim, _):
                return f"split {dim}"
            case Partial(reducer):
                return f"partial {reducer}"
            case _:
                return "whole"

    return ", ".join(map(one, places))


@pytest.mark.parametrize("name", QUICK)
def test_brute_force_finds_no_other_cut(name: str) -> None:
    known = listed()
    assert [cut for seed in (1, 2) for cut in unoffered(name, seed) if cut not in known] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", PROVEN)
def test_brute_force_finds_no_other_cut_on_more_cases(name: str) -> None:
    known = listed()
    found = [cut for seed in range(8) for cut in unoffered(name, seed) if cut not in known]
    assert found == []


def test_every_exception_has_a_reason() -> None:
    for what, why in listed().items():
        assert why in REASONS, what
