"""Programs on devices: each instruction becomes collectives over mesh axes, inside `shard_map` (P2, section 4).

AllReduce, ReduceScatter and AllGather over every group are JAX's own, over whole mesh axes where the groups are such, else over
groups of their indices. Reduce and Broadcast are binomial trees of ``ppermute``; what only masters do is a ring of ``ppermute``
in which the other devices send nothing. Every device runs the same code, so a device that a program leaves empty holds
leftovers until a Broadcast overwrites them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, assert_never, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from ..cost.network import Network, binomial_rounds
from ..errors import ClusterError, nearest
from ..mesh.cluster import Cluster
from ..mesh.devices import detect, device_numbers
from ..mesh.factoring import read_order
from .best import best_reduction
from .dsl import Instruction, Master, Reduction, ReductionError, Refusal, advance, groups, parse, replay
from .ranking import entries, names_of
from .states import Space

Part = tuple[int, int, int]  # an axis by its index, a size and a stride within the axis
_SMALL = 64  # replay a program on its true sizes up to so many devices; on two a level beyond


@dataclass(frozen=True, slots=True)
class Laying:
    """How a hierarchy lies on mesh axes: for each entry its parts, major first."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    entries: tuple[tuple[Part, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the entries."""
        return tuple(math.prod(size for _, size, _ in entry) for entry in self.entries)

    def positions(self) -> list[int]:
        """For each device of the hierarchy, in its own order, its index along all axes together."""
        parts = [part for entry in self.entries for part in entry]
        result: list[int] = []
        for at in itertools.product(*(range(size) for _, size, _ in parts)):
            along = [0] * len(self.axes)
            for (axis, _, stride), c in zip(parts, at, strict=True):
                along[axis] += c * stride
            result.append(int(np.ravel_multi_index(along, self.sizes)))
        return result

    def whole_axes(self, low: int, high: int) -> tuple[str, ...] | None:
        """The axes that entries [low, high) are made of, in their order, if these are whole axes."""
        parts = [part for entry in self.entries[low:high] for part in entry]
        merged: list[list[int]] = []
        for axis, size, stride in parts:
            if merged and merged[-1][0] == axis and merged[-1][2] == stride * size:
                merged[-1][1:] = [merged[-1][1] * size, stride]
            else:
                merged.append([axis, size, stride])
        if any(size != self.sizes[axis] or stride != 1 for axis, size, stride in merged):
            return None
        return tuple(self.axes[axis] for axis, _, _ in merged)


def all_reduce(
    x: Any,
    mesh: Mesh,
    *,
    over: str | Sequence[str],
    program: str | Reduction = "auto",
    cluster: str | Cluster | None = None,
    chunks: int = 1,
) -> Any:
    """The sum of ``x`` (any pytree of arrays) over mesh axes, by a reduction program; call it inside `jax.shard_map`.

    ``program`` is "auto" (the best one for the bytes at hand on the cluster), a `Reduction`, or its text over the cluster's level
    names. ``cluster`` says what the mesh's devices are (default: what `detect` finds); its levels give the hierarchy. ``chunks``
    cuts the data into so many pieces that go through the program one behind another. Pass ``check_vma=False`` to the
    `shard_map`: JAX cannot infer that the result is the same along ``over``.

    Raises `ReductionError` where the program does not compute the sum or an axis is not there.
    """
    axes = (over,) if isinstance(over, str) else tuple(over)
    laying, network, factors = lay(mesh, axes, cluster)
    names = names_of(network, entries(network, factors))

    def one(leaf: Any) -> Any:
        nbytes = leaf.size * leaf.dtype.itemsize
        chosen = program
        if isinstance(chosen, str):
            chosen = best_reduction(network, factors, nbytes)[1] if chosen == "auto" else parse(chosen, names)
        if not chosen.steps:
            return leaf
        check(chosen, laying.shape, names)
        return run(leaf, chosen, laying, chunks=chunks)

    return jax.tree.map(one, x)


