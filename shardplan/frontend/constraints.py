"""Shardings that a step asks for inside: `jax.lax.with_sharding_constraint`, `jax.device_put` on a sharding, `jax.shard_map`.

A constraint becomes an op that hands its operand on and says where the value lies. JAX's own primitives would bind the user's
mesh again, which a plan's program does not run on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import PinError
from shardplan.ir import Constraint, Manual, Op, Program

_DEVICE_MEMORY = (None, "device", "unpinned_host")
"""Kinds of memory that are a device's own: the second is that of a CPU."""


def asked_shardings(eqn: Any) -> tuple[Any, ...] | None:
    """What an equation asks for each of its results: a sharding or None; None for an equation that only computes."""
    match eqn.primitive.name:
        case "sharding_constraint":
            return (eqn.params["sharding"],)
        case "reshard":
            return (eqn.params["dst_sharding"],)
        case "device_put" if all(d is None or isinstance(d, NamedSharding) for d in eqn.params["devices"]):
            return tuple(eqn.params["devices"])
        case _:
            return None


def constraint_of(eqn: Any, result: int, asked: Any, source: object) -> Constraint | None:
    """The constraint that a sharding puts on a result; None for none, or on a scalar. Axes of size one are left out.

    Raises:
        PinError: for a sharding that names no axes, or another memory than the device's own.
    """
    rank = len(eqn.outvars[result].aval.shape)
    if asked is None or not rank:
        return None
    if not isinstance(asked, NamedSharding):
        raise PinError(
            f"the sharding constraint at {source} is a {type(asked).__name__}, which names no axes: "
            "give a jax.sharding.NamedSharding, or a PartitionSpec under jax.set_mesh"
        )
    if asked.memory_kind not in _DEVICE_MEMORY:
        raise PinError(
            f"the sharding constraint at {source} asks for memory of the kind {asked.memory_kind!r}: plans keep values in the "
            "device's memory; drop memory_kind"
        )
    sizes = dict(asked.mesh.shape)
    entries = (*asked.spec, *[None] * (rank - len(asked.spec)))
    loose = set(eqn.params.get("unconstrained_dims", ())) | {d for d, e in enumerate(entries) if e is PartitionSpec.UNCONSTRAINED}
    dims = tuple(None if d in loose else _axes(entry, sizes) for d, entry in enumerate(entries))
    used = {axis for dim in dims for axis in dim or ()}
    return Constraint(dims, tuple((name, size) for name, size in sizes.items() if name in used))


def _axes(entry: Any, sizes: dict[str, int]) -> tuple[str, ...]:
    """The axes of a dim, major first."""
    axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
    return tuple(a for a in axes if sizes[a] > 1)


def manual_of(eqn: Any, source: object) -> Manual:
    """How a `jax.shard_map` takes and leaves its values. Axes of size one are left out.

    Raises:
        PinError: if its function has sharding constraints of its own, over axes that are not manual.
    """
    params, sizes = eqn.params, dict(eqn.params["mesh"].shape)
    inner = next((e for e in params["jaxpr"].eqns if asked_shardings(e) is not None and e.outvars[0].aval.shape), None)
    if inner is not None:
        raise PinError(
            f"{inner.primitive.name} stands inside the jax.shard_map at {source}: put it outside, or name all axes of the mesh "
            "in axis_names"
        )

    def dims(specs: Any, variables: Any) -> tuple[tuple[tuple[str, ...], ...], ...]:
        ranks = [len(v.aval.shape) for v in variables]
        return tuple(
            tuple(_axes(e, sizes) for e in (*spec, *[None] * (rank - len(spec)))) for spec, rank in zip(specs, ranks, strict=True)
        )

    axes = tuple((str(name), int(size)) for name, size in sizes.items() if size > 1)
    return Manual(dims(params["in_specs"], eqn.invars), dims(params["out_specs"], eqn.outvars), axes)


def with_constraints(program: Program, change: Callable[[Constraint], Constraint | None]) -> Program:
    """A program with other constraints inside, in its bodies too; where there is None, the value is only handed on."""

    def changed(op: Op) -> Op:
        if op.bodies:
            return replace(op, bodies=tuple(with_constraints(body, change) for body in op.bodies))
        if "constraint" not in op.params:
            return op
        other = change(op.params["constraint"])
        return replace(op, primitive="copy", params={}) if other is None else replace(op, params={"constraint": other})

    return replace(program, ops=tuple(map(changed, program.ops)))


def handed_on(eqn: Any, operand: int) -> Any:
    """An equation that hands one operand of ``eqn`` on as the result of the same number."""
    own = {"invars": [eqn.invars[operand]], "outvars": [eqn.outvars[operand]]}
    return eqn.replace(primitive=_jax.primitives()["copy"][1], params={}, **own)


def without_sharding(eqn: Any, source: object) -> Any:
    """An equation without the shardings that JAX writes into its parameters once a mesh is in scope.

    Raises:
        PinError: for one that cuts its result, as `jax.numpy` functions do under Explicit axes.
    """
    asked = {key: value for key, value in eqn.params.items() if isinstance(value, NamedSharding) and key in _OUT}
    for value in asked.values():
        if any(e is not None for e in value.spec):
            raise PinError(
                f"{eqn.primitive.name} at {source} has a result of the sharding {value.spec} on Explicit axes, which a plan "
                "would choose: make the mesh with axis_types=(jax.sharding.AxisType.Auto, ...), and use with_sharding_constraint"
            )
    return eqn.replace(params={**eqn.params, **dict.fromkeys(asked)}) if asked else eqn


_OUT = ("sharding", "out_sharding")
