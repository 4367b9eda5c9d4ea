"""Wrong descriptions fail the proof: the verifier has teeth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from shardplan import tdl
from shardplan.tdl.cut_proof import verify
from shardplan.tdl.proof.case import Case, bound, traced

RNG = np.random.default_rng(0)


def drawn(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def convolution() -> Case:
    return traced("conv_general_dilated", lambda x, k: lax.conv(x, k, (1,), "SAME"), drawn(2, 4, 12), drawn(6, 4, 3))


def window(reducer: Any, start: float) -> Case:
    name = {lax.add: "reduce_window_sum", lax.max: "reduce_window_max"}[reducer]
    return traced(name, lambda x: lax.reduce_window(x, start, reducer, (3,), (1,), "SAME"), drawn(12))


def lookup() -> Case:
    return traced("gather", lambda t, i: t[i], drawn(12, 4), np.array([[1, 11], [3, 7]], np.int32))


PRODUCT = ((((1,), (0,)), ((), ())), None, None)

# (what is wrong, the case, the wrong description)
MUTATIONS: list[tuple[str, Callable[[], Case], Callable[..., Any]]] = [
    (
        "two dims of an operand swapped",
        lambda: traced("dot_general", lambda x, w: x @ w, drawn(4, 4), drawn(4, 4)),
        lambda x, w: lambda i, j: tdl.Sum(lambda k: x[k, i] * w[k, j]),
    ),
    (
        "two operands swapped",
        lambda: traced("dot_general", lambda x, w: x @ w, drawn(4, 4), drawn(4, 4)),
        lambda x, w: lambda i, j: tdl.Sum(lambda k: w[i, k] * x[k, j]),
    ),
    (
        "a halo dropped",
        convolution,
        lambda x, k: lambda b, o, i: tdl.Sum(lambda c, w: x[b, c, i] * k[o, c, w], extents=(4, 3)),
    ),
    (
        "an offset shifted",
        convolution,
        lambda x, k: lambda b, o, i: tdl.Sum(lambda c, w: x[b, c, i + w] * k[o, c, w], extents=(4, 3)),
    ),
    (
        "a maximum called a sum",
        lambda: traced("reduce_max", lambda x: jnp.max(x, 1), drawn(4, 6)),
        lambda x: lambda i: tdl.Sum(lambda k: x[i, k]),
    ),
    (
        "a sum called a product",
        lambda: traced("reduce_sum", lambda x: jnp.sum(x, 1), drawn(4, 6)),
        lambda x: lambda i: tdl.Prod(lambda k: x[i, k]),
    ),
    (
        "half of a window's halo dropped",
        lambda: window(lax.max, -np.inf),
        lambda x: lambda i: tdl.Max(lambda w: x[i + w], extents=(2,)),
    ),
    (
        "a running sum called elementwise",
        lambda: bound("cumsum", drawn(4, 6), axis=1, reverse=False),
        lambda x: lambda i, j: x[i, j],
    ),
    (
        "a sort called elementwise",
        lambda: traced("sort", lambda x: lax.sort(x), drawn(12)),
        lambda x: (lambda i: tdl.apply("sort", x[i]),),
    ),
    (
        "a transposition forgotten",
        lambda: bound("transpose", drawn(6, 6), permutation=(1, 0)),
        lambda x: lambda i, j: x[i, j],
    ),
    (
        "dims merged in the wrong order",
        lambda: bound("reshape", drawn(4, 6), new_sizes=(24,), dimensions=None, sharding=None),
        lambda x: lambda i: x[i % 4, i // 4],
    ),
    (
        "something nonlinear called linear",
        lambda: bound("abs", drawn(6)),
        lambda x: lambda i: x[i],
    ),
    (
        "an order along which a lookup's rows are swapped for its columns",
        lookup,
        lambda t, i: lambda a, b, d: tdl.Sum(lambda r: tdl.where(tdl.equals(i[a, b, 0], r), t[d, r]), extents=(4,)),
    ),
    (
        "a reversal forgotten",
        lambda: bound("rev", drawn(12), dimensions=(0,)),
        lambda x: lambda i: x[i],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("case", "wrong"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_a_wrong_description_fails_the_proof(case: Callable[[], Case], wrong: Callable[..., Any]) -> None:
    made = case()
    assert not verify(made.call, made.operands).faults
    description = tdl.op(wrong)(made.call)
    assert tdl.cuts(description, 2) or tdl.linear_sets(description)
    assert caught(made, description)


def caught(made: Case, description: tdl.Description) -> bool:
    """A fault is found, or the primitive refuses the regions."""
    try:
        return bool(verify(made.call, made.operands, description=description, nested=0).faults)
    except (TypeError, ValueError, AssertionError, IndexError):
        return True