@lru_cache(maxsize=128)
def lay(mesh: Mesh, over: tuple[str, ...], cluster: str | Cluster | None = None) -> tuple[Laying, Network, tuple[int, ...]]:
    """The hierarchy of a reduction over mesh axes, the network it runs on, and its factors there."""
    for axis in over:
        if axis not in mesh.axis_names:
            known = tuple(str(n) for n in mesh.axis_names)
            raise ReductionError(f"the mesh has no axis {axis!r}{nearest(axis, known)}: its axes are {', '.join(known)}")
    machine = detect(list(mesh.devices.ravel())) if cluster is None else Cluster.load(cluster)
    if machine.size != mesh.devices.size:
        raise ClusterError(f"the mesh has {mesh.devices.size} devices, the cluster {machine.name!r} has {machine.size}")
    factors, groups_of = read_order(machine, device_numbers(mesh))
    network = Network(machine, factors)
    mine = [(over.index(str(a)), group) for a, group in zip(mesh.axis_names, groups_of, strict=True) if a in over]
    where: dict[int, Part] = {}
    for axis, group in mine:
        stride = math.prod(factors[i].size for i in group)
        for i in group:
            stride //= factors[i].size
            where[i] = (axis, factors[i].size, stride)
    levels = entries(network, tuple(where))
    sizes = tuple(int(mesh.shape[a]) for a in over)
    return Laying(tuple(over), sizes, tuple(tuple(where[i] for i in entry) for entry in levels)), network, tuple(where)


def check(program: Reduction, shape: Sequence[int], names: Sequence[str] = ()) -> None:
    """Refuse a program that does not compute the sum, or that needs what a device no longer has once all run the same code."""
    sizes = tuple(shape) if math.prod(shape) <= _SMALL else (2,) * len(shape)
    replay(program, sizes, names=names)
    _check_same_code(program, sizes, names)


