"""`shardplan.score`: prices a sharding that the user wrote, and says where it loses against the plan."""

from __future__ import annotations

import glob
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.sharding import Mesh, PartitionSpec

from shardplan import _jax
from shardplan.collectives.issued import PlannedCollective
from shardplan.emit.inference import LOWERED_FOR, UnconstrainedEmitter, inferred_layouts
from shardplan.emit.stacked import partition_spec
from shardplan.errors import ClusterError, MemoryLimitError, PinError, ShardplanError, nearest
from shardplan.frontend.argnums import positions
from shardplan.frontend.constraints import with_constraints
from shardplan.frontend.given_shardings import GivenShardings, from_rules, from_tree
from shardplan.frontend.keywords import as_positional
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph.updates import described
from shardplan.hlo.reshards import unforeseen
from shardplan.ir import Constraint, Layout, spec_text
from shardplan.mesh import Cluster, factors
from shardplan.mesh.devices import device_numbers
from shardplan.mesh.factoring import read_order
from shardplan.planning.losses import PricedStep, losses, unasked
from shardplan.planning.partitioned import partitioned, refitted
from shardplan.planning.scheduled import Scheduled, scheduled
from shardplan.plans.score import MeasuredSharding, Score
from shardplan.plans.summary import collectives_of
from shardplan.schedule import unbundled
from shardplan.search.inference.anytime import Part, best_of
from shardplan.shell.api import checked_observer
from shardplan.shell.api import plan as plan_step
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.plan_of_step import Plan
from shardplan.shell.score_of_xla import added, replicated
from shardplan.verify.given import compiled_as_given, flat_step
from shardplan.verify.stand_ins import stand_ins
from shardplan.verify.verify import by_kind

_log = logging.getLogger("shardplan")

_NO_LIMIT = 2**62
"""More bytes than any device has."""

_OPTIONS = frozenset(
    {"memory_limit", "donate_argnums", "time_budget_s", "observer", "replicate", "one_choice", "backend", "time_model"}
)
"""The options of `shardplan.plan` that a score has too."""


