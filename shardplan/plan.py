"""The plan: what the search decided, what it costs, and the step that runs it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.emit.mutate import DroppingEmitter
from shardplan.emit.specs import SpecsEmitter, partition_spec
from shardplan.errors import PlanFileError, ShardplanError
from shardplan.ir import Factor, Layout
from shardplan.mesh import Cluster
from shardplan.mesh.devices import build_mesh
from shardplan.report.explain import explain_all
from shardplan.search.extract import Decisions, Extractor
from shardplan.search.solve import Solution
from shardplan.trace import Traced

FORMAT = 1
"""Version of the plan file."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that the plan issues: ``bytes`` of its operand on one device (of the result for an all-gather), per
    execution.

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
    """A sharding that people use today, scored in the plan's tables."""

    name: str
    step_time_s: float
    communication_bytes: float
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Plan:
    """How a step runs on a cluster. Made by `shardplan.plan` or `shardplan.load`.

    Seconds are predicted for one step and bytes for one device; ``communication_bytes`` are on the wire in the ring
    convention. ``time_model`` says how
    ``step_time_s`` adds up ("sum": compute plus communication, no overlap).
    """

    cluster: Cluster
    factors: tuple[Factor, ...]
    traced: Traced = field(repr=False)
    extractor: Extractor = field(repr=False)
    solution: Solution = field(repr=False)
    decisions: Decisions = field(repr=False)
    step_time_s: float
    compute_s: float
    communication_s: float
    communication_bytes: float
    peak_bytes: int
    lower_bound_s: float
    exact: bool
    memory_limit: int
    objective: str
    baselines: tuple[Baseline, ...]
    trace_s: float
    search_s: float
    donate_argnums: tuple[int, ...] = ()
    static: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    user_mesh: Mesh | None = field(default=None, repr=False)
    alternatives: tuple[Solution, ...] = field(default=(), repr=False)
    time_model: Literal["sum", "overlap"] = "sum"

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
        """A pytree of PartitionSpec like the arguments (a tuple)."""
        return jax.tree.unflatten(self.traced.in_tree, self.flat_in_specs)

    @property
    def out_specs(self) -> Any:
        """A pytree of PartitionSpec like the step's result."""
        return jax.tree.unflatten(self.traced.out_tree, [self._spec(t) for t in self.extractor.problem.graph.outputs])

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
        """The arguments placed on the devices; arrays that are sharded otherwise are moved."""
        mesh = mesh or self.mesh()

        def place(x: Any, sharding: NamedSharding) -> Any:
            there = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim)
            return x if there else jax.device_put(x, sharding)

        leaves, tree = jax.tree.flatten(tuple(args))
        placed = [place(x, NamedSharding(mesh, s)) for x, s in zip(leaves, self.flat_in_specs, strict=True)]
        return jax.tree.unflatten(tree, placed)

    def put_local(self, batch: Any, *, argument: int = -1, mesh: Mesh | None = None) -> Any:
        """One argument from the data of this process alone (each process gives its part of the global batch)."""
        mesh = mesh or self.mesh()
        shardings = self.in_shardings(mesh)[argument]
        return jax.tree.map(lambda x, s: jax.make_array_from_process_local_data(s, np.asarray(x)), batch, shardings)

    def jit(
        self, step: Callable[..., Any], devices: Sequence[Any] | None = None, backend: str = "specs", *, drop: int | None = None
    ) -> Callable[..., Any]:
        """The step to run, jitted with this plan's shardings; without exchange number ``drop``, for proofs of proofs.

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
        what = (self.traced.program, self.extractor, self.decisions, mesh)
        emitter = SpecsEmitter(*what) if drop is None else DroppingEmitter(*what, dropped=drop)
        leaf_specs = [NamedSharding(mesh, s) for s in self.flat_in_specs]
        out_specs = [NamedSharding(mesh, self._spec(t)) for t in self.extractor.problem.graph.outputs]

        def run(*leaves: Any) -> list[Any]:
            return emitter(*leaves)

        run.__name__ = getattr(step, "__name__", "step")
        flat = jax.jit(
            run, in_shardings=leaf_specs, out_shardings=out_specs, donate_argnums=self._donated_leaves(), keep_unused=True
        )
        return Runner(flat, self.traced.program.input_paths, self.traced)

    def _donated_leaves(self) -> tuple[int, ...]:
        sizes = [tree.num_leaves for tree in self.traced.in_tree.children()]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(k for i in sorted(self.donate_argnums) for k in range(starts[i], starts[i] + sizes[i]))

    def check(self, step: Callable[..., Any]) -> None:
        """Refuses a step that is not the one that was planned."""
        if self.static.get("step") is step:
            return
        from shardplan.trace import trace

        args = jax.tree.unflatten(self.traced.in_tree, self.traced.in_shapes)
        other = trace(step, *args, donate_argnums=self.donate_argnums)
        if fingerprint(other) != fingerprint(self.traced):
            raise PlanFileError("this step is not the one that was planned: it traces to another program; plan it anew")

    def as_baseline(self, name: str) -> Plan:
        """The plan that a baseline is, to run or measure it: its name as in ``baselines``.

        Raises:
            ShardplanError: if there is no such baseline (a loaded plan has none).
        """
        for solution in self.alternatives:
            if solution.name == name:
                made = self.extractor.decide(solution)
                return replace(
                    self,
                    solution=solution,
                    decisions=made,
                    step_time_s=solution.seconds,
                    compute_s=made.compute_s,
                    communication_s=made.communication_s,
                    communication_bytes=made.communication_bytes,
                    peak_bytes=solution.peak_bytes,
                )
        raise ShardplanError(f"no baseline {name!r} here: there are {', '.join(s.name for s in self.alternatives) or 'none'}")

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

    def baseline_plans(self) -> dict[str, Plan]:
        """Each baseline as a plan that can be compiled, by name; none for a plan that was loaded."""
        found: dict[str, Plan] = {}
        for solution in self.static.get("baselines", ()):
            decisions = self.extractor.decide(solution)
            found[solution.name] = replace(
                self,
                solution=solution,
                decisions=decisions,
                step_time_s=solution.seconds,
                compute_s=decisions.compute_s,
                communication_s=decisions.communication_s,
                communication_bytes=decisions.communication_bytes,
                peak_bytes=solution.peak_bytes,
                baselines=(),
            )
        return found

    def explain(self, path: str | None = None) -> str:
        """Why: for a path (or glob) what was chosen for it, what else would cost, and the source; without one, the whole plan."""
        from shardplan.report.explain import explain

        return explain(self, path)

    # -- files -------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: `shardplan.load` reads it back."""
        problem = self.extractor.problem
        layouts = [
            problem.resharder.space(len(v.shape)).layout(s)
            for v, s in zip(problem.coarse.variables, self.solution.states, strict=True)
        ]
        return {
            "format": FORMAT,
            "fingerprint": fingerprint(self.traced),
            "cluster": self.cluster.to_toml(),
            "cluster_fingerprint": self.cluster.fingerprint(),
            "factors": [[f.name, f.size, f.level, f.stride] for f in self.factors],
            "variables": [[list(map(list, layout.dims)), list(layout.partial)] for layout in layouts],
            "keep": sorted(self.solution.keep),
            "regather": self.solution.regather,
            "step_time_s": self.step_time_s,
            "compute_s": self.compute_s,
            "communication_s": self.communication_s,
            "communication_bytes": self.communication_bytes,
            "peak_bytes": self.peak_bytes,
            "lower_bound_s": self.lower_bound_s,
            "exact": self.exact,
            "memory_limit": self.memory_limit,
            "objective": self.objective,
            "time_model": self.time_model,
            "trace_s": self.trace_s,
            "search_s": self.search_s,
            "operators": self.operators,
            "donate_argnums": list(self.donate_argnums),
            "baselines": [
                {
                    "name": b.name,
                    "step_time_s": b.step_time_s,
                    "communication_bytes": b.communication_bytes,
                    "peak_bytes": b.peak_bytes,
                    "fits": b.fits,
                }
                for b in self.baselines
            ],
            "axes": self.axes,
            "matrix": self.matrix,
            "in_specs": {p: spec_text(s) for p, s in self.specs_by_path.items()},
            "explain": explain_all(self),
        }

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; the file is replaced only once all of it is written."""
        write_whole(Path(file), json.dumps(self.to_json(), indent=1))


class Runner:
    """A planned step, jitted: called, lowered and inspected like the function that `jax.jit` returns."""

    def __init__(self, flat: Any, paths: tuple[str, ...], traced: Traced) -> None:
        self._flat, self._paths, self._traced = flat, paths, traced

    def __call__(self, *args: Any) -> Any:
        """Runs the step."""
        return jax.tree.unflatten(self._traced.out_tree, self._flat(*self._leaves(args)))

    def lower(self, *args: Any) -> Any:
        """The step lowered for these arguments, to compile or to read."""
        return self._flat.lower(*self._leaves(args))

    def _cache_size(self) -> int:
        """How many entries the call cache holds, as of a jitted function."""
        return self.cache_size()

    def cache_size(self) -> int:
        """How many entries the call cache holds: one for each combination of shapes, dtypes and shardings."""
        return _jax.compilations(self._flat)

    def _leaves(self, args: tuple[Any, ...]) -> list[Any]:
        """The arguments' leaves. What is static in a tree (an optimizer's functions) may be another object than at planning."""
        leaves, tree = jax.tree.flatten(args)
        if tree != self._traced.in_tree:
            found, planned = leaf_paths(args), leaf_paths(jax.tree.unflatten(self._traced.in_tree, self._traced.in_shapes))
            if found != planned:
                odd = next((a or b for a, b in itertools.zip_longest(found, planned) if a != b), "?")
                raise ShardplanError(f"the plan was made for arguments of another structure: they differ first at {odd}")
        return leaves


def leaf_paths(args: Any) -> list[str]:
    """The path of every leaf of a tree."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_flatten_with_path(args)[0]]


