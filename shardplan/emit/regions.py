"""The ``regions`` backend: a jitted program for each piece of a placed step, on the devices of its group.

Programs are issued in the order of the dispatch, and each runs as soon as its arguments are there. A value that another group
reads is moved from its layout in one group to that in the other: by `jax.device_put`, or between processes by a `Crossing`. A
process issues the programs of the groups in which it owns a device. It has the values of the other groups as arrays without
blocks.
"""

# pyright: basic
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from shardplan import _jax
from shardplan.emit.crossings import Crossing, crossing
from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.launches import in_turn, launch_of
from shardplan.emit.layer_arrays import parts_of, whole_of, whole_sharding
from shardplan.emit.stacked import partition_spec, stacked_shape
from shardplan.errors import ShardplanError
from shardplan.ir import Constant, Layout
from shardplan.regions.buffers import reused
from shardplan.regions.placed import PlacedStep
from shardplan.regions.tasks import GroupMesh, Key, Piece, Result, Task, Transfer
from shardplan.schedule import PlannedProgram, Schedule

Shardings = Callable[[int, int], NamedSharding]
"""The sharding of a tensor, by number, in a group."""


class RegionsEmitter:
    """A placed step on flat arguments. ``jit`` compiles a function of arrays (`jax.jit` with the user's options).

    ``input_shardings`` are those of the leaves of the arguments. ``programs`` are the jitted functions of the pieces, by number.
    ``own`` are the numbers of those that this process runs, and ``names`` and ``devices`` what these are called and where they
    run.
    """

    def __init__(self, placed: PlacedStep, meshes: Sequence[Mesh], weak: Sequence[bool], jit: Callable[..., Any]) -> None:
        self.placed, self._graph = placed, placed.graph
        self._sharding = sharding_of(placed, meshes)
        outputs, layers = placed.program.outputs, placed.layers
        self.input_shardings = argument_shardings(placed, self._sharding)
        self._results = result_shardings(placed, self._sharding)
        if layers is not None:
            weak = [w for w, own in zip(weak, layers.outputs, strict=True) for _ in own]
        self._literals = tuple(_literal(o, w) for o, w in zip(outputs, weak, strict=True))
        self._weak = {at.key[0] for at, w in zip(self._graph.results, weak, strict=True) if w and at is not None}
        self._reused = reused(placed.graph, placed.dispatch)
        self.programs = tuple(self._jitted(n, piece, meshes[piece.group], jit) for n, piece in enumerate(self._graph.pieces))
        self._processes = [frozenset(d.process_index for d in mesh.devices.flat) for mesh in meshes]
        self._launches = [launch_of(mesh.devices.flatten().tolist()) for mesh in meshes]
        self._crossings = self._between_processes()
        self._connected = False
        self._copies = self._of_repeated(jit)
        pieces = self._graph.pieces
        self.own = tuple(n for n, piece in enumerate(pieces) if self._is_here(piece.group))
        self.names = tuple(pieces[n].name for n in self.own)
        self.devices = tuple(self._graph.groups[pieces[n].group].devices for n in self.own)

    def __call__(self, *leaves: Any) -> list[Any]:
        """The flat results; programs may still run when it returns.

        Raises:
            ShardplanError: inside another `jax.jit`, which would make one program of all of them.
        """
        if not _jax.is_outermost():
            raise ShardplanError(
                "a plan with groups of devices is several programs, so it cannot be called inside jax.jit, jax.grad or another "
                "transformation: call it from Python, or plan with placement='one'"
            )
        self._connect()
        graph, layers = self._graph, self.placed.layers
        held: dict[tuple[int, Key], Any] = dict(zip(graph.inputs, self._in_parts(leaves), strict=True))
        for issue in self.placed.dispatch.issues:
            match issue.what:
                case Task(number, microbatch, reads, makes):
                    piece = graph.pieces[number]
                    if not self._is_here(piece.group):
                        continue
                    arguments = [held[piece.group, key] for key in reads]
                    if piece.own == "slice":
                        arguments.append(np.int32(microbatch))
                    results = in_turn(self._launches[piece.group], self.programs[number], *arguments)
                    held.update(((piece.group, key), x) for key, x in zip(makes, results, strict=True))
                case Transfer(key, source, target, like):
                    if (way := self._crossings.get((source, key[0], target, like))) is not None:
                        held[target, key] = way.moved(held.get((source, key)))
                    elif self._is_here(source):
                        held[target, key] = jax.device_put(held[source, key], self._sharding(target, like))
            for at in issue.last:
                held.pop(at, None)
        rows = enumerate(zip(graph.results, self._literals, strict=True))
        results = [x if own is None else self._result(n, held, own) for n, (own, x) in rows]
        if layers is None:
            return results
        return [
            results[own[0]] if sharding is None or len(own) == 1 else whole_of([results[n] for n in own], sharding)
            for own, sharding in zip(layers.outputs, self._results, strict=True)
        ]

    def _in_parts(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The arguments of the programs."""
        layers, graph = self.placed.layers, self._graph
        if layers is None:
            return leaves
        found: list[Any] = []
        for x, own, whole in zip(leaves, layers.inputs, self.input_shardings, strict=True):
            ends = [graph.inputs[n] for n in own]
            found += [x] if len(own) == 1 else parts_of(x, whole, [self._sharding(group, key[0]) for group, key in ends])
        return found

    def _is_here(self, group: int) -> bool:
        """Whether this process owns a device of a group."""
        return jax.process_index() in self._processes[group]

    def _between_processes(self) -> dict[tuple[int, int, int, int], Crossing]:
        """The transfers between groups of several processes, by source, tensor, target and tensor there."""
        found: dict[tuple[int, int, int, int], Crossing] = {}
        for issue in self.placed.dispatch.issues:
            if isinstance(issue.what, Transfer):
                (tensor, _), source, target, like = issue.what.key, issue.what.source, issue.what.target, issue.what.like
                if len(self._processes[source] | self._processes[target]) > 1:
                    ends = self._sharding(source, tensor), self._sharding(target, like)
                    found[source, tensor, target, like] = crossing(self._typed(source, tensor), *ends)
        return found

    def _connect(self) -> None:
        """Runs each crossing once before the first step, so that no process waits in it while another compiles a segment."""
        if not self._connected:
            for way in dict.fromkeys(self._crossings.values()):
                if way.is_here:
                    way.connect()
            self._connected = True

    def _of_repeated(self, jit: Callable[..., Any]) -> dict[int, Any]:
        """The programs that copy a value for the second and later results that it is, by the number of the result: each result
        has a buffer of its own, as under `jax.jit`, so that all of them can be donated to the next step. They also move it where
        it lies in another way than the result.
        """
        lies = {(m.target, m.key): m.like for m in self._graph.transfers}
        found: dict[int, Any] = {}
        seen: set[tuple[int, Key]] = set()
        for n, own in enumerate(self._graph.results):
            if own is None:
                continue
            at = own.group, own.key
            here, there = self._sharding(own.group, lies.get(at, own.key[0])), self._sharding(own.group, own.like)
            if at in seen or not here.is_equivalent_to(there, len(self._graph.tensors[own.like].shape)):
                found[n] = jit(jnp.copy, in_shardings=[here], out_shardings=there)
            seen.add(at)
        return found

    def _result(self, number: int, held: Mapping[tuple[int, Key], Any], own: Result) -> Any:
        """A result of the step, without blocks where another process has it."""
        if (own.group, own.key) in held:
            x, copies = held[own.group, own.key], self._copies.get(number)
            return x if copies is None else in_turn(self._launches[own.group], copies, x)
        return _jax.absent_array(self._typed(own.group, own.key[0]), self._sharding(own.group, own.like))

    def using(self, programs: Sequence[Callable[..., Any]]) -> RegionsEmitter:
        """The same step with these functions in place of the programs that this process runs."""
        other, places = copy.copy(self), dict(zip(self.own, programs, strict=True))
        other.programs = tuple(places.get(n, program) for n, program in enumerate(self.programs))
        return other

    def trace(self, *leaves: Any) -> Any:
        """Refused: no one trace holds several programs.

        Raises:
            ShardplanError: always.
        """
        raise ShardplanError("a plan with groups of devices is several programs, which no one trace holds: use lower(*args)")

    def traced(self) -> list[Any]:
        """Each program that this process runs, as `jax.stages.Traced`."""
        found: list[Any] = []
        for n in self.own:
            piece = self._graph.pieces[n]
            shapes = [self._shape(piece.group, t) for t in piece.reads]
            found.append(self.programs[n].trace(*shapes, *([np.int32(0)] if piece.own == "slice" else [])))
        return found

    def cache_size(self) -> int:
        """The most entries in the call cache of a program."""
        return max((self.programs[n].cache_size() for n in self.own), default=0)

    def _shape(self, group: int, tensor: int) -> jax.ShapeDtypeStruct:
        """The array that holds a tensor in a group, with the dims of terms."""
        own, mesh = self._graph.tensors[tensor], self._graph.groups[group]
        layout = mesh.layouts.get(tensor)
        shape = own.shape if layout is None else stacked_shape(own.shape, layout, [f.size for f in mesh.factors])
        return _jax.shape_struct(shape, own.dtype)

    def _typed(self, group: int, tensor: int) -> jax.ShapeDtypeStruct:
        """That array, weakly typed if the result is."""
        shape = self._shape(group, tensor)
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=tensor in self._weak)

    def _jitted(self, number: int, piece: Piece, mesh: Mesh, jit: Callable[..., Any]) -> Any:
        group = self._graph.groups[piece.group]
        weak = [t in self._weak for t in piece.makes]
        match piece.own:
            case (planned, schedule):
                emit: Callable[..., Sequence[Any]] = _PieceEmitter(planned, mesh, schedule, piece, group)
            case "slice":
                emit = _sliced
            case "stack":
                emit = _stacked
            case "start":
                shapes = [self._shape(piece.group, t) for t in piece.makes]
                emit = lambda: [_full(s, c) for s, c in zip(shapes, piece.start, strict=True)]  # noqa: E731

        def run(*values: Any) -> list[Any]:
            return [_jax.weakly_typed(x) if w else x for x, w in zip(emit(*values), weak, strict=True)]

        run.__name__ = piece.name.replace(" ", "_")
        ins = [self._sharding(piece.group, t) for t in piece.reads]
        return jit(
            run,
            in_shardings=[*ins, *([None] if piece.own == "slice" else [])],
            out_shardings=[self._sharding(piece.group, t) for t in piece.makes],
            donate_argnums=tuple(self._reused.get(number, ())),
            keep_unused=True,
        )


class _PieceEmitter(ExplicitEmitter):
    """Runs a piece on its group. A value that is partial comes and goes as an array of its terms."""

    def __init__(self, planned: PlannedProgram, mesh: Mesh, schedule: Schedule, piece: Piece, group: GroupMesh) -> None:
        super().__init__(planned, mesh, schedule)
        self._ins, self._outs = ([group.layouts.get(t) for t in own] for own in (piece.reads, piece.makes))

    def __call__(self, *flat: Any) -> list[Any]:
        """The piece on its arguments."""
        ins, outs = (tuple(partition_spec(at, self.planned.names) for at in own) for own in (self._ins, self._outs))
        run = _jax.shard_mapped(self.local, mesh=self.mesh, in_specs=ins, out_specs=outs)
        with _jax.on_mesh(self.mesh):
            return list(run(*flat))

    def local(self, *arguments: Any) -> tuple[Any, ...]:
        """The program of one device."""
        own = [x if _terms(at) == 0 else x.reshape(x.shape[_terms(at) :]) for x, at in zip(arguments, self._ins, strict=True)]
        made = zip(super().local(*own), self._outs, strict=True)
        return tuple(x if _terms(at) == 0 else x.reshape((1,) * _terms(at) + jnp.shape(x)) for x, at in made)


def _terms(layout: Layout | None) -> int:
    """The number of dims of terms."""
    return 0 if layout is None else len(layout.partial)


def sharding_of(placed: PlacedStep, meshes: Sequence[Mesh]) -> Shardings:
    """The sharding of each tensor in each group."""
    groups, known = placed.graph.groups, dict[tuple[int, int], NamedSharding]()

    def sharding(group: int, tensor: int) -> NamedSharding:
        if (group, tensor) not in known:
            spec = partition_spec(groups[group].layouts.get(tensor), groups[group].names)
            known[group, tensor] = NamedSharding(meshes[group], spec)
        return known[group, tensor]

    return sharding


def argument_shardings(placed: PlacedStep, sharding: Shardings) -> list[NamedSharding]:
    """The sharding of each leaf of the arguments."""
    own = [sharding(group, key[0]) for group, key in placed.graph.inputs]
    if placed.layers is None:
        return own
    return [own[n[0]] if len(n) == 1 else whole_sharding([own[i] for i in n]) for n in placed.layers.inputs]


def result_shardings(placed: PlacedStep, sharding: Shardings) -> list[NamedSharding | None]:
    """The sharding of each leaf of the results; None for a constant of the step."""
    own = [None if at is None else sharding(at.group, at.like) for at in placed.graph.results]
    if placed.layers is None:
        return own
    found: list[NamedSharding | None] = []
    for numbers in placed.layers.outputs:
        parts = [at for n in numbers if (at := own[n]) is not None]
        found.append(whole_sharding(parts) if len(parts) > 1 else own[numbers[0]])
    return found


def _sliced(*stacks: Any) -> list[Any]:
    """The slices of stacks at the index that comes last."""
    *stacks, index = stacks  # type: ignore[assignment]
    return [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in stacks]


def _stacked(*values: Any) -> list[Any]:
    return [jnp.stack(values)]


def _full(shape: Any, value: Constant) -> Any:
    return jnp.full(shape.shape, value.value, shape.dtype)


def _literal(output: Any, weak: bool) -> Any:
    """A result of the step that is a literal, as an array."""
    if not isinstance(output, Constant):
        return None
    x = jnp.asarray(np.asarray(output.value, dtype=jnp.dtype(output.dtype)))
    return _jax.weakly_typed(x) if weak else x
