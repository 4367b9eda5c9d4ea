"""Arrays on their way between groups of devices that belong to several processes.

`jax.device_put` moves an array to other processes only over servers that each of them has to start, between meshes of one shape
that share no process, and in one layout. So an array crosses by a program of permutes on the devices of both groups, which runs
wherever collectives do. Every process that owns one of these devices issues it, and all issue their programs in one order.

If a process holds none of an array's blocks, it has the array as one without blocks.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from shardplan import _jax
from shardplan.collectives.pieces import ArrayPart, Box, box_of, in_rounds, pieces, shape_of
from shardplan.emit.launches import in_turn, launch_of
from shardplan.errors import ShardplanError
from shardplan.frontend.nnx_state import abstract

_AXIS = "device"
_TUNES_IN_SHARDS = frozenset({"cpu", "cuda", "gpu", "rocm"})
"""The platforms whose compilers know the option. The compiler for CPUs ignores it."""


def compiled_apart(devices: Sequence[Any]) -> dict[str, bool]:
    """The compiler options of programs on these devices that only some processes of a run compile.

    XLA divides the autotuning of a program for GPUs among processes, and each then waits for the others' results.
    """
    several = len({d.process_index for d in devices}) > 1
    return {"xla_gpu_shard_autotuning": False} if several and devices[0].platform in _TUNES_IN_SHARDS else {}


@dataclass(frozen=True, slots=True)
class _Turn:
    """One permute: who sends to whom, by number, and the shape of each piece. A device cuts it out of its block at ``cut_at``
    [devices, rank], and one that receives [devices] puts it into its new block at ``put_at`` [devices, rank].
    """

    pairs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...]
    cut_at: NDArray[np.int32]
    put_at: NDArray[np.int32]
    receives: NDArray[np.bool_]


class Crossing:
    """Moves arrays of one type from one sharding to another, by one program on the devices of both.

    Every process that owns one of these devices makes the same calls, in the same order among all programs on them.
    """

    def __init__(self, shape: jax.ShapeDtypeStruct, source: Sharding, target: Sharding) -> None:
        self._shape, self._target = shape, target
        held, wanted = _boxes(source, shape.shape), _boxes(target, shape.shape)
        devices = tuple(dict.fromkeys((*held, *wanted)))
        self._own = tuple(d for d in devices if d.process_index == jax.process_index())
        self._goals = tuple(d for d in wanted if d in self._own)
        mesh = Mesh(np.array(devices, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))
        # each device has a block of its own: no program reads this array as one whole
        self._each, self._options = NamedSharding(mesh, PartitionSpec()), compiled_apart(devices)
        self._block, self._made = (shape_of(next(iter(boxes.values()))) for boxes in (held, wanted))
        self._turns, self._launch = _turns(devices, held, wanted), launch_of(devices)
        self._program = self._jitted()

    @property
    def is_here(self) -> bool:
        """Whether this process takes part."""
        return bool(self._own)

    def moved(self, x: Any | None) -> Any:
        """The array with the new sharding; ``x`` may be None in a process that owns none of its devices."""
        if not self.is_here:
            return _jax.absent_array(self._shape, self._target)
        return self._sent({} if x is None else {s.device: s.data for s in x.addressable_shards})

    def connect(self) -> None:
        """Compiles the program and runs it on zeros. Processes connect in a first run, and wait only half a minute for it."""
        jax.block_until_ready(self._sent({}))

    def _sent(self, blocks: Mapping[Any, Any]) -> Any:
        """The array whose blocks these devices hold."""
        blocks = {**blocks, **self._zeros(tuple(d for d in self._own if d not in blocks))}
        each = jax.make_array_from_single_device_arrays(self._block, self._each, [blocks[d] for d in self._own])
        made = {s.device: s.data for s in in_turn(self._launch, self._program, each).addressable_shards}
        return assembled(self._shape, self._target, [made[d] for d in self._goals])

    def _zeros(self, devices: tuple[Any, ...]) -> dict[Any, Any]:
        """A block on each of these devices, for those that hold none."""
        return {s.device: s.data for s in _zeros(self._block, self._shape.dtype, devices)().addressable_shards} if devices else {}

    def _jitted(self) -> Any:
        spec, mesh = PartitionSpec(), self._each.mesh

        def crossing(each: Any) -> Any:
            with _jax.on_mesh(mesh):
                return _jax.shard_mapped(self._permuted, mesh=mesh, in_specs=spec, out_specs=spec)(each)

        return jax.jit(crossing, in_shardings=self._each, out_shardings=self._each, compiler_options=self._options or None)

    def _permuted(self, block: Any) -> Any:
        """The program of one device."""
        keys = jnp.issubdtype(block.dtype, jax.dtypes.extended)
        data = jax.random.key_data(block) if keys else block
        words = data.shape[block.ndim :]  # of a key
        here = lax.axis_index(_AXIS)
        made = jnp.zeros((*self._made, *words), data.dtype)
        for turn in self._turns:
            cut_at, put_at = (
                [jnp.asarray(row)[here] for row in (*at.T, *np.zeros((len(words), len(at)), np.int32))]
                for at in (turn.cut_at, turn.put_at)
            )
            shape = *turn.shape, *words
            piece = lax.ppermute(lax.dynamic_slice(data, cut_at, shape), _AXIS, turn.pairs)
            piece = jnp.where(jnp.asarray(turn.receives)[here], piece, lax.dynamic_slice(made, put_at, shape))
            made = lax.dynamic_update_slice(made, piece, put_at)
        return jax.random.wrap_key_data(made, impl=_jax.key_impl(block.dtype)) if keys else made


@cache
def crossing(shape: jax.ShapeDtypeStruct, source: Sharding, target: Sharding) -> Crossing:
    """The one `Crossing` of this type between these shardings: its program compiles once."""
    return Crossing(shape, source, target)


class Places:
    """The groups of devices of a plan, and what its processes do with arrays on them and with values that each of them has.

    All processes make the same calls, in the same order.
    """

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        groups = [frozenset(mesh.devices.flat) for mesh in meshes]
        self._groups = {*groups, frozenset[Any]().union(*groups)}

    def put(self, x: Any, sharding: NamedSharding) -> Any:
        """A value that every process has as a whole, or an array of the plan or on devices of several processes, moved there.

        Raises:
            ShardplanError: for any other array: only one other process has it.
        """
        shape = abstract(x)
        assert shape is not None, "the leaf was checked"
        if isinstance(x, jax.Array) and (self._holds(x) or not x.is_fully_addressable):
            processes = {d.process_index for d in x.sharding.device_set}
            if not self._holds(x) and len(processes) == 1:
                raise ShardplanError(
                    f"an array of shape {list(x.shape)} lies on devices of process {min(processes)} alone, which hold nothing of "
                    "this plan: give all processes the whole array"
                )
            if len(processes | {d.process_index for d in sharding.device_set}) > 1:
                return crossing(shape, x.sharding, sharding).moved(x)
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        value = x if isinstance(x, jax.Array) else np.asarray(x, shape.dtype)
        blocks = [jax.device_put(value[i], d) for d, i in sharding.addressable_devices_indices_map(shape.shape).items()]
        return assembled(shape, sharding, blocks)

    def fetch(self, x: Any) -> Any:
        """The whole of an array as one of NumPy, and of random keys as keys, in every process."""
        if self._holds(x):
            devices: list[Any] = jax.devices(next(iter(x.sharding.device_set)).platform)
            firsts = list({d.process_index: d for d in reversed(devices)}.values())[::-1]
            if len(firsts) > 1:
                mesh = Mesh(np.array(firsts, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))
                x = self.put(x, NamedSharding(mesh, PartitionSpec())).addressable_shards[0].data
        return x if jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended) else np.asarray(x)

    def _holds(self, x: Any) -> bool:
        """Whether an array lies on a group or on all of them, as all processes know; what a process has made for itself has no
        mesh.
        """
        sharding = getattr(x, "sharding", None)
        return isinstance(sharding, NamedSharding) and frozenset(sharding.device_set) in self._groups


def assembled(shape: jax.ShapeDtypeStruct, sharding: Sharding, blocks: Sequence[Any]) -> Any:
    """The array of these blocks of this process, weakly typed where ``shape`` is."""
    if not blocks:
        return _jax.absent_array(shape, sharding)
    result = jax.make_array_from_single_device_arrays(shape.shape, sharding, list(blocks))
    return jax.jit(_jax.weakly_typed, out_shardings=sharding)(result) if shape.weak_type else result


@cache
def _zeros(shape: tuple[int, ...], dtype: Any, devices: tuple[Any, ...]) -> Any:
    """A program that makes zeros of a shape on each of these devices of this process."""

    def run() -> Any:
        if not jnp.issubdtype(dtype, jax.dtypes.extended):
            return jnp.zeros(shape, dtype)
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, dtype))
        return jax.random.wrap_key_data(jnp.zeros(words.shape, words.dtype), impl=_jax.key_impl(dtype))

    mesh = Mesh(np.array(devices, dtype=object), (_AXIS,), axis_types=(AxisType.Auto,))
    return jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """The block of each device of all processes."""
    return {d: box_of(index, shape) for d, index in sharding.devices_indices_map(shape).items()}


def _turns(devices: Sequence[Any], held: Mapping[Any, Box], wanted: Mapping[Any, Box]) -> tuple[_Turn, ...]:
    """The permutes that make wanted blocks of held ones."""
    number = {d: n for n, d in enumerate(devices)}
    if not all(b > a for box in held.values() for a, b in box):
        return ()  # no elements
    parts = pieces(list(held.items()), list(wanted.items()), ())
    assert all(parts), "the source holds all of the array"
    return tuple(_turn(turn, number, held, wanted) for turn in in_rounds([p for own in parts for p in own]))


def _turn(
    parts: Sequence[ArrayPart[Any]], number: Mapping[Any, int], held: Mapping[Any, Box], wanted: Mapping[Any, Box]
) -> _Turn:
    cut_at, put_at = (np.zeros((len(number), len(parts[0].box)), np.int32) for _ in range(2))
    receives = np.zeros(len(number), np.bool_)
    for p in parts:
        cut_at[number[p.source]] = [a - low for (a, _), (low, _) in zip(p.box, held[p.source], strict=True)]
        put_at[number[p.target]] = [a - low for (a, _), (low, _) in zip(p.box, wanted[p.target], strict=True)]
        receives[number[p.target]] = True
    pairs = tuple((number[p.source], number[p.target]) for p in parts)
    return _Turn(pairs, shape_of(parts[0].box), cut_at, put_at, receives)
