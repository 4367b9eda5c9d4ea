"""A plan together with the step that it is for: what `shardplan.plan` gives and users hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.mutate import DroppingEmitter
from shardplan.emit.planned import PlannedProgram, planned_program
from shardplan.emit.specs import SpecsEmitter
from shardplan.emit.stacked import partition_spec
from shardplan.errors import ArgumentError, PlanFileError, ShardplanError
from shardplan.frontend.argnums import leaves_of, positions, tuple_of
from shardplan.frontend.nnx_state import apart, bare, has_objects, together, trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph
from shardplan.ir import Factor, Program
from shardplan.mesh import Cluster
from shardplan.mesh.devices import build_mesh
from shardplan.plans.data import Argument, Baseline, Collective, PlanData
from shardplan.plans.files import plan_file, save, write_whole
from shardplan.plans.fingerprint import difference, fingerprint
from shardplan.plans.runner import Leaves, Runner, check_tree, shape_text
from shardplan.plans.summary import baselines, decided, session_of
from shardplan.remat import Remat
from shardplan.report.draw import picture, picture_format
from shardplan.report.drawing import drawing
from shardplan.report.explain import explain, explain_all
from shardplan.search.inference.anytime import Stopped
from shardplan.search.session import Session


class Plan:
    """How a step runs on a cluster. Made by `shardplan.plan` or `shardplan.load`.

    ``data`` is all that the plan says, as a value; most properties here hand its fields on. What needs the search again (the
    bound, the baselines, explanations) asks ``session`` when it is first asked for, and keeps the answer in ``data``.
    """

    def __init__(
        self,
        data: PlanData,
        *,
        traced: Traced,
        program: Program,
        graph: Graph,
        step: Callable[..., Any],
        user_mesh: Mesh | None = None,
        session: Session | None = None,
    ) -> None:
        self._data, self._session = data, session
        self.traced, self.program, self.graph, self.step, self.user_mesh = traced, program, graph, step, user_mesh

    def __repr__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"<Plan of {self.operators} operators on {self.cluster.name} ({mesh}): {self.step_time_s:.3g} s a step>"

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def data(self) -> PlanData:
        """All that the plan says so far; `completed` asks for the rest."""
        return self._data

    @property
    def cluster(self) -> Cluster:
        """The cluster that it is for."""
        return self._data.cluster

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The factors of the levels: one mesh axis each, slowest first."""
        return self._data.factors

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self._data.step_time_s

    @property
    def compute_s(self) -> float:
        """Of them the seconds in which devices compute."""
        return self._data.compute_s

    @property
    def communication_s(self) -> float:
        """Of them the seconds in which devices talk."""
        return self._data.communication_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in one step, in the ring convention."""
        return self._data.communication_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device holds at any point of a step."""
        return self._data.peak_bytes

    @property
    def memory_limit(self) -> int:
        """The bytes that a device may hold."""
        return self._data.memory_limit

    @property
    def lower_bound_s(self) -> float:
        """No plan of this mesh within the pins and the memory limit takes fewer seconds, what shares a choice of layouts being
        settled (``one_choice``); found when it is first asked for.
        """
        if self._data.lower_bound_s is None:
            bound = self.session.bound
            assert bound is not None, "a plan that was loaded has its bound in its file"
            self._data = replace(self._data, lower_bound_s=bound.seconds)
        assert self._data.lower_bound_s is not None
        return self._data.lower_bound_s

    @property
    def gap(self) -> float:
        """The part of ``lower_bound_s`` by which the plan lies above it."""
        assert self.lower_bound_s >= 0
        return self._data.gap or 0.0

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """What people use today, each at its best, in the plan's tables and under its memory limit; solved when first read."""
        if self._data.baselines is None:
            self._data = replace(self._data, **baselines(self.session))
        assert self._data.baselines is not None
        return self._data.baselines

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of one step, in the order of the program."""
        return self._data.collectives

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The leaves of the arguments, with their layouts."""
        return self._data.arguments

    @property
    def objective(self) -> str:
        """What the search made least: "time" or "bytes"."""
        return self._data.objective

    @property
    def time_model(self) -> str:
        """How ``step_time_s`` adds up: "sum" is compute plus communication, without overlap."""
        return self._data.time_model

    @property
    def exact(self) -> bool:
        """Whether it is the optimum of its mesh where memory has no limit."""
        return self._data.exact

    @property
    def stopped(self) -> Stopped:
        """What ended the search early: "time budget", "interrupted", or nothing."""
        return self._data.stopped

    @property
    def remat(self) -> Remat:
        """What is computed again in the backward pass."""
        return self._data.remat

    @property
    def trace_s(self) -> float:
        """Measured seconds of tracing."""
        return self._data.trace_s

    @property
    def search_s(self) -> float:
        """Measured seconds of the search."""
        return self._data.search_s

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The arguments whose memory the step takes."""
        return self._data.donate_argnums

    @property
    def replicate(self) -> tuple[str, ...]:
        """Primitives without a description that run whole on every device."""
        return self._data.replicate

    @property
    def pins(self) -> Mapping[str, PartitionSpec]:
        """The PartitionSpecs that arguments had to have, by glob of their paths."""
        return {glob: PartitionSpec(*entries) for glob, entries in self._data.pins.items()}

    @property
    def time_budget_s(self) -> float | None:
        """The seconds that planning was given."""
        return self._data.time_budget_s

    @property
    def operators(self) -> int:
        """Number of ops of the step, those of bodies once."""
        return self._data.operators

    def completed(self) -> PlanData:
        """The plan with its bound and its baselines, which are looked for now if they are not known."""
        self.lower_bound_s  # noqa: B018 - asking fills the field
        self.baselines  # noqa: B018
        return self._data

    # -- layouts -----------------------------------------------------------------------------------------------------

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis names and sizes, slowest first."""
        return self._data.axes

    @property
    def matrix(self) -> dict[str, Any]:
        """The parallelism matrix (P2, section 3.1): one row per mesh axis, one column per level."""
        return self._data.matrix

    @property
    def flat_in_specs(self) -> tuple[PartitionSpec, ...]:
        """One spec for each leaf of the arguments."""
        return tuple(partition_spec(a.layout, tuple(self.axes)) for a in self._data.arguments)

    @property
    def flat_out_specs(self) -> tuple[PartitionSpec, ...]:
        """One spec for each leaf of the result."""
        return tuple(partition_spec(layout, tuple(self.axes)) for layout in self._data.result_layouts)

    @property
    def specs_by_path(self) -> dict[str, PartitionSpec]:
        """Path of each argument leaf to its spec."""
        return dict(zip(self.traced.program.input_paths, self.flat_in_specs, strict=True))

    @property
    def in_specs(self) -> Any:
        """A pytree of PartitionSpec like the arguments (a tuple); for an nnx object those of its state."""
        return bare(jax.tree.unflatten(self.traced.in_tree, self.flat_in_specs), self.flat_in_specs)

    @property
    def out_specs(self) -> Any:
        """A pytree of PartitionSpec like the step's result; an nnx object that the step changes keeps those of ``in_specs``."""
        return bare(jax.tree.unflatten(self.traced.out_tree, self.flat_out_specs), self.flat_in_specs)

    # -- devices -----------------------------------------------------------------------------------------------------

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh (Auto axes) on these devices, by default `jax.devices()`.

        Raises:
            DeviceError: if there are fewer devices than the cluster has.
        """
        if self.user_mesh is not None and devices is None:
            return self.user_mesh
        return build_mesh(self.cluster, self.factors, {f.name: (i,) for i, f in enumerate(self.factors)}, devices)

    def in_shardings(self, mesh: Mesh) -> Any:
        """A pytree of NamedSharding like the arguments."""
        return _shardings(mesh, self.in_specs)

    def out_shardings(self, mesh: Mesh) -> Any:
        """A pytree of NamedSharding like the result."""
        return _shardings(mesh, self.out_specs)

    def put(self, args: Sequence[Any], *, mesh: Mesh | None = None) -> tuple[Any, ...]:
        """The arguments placed on the devices; arrays that are sharded otherwise are moved. Of nnx objects there are new ones.

        Raises:
            ArgumentError: for an array of another shape or dtype than was planned.
            ShardplanError: for arguments of another structure, or for deleted ones.
        """
        leaves, tree = jax.tree.flatten(apart(tuple(args)))
        check_tree(tree, self.traced, self.step)
        wanted = self.leaves(mesh or self.mesh())
        wanted.fit(leaves)
        placed = jax.tree.unflatten(tree, wanted.placed(leaves))
        return together(placed) if has_objects(args) else placed

    def put_local(self, batch: Any, *, argument: int = -1, mesh: Mesh | None = None) -> Any:
        """One argument from the data of this process alone (each process gives its part of the global batch).

        Raises:
            ArgumentError: where the parts do not add up to the shape that was planned, or have another dtype.
            ShardplanError: for an argument that is not there, or of another structure.
        """
        mesh = mesh or self.mesh()
        children = self.traced.in_tree.children()
        (at,) = positions(argument, len(children), "argument")
        own = leaves_of(self.traced.in_tree, (at,))
        given, tree = jax.tree.flatten(batch)
        whole = list(children)
        whole[at] = tree
        check_tree(tuple_of(whole), self.traced, self.step)
        placed = [self._from_local(i, x, mesh) for i, x in zip(own, given, strict=True)]
        return jax.tree.unflatten(tree, placed)

    def _from_local(self, leaf: int, part: Any, mesh: Mesh) -> Any:
        """Leaf number ``leaf`` of the arguments from this process's part of it."""
        path, planned = self.traced.program.input_paths[leaf], self.traced.in_shapes[leaf]
        local = np.asarray(part)
        local = local.astype(jax.dtypes.canonicalize_dtype(local.dtype))
        try:
            made = jax.make_array_from_process_local_data(NamedSharding(mesh, self.flat_in_specs[leaf]), local)
        except ValueError as error:
            raise ArgumentError(path, shape_text(planned), f"in part {shape_text(local)}") from error
        if (made.shape, made.dtype) != (planned.shape, planned.dtype):
            raise ArgumentError(path, shape_text(planned), shape_text(made))
        return made

    def leaves(self, mesh: Mesh, *, weak: bool = False) -> Leaves:
        """What the leaves of the arguments must be, and where they lie on a mesh."""
        shardings = [NamedSharding(mesh, s) for s in self.flat_in_specs]
        return Leaves(self.traced.program.input_paths, self.traced.in_shapes, shardings, weak=weak)

    def jit(
        self,
        step: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        backend: str = "specs",
        *,
        drop: int | None = None,
        weak: bool = False,
    ) -> Runner:
        """The step to run, jitted with this plan's shardings; without exchange number ``drop``, for proofs of proofs.

        With ``weak`` it takes Python numbers and their like only where the planned arguments had them.

        Raises:
            PlanFileError: if ``step`` is not the step that was planned.
            ShardplanError: for a backend that does not exist.
        """
        if backend != "specs":
            raise ShardplanError(f"unsupported backend {backend!r}: use 'specs'")
        self.check(step)
        mesh = self.mesh(devices)
        emitter = SpecsEmitter(self.planned, mesh) if drop is None else DroppingEmitter(self.planned, mesh, dropped=drop)
        weak_results = [shape.weak_type for shape in self.traced.out_shapes]

        def run(*leaves: Any) -> list[Any]:
            return [_jax.weakly_typed(x) if w else x for x, w in zip(emitter(*leaves), weak_results, strict=True)]

        run.__name__ = getattr(step, "__name__", "step")
        flat = jax.jit(
            run,
            in_shardings=[NamedSharding(mesh, s) for s in self.flat_in_specs],
            out_shardings=[NamedSharding(mesh, s) for s in self.flat_out_specs],
            donate_argnums=self.donated_leaves,
            keep_unused=True,
        )
        return Runner(flat, step, self.traced, self.donate_argnums, self.leaves(mesh, weak=weak))

    @cached_property
    def planned(self) -> PlannedProgram:
        """The program with the plan's choices, as backends run it."""
        return planned_program(self.program, self.graph, self._data.choices, self.cluster, self.factors)

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """Positions, among all leaves of the arguments, of those that are donated."""
        return leaves_of(self.traced.in_tree, self.donate_argnums)

    def check(self, step: Callable[..., Any]) -> None:
        """Refuses a step that is not the one that was planned."""
        if self.step is step:
            return
        args = jax.tree.unflatten(self.traced.in_tree, self.traced.in_shapes)
        odd = difference(self.traced, trace_step(step, args, self.donate_argnums))
        if odd:
            raise PlanFileError(f"this step is not the one that was planned, they differ first at {odd}; plan it anew")

    # -- the search again --------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The search behind the plan; made anew, once, for a plan that was loaded."""
        if self._session is None:
            self._session = session_of(self._data, self.program, frozenset(self.donated_leaves))
        return self._session

    def at(self, session: Session) -> Plan:
        """The plan that another solution of the same search is."""
        data = replace(self._data, **decided(session), exact=False, explanations=None)
        return Plan(
            data,
            traced=self.traced,
            program=self.program,
            graph=self.graph,
            step=self.step,
            user_mesh=self.user_mesh,
            session=session,
        )

    def as_baseline(self, name: str) -> Plan:
        """The plan that a baseline is, to run or measure it: its name as in ``baselines``.

        Raises:
            ShardplanError: if there is no such baseline.
        """
        known = self.baseline_plans()
        if name not in known:
            raise ShardplanError(f"no baseline {name!r} here: there are {', '.join(known) or 'none'}")
        return known[name]

    def baseline_plans(self) -> dict[str, Plan]:
        """Each baseline as a plan that can be compiled, by name."""
        return {s.name: self.at(self.session.at(s)) for s in self.session.rivals.solutions}

    # -- words and files ---------------------------------------------------------------------------------------------

    def explain(self, path: str | None = None) -> str:
        """Why: for a path (or glob) what was chosen for it, what else would cost, and the source; without one, the whole plan."""
        return explain(self.completed(), self.session, path)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: `shardplan.load` reads it back."""
        return plan_file(self._whole())

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced only once all of it is written."""
        save(self._whole(), file)

    def _whole(self) -> PlanData:
        """The plan with all that its file holds."""
        data = self.completed()
        if data.explanations is None:
            data = replace(data, explanations=explain_all(data, self.session))
        if data.fingerprint is None:
            data = replace(data, fingerprint=fingerprint(self.traced))
        self._data = data
        return data

    def draw(self, file: str | os.PathLike[str], *, title: str = "") -> None:
        """A picture of the plan (Tofu, Figure 11): weights and activations of each layer as tiles, a line for each cut.

        The suffix of ``file`` says as what it is written: .png, .svg or .pdf. Needs matplotlib (the extra ``draw``).

        Raises:
            ShardplanError: for another suffix, where matplotlib is not installed, or where the file cannot be written.
        """
        suffix = picture_format(os.fspath(file))
        shown = drawing(self.planned)
        write_whole(Path(file), picture(shown, title=_heading(title, self.cluster.name), suffix=suffix))


def _heading(title: str, cluster: str) -> str:
    return f"{title} on {cluster}" if title else f"on {cluster}"


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
