"""Programs on devices: each instruction becomes collectives over mesh axes, inside `shard_map` (P2, section 4).

AllReduce, ReduceScatter and AllGather in which all devices take part are JAX's own: over whole mesh axes if these are the
groups, else over groups of indices. Among masters only, they are rings of ``ppermute`` in which the other devices send nothing.
Reduce and Broadcast are binomial trees of ``ppermute``. Every device runs the same code, so a device that a program leaves
empty holds leftovers until a Broadcast overwrites them.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from os import PathLike
from typing import Any, assert_never, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from ..cost.network import Network, binomial_rounds
from ..errors import ClusterError, nearest
from ..ir import Collective
from ..mesh.cluster import Cluster
from ..mesh.devices import detect, device_numbers
from ..mesh.factoring import read_order
from .best import best_reduction
from .dsl import Instruction, Master, Reduction, ReductionError, parse
from .laying import Laying, check, laying_over, reorderings, smallest_part
from .ranking import entries, names_of
from .states import P2Collective

Groups = Sequence[Sequence[int]]


def all_reduce(
    x: Any,
    mesh: Mesh,
    *,
    over: str | Sequence[str],
    program: str | Reduction = "auto",
    cluster: str | PathLike[str] | Cluster | Mesh | None = None,
    chunks: int = 1,
) -> Any:
    """The sum of ``x`` (any pytree of arrays) over mesh axes, by a reduction program; call it inside `jax.shard_map`.

    ``program`` is "auto" (the best one on the cluster for the size of the data), a `Reduction`, or its text over the cluster's
    level names. ``cluster`` describes the mesh's devices, and its levels give the hierarchy; without one, or given a mesh,
    `detect` describes them. ``chunks`` is the number of pieces that go through the program one after another. Pass
    ``check_vma=False`` to the `shard_map`: JAX cannot infer that the result is the same along ``over``.

    Raises `ReductionError` where the program does not compute the sum, the mesh lacks an axis, or the call is not inside a
    `shard_map` of this mesh over it, and `ClusterError` where the mesh does not fit the cluster's levels.
    """
    if not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        kind = type(mesh).__name__
        raise ReductionError(f"the mesh must be the jax.sharding.Mesh of the shard_map, with its devices, not an {kind}")
    _check_options(program, cluster, chunks)
    axes = _axes(over)
    laying, network, factors = lay(mesh, axes, cluster)
    names = names_of(network, entries(network, factors))
    _check_inside(axes, mesh)

    def sum_leaf(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        nbytes = leaf.size * leaf.dtype.itemsize
        chosen = program
        if isinstance(chosen, str):
            chosen = best_reduction(network, factors, nbytes)[1] if chosen == "auto" else parse(chosen, names)
        check(chosen, laying.shape, names)
        return run(leaf, chosen, laying, chunks=chunks)

    return jax.tree.map(sum_leaf, x)


def _axes(over: Any) -> tuple[str, ...]:
    """The names of the axes to reduce over, in the order that the user gives."""
    axes = (over,) if isinstance(over, str) else tuple(over) if isinstance(over, Iterable) else None
    if axes is None or not all(isinstance(axis, str) for axis in axes):
        raise ReductionError(f"over={over!r} names no mesh axes: give a name like 'data', or several: ('data', 'model')")
    twice = next((axis for axis in axes if axes.count(axis) > 1), None)
    if twice is not None:
        raise ReductionError(f"over={over!r} names the axis {twice!r} twice: once is enough")
    return axes


def _check_options(program: Any, cluster: Any, chunks: Any) -> None:
    if not isinstance(program, str | Reduction):
        raise ReductionError(
            f"unsupported program={program!r}: give 'auto', a program's text (`shardplan reduce` lists them) or a Reduction"
        )
    if not (cluster is None or isinstance(cluster, str | PathLike | Cluster | Mesh)):
        raise ReductionError(
            f"unsupported cluster={cluster!r}: give a preset ('dgx-h100:4'), a TOML file, a shape ('2x4') or a Cluster, "
            "or leave it out to detect the devices"
        )
    if isinstance(chunks, bool) or not isinstance(chunks, int | np.integer) or chunks < 1:
        raise ReductionError(f"unsupported chunks={chunks!r}: give a whole number of at least 1")


def _check_inside(axes: Sequence[str], mesh: Mesh) -> None:
    """Refuse a call outside a `shard_map` over the axes, or inside one whose axes differ in size or order."""
    for axis in axes:
        try:
            around = lax.axis_size(axis)
        except NameError as error:
            raise ReductionError(
                f"all_reduce over {axis!r} outside of a shard_map over it: call it in the function given to "
                "jax.shard_map(..., mesh=mesh, check_vma=False)"
            ) from error
        if around != mesh.shape[axis]:
            raise ReductionError(
                f"the axis {axis!r} has size {mesh.shape[axis]} in the mesh given to all_reduce, {around} in the shard_map "
                "around it: give all_reduce the mesh of the shard_map"
            )
    # collectives over several axes number devices in the order of the surrounding mesh
    ours, around = (
        [str(name) for name in m.axis_names if name in axes and m.shape[name] > 1]
        for m in (mesh, jax.sharding.get_abstract_mesh())
    )
    if sorted(ours) == sorted(around) and ours != around:
        raise ReductionError(
            f"the mesh given to all_reduce has its axes in the order {', '.join(ours)}, the shard_map around it "
            f"{', '.join(around)}: give all_reduce the mesh of the shard_map"
        )


@lru_cache(maxsize=128)
def lay(
    mesh: Mesh, over: tuple[str, ...], cluster: str | PathLike[str] | Cluster | Mesh | None = None
) -> tuple[Laying, Network, tuple[int, ...]]:
    """The `Laying` of a reduction over mesh axes, the network that it runs on, and the factors that it reduces."""
    for axis in over:
        if axis not in mesh.axis_names:
            known = tuple(str(n) for n in mesh.axis_names)
            raise ReductionError(f"the mesh has no axis {axis!r}{nearest(axis, known)}: its axes are {', '.join(known)}")
    # in the mesh's order: ppermute numbers devices so for any order of its axes, axis_index does not
    over = tuple(str(a) for a in mesh.axis_names if a in over)
    if cluster is None or isinstance(cluster, Mesh):
        machine = detect(list((mesh if cluster is None else cluster).devices.ravel()))
    else:
        machine = Cluster.load(cluster)
        machine.check_equal()
    if machine.size != mesh.devices.size:
        raise ClusterError(f"the mesh has {mesh.devices.size} devices, the cluster {machine.name!r} has {machine.size}")
    factors, groups_of = read_order(machine, device_numbers(mesh))
    network = Network(machine, factors)
    axes = {str(a): group for a, group in zip(mesh.axis_names, groups_of, strict=True) if a in over}
    reduced = tuple(i for group in axes.values() for i in group)
    return laying_over(network, reduced, axes), network, reduced


def run(x: Array, program: Reduction, laying: Laying, *, chunks: int = 1) -> Array:
    """Sum ``x`` over a laying's axes by a program, on each device of a `shard_map`; any shape, padded inside."""
    if x.dtype == jnp.bool_:
        return run(x.astype(jnp.int32), program, laying, chunks=chunks)  # as psum sums booleans
    if x.size == 0:
        return x
    shape = laying.shape
    divisor = smallest_part(program, shape)
    if divisor == 1 and chunks == 1:
        return run_steps(x, program, laying)
    flat = x.ravel()
    pieces = max(1, min(chunks, flat.size // divisor))
    padded = jnp.pad(flat, (0, -flat.size % (divisor * pieces)))
    sums = [run_steps(piece, program, laying) for piece in jnp.split(padded, pieces)]
    return jnp.concatenate(sums)[: flat.size].reshape(x.shape)


def run_steps(x: Array, program: Reduction, laying: Laying) -> Array:
    """Runs the steps of a program on flat data; each step divides its part evenly."""
    previous = None
    for step, order in zip(program.steps, reorderings(program, laying.shape), strict=True):
        if previous == step.collective:
            x = lax.optimization_barrier(x)  # XLA on GPUs would merge two consecutive all-reduces into one
        x = _step(x, step, laying)
        if order is not None:
            x = x.reshape(len(order), -1)[np.array(order)].ravel()
        previous = step.collective
    return x


def _step(x: Array, step: Instruction, laying: Laying) -> Array:
    low, high = step.span(len(laying.shape))
    masters = isinstance(step.form, Master)
    return collective(x, step.collective, laying.groups(step), laying, axes=None if masters else laying.whole_axes(low, high))


def collective(x: Array, kind: P2Collective, among: Groups, laying: Laying, *, axes: tuple[str, ...] | None = None) -> Array:
    """One collective among groups of indices along all of a laying's axes; ``axes`` are whole axes that make the same groups."""
    if kind == Collective.REDUCE:
        return _reduce(x, among, laying)
    if kind == Collective.BROADCAST:
        return _broadcast(x, among, laying)
    if sum(map(len, among)) < math.prod(laying.sizes):
        return _masters(x, kind, among, laying)
    names, indices = (axes, None) if axes else (laying.names, among)
    match kind:
        case Collective.ALL_REDUCE:
            return lax.psum(x, names, axis_index_groups=indices)
        case Collective.REDUCE_SCATTER:
            return cast(Array, lax.psum_scatter(x, names, scatter_dimension=0, axis_index_groups=indices, tiled=True))
        case Collective.ALL_GATHER:
            return cast(Array, lax.all_gather(x, names, axis=0, axis_index_groups=indices, tiled=True))
        case _:
            assert_never(kind)


def _reduce(x: Array, among: Groups, laying: Laying) -> Array:
    for parents, children in binomial_rounds(len(among[0])):
        pairs = [(g[c], g[p]) for g in among for p, c in zip(parents, children, strict=True)]
        x = x + lax.ppermute(x, laying.names, pairs)  # devices that receive nothing add zero
    return x


def _broadcast(x: Array, among: Groups, laying: Laying) -> Array:
    for parents, children in reversed(binomial_rounds(len(among[0]))):
        pairs = [(g[p], g[c]) for g in among for p, c in zip(parents, children, strict=True)]
        x = jnp.where(_is_one_of([to for _, to in pairs], laying), lax.ppermute(x, laying.names, pairs), x)
    return x


def _masters(x: Array, kind: P2Collective, among: Groups, laying: Laying) -> Array:
    """A ring among the members of the groups; all other devices run the same code and receive zeros."""
    n = len(among[0])
    pairs = [(g[i], g[(i + 1) % n]) for g in among for i in range(n)]
    places = np.zeros(math.prod(laying.sizes), np.int32)
    for group in among:
        places[list(group)] = range(n)
    place = jnp.asarray(places)[lax.axis_index(laying.names)]
    match kind:
        case Collective.REDUCE_SCATTER:
            return _ring_scatter(x, pairs, place, n, laying)
        case Collective.ALL_GATHER:
            return _ring_gather(x, pairs, place, n, laying)
        case Collective.ALL_REDUCE:
            flat = jnp.pad(x.ravel(), (0, -x.size % n))
            whole = _ring_gather(_ring_scatter(flat, pairs, place, n, laying), pairs, place, n, laying)
            whole = whole[: x.size].reshape(x.shape)
            return jnp.where(_is_one_of([d for g in among for d in g], laying), whole, x)
        case _:
            raise AssertionError(kind)


def _ring_scatter(x: Array, pairs: list[tuple[int, int]], place: Array, n: int, laying: Laying) -> Array:
    chunks = x.reshape(n, -1)
    total = jnp.take(chunks, (place - 1) % n, axis=0)
    for hop in range(1, n):
        total = lax.ppermute(total, laying.names, pairs) + jnp.take(chunks, (place - 1 - hop) % n, axis=0)
    return total


def _ring_gather(x: Array, pairs: list[tuple[int, int]], place: Array, n: int, laying: Laying) -> Array:
    result = jnp.zeros((n, x.size), x.dtype).at[place].set(x)
    for hop in range(1, n):
        x = lax.ppermute(x, laying.names, pairs)
        result = result.at[(place - hop) % n].set(x)
    return result.ravel()


def _is_one_of(devices: Sequence[int], laying: Laying) -> Array:
    mask = np.zeros(math.prod(laying.sizes), bool)
    mask[list(devices)] = True
    return jnp.asarray(mask)[lax.axis_index(laying.names)]
