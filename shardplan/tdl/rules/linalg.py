"""Decompositions and solves: opaque on the last dims (Tofu's batch Cholesky), cut along the batch."""

# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardplan.tdl.describe import rule
from shardplan.tdl.description import Call, Lambda
from shardplan.tdl.language import (
    Named,
    Opaque,
    Sum,
    TensorRef,
    given,
    transformed,
)
from shardplan.tdl.rules.movement import held

_ALL = slice(None)

# The rank of each operand without its batch.
_CORES: dict[str, tuple[int, ...]] = {
    "cholesky": (2,), "cholesky_update": (2, 1), "eig": (2,), "eigh": (2,), "geqp3": (2, 1), "geqrf": (2,), "hessenberg": (2,),
    "householder_product": (2, 1), "lu": (2,), "lu_pivots_to_permutation": (1,), "qr": (2,), "schur": (2,), "svd": (2,),
    "tridiagonal": (2,),
}  # fmt: skip


def batched(call: Call, operands: tuple[TensorRef, ...], cores: tuple[int, ...]) -> tuple[Lambda, ...]:
    """One lambda for each result: they share the operands' batch dims, and all other dims are opaque."""
    batch = len(operands[0].shape) - cores[0]

    def result(number: int, rank: int) -> Lambda:
        names = tuple(f"b{d}" if d < batch else f"r{number}_{d}" for d in range(rank))
        return Named(
            names, lambda *i: Opaque()(*(x[(*i[:batch], *[_ALL] * c)] for x, c in zip(operands, cores, strict=True)))[i[batch:]]
        )

    return tuple(result(n, len(shape)) for n, shape in enumerate(call.results))


def _register(name: str, cores: tuple[int, ...]) -> Callable[..., Any]:
    def describe(call: Call, *operands: TensorRef) -> tuple[Lambda, ...]:
        return batched(call, operands, cores)

    return rule(name)(describe)


for _name, _cores in _CORES.items():
    _register(_name, _cores)


@rule("triangular_solve")
def _triangular_solve(call: Call, a: TensorRef, b: TensorRef) -> Lambda:
    """Linear in ``b``; each of its columns (rows, if ``a`` is on the right) is a system of its own."""
    left = bool(call.params["left_side"])

    def element(*i: Any) -> Any:
        *batch, row, column = i
        inside, at_b = (row, (*batch, _ALL, column)) if left else (column, (*batch, row, _ALL))
        return transformed(held(inside) + a[(*batch, _ALL, _ALL)], b[at_b])

    return element


@rule("tridiagonal_solve")
def _tridiagonal_solve(call: Call, lower: TensorRef, main: TensorRef, upper: TensorRef, b: TensorRef) -> Lambda:
    """As `_triangular_solve`: linear in ``b``, one system for each column."""

    def element(*i: Any) -> Any:
        *batch, row, column = i
        bands = sum((x[(*batch, _ALL)] for x in (main, upper)), lower[(*batch, _ALL)])
        return transformed(held(row) + bands, b[(*batch, _ALL, column)])

    return element


@rule("ormqr")
def _ormqr(call: Call, a: TensorRef, taus: TensorRef, c: TensorRef) -> Lambda:
    """``Q @ c`` or ``c @ Q``: linear in ``c``, whose other dim may be cut."""
    left = bool(call.params["left"])

    def element(*i: Any) -> Any:
        *batch, row, column = i
        inside, at_c = (row, (*batch, _ALL, column)) if left else (column, (*batch, row, _ALL))
        return transformed(held(inside) + a[(*batch, _ALL, _ALL)] + taus[(*batch, _ALL)], c[at_c])

    return element


@rule("symmetric_product")
def _symmetric_product(call: Call, a: TensorRef, c: TensorRef) -> Lambda:
    """``alpha a a^T + beta c``: rows and columns are computed together, so only the batch and the summed dim may be cut."""

    def element(*i: Any) -> Any:
        *batch, row, column = i
        total = Sum(lambda k: a[(*batch, row, k)] * a[(*batch, column, k)], (a.shape[-1],))
        return given(held(row, column), c[tuple(i)]) + total

    return element


@rule("fft")
def _fft(call: Call, x: TensorRef) -> Lambda:
    """Linear; the transformed dims are the last ones and stay whole."""
    batch = len(x.shape) - len(call.params["fft_lengths"])
    return lambda *i: transformed(held(*i[batch:]), x[(*i[:batch], *[_ALL] * (len(x.shape) - batch))])
