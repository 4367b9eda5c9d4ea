# pyright: basic
"""Cases of linear algebra: a batch of small systems, none of them singular."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan import _jax
from shardplan.tdl.proof.case import (
    Case,
    Draw,
    array,
    bound,
    case,
    traced,
)

_BATCHES = ((2,), (6,), (2, 3))


def _square(draw: Draw, n: int = 4) -> Any:
    """A batch of symmetric, positive definite matrices."""
    a = array(draw, (*draw.choose(_BATCHES), n, n))
    return (a @ np.swapaxes(a, -1, -2) + n * np.eye(n)).astype(np.float32)


def _general(draw: Draw) -> Any:
    return array(draw, (*draw.choose(_BATCHES), *draw.choose(((4, 4), (6, 4)))))


@case("cholesky", "eigh", "eig", "schur", "hessenberg", "tridiagonal", "lu")
def _of_square(name: str, draw: Draw) -> Case:
    makers = {
        "cholesky": lambda a: lax.linalg.cholesky(a, symmetrize_input=False),
        "eigh": lax.linalg.eigh,
        "eig": lax.linalg.eig,
        "schur": lax.linalg.schur,
        "hessenberg": lax.linalg.hessenberg,
        "tridiagonal": lax.linalg.tridiagonal,
        "lu": lax.linalg.lu,
    }
    return traced(name, makers[name], _square(draw))


@case("qr", "svd", "geqrf")
def _of_general(name: str, draw: Draw) -> Case:
    full = draw.choose((False, True))
    makers = {
        "qr": lambda a: lax.linalg.qr(a, full_matrices=full),
        "svd": lambda a: lax.linalg.svd(a, full_matrices=full),
        "geqrf": lambda a: _jax.linalg().geqrf(a),
    }
    return traced(name, makers[name], _general(draw))


@case("geqp3")
def _geqp3(name: str, draw: Draw) -> Case:
    a = _general(draw)
    return traced(name, lambda a, p: _jax.linalg().geqp3(a, p), a, np.zeros((*a.shape[:-2], a.shape[-1]), np.int32))


@case("householder_product", "ormqr")
def _reflectors(name: str, draw: Draw) -> Case:
    a, taus = _jax.linalg().geqrf(_general(draw))
    if name == "householder_product":
        return traced(name, lax.linalg.householder_product, a, taus)
    left = draw.choose((True, False))
    m, n = a.shape[-2], draw.choose((2, 6))
    c = array(draw, (*a.shape[:-2], *((m, n) if left else (n, m))))
    return traced(name, lambda a, t, c: _jax.linalg().ormqr(a, t, c, left=left, transpose=draw.choose((False, True))), a, taus, c)


@case("lu_pivots_to_permutation")
def _pivots(name: str, draw: Draw) -> Case:
    pivots = lax.linalg.lu(jnp.asarray(_square(draw)))[1]
    return bound(name, np.asarray(pivots), permutation_size=4)


@case("triangular_solve")
def _triangular_solve(name: str, draw: Draw) -> Case:
    left = draw.choose((True, False))
    a = _square(draw)
    b = array(draw, (*a.shape[:-2], *((4, 6) if left else (6, 4))))
    lower, transposed, unit = (draw.choose((True, False)) for _ in range(3))
    return bound(name, a, b, left_side=left, lower=lower, transpose_a=transposed, conjugate_a=False, unit_diagonal=unit)


@case("tridiagonal_solve")
def _tridiagonal_solve(name: str, draw: Draw) -> Case:
    batch = draw.choose(_BATCHES)
    lower, main, upper, b = (
        array(draw, (*batch, 4)),
        array(draw, (*batch, 4)) + 9,
        array(draw, (*batch, 4)),
        array(draw, (*batch, 4, 6)),
    )
    lower[..., 0] = upper[..., -1] = 0
    return traced(name, lax.linalg.tridiagonal_solve, lower, main.astype(np.float32), upper, b)


@case("symmetric_product")
def _symmetric_product(name: str, draw: Draw) -> Case:
    batch = draw.choose(_BATCHES)
    a, c = array(draw, (*batch, 4, 6)), array(draw, (*batch, 4, 4))
    return traced(name, lambda a, c: lax.linalg.symmetric_product(a, c, alpha=2.0, beta=0.5), a, c)


@case("fft")
def _fft(name: str, draw: Draw) -> Case:
    kind = draw.choose((lax.FftType.FFT, lax.FftType.IFFT, lax.FftType.RFFT, lax.FftType.IRFFT))
    rank = draw.choose((1, 2))
    lengths = (4, 6)[-rank:]
    last = lengths[-1] // 2 + 1 if kind == lax.FftType.IRFFT else lengths[-1]
    dims = (*draw.choose(_BATCHES), *lengths[:-1], last)
    x = array(draw, dims, "float32" if kind == lax.FftType.RFFT else "complex64")
    return bound(name, x, fft_type=kind, fft_lengths=lengths)


@case("cholesky_update")
def _cholesky_update(name: str, draw: Draw) -> Case:
    lower = np.triu(array(draw, (4, 4))) + 4 * np.eye(4, dtype=np.float32)
    return bound(name, lower, array(draw, (4,)))
