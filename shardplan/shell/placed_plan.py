"""`PlacedPlan`: a plan in which ops run on different groups of devices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan.collectives.issued import PlannedCollective, Send, StepCost
from shardplan.emit.regions import RegionsEmitter, sharding_of
from shardplan.emit.stacked import partition_spec
from shardplan.errors import ShardplanError
from shardplan.frontend.keywords import with_arguments_of
from shardplan.frontend.nnx_state import bare
from shardplan.frontend.trace import Traced
from shardplan.ir import Backend
from shardplan.mesh import Cluster
from shardplan.mesh.devices import build_mesh, cluster_devices
from shardplan.plans.data import PlanData, TriedPlacement
from shardplan.plans.placed_runner import PlacedRunner
from shardplan.plans.runner import Flat, Leaves
from shardplan.plans.xla_flags import xla_flags
from shardplan.regions.dispatch import most_held
from shardplan.regions.placed import PlacedStep
from shardplan.report.placed_text import PlacedFigures, placed_text
from shardplan.schedule import sends
from shardplan.search.inference.anytime import Stopped
from shardplan.shell.compiler_options import compiler_options
from shardplan.shell.planned_step import PlannedStep


class PlacedPlan(PlannedStep):
    """How a step runs with its ops on groups of devices. Made by `shardplan.plan` with a ``placement``, or by `shardplan.load`.

    ``groups[g]`` is the plan of the ops of group g on its devices. ``placed`` has the programs that run and their order.
    """

    def __init__(
        self,
        groups: Sequence[PlanData],
        placed: PlacedStep,
        *,
        cluster: Cluster,
        traced: Traced,
        step: Callable[..., Any],
        donate_argnums: Sequence[int],
        origin: str,
        trace_s: float,
        search_s: float,
    ) -> None:
        self.groups, self.placed, self.cluster = tuple(groups), placed, cluster
        self.traced, self.step, self.donate_argnums = traced, step, tuple(donate_argnums)
        self.origin, self.trace_s, self.search_s = origin, trace_s, search_s
        self.placements_tried: tuple[TriedPlacement, ...] = ()
        self._stopped: Stopped = ""

    def __repr__(self) -> str:
        count, seconds = len(self.groups), self.step_time_s
        return f"<PlacedPlan on {count} groups of {self.cluster.name}: {seconds:.3g} s a step>"

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group."""
        return tuple(g.devices for g in self.placed.graph.groups)

    @property
    def step_time_s(self) -> float:
        """Seconds of a step: when the last segment or transfer ends."""
        return self.placed.dispatch.step_time_s

    @property
    def compute_s(self) -> float:
        """Seconds in which the busiest group computes."""
        return max(sum(c.compute_s for c in self._costs_of(g)) for g in range(len(self.groups)))

    @property
    def communication_s(self) -> float:
        """Seconds of collectives in the group that communicates most, without transfers between groups."""
        return max(sum(c.communication_s for c in self._costs_of(g)) for g in range(len(self.groups)))

    @property
    def communication_bytes(self) -> float:
        """Bytes that a device of the group that communicates most sends in collectives, in the ring convention."""
        return max(sum(c.communication_bytes for c in self._costs_of(g)) for g in range(len(self.groups)))

    @property
    def transfer_bytes(self) -> int:
        """Bytes of all tensors that go from one group to another in a step."""
        graph = self.placed.graph
        return sum(graph.tensors[t.key[0]].nbytes for t in graph.transfers)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds: the sum of the peaks of its groups, each as if its program ran in one piece."""
        held: dict[int, int] = {}
        for devices, plan in zip(self.devices, self.groups, strict=True):
            for d in devices:
                held[d] = held.get(d, 0) + plan.peak_bytes
        return max(held.values())

    @property
    def memory_limit(self) -> int:
        """The bytes that a device may hold."""
        return min(plan.memory_limit for plan in self.groups)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """For each group, the most bytes that a device holds of values that enter or leave its programs: arguments, saved values
        of the microbatches that are under way, what is sent. What a program needs inside is not counted.
        """
        graph, dispatch = self.placed.graph, self.placed.dispatch
        return tuple(most_held(graph, dispatch, g) for g in range(len(graph.groups)))

    @property
    def idle_share(self) -> float:
        """The part of the step in which a device computes nothing, on average over the devices of the cluster."""
        total = 0.0
        for g, devices in enumerate(self.devices):
            total += self.placed.dispatch.busy_s(self.placed.graph, g) * len(devices)
        whole = self.step_time_s * self.cluster.size
        return 1 - total / whole if whole else 0.0

    @property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """The collectives of all groups, without transfers between them, as if each group's program ran in one piece."""
        return tuple(c for plan in self.groups for c in plan.collectives)

    def collectives_under(self, backend: Backend) -> tuple[PlannedCollective, ...]:
        """`collectives`; a placed step has one backend."""
        return self.collectives

    @property
    def xla_flags(self) -> dict[str, int]:
        """The flags that the plan counts on where XLA compiles its programs for GPUs."""
        return xla_flags(self.cluster)

    @property
    def backend(self) -> str:
        """What runs the plan."""
        return "regions"

    @property
    def stopped(self) -> str:
        """What ended the search of a placement or of a group early ("time budget", "interrupted"; else empty)."""
        return self._stopped or next((g.stopped for g in self.groups if g.stopped), "")

    def chosen_among(self, tried: Sequence[TriedPlacement], stopped: Stopped) -> PlacedPlan:
        """This plan, with what it was chosen among (``placements_tried``), and what ended that search early."""
        self.placements_tried, self._stopped = tuple(tried), stopped
        return self

    def _costs_of(self, group: int) -> list[StepCost]:
        """The cost of each task of a group."""
        pieces = self.placed.graph.pieces
        own = [pieces[t.piece] for t in self.placed.graph.tasks if pieces[t.piece].group == group]
        return [p.cost for p in own if p.cost is not None]

    def figures(self, title: str = "the step") -> PlacedFigures:
        """What `shardplan.report.placed_text` shows."""
        names = ("step_time_s", "compute_s", "communication_s", "communication_bytes", "transfer_bytes", "idle_share")
        figures = {name: getattr(self, name) for name in (*names, "peak_bytes", "trace_s", "search_s", "stopped")}
        parts = self.groups[0].microbatches.count
        paths, tried = self.traced.program.input_paths, self.placements_tried
        return PlacedFigures(title, self.cluster.name, self.groups, self.placed, paths, parts, figures, tried)

    def text(self, title: str = "the step") -> str:
        """The step, what each group runs and holds, and where arguments lie."""
        return placed_text(self.figures(title))

    def html(self, file: str | os.PathLike[str] | None = None, **options: Any) -> str:
        """Refused: there is no page for plans with groups of devices yet.

        Raises:
            ShardplanError: always.
        """
        raise ShardplanError(
            "a plan with groups of devices has no HTML page yet: print plan.text(), or plan with placement='one'"
        )

    # -- layouts and devices -----------------------------------------------------------------------------------------

    @property
    def group_of(self) -> dict[str, int]:
        """The group that holds each argument leaf, by path."""
        paths = self.traced.program.input_paths
        return {path: group for path, (group, _) in zip(paths, self.placed.graph.inputs, strict=True)}

    @property
    def specs_by_path(self) -> dict[str, PartitionSpec]:
        """The spec of each argument leaf, by path, over the mesh axes of the group that holds it."""
        paths = self.traced.program.input_paths
        return {path: self._spec(group, key[0]) for path, (group, key) in zip(paths, self.placed.graph.inputs, strict=True)}

    @property
    def in_specs(self) -> Any:
        """A pytree of PartitionSpec like the tuple of arguments, over the mesh axes of the group that holds each leaf."""
        specs = tuple(self.specs_by_path.values())
        return bare(jax.tree.unflatten(self.traced.in_tree, specs), specs)

    def _spec(self, group: int, tensor: int) -> PartitionSpec:
        own = self.placed.graph.groups[group]
        return partition_spec(own.layouts.get(tensor), own.names)

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """All devices of the cluster, one axis for each level: `in_shardings` takes its groups from it."""
        found = cluster_devices(self.cluster, devices).reshape(self.cluster.shape)
        return Mesh(found, self.cluster.level_names, axis_types=(AxisType.Auto,) * len(self.cluster.levels))

    def meshes(self, devices: Sequence[Any] | None = None) -> tuple[Mesh, ...]:
        """The mesh of each group.

        Raises:
            DeviceError: if there are fewer devices than the cluster has.
        """
        found = cluster_devices(self.cluster, devices)
        return tuple(
            build_mesh(
                own.cluster, own.factors, {f.name: (i,) for i, f in enumerate(own.factors)}, found[list(own.devices)].tolist()
            )
            for own in self.placed.graph.groups
        )

    def in_shardings(self, mesh: Mesh) -> Any:
        """A pytree of NamedSharding like the arguments, each on the devices of one group; ``mesh`` as `mesh` returns it."""
        leaves = self._shardings(mesh.devices.flatten().tolist())
        return bare(jax.tree.unflatten(self.traced.in_tree, leaves), leaves)

    def _shardings(self, devices: Sequence[Any] | None) -> list[NamedSharding]:
        sharding = sharding_of(self.placed, self.meshes(devices))
        return [sharding(group, key[0]) for group, key in self.placed.graph.inputs]

    def leaves(self, mesh: Mesh | None = None, *, weak: bool = False) -> Leaves:
        """The planned types of the arguments' leaves, and their shardings on the groups of a mesh."""
        shardings = self._shardings(None if mesh is None else mesh.devices.flatten().tolist())
        return Leaves(self.traced.program.input_paths, self.traced.in_shapes, shardings, weak=weak)

    # -- the step that runs ------------------------------------------------------------------------------------------

    def jit(
        self,
        step: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        backend: str = "auto",
        xla_flags: Mapping[str, Any] | bool | None = None,
        *,
        drop: int | None = None,
        weak: bool = False,
    ) -> PlacedRunner:
        """The step as jitted programs on its groups, called like one function. Arguments as for `Plan.jit`.

        Raises:
            PlanFileError: if ``step`` is not the step that was planned.
            ShardplanError: for another backend than "regions", or for ``drop``.
        """
        if drop is not None:
            raise ShardplanError("drop leaves out an exchange of a plan with one program: plan with placement='one'")
        self.backend_for(backend)
        step = with_arguments_of(step, self.step)
        self.check_step(step)
        meshes = self.meshes(devices)
        options = compiler_options(self.xla_flags, xla_flags, meshes[0].devices.flat[0].platform, os.environ)
        weak_results = [shape.weak_type for shape in self.traced.out_shapes]
        jit = partial(Flat, options=options)
        emit = RegionsEmitter(self.placed, meshes, self.donated_leaves, weak_results, jit)
        leaves = Leaves(self.traced.program.input_paths, self.traced.in_shapes, emit.input_shardings, weak=weak)
        return PlacedRunner(emit, step, self.traced, self.donate_argnums, leaves)

    def backend_for(self, backend: str = "auto") -> str:
        """The backend that this name stands for: a placed step has one."""
        if backend not in ("auto", "regions"):
            raise ShardplanError(f"unsupported backend {backend!r} for a plan with groups of devices: use 'auto' or 'regions'")
        return "regions"

    @property
    def program_sends(self) -> tuple[tuple[Send, ...], ...]:
        """Every collective instruction of each program, with its bytes and its times a step."""
        owns = (piece.own for piece in self.placed.graph.pieces)
        return tuple(() if isinstance(own, str) else sends(own[1], own[0]) for own in owns)

    @property
    def program_runs(self) -> tuple[int, ...]:
        """How often each program runs in a step."""
        graph = self.placed.graph
        counts = Counter(task.piece for task in graph.tasks)
        return tuple(counts[n] for n in range(len(graph.pieces)))
