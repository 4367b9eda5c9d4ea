"""The plan: what the search decided, what it costs, and the step that runs it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.mutate import DroppingEmitter
from shardplan.emit.specs import SpecsEmitter
from shardplan.emit.stacked import partition_spec
from shardplan.errors import ArgumentError, PlanFileError, ShardplanError
from shardplan.frontend.argnums import leaves_of, positions, tuple_of
from shardplan.frontend.nnx_state import apart, bare, has_objects, together, trace_step
from shardplan.frontend.trace import Traced
from shardplan.ir import Factor, Program
from shardplan.mesh import Cluster
from shardplan.mesh.devices import build_mesh
from shardplan.plans.fingerprint import arguments, difference, fingerprint
from shardplan.plans.runner import Leaves, Runner, check_tree, shape_text
from shardplan.remat import Remat
from shardplan.report.draw import picture, picture_format
from shardplan.report.drawing import drawing
from shardplan.report.explain import explain, explain_all
from shardplan.report.json import figures
from shardplan.search.baselines.rivals import Rivals
from shardplan.search.inference.anytime import Stopped
from shardplan.search.inference.bound import Bound, Known
from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.pricing import Limits
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.strategies import Cuts

FORMAT = 5
"""Version of the plan file."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that the plan issues, ``times`` a step.

    ``bytes`` are of its operand on one device (of the result for an all-gather), ``wire_bytes`` what a device sends in the ring
    convention, ``seconds`` what the model of the network says: all three of one execution. ``source`` is the user's line.
    ``program`` is the reduction program whose time ``seconds`` is, in P2's words over the cluster's levels; empty where that is
    the collective itself.
    """

    kind: str
    bytes: float
    wire_bytes: float
    axes: tuple[str, ...]
    times: float
    seconds: float
    tensor: str
    source: str
    program: str = ""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A sharding that people use today, scored in the plan's tables: seconds of one step, bytes of one device and step."""

    name: str
    step_time_s: float
    communication_bytes: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step runs on a cluster. Made by `shardplan.plan` or `shardplan.load`.

    Seconds are predicted for one step and bytes for one device. ``bound`` finds ``lower_bound_s``; where ``exact``, its
    ``unlimited_s`` is the optimum of all plans where memory has no limit. ``time_model`` says how ``step_time_s`` adds up
    ("sum": compute plus communication, no overlap). ``memory_limit`` is in bytes; ``trace_s`` and ``search_s`` were measured.
    ``rivals`` solves the baselines when they are first asked for; ``scored`` are those that a plan's file lists. ``stopped`` says
    what ended the search early ("time budget", "interrupted"; else empty): the plan is the best until then, its baselines those
    that were solved.
    """

    cluster: Cluster
    factors: tuple[Factor, ...]
    traced: Traced = field(repr=False)
    program: Program = field(repr=False)
    remat: Remat = field(repr=False)
    extractor: Extractor = field(repr=False)
    solution: Solution = field(repr=False)
    decisions: Decisions = field(repr=False)
    step: Callable[..., Any] = field(repr=False)
    memory_limit: int
    objective: str
    bound: Bound | Known = field(repr=False)
    exact: bool
    rivals: Rivals = field(repr=False)
    trace_s: float
    search_s: float
    donate_argnums: tuple[int, ...] = ()
    replicate: tuple[str, ...] = ()
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict[str, PartitionSpec])
    time_budget_s: float | None = None
    stopped: Stopped = ""
    user_mesh: Mesh | None = field(default=None, repr=False)
    scored: tuple[Baseline, ...] | None = None
    time_model: Literal["sum", "overlap"] = "sum"

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def step_time_s(self) -> float:
        """Predicted seconds of one step."""
        return self.solution.seconds

    @property
    def compute_s(self) -> float:
        """Of them the seconds in which devices compute."""
        return self.decisions.compute_s

    @property
    def communication_s(self) -> float:
        """Of them the seconds in which devices talk."""
        return self.decisions.communication_s

    @property
    def communication_bytes(self) -> float:
        """Bytes that one device sends in one step, in the ring convention."""
        return self.decisions.communication_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device holds at any point of a step."""
        return self.solution.peak_bytes

    @property
    def lower_bound_s(self) -> float:
        """No plan of this mesh within the pins and the memory limit takes fewer seconds, what shares a choice of layouts being
        settled (``one_choice``); found when it is first asked for.
        """
        return self.bound.seconds

    @property
    def gap(self) -> float:
        """The part of ``lower_bound_s`` by which the plan lies above it."""
        return max(0.0, self.step_time_s / self.lower_bound_s - 1) if self.lower_bound_s > 0 else 0.0

    @property
    def baselines(self) -> tuple[Baseline, ...]:
        """What people use today, each at its best, in the plan's tables and under its memory limit; solved when first read."""
        if self.scored is not None:
            return self.scored
        return tuple(
            Baseline(s.name, s.seconds, self.extractor.decide(s).communication_bytes, s.peak_bytes, s.fits(self.memory_limit))
            for s in self.rivals.solutions
        )

    # -- layouts -----------------------------------------------------------------------------------------------------

    @property
    def axes(self) -> dict[str, int]:
        """Mesh axis names and sizes, slowest first."""
        return {f.name: f.size for f in self.factors}

    @property
    def operators(self) -> int:
        """Number of ops of the step, those of bodies once."""
        return self.traced.program.count_ops()

    @property
    def matrix(self) -> dict[str, Any]:
        """The parallelism matrix (P2, section 3.1): one row per mesh axis, one column per level."""
        levels = list(self.cluster.level_names)
        rows = [[f.size if f.level == n else 1 for n in range(len(levels))] for f in self.factors]
        return {"axes": list(self.axes), "levels": levels, "factors": rows}

    def _spec(self, tensor: int) -> PartitionSpec:
        return partition_spec(self.decisions.layouts[tensor] if tensor >= 0 else None, tuple(self.axes))

    @property
    def flat_in_specs(self) -> tuple[PartitionSpec, ...]:
        """One spec for each leaf of the arguments."""
        return tuple(self._spec(t) for t in self.extractor.problem.graph.inputs)

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
        specs = [self._spec(t) for t in self.extractor.problem.graph.outputs]
        return bare(jax.tree.unflatten(self.traced.out_tree, specs), self.flat_in_specs)

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
            raise ShardplanError(
                f"no backend {backend!r}: use backend='specs'; running a plan through shard_map is not there yet"
            )
        self.check(step)
        mesh = self.mesh(devices)
        what = (self.program, self.extractor, self.decisions, mesh)
        emitter = SpecsEmitter(*what) if drop is None else DroppingEmitter(*what, dropped=drop)
        leaf_specs = [NamedSharding(mesh, s) for s in self.flat_in_specs]
        out_specs = [NamedSharding(mesh, self._spec(t)) for t in self.extractor.problem.graph.outputs]

        weak_results = [shape.weak_type for shape in self.traced.out_shapes]

        def run(*leaves: Any) -> list[Any]:
            return [_jax.weakly_typed(x) if w else x for x, w in zip(emitter(*leaves), weak_results, strict=True)]

        run.__name__ = getattr(step, "__name__", "step")
        flat = jax.jit(
            run, in_shardings=leaf_specs, out_shardings=out_specs, donate_argnums=self.donated_leaves, keep_unused=True
        )
        return Runner(flat, step, self.traced, self.donate_argnums, self.leaves(mesh, weak=weak))

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

    def as_baseline(self, name: str) -> Plan:
        """The plan that a baseline is, to run or measure it: its name as in ``baselines``.

        Raises:
            ShardplanError: if there is no such baseline.
        """
        known = self.rivals.solutions
        for solution in known:
            if solution.name == name:
                return replace(self, solution=solution, decisions=self.extractor.decide(solution), exact=False)
        raise ShardplanError(f"no baseline {name!r} here: there are {', '.join(s.name for s in known) or 'none'}")

    def baseline_plans(self) -> dict[str, Plan]:
        """Each baseline as a plan that can be compiled, by name."""
        return {s.name: self.as_baseline(s.name) for s in self.rivals.solutions}

    # -- words -------------------------------------------------------------------------------------------------------

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective of one step, in the order of the program."""
        names = tuple(self.axes)
        paths = self.names_of_tensors()
        return tuple(
            Collective(
                i.step.kind.replace("_", "-").replace("permute", "collective-permute"),
                i.step.nbytes,
                i.wire_bytes,
                tuple(names[f] for f in i.step.over),
                i.times,
                i.step.seconds,
                paths.get(i.tensor, f"value {i.tensor}"),
                str(i.source),
                i.step.program,
            )
            for i in self.decisions.issued
        )

    def names_of_tensors(self) -> dict[int, str]:
        """Paths of the tensors that have one: arguments and results."""
        graph = self.extractor.problem.graph
        names = {t: f"result {p}" for t, p in zip(graph.outputs, self.traced.program.output_paths, strict=True) if t >= 0}
        names.update(zip(graph.inputs, self.traced.program.input_paths, strict=True))
        return names

    def explain(self, path: str | None = None) -> str:
        """Why: for a path (or glob) what was chosen for it, what else would cost, and the source; without one, the whole plan."""
        return explain(self, path)

    # -- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: `shardplan.load` reads it back."""
        problem = self.extractor.problem
        layouts = [
            problem.resharder.layout(v.shape, s) for v, s in zip(problem.coarse.variables, self.solution.states, strict=True)
        ]
        return {
            **figures(self),
            "format": FORMAT,
            "fingerprint": fingerprint(self.traced),
            "arguments": arguments(self.traced),
            "cluster": self.cluster.to_toml(),
            "cluster_fingerprint": self.cluster.fingerprint(),
            "factors": [[f.name, f.size, f.level, f.stride] for f in self.factors],
            "variables": [[list(map(list, layout.dims)), list(layout.partial)] for layout in layouts],
            "keep": sorted(self.solution.keep),
            "regather": self.solution.regather,
            "limits": _limits(self.solution.limits),
            "one_choice": problem.coarse.one_choice,
            "remat_parts": [asdict(part) for part in self.remat.parts],
            "donate_argnums": list(self.donate_argnums),
            "replicate": list(self.replicate),
            "pins": {glob: [list(e) if isinstance(e, tuple) else e for e in spec] for glob, spec in self.pins.items()},
            "baselines": [asdict(b) for b in self.baselines],
            "explain": explain_all(self),
        }

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced only once all of it is written."""
        write_whole(Path(file), json.dumps(self.to_json(), indent=1))

    def draw(self, file: str | os.PathLike[str], *, title: str = "") -> None:
        """A picture of the plan (Tofu, Figure 11): weights and activations of each layer as tiles, a line for each cut.

        The suffix of ``file`` says as what it is written: .png, .svg or .pdf. Needs matplotlib (the extra ``draw``).

        Raises:
            ShardplanError: for another suffix, where matplotlib is not installed, or where the file cannot be written.
        """
        suffix = picture_format(os.fspath(file))
        write_whole(Path(file), picture(drawing(self), title=_heading(title, self.cluster.name), suffix=suffix))


def _limits(limits: Limits | None) -> dict[str, Any] | None:
    """Limits as JSON values: each way to cut once, with the numbers of the ops that it holds for."""
    if limits is None:
        return None
    nodes: dict[Cuts, list[int]] = {}
    for n, cuts in sorted(limits.cuts.items()):
        nodes.setdefault(cuts, []).append(n)
    held = [{"loops": [sorted(may) for may in cuts], "nodes": own} for cuts, own in nodes.items()]
    return {"groups": [list(group) for group in limits.groups], "cuts": held}


def _heading(title: str, cluster: str) -> str:
    return f"{title} on {cluster}" if title else f"on {cluster}"


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes to a temporary file beside ``path``, then renames it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent or Path("."), prefix=path.name, suffix=".tmp")
        with os.fdopen(handle, "wb") as out:
            out.write(content if isinstance(content, bytes) else content.encode())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise PlanFileError(f"cannot write {path}: {error.strerror}") from error


def auto(mesh: Mesh) -> Mesh:
    """A mesh with Auto axes, on which constraints are requests that XLA's partitioner carries out."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
