"""Seconds of compute of one op on one device: under each of its strategies, run whole, and at the least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.reshard import Resharder
from shardplan.cost import compute
from shardplan.graph.nodes import Signature
from shardplan.ir import itemsize
from shardplan.mesh import Device


def nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a whole tensor."""
    return math.prod(shape) * itemsize(dtype)


def compute_s(
    signature: Signature,
    resharder: Resharder,
    device: Device | None,
    loops: NDArray[np.int64],
    needs: NDArray[np.int64],
    gives: NDArray[np.int64],
    part: NDArray[np.float64],
) -> NDArray[np.float64]:
    """[strategies]: seconds of compute on one device.

    ``loops`` [strategies, factors] are the loops cut, as in `Options`. ``needs`` and ``gives`` [strategies, tensors] are the
    states of operands and results, ``part`` [strategies] is the fraction of the arithmetic that is left to the device.
    """
    work = _work(signature)
    if not work.counts or device is None:
        return np.zeros(len(part))
    moved, call = np.zeros(len(part)), signature.call
    for shapes, sizes, states in ((call.operands, work.operand_bytes, needs), (call.results, work.result_bytes, gives)):
        for i, (shape, size) in enumerate(zip(shapes, sizes, strict=True)):
            moved += size * resharder.space(shape).local[states[:, i]]
    return _seconds_each(device, work, work.flops * part * _tile_factor(signature, device, loops, resharder.sizes), moved)


def _tile_factor(signature: Signature, device: Device, loops: NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.float64]:
    """[strategies]: `tiles.tile_factor` of the product that is left to a device; 1 where the op or the device has no tiles."""
    product, description = signature.product, signature.description
    if product is None or description is None or device.compute_units is None:
        return np.ones(1)
    local = {
        v: np.ceil(loop.extent / np.prod(np.where(loops == v, np.array(sizes, np.int64), 1), axis=1))
        for v, loop in enumerate(description.loops)
    }
    return product.tile_factor(device.compute_units, local)


def whole_compute_s(signature: Signature, device: Device) -> float:
    """Seconds of an op that runs whole on one device."""
    work = _work(signature)
    if not work.counts:
        return 0.0
    tile_factor = _tile_factor(signature, device, np.full((1, 0), -1, np.int64), ())
    moved = np.array([sum((*work.operand_bytes, *work.result_bytes))])
    return float(_seconds_each(device, work, work.flops * tile_factor, moved)[0])


def shared_compute_s(
    signature: Signature,
    device: Device,
    part: NDArray[np.float64],
    operands: Sequence[NDArray[np.float64]],
    results: Sequence[NDArray[np.float64]],
    ways: Mapping[int, NDArray[np.int64]],
) -> NDArray[np.float64]:
    """[cuts]: seconds of an op's share on one device, for many cuts at once.

    ``part`` [cuts] is the fraction of the arithmetic that remains, ``operands`` and ``results`` the fraction of each tensor,
    ``ways`` the number of parts of each loop that is cut.
    """
    work = _work(signature)
    if not work.counts:
        return np.zeros(len(part))
    moved = np.zeros(len(part))
    for sizes, shares in ((work.operand_bytes, operands), (work.result_bytes, results)):
        for size, share in zip(sizes, shares, strict=True):
            moved = moved + size * share
    factor: NDArray[np.float64] = np.ones(1)
    if signature.product is not None and signature.description is not None and device.compute_units is not None:
        loops = signature.description.loops
        local = {v: np.ceil(loop.extent / ways.get(v, np.ones(len(part), np.int64))) for v, loop in enumerate(loops)}
        factor = signature.product.tile_factor(device.compute_units, local)
    return _seconds_each(device, work, work.flops * part * factor, moved)


def least_compute_s(signature: Signature, device: Device, devices: int) -> float:
    """A lower bound on the compute of an op under any strategy: its arithmetic and traffic spread evenly over all devices.

    Tiles count nothing here: a strategy may cut them to fit.
    """
    work = _work(signature)
    if not work.counts:
        return 0.0
    flops, moved = np.array([[work.flops], [sum((*work.operand_bytes, *work.result_bytes))]]) / devices
    return float(_seconds_each(device, work, flops, moved)[0])


def _seconds_each(device: Device, own: _Work, flop: NDArray[np.float64], moved: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds of an op's arithmetic and traffic on one device."""
    return compute.seconds_each(device, flop, moved, own.dtype, matrix=own.matrix, attention=own.attention, launches=own.launches)


@dataclass(frozen=True, slots=True)
class _Work:
    """Arithmetic and memory traffic of a whole op; ``counts`` is false for an op that is fused into its reader.

    ``matrix``: it has products, ``attention``: inside fused attention. ``launches``: None for one, if it computes or moves.
    """

    flops: float
    operand_bytes: tuple[float, ...]
    result_bytes: tuple[float, ...]
    dtype: str
    matrix: bool
    attention: bool
    counts: bool
    launches: float | None = None


def _work(signature: Signature) -> _Work:
    call, description, traffic = signature.call, signature.description, signature.traffic
    size = tuple(nbytes(s, d) for s, d in zip(call.operands, call.dtypes, strict=True))
    out = tuple(nbytes(s, d) for s, d in zip(call.results, call.result_dtypes, strict=True))
    dtype, matrix = compute.product_dtype(call, contracts=signature.contracts), signature.multiplies
    flops = compute.flops(description, padding=True) if description is not None and matrix else 0.0  # others are memory-bound
    if traffic is not None:
        read = tuple(n * part for n, part in zip(size, traffic.reads, strict=True))
        written = tuple(n * part for n, part in zip(out, traffic.writes, strict=True))
        return _Work(flops, read, written, dtype, matrix, signature.attends, not traffic.empty, traffic.launches)
    if description is None:
        return _Work(0.0, size, out, dtype, False, False, True)
    # an op that moves the elements of one tensor, or broadcasts it, is fused into the reader
    moves = all(info.reducer is None for info in description.loops) and len([s for s in size if s > 8]) <= 1
    return _Work(flops, size, out, dtype, matrix, signature.attends, not moves)
