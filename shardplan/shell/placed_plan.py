"""`PlacedPlan`: a plan in which ops run on different groups of devices."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan.collectives.issued import PlannedCollective, Send, StepCost
from shardplan.emit.crossings import Places, compiled_apart
from shardplan.emit.layer_arrays import whole_spec
from shardplan.emit.regions import RegionsEmitter, argument_shardings, result_shardings, sharding_of
from shardplan.emit.stacked import partition_spec
from shardplan.errors import GroupsError, ShardplanError
from shardplan.frontend.keywords import with_arguments_of
from shardplan.frontend.nnx_state import bare
from shardplan.frontend.trace import Traced
from shardplan.ir import Backend, Microbatches
from shardplan.mesh import Cluster
from shardplan.mesh.devices import build_mesh, cluster_devices
from shardplan.plans.data import PlanData, TimeModel, TriedPlacement
from shardplan.plans.files import plan_file, save, write_whole
from shardplan.plans.fingerprint import fingerprint, marks
from shardplan.plans.fitted import fitted_groups
from shardplan.plans.placed_data import AutoPlacement, PlacedData
from shardplan.plans.placed_runner import PlacedRunner
from shardplan.plans.runner import Flat, Leaves
from shardplan.plans.xla_flags import xla_flags
from shardplan.regions.buffers import most_held, peak_bytes
from shardplan.regions.placed import PlacedStep
from shardplan.report.placed_explain import explained, placed_explanations
from shardplan.report.placed_text import PlacedFigures, idle_share, placed_text, transfer_bytes
from shardplan.report.placed_timeline import PlacedTimeline, placed_timeline
from shardplan.schedule import sends
from shardplan.search.inference.anytime import Stopped
from shardplan.search.session import Session
from shardplan.shell.compiler_options import compiler_options
from shardplan.shell.exporting import STEP, form_of, write_text
from shardplan.shell.plan_figures import Figures
from shardplan.shell.plan_of_step import Plan
from shardplan.shell.planned_step import PlannedStep

ONE_PROGRAM = (
    "the overlap and contention of a simulation are those of one program, and groups of devices run several: leave them out"
)


_OF_A_SEARCH = frozenset({"baselines", "lower_bound_s", "gap", "bound_s", "left_out"})
"""Figures that only a search over all devices finds."""


class PlacedPlan(PlannedStep):
    """How a step runs with its ops on groups of devices. Made by `shardplan.plan` with a ``placement``, or by `shardplan.load`.

    ``data`` holds the plan as plain data, ``placed`` its programs and their order. ``sessions`` are the searches behind the
    plans of the groups, which explanations need; a loaded plan has none.
    """

    def __init__(
        self,
        data: PlacedData,
        placed: PlacedStep,
        *,
        traced: Traced,
        step: Callable[..., Any],
        sessions: Sequence[Session] = (),
    ) -> None:
        self._data, self.placed, self._sessions = data, placed, tuple(sessions)
        self.traced, self.step = traced, step

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses attributes that only a plan on all devices has.

        Raises:
            GroupsError: for a public attribute of `Plan`; it is an AttributeError too.
        """
        if name.startswith("_") or not hasattr(Plan, name):
            raise AttributeError(f"'PlacedPlan' object has no attribute {name!r}", name=name, obj=self)
        own = name in Figures.__dict__ and name not in _OF_A_SEARCH
        groups = f"ask each group (plan.groups[0].{name}), or " if own else ""
        raise GroupsError(name, f"{groups}plan with placement='one'")

    def __repr__(self) -> str:
        count, seconds = len(self.groups), self.step_time_s
        return f"<PlacedPlan on {count} groups of {self.cluster.name}: {seconds:.3g} s a step>"

    # -- fields ------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> PlacedData:
        """The plan as plain data."""
        return self._data

    @property
    def groups(self) -> tuple[PlanData, ...]:
        """For each group, the plan of its ops on its devices."""
        return self._data.groups

    @property
    def cluster(self) -> Cluster:
        """The cluster that the groups are taken from."""
        return self._data.cluster

    @property
    def origin(self) -> str:
        """Where the groups come from."""
        return self._data.origin

    @property
    def donate_argnums(self) -> tuple[int, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The arguments whose buffers the step may reuse."""
        return self.groups[0].donate_argnums

    @property
    def objective(self) -> Literal["time", "bytes"]:
        """The objective that the plan of each group minimises."""
        return self.groups[0].objective

    @property
    def time_model(self) -> TimeModel:
        """How the seconds of each program add up."""
        return self.groups[0].time_model

    @property
    def microbatches(self) -> Microbatches:
        """The parts of the batch that run one after the other."""
        return self.groups[0].microbatches

    @property
    def trace_s(self) -> float:
        """Measured seconds of tracing."""
        return self._data.trace_s

    @property
    def search_s(self) -> float:
        """Measured seconds of planning all groups."""
        return self._data.search_s

    @property
    def placements_tried(self) -> tuple[TriedPlacement, ...]:
        """The candidates that ``placement="auto"`` considered."""
        return self._data.placements_tried

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each group."""
        return self._data.devices

    @property
    def chunks(self) -> tuple[int, ...]:
        """The group that runs each chunk of the layers of a pipeline, first to last; empty for other placements."""
        return self._data.chunks

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
        return transfer_bytes(self.placed.graph)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds under the schedule of its groups' programs: microbatches in flight, values being
        sent, and the memory of each program while it runs.
        """
        return peak_bytes(self.placed.graph, self.placed.dispatch)

    @property
    def memory_limit(self) -> int:
        """The bytes that a device may hold."""
        return min(plan.memory_limit for plan in self.groups)

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """For each group, the most bytes that a device holds of values that enter or leave its programs: arguments, saved
        values of microbatches in flight, and values being sent. Memory inside a program is not counted.
        """
        graph, dispatch = self.placed.graph, self.placed.dispatch
        return tuple(most_held(graph, dispatch, g) for g in range(len(graph.groups)))

    @property
    def idle_share(self) -> float:
        """The part of the step in which a device computes nothing, on average over the devices of the cluster."""
        return idle_share(self.placed, self.cluster.size)

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
        """The backend that runs the plan."""
        return "regions"

    @property
    def stopped(self) -> Stopped:
        """What ended the search of a placement or of a group early ("time budget", "interrupted"; else empty)."""
        return self._data.stopped

    def chosen_among(self, tried: Sequence[TriedPlacement], stopped: Stopped, auto: AutoPlacement | None = None) -> PlacedPlan:
        """Records the candidates (``placements_tried``), what ended their search early, and the request."""
        data = self._data
        self._data = replace(data, placements_tried=tuple(tried), stopped=stopped or data.stopped, auto=auto)
        return self

    def asked_for_chunks(self, each: int) -> PlacedPlan:
        """Records how many chunks of each stage were asked for."""
        self._data = replace(self._data, chunks_asked=each)
        return self

    def _costs_of(self, group: int) -> list[StepCost]:
        """The cost of each task of a group."""
        pieces = self.placed.graph.pieces
        own = [pieces[t.piece] for t in self.placed.graph.tasks if pieces[t.piece].group == group]
        return [p.cost for p in own if p.cost is not None]

    def figures(self, title: str = "the step") -> PlacedFigures:
        """The figures that `shardplan.report.placed_text` shows."""
        names = ("step_time_s", "compute_s", "communication_s", "communication_bytes", "transfer_bytes", "idle_share")
        figures = {name: getattr(self, name) for name in (*names, "peak_bytes", "stopped")}
        figures |= {"trace_s": self._data.trace_s, "search_s": self._data.search_s}
        parts = self.microbatches.count
        paths, tried = self.placed.program.input_paths, self.placements_tried
        return PlacedFigures(title, self.cluster.name, self.groups, self.placed, paths, parts, figures, tried)

    def text(self, title: str = "the step") -> str:
        """A report on the step: the ops and memory of each group, and the devices and layouts of arguments."""
        return placed_text(self.figures(title))

    def export(self, file: str | os.PathLike[str], *, platform: str | None = None) -> None:
        """Writes ``specs.py``: the mesh of each group, and the group and PartitionSpec of each argument, as Python that imports
        JAX alone. An existing file is replaced once the new one is complete.

        Raises:
            ShardplanError: for other forms of `Plan.export`, which have one mesh or program, or if the file cannot be written.
        """
        if form_of(file) == STEP:
            raise ShardplanError(f"{STEP} holds one program, and groups of devices run several: plan with placement='one'")
        write_text(self._data, file)

    def html(self, file: str | os.PathLike[str] | None = None, *, title: str = "") -> str:
        """The plan as one HTML page that needs no network; with a ``file``, it is written there too, whole or not at all.

        The page has the groups with their devices, which source lines each runs, when each program and transfer runs and where
        groups wait, the layouts of each group's arrays, and its collectives.

        Raises:
            ShardplanError: if the file cannot be written.
        """
        from shardplan.report.placed_page import placed_page  # rarely needed

        figures = self.figures(title or "the step")
        text = placed_page(self._whole(), self.placed, self.simulate(), figures, self.memory_limit)
        if file is not None:
            write_whole(Path(file), text)
        return text

    # -- words and files ---------------------------------------------------------------------------------------------

    def explain(self, path: str | None = None) -> str:
        """The reasons for the plan, as text: for a path or a glob of paths, or by default for the whole plan.

        Raises:
            ShardplanError: if no argument matches.
        """
        return explained(self._whole(), path)

    def simulate(self, overlap: bool = True, contention: float | None = None) -> PlacedTimeline:
        """A timeline of each group's programs and of the transfers, to save or to draw as a Gantt chart.

        Raises:
            ShardplanError: for options that apply to a single program alone.
        """
        if not overlap or contention is not None:
            raise ShardplanError(ONE_PROGRAM)
        return placed_timeline(self.placed, self.cluster.size)

    def draw(self, file: str | os.PathLike[str], *, title: str = "") -> None:
        """Draws the timeline as a Gantt chart with a row for each group. The suffix of ``file``: .png, .svg or .pdf.

        Raises:
            ShardplanError: for another suffix, if matplotlib is not installed, or if the file cannot be written.
        """
        self.simulate().draw(file, title=f"{title} on {self.cluster.name}" if title else f"on {self.cluster.name}")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: `shardplan.load` reads it back."""
        return plan_file(self._whole())

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; an existing file is replaced only once the new one is complete.

        The file holds the plan of each group, the group of each op, the order of tasks and transfers, and all explanations.
        """
        save(self._whole(), file)

    def _whole(self) -> PlacedData:
        """The data with all fields that the file of a plan needs."""
        data = self._data
        if data.explanations is None:
            data = replace(data, explanations=placed_explanations(data, self.placed, self._sessions))
        if data.fingerprint is None:
            data = replace(data, fingerprint=fingerprint(self.traced, numbers=False), marks=marks(self.traced))
        self._data = data
        return data

    # -- layouts and devices -----------------------------------------------------------------------------------------

    @property
    def group_of(self) -> dict[str, int]:
        """The group that holds each argument leaf, by path. An array with the layers of several stages has an entry for each of
        its parts: ``{"params/blocks/kernel[0:6]": 0, "params/blocks/kernel[6:12]": 1}``.
        """
        return dict(self._data.group_of)

    @property
    def specs_by_path(self) -> dict[str, PartitionSpec]:
        """The spec of each argument leaf, by path, over the mesh axes of the group that holds it. An array with the layers of
        several stages is cut over the axis ``stage``, too.
        """
        specs = self._joined([self._spec(group, key[0]) for group, key in self.placed.graph.inputs], "inputs")
        return dict(zip(self.traced.program.input_paths, specs, strict=True))

    @property
    def in_specs(self) -> Any:
        """A pytree of PartitionSpec like the tuple of arguments, over the mesh axes of the group that holds each leaf."""
        specs = tuple(self.specs_by_path.values())
        return bare(jax.tree.unflatten(self.traced.in_tree, specs), specs)

    @property
    def out_specs(self) -> Any:
        """A pytree of PartitionSpec like the step's result, over the mesh axes of the group that makes each leaf."""
        made = self.placed.graph.results
        specs = self._joined([PartitionSpec() if at is None else self._spec(at.group, at.like) for at in made], "outputs")
        return bare(jax.tree.unflatten(self.traced.out_tree, specs), tuple(self.specs_by_path.values()))

    def _joined(self, specs: Sequence[PartitionSpec], ends: Literal["inputs", "outputs"]) -> list[PartitionSpec]:
        """The specs of the step's leaves, from those of their parts."""
        layers = self.placed.layers
        if layers is None:
            return list(specs)
        return [specs[own[0]] if len(own) == 1 else whole_spec(specs[own[0]]) for own in getattr(layers, ends)]

    def _spec(self, group: int, tensor: int) -> PartitionSpec:
        own = self.placed.graph.groups[group]
        return partition_spec(own.layouts.get(tensor), own.names)

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh of all devices of the cluster, with one axis for each level, as `in_shardings` takes it."""
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

    def out_shardings(self, mesh: Mesh) -> Any:
        """A pytree of NamedSharding like the result, each on the devices of one group; None for a constant of the step."""
        devices = mesh.devices.flatten().tolist()
        leaves = result_shardings(self.placed, sharding_of(self.placed, self.meshes(devices)))
        return bare(jax.tree.unflatten(self.traced.out_tree, leaves), self._shardings(devices))

    def _shardings(self, devices: Sequence[Any] | None) -> list[NamedSharding]:
        return argument_shardings(self.placed, sharding_of(self.placed, self.meshes(devices)))

    def leaves(self, mesh: Mesh | None = None, *, weak: bool = False) -> Leaves:
        """The planned types of the arguments' leaves, and their shardings on the groups of a mesh."""
        devices = None if mesh is None else mesh.devices.flatten().tolist()
        paths, places = self.traced.program.input_paths, Places(self.meshes(devices))
        return Leaves(paths, self.traced.in_shapes, self._shardings(devices), weak=weak, put=places.put)

    def on_shapes(self, traced: Traced) -> PlacedPlan:
        """The choices of this plan, applied to its step traced on other shapes; a PlanFileError says where they do not fit."""
        return PlacedPlan(self._data, fitted_groups("the plan", self._data, traced), traced=traced, step=self.step)

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
        everything = [d for mesh in meshes for d in mesh.devices.flat]
        options = compiled_apart(everything) | compiler_options(self.xla_flags, xla_flags, everything[0].platform, os.environ)
        weak_results = [shape.weak_type for shape in self.traced.out_shapes]
        jit = partial(Flat, options=options)
        emit = RegionsEmitter(self.placed, meshes, weak_results, jit)
        leaves = Leaves(
            self.traced.program.input_paths, self.traced.in_shapes, emit.input_shardings, weak=weak, put=Places(meshes).put
        )
        return PlacedRunner(emit, step, self.traced, self.donate_argnums, leaves)

    def backend_for(self, backend: str = "auto") -> str:
        """The backend that this name stands for: a placed step has one."""
        if backend not in ("auto", "regions"):
            raise ShardplanError(f"unsupported backend {backend!r} for a plan with groups of devices: use 'auto' or 'regions'")
        return "regions"

    @property
    def uncut(self) -> bool:
        """Whether no array is cut: False, as values move between the groups even where none is cut within one."""
        return False

    @property
    def program_sends(self) -> tuple[tuple[Send, ...], ...]:
        """Every collective instruction of each program, with its bytes and its number of runs in a step."""
        owns = (piece.own for piece in self.placed.graph.pieces)
        return tuple(() if isinstance(own, str) else sends(own[1], own[0]) for own in owns)

    @property
    def program_runs(self) -> tuple[int, ...]:
        """How often each program runs in a step."""
        graph = self.placed.graph
        counts = Counter(task.piece for task in graph.tasks)
        return tuple(counts[n] for n in range(len(graph.pieces)))