def spec_text(spec: PartitionSpec) -> str:
    """``P('node', None, ('gpu', 'x'))``."""
    return "P(" + ", ".join(repr(e) for e in spec) + ")"


def write_whole(path: Path, text: str) -> None:
    """Writes to a temporary file beside ``path``, then renames it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent or Path("."), prefix=path.name, suffix=".tmp")
        with os.fdopen(handle, "w") as out:
            out.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise PlanFileError(f"cannot write {path}: {error.strerror}") from error


def fingerprint(traced: Traced) -> str:
    """A hash of the program: ops, shapes, dtypes, how they are wired, and the argument paths."""
    hasher = hashlib.blake2b(digest_size=16)

    def add(program: Any) -> None:
        for op in program.ops:
            shapes = [(program.tensors[t].shape, program.tensors[t].dtype) for t in (*op.tensors, *op.outputs)]
            wires = [i if isinstance(i, int) else repr(i.value) for i in op.inputs]
            hasher.update(repr((op.primitive, wires, op.outputs, shapes, op.trips)).encode())
            for body in op.bodies:
                add(body)
        hasher.update(
            repr((program.inputs, [o if isinstance(o, int) else "c" for o in program.outputs], program.input_paths)).encode()
        )

    add(traced.program)
    return hasher.hexdigest()


def _shardings(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))


def layout_from_json(entry: Any) -> Layout:
    """The inverse of what `Plan.to_json` writes for a layout."""
    dims, partial = entry
    return Layout(tuple(tuple(int(f) for f in d) for d in dims), tuple(int(f) for f in partial))