def run(x: Array, program: Reduction, laying: Laying, *, chunks: int = 1) -> Array:
    """``x`` summed by a program over a laying's axes, on each device of a `shard_map`; any shape, padded inside."""
    if x.dtype == jnp.bool_:
        return run(x.astype(jnp.int32), program, laying, chunks=chunks)  # as psum counts booleans
    shape = laying.shape
    divisor = _smallest_part(program, shape)
    if divisor == 1 and chunks == 1:
        return _steps(x, program, laying)
    flat = x.ravel()
    pieces = max(1, min(chunks, flat.size // divisor))
    padded = jnp.pad(flat, (0, -flat.size % (divisor * pieces)))
    done = [_steps(piece, program, laying) for piece in jnp.split(padded, pieces)]
    return jnp.concatenate(done)[: flat.size].reshape(x.shape)


def _steps(x: Array, program: Reduction, laying: Laying) -> Array:
    previous = None
    for step, order in zip(program.steps, _reorderings(program, laying.shape), strict=True):
        if previous == step.collective:
            x = lax.optimization_barrier(x)  # XLA on GPUs would merge two all-reduces in a row into one
        x = _step(x, step, laying)
        if order is not None:
            x = x.reshape(len(order), -1)[np.array(order)].ravel()
        previous = step.collective
    return x


def _step(x: Array, step: Instruction, laying: Laying) -> Array:
    position = laying.positions()
    among = [[position[d] for d in group] for group in groups(laying.shape, step)]
    low, high = step.span(len(laying.shape))
    if step.collective == "Reduce":
        return _reduce(x, among, laying)
    if step.collective == "Broadcast":
        return _broadcast(x, among, laying)
    if isinstance(step.form, Master):
        return _masters(x, step, among, laying)
    axes = laying.whole_axes(low, high)
    names, indices = (axes, None) if axes else (laying.axes, among)
    match step.collective:
        case "AllReduce":
            return lax.psum(x, names, axis_index_groups=indices)
        case "ReduceScatter":
            return cast(Array, lax.psum_scatter(x, names, scatter_dimension=0, axis_index_groups=indices, tiled=True))
        case "AllGather":
            return cast(Array, lax.all_gather(x, names, axis=0, axis_index_groups=indices, tiled=True))
        case _:
            assert_never(step.collective)


def _reduce(x: Array, among: Sequence[Sequence[int]], laying: Laying) -> Array:
    for parents, children in binomial_rounds(len(among[0])):
        pairs = [(g[c], g[p]) for g in among for p, c in zip(parents, children, strict=True)]
        x = x + lax.ppermute(x, laying.axes, pairs)  # who gets nothing adds zero
    return x


def _broadcast(x: Array, among: Sequence[Sequence[int]], laying: Laying) -> Array:
    for parents, children in reversed(binomial_rounds(len(among[0]))):
        pairs = [(g[p], g[c]) for g in among for p, c in zip(parents, children, strict=True)]
        x = jnp.where(_is_one_of([to for _, to in pairs], laying), lax.ppermute(x, laying.axes, pairs), x)
    return x


def _masters(x: Array, step: Instruction, among: Sequence[Sequence[int]], laying: Laying) -> Array:
    """A ring among the members of the groups; everybody else computes along on zeros."""
    n = len(among[0])
    pairs = [(g[i], g[(i + 1) % n]) for g in among for i in range(n)]
    places = np.zeros(math.prod(laying.sizes), np.int32)
    for group in among:
        places[list(group)] = range(n)
    place = jnp.asarray(places)[lax.axis_index(laying.axes)]
    match step.collective:
        case "ReduceScatter":
            return _ring_scatter(x, pairs, place, n, laying)
        case "AllGather":
            return _ring_gather(x, pairs, place, n, laying)
        case "AllReduce":
            flat = jnp.pad(x.ravel(), (0, -x.size % n))
            whole = _ring_gather(_ring_scatter(flat, pairs, place, n, laying), pairs, place, n, laying)
            whole = whole[: x.size].reshape(x.shape)
            return jnp.where(_is_one_of([d for g in among for d in g], laying), whole, x)
        case _:
            raise AssertionError(step)


def _ring_scatter(x: Array, pairs: list[tuple[int, int]], place: Array, n: int, laying: Laying) -> Array:
    chunks = x.reshape(n, -1)
    total = jnp.take(chunks, (place - 1) % n, axis=0)
    for hop in range(1, n):
        total = lax.ppermute(total, laying.axes, pairs) + jnp.take(chunks, (place - 1 - hop) % n, axis=0)
    return total


def _ring_gather(x: Array, pairs: list[tuple[int, int]], place: Array, n: int, laying: Laying) -> Array:
    result = jnp.zeros((n, x.size), x.dtype).at[place].set(x)
    for hop in range(1, n):
        x = lax.ppermute(x, laying.axes, pairs)
        result = result.at[(place - hop) % n].set(x)
    return result.ravel()


def _is_one_of(devices: Sequence[int], laying: Laying) -> Array:
    mask = np.zeros(math.prod(laying.sizes), bool)
    mask[list(devices)] = True
    return jnp.asarray(mask)[lax.axis_index(laying.axes)]


def _smallest_part(program: Reduction, shape: Sequence[int]) -> int:
    """Into how many parts the data has to be cut for every step to divide."""
    parts = now = 1
    for step in program.steps:
        low, high = step.span(len(shape))
        members = math.prod(shape[low:high])
        if step.collective == "ReduceScatter":
            now *= members
        elif step.collective == "AllGather":
            now //= members
        parts = math.lcm(parts, now)
    return parts


@lru_cache(maxsize=4096)
def _reorderings(program: Reduction, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """For each step, the order into which a device has to put the parts that it gathered, None where they come in order.

    Members come in the order of their group, parts in the order of the scatters: they differ where levels are gathered in another
    order than they were scattered in.
    """
    held = np.tile(np.arange(_smallest_part(program, shape)), (math.prod(shape), 1))  # parts by number  [devices, parts held]
    result: list[tuple[int, ...] | None] = []
    for step in program.steps:
        among = np.array(groups(shape, step))
        order = None
        if step.collective == "ReduceScatter":
            mine = held.reshape(len(held), among.shape[1], -1)
            held = mine[:, 0].copy()  # who is outside the masters' groups holds leftovers of the right size
            held[among] = mine[among, np.arange(among.shape[1])[None, :]]
        elif step.collective == "AllGather":
            gathered = held[among].reshape(len(among), -1)
            orders = np.argsort(gathered, axis=1)
            assert (orders == orders[0]).all(), "all groups gather alike"
            held = np.repeat(held[:, :1], gathered.shape[1], axis=1)
            held[among] = np.sort(gathered, axis=1)[:, None, :]
            if not np.array_equal(orders[0], np.arange(gathered.shape[1])):
                order = tuple(int(i) for i in orders[0])
        elif step.collective == "Broadcast":
            held[among] = held[among[:, :1]]
        result.append(order)
    return tuple(result)


def _check_same_code(program: Reduction, shape: tuple[int, ...], names: Sequence[str]) -> None:
    """Replay with what the lowering loses: where masters scatter or gather, the others' buffers change size and are void."""
    space = Space(math.prod(shape))
    context = space.initial()
    for number, step in enumerate(program.steps):
        among = groups(shape, step)
        alive = tuple(g for g in among if any(context[d] for d in g))
        after = advance(space, step.collective, alive, context)
        if isinstance(after, Refusal):
            what = step.text(names or [f"level{i}" for i in range(len(shape))])
            why = "devices outside the masters' groups would need data of another size"
            raise ReductionError(f"step {number + 1}, {what}, cannot run as one code on all devices: {why}", step=number)
        if isinstance(step.form, Master) and step.collective in ("ReduceScatter", "AllGather"):
            inside = {d for g in among for d in g}
            after = tuple(state if d in inside else 0 for d, state in enumerate(after))
        context = after