def score(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    in_shardings: Any = (),
    rules: Any = (),
    mesh: Mesh | Mapping[str, int] | None = None,
    measure: bool = False,
    constraints: str = "keep",
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Score:
    """Prices the sharding of a step's arguments that the user wrote, beside the plan of the step.

    Args:
        step: The function.
        args: Its arguments: trees of arrays or `jax.ShapeDtypeStruct`, nnx objects too.
        cluster: As for `shardplan.plan`.
        in_shardings: PartitionSpecs, NamedShardings or None (whole on every device) for all arguments, as a tree like them or a
            prefix of it, as `jax.jit` takes it.
        rules: In place of ``in_shardings``: {glob of paths: PartitionSpec}, where the first match counts; or flax's logical
            rules, pairs of a logical axis name and a mesh axis, for arguments that carry axis names; or pairs of both kinds. An
            argument that no glob matches is sharded by the axis names that it carries, else by its present sharding, else not
            at all. The same holds for every argument if neither ``rules`` nor ``in_shardings`` is given.
        mesh: The axes that the specs name, slowest first: a Mesh, or sizes by name. By default those of the NamedShardings, else
            the levels of the cluster.
        measure: Also compile the step with these shardings for devices that are here (simulated ones will do), and count what
            XLA's partitioner sends.
        constraints: "keep" the step's own sharding constraints, in the sharding and in the plan; or "ignore" them, which leaves
            both free inside the step.
        kwargs: Arguments that the step takes by name.
        options: Options of `shardplan.plan`, for the plan and the score: memory_limit, donate_argnums, time_budget_s (of the plan
            alone), observer, replicate, one_choice, backend, time_model.

    Raises:
        PinError: for a sharding that no argument can have, a rule that matches nothing, an unknown axis.
        ClusterError: for a mesh whose axes do not fit the cluster's levels.
        MemoryLimitError: if no plan fits.
    """
    said = {"in_shardings": in_shardings, "rules": rules, "mesh": mesh, "measure": measure, "kwargs": kwargs}
    said["constraints"] = constraints
    return scored(step, *args, cluster=cluster, **said, **options)[0]


def scored(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    in_shardings: Any = (),
    rules: Any = (),
    mesh: Mesh | Mapping[str, int] | NumberedMesh | None = None,
    measure: bool = False,
    constraints: str = "keep",
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Score, Plan]:
    """`score`, and the plan that the user's sharding is priced beside."""
    if unknown := sorted(set(options) - _OPTIONS):
        raise ShardplanError(f"score has no option {unknown[0]!r}: it takes {', '.join(sorted(_OPTIONS))}")
    if in_shardings != () and rules != ():
        raise PinError("in_shardings= and rules= cannot be given together: each says how all arguments lie")
    if not isinstance(measure, bool):
        raise ShardplanError(f"unsupported measure={measure!r}: use True or False")
    if constraints not in ("keep", "ignore"):
        raise ShardplanError(f"unsupported constraints={constraints!r}: use 'keep', or 'ignore' to leave them out")
    options["donate_argnums"] = positions(options.get("donate_argnums", ()), len(args), "donate_argnums")
    step, args = as_positional(step, args, kwargs)
    given = from_tree(in_shardings, step, args) if in_shardings != () and args else from_rules(rules, step, args)
    axes = _axes(resolve_cluster(cluster)[0], _mesh_of(given, mesh, cluster))
    observer = checked_observer(options.pop("observer", None))
    half = 0.4 if measure else 0.5  # the share of each of the two searches
    traced = trace_step(step, args, options["donate_argnums"])
    traced = replace(traced, program=with_constraints(traced.program, lambda c: axes.named(c) if constraints == "keep" else None))
    first = {"traced": traced, "observer": Part(observer, 0.0, half, "your sharding")}
    mine = _priced(step, args, cluster, given, axes, {**options, **first})
    best_of(observer)(math.inf, 0.0)
    over = {"factors": axes.parts} if axes.parts and mine.graph.placed else {}  # the axes that constraints name
    second = {"traced": traced, "observer": Part(observer, half, 2 * half, "the plan")}
    plan = plan_step(step, *args, cluster=cluster, **second, **over, **options)
    if measure:
        observer("compiling your sharding", 2 * half)
    return _score(plan, mine, given, axes, constraints, measure=measure), plan


# -- axes --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NumberedMesh:
    """A mesh as an array of device ``numbers``, with one dim for each axis in ``sizes``."""

    sizes: Mapping[str, int]
    numbers: Any


@dataclass(frozen=True, slots=True)
class _Axes:
    """The axes that specs name: the size of each, and its factors by the names that a plan gives them, major first.

    ``parts`` splits the levels into these factors, in the form of ``factors=``.
    """

    sizes: Mapping[str, int]
    factors: Mapping[str, tuple[str, ...]]
    factor_sizes: Mapping[str, int]
    parts: Mapping[str, tuple[int, ...]]

    def over_factors(self, what: str, entries: Sequence[Any]) -> PartitionSpec:
        """The spec over the names of factors; ``what`` names it in errors."""
        wanted = [() if e is None else (e,) if isinstance(e, str) else e for e in entries]
        unknown = next((axis for dim in wanted for axis in dim if axis not in self.factors), None)
        if unknown is not None:
            has = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
            raise PinError(
                f"{what} = {spec_text(entries)} names an unknown axis {unknown!r}; the mesh has {has}{self._near(unknown)}"
            )
        return PartitionSpec(*(tuple(f for axis in dim for f in self.factors[axis]) or None for dim in wanted))

    def named(self, constraint: Constraint) -> Constraint:
        """A constraint inside the step, over the names of factors; axes that the mesh lacks, or has in another size, stay."""
        own = {name for name, size in constraint.axes if self.sizes.get(name) == size}

        def over(axes: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(f for axis in axes for f in (self.factors[axis] if axis in own else (axis,)))

        sizes = [(name, size) for name, size in constraint.axes if name not in own]
        sizes += [(f, self.factor_sizes[f]) for name, _ in constraint.axes if name in own for f in self.factors[name]]
        return Constraint(tuple(None if dim is None else over(dim) for dim in constraint.dims), tuple(sizes))

    def _near(self, axis: str) -> str:
        return nearest(axis, list(self.factors)) or ": other axes need mesh="

    def names(self, plan: Plan) -> tuple[str, ...]:
        """A name for each factor of the plan: that of its axis, with a number where the axis has several."""
        named = {f: axis if len(own) == 1 else f"{axis}[{n}]" for axis, own in self.factors.items() for n, f in enumerate(own)}
        return tuple(named[f.name] for f in plan.factors)


def _mesh_of(given: GivenShardings, mesh: Any, cluster: ClusterLike) -> Any:
    """The mesh whose axes the specs name; None for the cluster's levels.

    Raises:
        ClusterError: for several meshes, or an invalid one.
    """
    if isinstance(mesh, Mapping) and not (mesh and all(type(n) is int and n > 0 for n in mesh.values())):
        raise ClusterError(f"mesh={mesh!r}: give sizes by axis name, slowest first, for example {{'data': 4, 'tensor': 2}}")
    meshes: list[Any] = [*given.meshes]
    meshes += [mesh] if mesh is not None and mesh not in meshes else []
    if len(meshes) > 1:
        first, second = (dict(getattr(m, "shape", m)) for m in meshes[:2])
        raise ClusterError(f"the shardings are over several meshes, {first} and {second}: give all over one")
    return None if not meshes or meshes[0] == cluster else meshes[0]


def _axes(cluster: Cluster, mesh: Any) -> _Axes:
    """The axes of a mesh on a cluster; its levels where there is no mesh.

    Raises:
        ClusterError: for a mesh of another size, or one whose axes do not fit the cluster's levels.
    """
    if mesh is None:
        sizes = {level.name: level.size for level in cluster.levels}
        return _Axes(sizes, {n: (n,) if size > 1 else () for n, size in sizes.items()}, sizes, {})
    own = mesh.sizes if isinstance(mesh, NumberedMesh) else mesh if isinstance(mesh, Mapping) else mesh.shape
    sizes = {str(name): int(size) for name, size in own.items()}
    count = int(np.prod(list(sizes.values())))
    if count != cluster.size:
        raise ClusterError(f"the mesh {sizes} has {count} devices, and {cluster.name!r} has {cluster.size}: give a mesh of all")
    row_major = np.arange(count).reshape(list(sizes.values()))
    order = device_numbers(mesh) if isinstance(mesh, Mesh) else getattr(mesh, "numbers", row_major)
    found, groups = read_order(cluster, order)
    parts = {cluster.levels[n].name: tuple(f.size for f in found if f.level == n) for n in sorted({f.level for f in found})}
    over = factors(cluster, parts)
    named = {axis: tuple(over[i].name for i in group) for axis, group in zip(sizes, groups, strict=True)}
    return _Axes(sizes, named, {f.name: f.size for f in over}, parts)


# -- prices ------------------------------------------------------------------------------------------------------------


def _priced(
    step: Callable[..., Any],
    args: Sequence[Any],
    cluster: ClusterLike,
    given: GivenShardings,
    axes: _Axes,
    options: Mapping[str, Any],
) -> Plan:
    """The plan in which all arguments lie as given; it may not fit."""
    globs = {glob.escape(path): path for path in given.entries}
    pins = {at: axes.over_factors(given.origins[path] or path, given.entries[path]) for at, path in globs.items()}
    own = {name: value for name, value in options.items() if name != "time_budget_s"}
    own["one_choice"] = "none" if own.get("one_choice") == "none" else "timesteps"
    try:
        return _pinned(step, args, cluster, {**own, "pins": pins, "factors": axes.parts})
    except PinError as error:
        paths = [globs[pin] for pin in error.pins if pin in globs]
        raise PinError(f"{given.origins[paths[0]] if paths else 'your sharding'}: {error.reason}", pins=paths) from None


def _pinned(step: Callable[..., Any], args: Sequence[Any], cluster: ClusterLike, options: Mapping[str, Any]) -> Plan:
    """The best plan that fits under these options, else the fastest."""
    try:
        return plan_step(step, *args, cluster=cluster, **options)
    except MemoryLimitError:
        return plan_step(step, *args, cluster=cluster, **{**options, "memory_limit": _NO_LIMIT})


@dataclass(frozen=True, slots=True)
class _Step(PricedStep):
    """The user's sharding, with all other layouts as XLA's partitioner infers them as far as it is known: for the share
    ``inferred`` of their bytes. The others are the best ones.
    """

    run: Scheduled
    inferred: float


def _step(mine: Plan, moved: Mapping[int, Layout]) -> _Step:
    """The price of the plan in which all arguments lie as given, but for those that are ``moved``, by number."""
    names, paths = tuple(mine.axes), mine.traced.program.input_paths
    specs = [partition_spec(moved[i], names) if i in moved else spec for i, spec in enumerate(mine.flat_in_specs)]
    other = {glob.escape(paths[i]): layout.entries(names) for i, layout in moved.items()}
    session = replace(mine.session, pins={**mine.session.pins, **other})
    with stand_ins(mine.traced.program, platform=LOWERED_FOR):
        try:
            layouts = inferred_layouts(mine.planned, mine.traced, specs)
        except _jax.UnknownShardyError as error:
            _log.warning("what XLA's partitioner infers is unknown with this JAX (%s): the best layouts are priced", error)
            session = refitted(session) if moved else session
            return _Step(session, scheduled(session), inferred=0.0)
    session, share = partitioned(session, layouts)
    return _Step(session, scheduled(session), inferred=share)


def _score(plan: Plan, mine: Plan, given: GivenShardings, axes: _Axes, constraints: str, *, measure: bool) -> Score:
    own = _step(mine, {})
    collectives, peak = collectives_of(own.session, own.run, described(own.session.graph)), own.session.solution.peak_bytes
    best = min((mine.step_time_s, mine.communication_bytes), (own.run.step_time_s, own.run.communication_bytes))
    return Score(
        step_time_s=own.run.step_time_s,
        plan_s=plan.step_time_s,
        communication_bytes=own.run.communication_bytes,
        plan_communication_bytes=plan.communication_bytes,
        best_s=best[0],
        best_communication_bytes=best[1],
        peak_bytes=peak,
        plan_peak_bytes=plan.peak_bytes,
        memory_limit=plan.memory_limit,
        fits=peak <= plan.memory_limit,
        losses=losses(mine.session, own, best[0], lambda moved: _step(mine, moved), axes.names(mine)),
        unasked=unasked(collectives, plan.collectives),
        axes=dict(axes.sizes),
        in_specs={path: spec_text(entries) for path, entries in given.entries.items()},
        replicated=given.replicated,
        constraints=constraints,
        inferred=own.inferred > 0,
        inferred_share=own.inferred,
        measured=_measured(mine, own, collectives, constraints) if measure else None,
    )


def _measured(mine: Plan, own: _Step, collectives: Sequence[PlannedCollective], constraints: str) -> MeasuredSharding:
    """The bytes and memory of the step as XLA compiles it for devices that are here."""
    traced, mesh = mine.traced, mine.mesh()
    if constraints == "keep":
        flat = flat_step(mine.step, traced, mine.donate_argnums)
    else:  # the user's function has its constraints inside
        flat = UnconstrainedEmitter(mine.planned, mesh)
    made = compiled_as_given(flat, traced, mine.flat_in_specs, mesh, mine.donated_leaves)
    paths = traced.program.input_paths
    kinds = {
        kind: {"predicted": row.predicted, "measured": row.measured} for kind, row in by_kind(collectives, made.sent).items()
    }
    planned = [(i.step.kind.hlo, i.wire_bytes, i.times) for i in unbundled(own.run.schedule, own.run.planned)]
    return MeasuredSharding(
        communication_bytes=made.sent.wire_bytes,
        raw_communication_bytes=made.sent.raw_wire_bytes,
        peak_bytes=made.peak_bytes,
        collectives=kinds,
        added=added(unforeseen(made.each, planned), paths),
        replicated=replicated(made, paths),
    )
