"""The device groups of a collective, in every form in which HLO writes them.

Lists: ``{{0,1},{2,3}}``.

Iota: ``[2,4]<=[4,2]T(1,0)``. The devices are numbered in an array of the right-hand shape, transposed and cut into rows.

Mesh: ``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b','a':(1)2}``. The devices of a group differ only in the named axes;
``'a':(p)s`` is the sub-axis of size s of the axis a split into [p, s, rest].
"""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardplan.hlo.text import HloInstruction, Module

Groups = tuple[tuple[int, ...], ...]

_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?(?:,|$)")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:,\s*device_ids=\(([^()]*(?:\([^()]*\))?[^()]*)\))?\s*\{([^}]*)\}")
_ARRANGEMENT = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?$")


def replica_groups(instruction: HloInstruction, module: Module) -> Groups:
    """The groups of a collective; one of all devices where the list is empty or absent. Raises `HloError` on an unknown form."""
    text = instruction.attribute(r"\breplica_groups=(.*)$")
    if text is None or text.startswith("{}"):
        return (tuple(range(module.num_devices)),)
    if text.startswith("{"):
        return id_lists(text)
    if match := _IOTA.match(text):
        shape, counted, order = match.groups()
        return _rows(_arranged(counted, order).reshape(_ints(shape)))
    if match := _MESH.match(text):
        return _mesh_groups(instruction, *match.groups())
    raise instruction.error("unknown form of replica_groups")


def id_lists(text: str) -> Groups:
    """``{{0,1},{2,3}}...`` -> ((0, 1), (2, 3)); text after the closing braces is ignored."""
    body = text[: text.index("}}") + 1]
    return tuple(_ints(group) for group in re.findall(r"\{([\d,\s]+)\}", body))


def _mesh_groups(instruction: HloInstruction, axes: str, device_ids: str | None, chosen: str) -> Groups:
    sizes = {name: int(size) for name, size in _AXIS.findall(axes)}
    refs = [(name, int(pre or 1), int(size) if size else sizes.get(name, 0)) for name, pre, size in _AXIS_REF.findall(chosen)]
    if unknown := [name for name, _, _ in refs if name not in sizes]:
        raise instruction.error(f"the axis {unknown[0]!r} is not in its mesh")
    # Cut every axis at the borders of its named sub-axes, so that each reference covers whole dims of the array.
    dims: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, full in sizes.items():
        borders = sorted({1, full} | {b for n, pre, size in refs if n == name for b in (pre, pre * size)})
        for low, high in pairwise(borders):
            place[name, low] = len(dims)
            dims.append(high // low)
        if full == 1:
            place[name, 1] = len(dims)
            dims.append(1)
    inner = [
        at for n, pre, size in refs for (name, low), at in place.items() if name == n and pre <= low < max(pre * size, pre + 1)
    ]
    devices = _device_ids(device_ids, int(np.prod(list(sizes.values())))).reshape(dims)
    outer = [at for at in range(len(dims)) if at not in inner]
    group = int(np.prod([dims[at] for at in inner]))
    return _rows(devices.transpose(outer + inner).reshape(-1, group))


def _device_ids(text: str | None, count: int) -> NDArray[np.int64]:
    if text is None:
        return np.arange(count)
    if match := _ARRANGEMENT.match(text.strip()):
        return _arranged(*match.groups())
    return np.array(_ints(text))


def _arranged(counted: str, order: str | None) -> NDArray[np.int64]:
    devices = np.arange(int(np.prod(_ints(counted)))).reshape(_ints(counted))
    return devices.transpose(_ints(order)) if order else devices


def _rows(array: NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(d) for d in row) for row in array)


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(piece) for piece in text.split(",") if piece.strip())
