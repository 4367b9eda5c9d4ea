"""Arrays of a state on their way to another layout: by a program of collectives, or in pieces from device to device."""

# pyright: basic
from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from shardplan import _jax
from shardplan.collectives.pieces import Box, box_of, pieces
from shardplan.cost import Network
from shardplan.emit.crossings import assembled
from shardplan.emit.stacked import partition_spec
from shardplan.emit.transfers import Transfers
from shardplan.schedule import Move


class Collectives:
    """Moves arrays over one mesh of these devices, which are row-major over the network's factors; equal moves compile once."""

    def __init__(self, network: Network, devices: Sequence[Any]) -> None:
        self._names, sizes = tuple(f.name for f in network.factors), [f.size for f in network.factors]
        own = np.array(devices, dtype=object).reshape(sizes)
        self._mesh = Mesh(own, self._names, axis_types=(AxisType.Auto,) * len(sizes))
        self._transfers = Transfers(network, self._names, sizes)
        self._programs: dict[object, Any] = {}

    def moved(self, x: Any, move: Move, sharding: NamedSharding) -> Any:
        """The array after the collectives of a move, with this sharding, which is the move's last layout."""
        before = NamedSharding(self._mesh, partition_spec(move.before, self._names))
        with _jax.on_mesh(self._mesh):
            return self.program(move, sharding)(jax.device_put(x, before))

    def program(self, move: Move, sharding: NamedSharding) -> Any:
        """The jitted program of a move."""
        key = move.shape, move.steps, sharding
        if key not in self._programs:
            before, after = (partition_spec(layout, self._names) for layout in (move.before, move.after))
            run = _jax.shard_mapped(
                lambda block: (self._transfers.move(block, move),), mesh=self._mesh, in_specs=(before,), out_specs=(after,)
            )
            self._programs[key] = jax.jit(lambda whole: run(whole)[0], out_shardings=sharding)
        return self._programs[key]


def in_pieces(x: Any, sharding: NamedSharding, lost: Collection[Any]) -> Any | None:
    """The array with another sharding, each block put together on its own device; None where devices that are not ``lost`` (and
    belong to this process) do not hold all of it.
    """
    held = {s.device: (box_of(s.index, x.shape), s.data) for s in x.addressable_shards if s.device not in lost}
    wanted = [(d, box_of(index, x.shape)) for d, index in sharding.addressable_devices_indices_map(x.shape).items()]
    found = pieces([(d, box) for d, (box, _) in held.items()], wanted, [d for d, _ in wanted])
    if not all(found):
        return None
    blocks: list[Any] = []
    for own in found:
        parts = [(piece.box, _cut(*held[piece.source], piece.box, piece.target)) for piece in own]
        blocks.append(_joined(parts))
    return assembled(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)), sharding, blocks)


def _cut(held: Box, block: Any, wanted: Box, device: Any) -> Any:
    """A part of a block, on a device."""
    if held != wanted:
        starts = [a - low for (a, _), (low, _) in zip(wanted, held, strict=True)]
        block = lax.dynamic_slice(block, starts, [b - a for a, b in wanted])
    return jax.device_put(block, device)


def _joined(parts: Sequence[tuple[Box, Any]], dim: int = 0) -> Any:
    """Parts that lie in a grid, row-major, as one block."""
    if len(parts) == 1:
        return parts[0][1]
    rows: dict[int, list[tuple[Box, Any]]] = {}
    for box, part in parts:
        rows.setdefault(box[dim][0], []).append((box, part))
    blocks = list(map(partial(_joined, dim=dim + 1), rows.values()))
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=dim)
