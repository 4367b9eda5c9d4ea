"""`Plan`: a plan together with its step, as `shardplan.plan` returns it."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.collectives.issued import PlannedCollective, Send
from shardplan.emit.backends import checked_backend, emitter
from shardplan.emit.stacked import partition_spec
from shardplan.errors import ShardplanError
from shardplan.frontend.argnums import leaves_of, positions, tuple_of
from shardplan.frontend.keywords import with_arguments_of
from shardplan.frontend.nnx_state import bare
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph, flatten
from shardplan.ir import Backend, Program
from shardplan.mesh.devices import build_mesh
from shardplan.planning.scheduled import Scheduled, scheduled
from shardplan.plans.data import Baseline, PlanData, TriedPlacement
from shardplan.plans.files import plan_file, save, write_whole
from shardplan.plans.fingerprint import fingerprint, marks
from shardplan.plans.fit import unfit
from shardplan.plans.fitted import fitted
from shardplan.plans.local_parts import from_local
from shardplan.plans.runner import Flat, Leaves, Runner, check_tree
from shardplan.plans.score import Score
from shardplan.plans.summary import baselines, collectives_of, decided, session_of
from shardplan.report.draw import picture, picture_format
from shardplan.report.drawing import drawing
from shardplan.report.explain import explain, explain_all
from shardplan.report.plan_lines import plan_lines
from shardplan.report.timeline import Timeline, priced_of, timeline
from shardplan.schedule import PlannedProgram, Schedule, build, planned_program, sends
from shardplan.search.inference.anytime import Stopped
from shardplan.search.session import Session
from shardplan.shell.compiler_options import compiler_options
from shardplan.shell.exporting import STEP, form_of, write_text
from shardplan.shell.plan_figures import Figures
from shardplan.shell.planned_step import PlannedStep
from shardplan.simulate.engine import Contention
from shardplan.simulate.simulated_step import peak_bytes, simulated
from shardplan.verify.mutate import dropping_emitter


class Plan(PlannedStep, Figures):
    """How a step runs on a cluster. Made by `shardplan.plan` or `shardplan.load`.

    ``data`` holds everything that the plan says; most properties here return its fields. The bound, the baselines and the
    explanations need the search (``session``) and are computed on first use. The bound and the baselines are then kept in
    ``data``.
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
        run: Scheduled | None = None,
    ) -> None:
        self._data, self._session, self._run = data, session, run
        self.traced, self.program, self.graph, self.step, self.user_mesh = traced, program, graph, step, user_mesh

    def __repr__(self) -> str:
        return plan_lines(self._data)

    def _repr_html_(self) -> str:
        """The plan in notebooks. The bound and the baselines are computed now if they are missing."""
        from shardplan.report.html_fragment import plan_fragment  # rarely needed

        return plan_fragment(self.completed())

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def lower_bound_s(self) -> float:
        """A lower bound on the seconds of any plan on this mesh with the same pins, memory limit and ``one_choice``.

        It is a bound in the search's prices, in which each collective has its part of a bundle. If this plan is faster as
        scheduled, its own seconds stand here, and nothing is proven of other plans as scheduled. It is computed on first use.
        """
        if self._data.bound_s is None:
            bound = self.session.bound
            assert bound is not None, "a plan that was loaded has its bound in its file"
            self._data = replace(self._data, bound_s=bound.seconds)
        assert self._data.lower_bound_s is not None
        return self._data.lower_bound_s

    @property
    def gap(self) -> float:
        """How far ``step_time_s`` lies above ``lower_bound_s``, as a fraction of that."""
        self.lower_bound_s  # noqa: B018 - computes the bound if it is missing
        return self._data.gap or 0.0

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """Shardings that people use today, each at its best under the plan's costs and memory limit; solved on first use."""
        if self._data.baselines is None:
            self._data = replace(self._data, **baselines(self.session, self._data.backend))
        assert self._data.baselines is not None
        return self._data.baselines

    def completed(self) -> PlanData:
        """The data with the bound and the baselines, which are computed now if they are missing."""
        self.lower_bound_s  # noqa: B018 - asking fills the field
        self.baselines  # noqa: B018
        return self._data

    def chosen_among(self, tried: Sequence[TriedPlacement], stopped: Stopped) -> Plan:
        """Records the candidates (``placements_tried``) and what ended their search early."""
        self._data = replace(self._data, placements_tried=tuple(tried), stopped=self._data.stopped or stopped)
        return self

    # -- layouts -----------------------------------------------------------------------------------------------------

    @property
    def pins(self) -> Mapping[str, PartitionSpec]:
        """The PartitionSpecs that the user required, by glob of argument paths."""
        return {glob: PartitionSpec(*entries) for glob, entries in self._data.pins.items()}

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
        """The spec of each argument leaf, by path."""
        return dict(zip(self.traced.program.input_paths, self.flat_in_specs, strict=True))

    @property
    def in_specs(self) -> Any:
        """A pytree of PartitionSpec like the tuple of arguments; an nnx object has the specs of its state."""
        return bare(jax.tree.unflatten(self.traced.in_tree, self.flat_in_specs), self.flat_in_specs)

    @property
    def out_specs(self) -> Any:
        """A pytree of PartitionSpec like the step's result; an nnx object that the step updates has its ``in_specs``."""
        return bare(jax.tree.unflatten(self.traced.out_tree, self.flat_out_specs), self.flat_in_specs)

    # -- devices -----------------------------------------------------------------------------------------------------

    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh (Auto axes) on these devices; by default on those of the user's mesh, else on `jax.devices()`.

        A plan that splits an axis of the user's mesh has an axis for each part.

        Raises:
            DeviceError: if there are fewer devices than the cluster has.
        """
        if self.user_mesh is not None and devices is None:
            sizes, names = [f.size for f in self.factors], tuple(f.name for f in self.factors)
            if tuple(name for name, size in self.user_mesh.shape.items() if size > 1 or name in names) == names:
                return self.user_mesh  # axes of one device are not factors
            return Mesh(self.user_mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))
        return build_mesh(self.cluster, self.factors, {f.name: (i,) for i, f in enumerate(self.factors)}, devices)

    def in_shardings(self, mesh: Mesh) -> Any:
        """A pytree of NamedSharding like the arguments."""
        shardings = self.flat_in_shardings(mesh)
        return bare(jax.tree.unflatten(self.traced.in_tree, shardings), shardings)

    def out_shardings(self, mesh: Mesh) -> Any:
        """A pytree of NamedSharding like the result."""
        shardings = self.flat_out_shardings(mesh)
        return bare(jax.tree.unflatten(self.traced.out_tree, shardings), self.flat_in_shardings(mesh))

    def flat_in_shardings(self, mesh: Mesh) -> list[NamedSharding]:
        """One sharding for each leaf of the arguments, with the memory that holds it between steps."""
        offloaded = self.program.offloaded
        return [_sharding(mesh, spec, i in offloaded) for i, spec in enumerate(self.flat_in_specs)]

    def flat_out_shardings(self, mesh: Mesh) -> list[NamedSharding]:
        """One sharding for each leaf of the result, with the memory in which the step leaves it."""
        hosted = self.program.hosted
        return [_sharding(mesh, spec, o in hosted) for o, spec in enumerate(self.flat_out_specs)]

    def put_local(self, batch: Any, *, argument: int = -1, mesh: Mesh | None = None) -> Any:
        """One argument, made from the data of this process alone: each process gives its part of the global batch.

        Raises:
            ArgumentError: if the data are not the part that this process's devices hold, or have another dtype.
            ShardplanError: for an argument that does not exist, or one of another structure.
        """
        mesh = mesh or self.mesh()
        children = self.traced.in_tree.children()
        (at,) = positions(argument, len(children), "argument")
        leaf_numbers = leaves_of(self.traced.in_tree, (at,))
        parts, tree = jax.tree.flatten(batch)
        trees = list(children)
        trees[at] = tree
        check_tree(tuple_of(trees), self.traced, self.step)
        paths, shapes, shardings = self.traced.program.input_paths, self.traced.in_shapes, self.flat_in_shardings(mesh)
        placed = [from_local(paths[i], shapes[i], x, shardings[i]) for i, x in zip(leaf_numbers, parts, strict=True)]
        return jax.tree.unflatten(tree, placed)

    def leaves(self, mesh: Mesh | None = None, *, weak: bool = False) -> Leaves:
        """The planned types of the arguments' leaves, and their shardings on a mesh."""
        on = mesh or self.mesh()
        return Leaves(self.traced.program.input_paths, self.traced.in_shapes, self.flat_in_shardings(on), weak=weak)

    def jit(
        self,
        step: Callable[..., Any],
        devices: Sequence[Any] | None = None,
        backend: str = "auto",
        xla_flags: Mapping[str, Any] | bool | None = None,
        *,
        drop: int | None = None,
        weak: bool = False,
    ) -> Runner:
        """The step, jitted with this plan's shardings.

        ``backend`` is "explicit" (each device runs its own program, which sends what was planned), "specs" (XLA's partitioner
        follows the plan's PartitionSpecs) or "auto" (the plan's own ``backend``). The program is compiled with the plan's own
        ``xla_flags``; a dict replaces them, and False means none. A flag that XLA_FLAGS in the environment sets keeps that
        value. ``drop`` leaves out the exchange of that number, to test that verification notices. With ``weak``, arguments must
        be weakly typed (as Python numbers are) exactly where the planned ones were; without, the step computes with the planned
        types. Values that the step closes over stay as they were when it was planned.

        Raises:
            PlanFileError: if ``step`` is not the step that was planned.
            ShardplanError: for a backend that does not exist, for invalid ``xla_flags``, or if the plan was made for "explicit"
                and cuts an op in a way that "specs" gets wrong.
        """
        name, step = self.backend_for(backend), with_arguments_of(step, self.step)
        self.check_step(step)
        mesh = self.mesh(devices)
        options = compiler_options(self.xla_flags, xla_flags, mesh.devices.flat[0].platform, os.environ)
        emitted = self._planned_for(name), mesh, name, lambda: self.schedule
        emit = emitter(*emitted) if drop is None else dropping_emitter(*emitted, drop)
        weak_results = [shape.weak_type for shape in self.traced.out_shapes]

        def run(*leaves: Any) -> list[Any]:
            return [_jax.weakly_typed(x) if w else x for x, w in zip(emit(*leaves), weak_results, strict=True)]

        run.__name__ = getattr(step, "__name__", "step")
        flat = Flat(
            run,
            options,
            in_shardings=self.flat_in_shardings(mesh),
            out_shardings=self.flat_out_shardings(mesh),
            donate_argnums=self.donated_leaves,
            keep_unused=True,
        )
        return Runner(flat, step, self.traced, self.donate_argnums, self.leaves(mesh, weak=weak))

    def backend_for(self, backend: str = "auto") -> str:
        """The backend that this name stands for: "auto" is the plan's own."""
        return self.backend if checked_backend(backend) == "auto" else backend

    @cached_property
    def planned(self) -> PlannedProgram:
        """The program with the plan's choices, as backends run it."""
        return self._planned(self.graph) if self._run is None else self._run.planned

    def _planned(self, graph: Graph) -> PlannedProgram:
        overlaps = self._data.time_model == "overlap"
        return planned_program(self.program, graph, self._data.choices, self.cluster, self.factors, overlaps)

    def _planned_for(self, backend: str) -> PlannedProgram:
        """The program with the plan's choices, as this backend runs it."""
        if backend == self.backend or backend == "explicit":
            return self.planned
        graph = flatten(self.program, replicate=self.replicate, backend="specs")
        node = unfit(self._data, graph)
        if node is not None:
            raise ShardplanError(
                f"the plan was made for backend='explicit' and cuts {node.op.primitive} at {node.op.source} in a way that XLA's "
                "partitioner gets wrong: run it with backend='explicit', or plan with backend='specs'"
            )
        return self._planned(graph)

    @cached_property
    def schedule(self) -> Schedule:
        """The program of each device under the explicit backend."""
        return build(self.planned) if self._run is None else self._run.schedule

    @property
    def sends(self) -> tuple[Send, ...]:
        """Every collective instruction of the explicit backend, with its bytes and its number of runs in a step."""
        return sends(self.schedule, self.planned)

    @property
    def program_sends(self) -> tuple[tuple[Send, ...], ...]:
        """`sends` of each program that a step runs: one."""
        return (self.sends,)

    @property
    def program_runs(self) -> tuple[int, ...]:
        """How often each program runs in a step: once."""
        return (1,)

    def collectives_under(self, backend: Backend) -> tuple[PlannedCollective, ...]:
        """`collectives` as a backend sends them: by the schedule, or as the search priced them."""
        if backend == self._data.backend:
            return self._data.collectives
        run = scheduled(self.session) if backend == "explicit" else None
        return collectives_of(self.session, run)

    def on_shapes(self, traced: Traced) -> Plan:
        """The choices of this plan, applied to its step traced on other shapes; a PlanFileError says where they do not fit."""
        program, graph = fitted("the plan", self._data, traced)
        copy = Plan(self._data, traced=traced, program=program, graph=graph, step=self.step, user_mesh=self.user_mesh)
        copy._data = replace(self._data, peak_bytes=math.ceil(peak_bytes(copy.schedule, copy.planned)))
        return copy

    # -- simulation --------------------------------------------------------------------------------------------------

    def simulate(self, overlap: bool = True, contention: float | tuple[float, float] | None = None) -> Timeline:
        """Simulates one step of the explicit program: compute and each level's links run at once (FlexFlow, section 5).

        Without ``overlap`` all tasks run one after the other, in the order of the program. ``contention`` is the factor by
        which compute and communication slow down while both run: one for both, or one for each (1.0 for none; default: the
        device's).

        Raises:
            ShardplanError: for a factor below 1 or above 1000, or a value that is not a factor.
        """
        given = self.cluster.device.contention if contention is None else contention
        factors = given if isinstance(given, tuple) else (given, given)
        if len(factors) != 2 or not all(isinstance(f, numbers.Real) and not isinstance(f, bool) for f in factors):
            raise ShardplanError(f"contention={contention!r} is neither a factor nor a pair of factors: give 1.3 or (1.3, 1.1)")
        return timeline(
            simulated(
                self.schedule,
                self.planned,
                priced_of(self._data),
                donated=frozenset(self.donated_leaves),
                overlap=overlap,
                contention=Contention(*map(float, factors)),
            )
        )

    # -- the search again --------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The search behind the plan; for a loaded plan it is rebuilt once, on first use."""
        if self._session is None:
            self._session = session_of(self._data, self.program, frozenset(self.donated_leaves))
        return self._session

    def at(self, session: Session) -> Plan:
        """The plan of another solution of the same search."""
        run = scheduled(session) if self.backend == "explicit" else None
        data = replace(self._data, **decided(session, run, session.decisions.step_time_s), exact=False, explanations=None)
        return Plan(
            data, traced=self.traced, program=self.program, graph=self.graph, step=self.step, user_mesh=self.user_mesh,
            session=session, run=run,
        )  # fmt: skip

    def as_baseline(self, name: str) -> Plan:
        """The plan of a baseline, to run or measure it; ``name`` as in ``baselines``.

        Raises:
            ShardplanError: if there is no such baseline.
        """
        known = {s.name: s for s in self.session.rivals.solutions}
        if name not in known:
            raise ShardplanError(f"no baseline {name!r}: this step has {', '.join(known) or 'none'}")
        return self.at(self.session.at(known[name]))

    def baseline_plans(self) -> dict[str, Plan]:
        """Each baseline as a plan that can be compiled, by name."""
        return {s.name: self.at(self.session.at(s)) for s in self.session.rivals.solutions}

    # -- words and files ---------------------------------------------------------------------------------------------

    def explain(self, path: str | None = None) -> str:
        """The reasons for the plan, as text.

        For a path (or a glob of paths): the choice, the costs of alternatives, and the source line. Without one: the whole
        plan.
        """
        return explain(self.completed(), self.session, path)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: `shardplan.load` reads it back."""
        return plan_file(self._whole())

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; an existing file is replaced only once the new one is complete.

        The file holds the bound, the baselines and all explanations: those that are missing are computed first.
        """
        save(self._whole(), file)

    def _whole(self) -> PlanData:
        """The data with all fields that the file of a plan needs."""
        data = self.completed()
        if data.explanations is None:
            data = replace(data, explanations=explain_all(data, self.session))
        if data.fingerprint is None:
            data = replace(data, fingerprint=fingerprint(self.traced, numbers=False), marks=marks(self.traced))
        self._data = data
        return data

    def export(self, file: str | os.PathLike[str], *, devices: Sequence[Any] | None = None, platform: str | None = None) -> None:
        """Writes the plan in the form that the file's name ends in; an existing file is replaced once the new one is complete.

        - ``specs.py``: the PartitionSpecs of arguments and results, by path, as Python that imports JAX alone.
        - ``rules.yml``: ordered rules [pattern, spec] on the paths of arguments.
        - ``maxtext.yml``: the sizes of MaxText's mesh axes, by purpose.
        - ``step.stablehlo``: the planned step, serialized by `jax.export`, as a function from the flat leaves of its arguments to
          those of its result, for these ``devices`` (by default those of `mesh`) or another ``platform`` ("cuda", "cpu"). Needs
          flatbuffers (the extra ``export``).

        Raises:
            ShardplanError: for another name, if the file cannot be written, or for a step that JAX cannot export.
        """
        if form_of(file) == STEP:
            write_whole(Path(file), self.jit(self.step, devices).exported(platform))
            return
        everything = jax.devices()
        own = None if self.user_mesh is None else [everything.index(d) for d in self.mesh().devices.flat]
        write_text(self.data, file, own)

    def draw(self, file: str | os.PathLike[str], *, title: str = "") -> None:
        """Draws the plan (Tofu, Figure 11): weights and activations of each layer as tiles, with a line for each cut.

        The suffix of ``file`` sets the format: .png, .svg or .pdf. Needs matplotlib (the extra ``draw``).

        Raises:
            ShardplanError: for another suffix, if matplotlib is not installed, or if the file cannot be written.
        """
        suffix = picture_format(os.fspath(file))
        shown = drawing(self.planned)
        write_whole(Path(file), picture(shown, title=_heading(title, self.cluster.name), suffix=suffix))

    def html(self, file: str | os.PathLike[str] | None = None, *, title: str = "", score: Score | None = None) -> str:
        """The plan as one HTML page that needs no network; with a ``file``, it is written there too, whole or not at all.

        The page has the cluster, how each array is cut and what its next-best layouts would cost, the seconds by layer and source
        line, the memory over the step, the collectives, the baselines, and the simulated timeline. With a ``score``
        (`shardplan.score` of the same step), the user's own sharding stands beside the plan.

        Raises:
            ShardplanError: if the file cannot be written.
        """
        from shardplan.report.html_page import page, page_data  # rarely needed

        data = self.completed()
        shown = page_data(data, self.session, self.planned, self.simulate(), title=title, score=score)
        text = page(shown, data)
        if file is not None:
            write_whole(Path(file), text)
        return text


def _heading(title: str, cluster: str) -> str:
    return f"{title} on {cluster}" if title else f"on {cluster}"


def _sharding(mesh: Mesh, spec: PartitionSpec, hosted: bool) -> NamedSharding:
    return NamedSharding(mesh, spec, memory_kind="pinned_host") if hosted else NamedSharding(mesh, spec)
