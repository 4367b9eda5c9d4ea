"""The ``regions`` backend: a jitted program for each segment of a placed step, on the devices of its group.

Programs are issued in the order of the dispatch, and each runs as soon as its arguments are there. A value that another group
reads is moved by `jax.device_put`, from its layout in one group to that in the other.
"""

# pyright: basic
from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardplan import _jax
from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.stacked import partition_spec
from shardplan.errors import ShardplanError
from shardplan.ir import Constant
from shardplan.regions.dispatch import Run, Send
from shardplan.regions.placed import PlacedStep


class RegionsEmitter:
    """A placed step on flat arguments. ``jit`` compiles a function of arrays (`jax.jit` with the user's options).

    ``programs`` are the jitted functions of the segments, ``names`` and ``devices`` what they are called and where they run.
    """

    def __init__(
        self, placed: PlacedStep, meshes: Sequence[Mesh], donated: Sequence[int], weak: Sequence[bool], jit: Callable[..., Any]
    ) -> None:
        self.placed, self._split = placed, placed.split
        self._program = placed.split.assignment.program
        self._shardings = placed_shardings(placed, meshes)
        self._weak = {t for t, w in zip(self._program.outputs, weak, strict=True) if w and isinstance(t, int)}
        self._owned = self._donated(donated)
        self.programs = tuple(self._jitted(n, meshes, jit) for n in range(len(placed.segments)))
        groups = placed.split.assignment.groups
        self.names = tuple(f"segment {n} of group {s.group}" for n, s in enumerate(placed.split.segments))
        self.devices = tuple(groups[s.group] for s in placed.split.segments)
        self._literals = tuple(_literal(o, w) for o, w in zip(self._program.outputs, weak, strict=True))

    @property
    def input_shardings(self) -> list[NamedSharding]:
        """The sharding of each leaf of the arguments."""
        homes = self._split.assignment.home
        return [self._shardings[homes[t]][t] for t in self._program.inputs]

    def __call__(self, *leaves: Any) -> list[Any]:
        """The flat results; programs may still run when it returns.

        Raises:
            ShardplanError: inside another `jax.jit`, which makes one program of all.
        """
        if not _jax.is_outermost():
            raise ShardplanError(
                "a plan with groups of devices is several programs, so it cannot be called inside jax.jit, jax.grad or another "
                "transformation: call it from Python, or plan with placement='one'"
            )
        split, homes = self._split, self._split.assignment.home
        held: dict[tuple[int, int], Any] = {(homes[t], t): x for t, x in zip(self._program.inputs, leaves, strict=True)}
        for issue in self.placed.dispatch.issues:
            match issue:
                case Run():
                    group, boundary = split.segments[issue.segment].group, split.boundaries[issue.segment]
                    results = self.programs[issue.segment](*[held[group, t] for t in boundary.reads])
                    held.update(((group, t), x) for t, x in zip(boundary.makes, results, strict=True))
                case Send(transfer=move):
                    held[move.target, move.tensor] = jax.device_put(held[move.source, move.tensor], self._target(issue))
            for key in issue.last:
                held.pop(key, None)
        return [x if at is None else held[at] for at, x in zip(split.results, self._literals, strict=True)]

    def using(self, programs: Sequence[Callable[..., Any]]) -> RegionsEmitter:
        """The same step with these functions in place of its programs."""
        other = copy.copy(self)
        other.programs = tuple(programs)
        return other

    def trace(self, *leaves: Any) -> Any:
        """Refused: no one trace holds several programs.

        Raises:
            ShardplanError: always.
        """
        raise ShardplanError("a plan with groups of devices is several programs, which no one trace holds: use lower(*args)")

    def traced(self) -> list[Any]:
        """Each program as `jax.stages.Traced`."""
        found: list[Any] = []
        for program, boundary in zip(self.programs, self._split.boundaries, strict=True):
            tensors = [self._program.tensors[t] for t in boundary.reads]
            found.append(program.trace(*[_jax.shape_struct(t.shape, t.dtype) for t in tensors]))
        return found

    def cache_size(self) -> int:
        """The number of entries in the call caches of all programs."""
        return max((p.cache_size() for p in self.programs), default=0)

    def _target(self, send: Send) -> NamedSharding:
        """The sharding that a value has where it is sent."""
        move = send.transfer
        if not move.result:
            return self._shardings[move.target][move.tensor]
        n = next(n for n, at in enumerate(self._split.results) if at == (move.target, move.tensor))
        i = self._program.feedback[n]
        assert i is not None, "only next values of arguments are sent as results"
        return self._shardings[move.target][self._program.inputs[i]]

    def _donated(self, donated: Sequence[int]) -> set[int]:
        """The tensors whose buffers the step may reuse: donated arguments, and whatever it makes.

        A value that is sent to a device that already has it may share its buffer there.
        """
        kept = set(self._program.inputs) - {self._program.inputs[i] for i in donated}
        groups = [set(g) for g in self._split.assignment.groups]
        kept |= {m.tensor for m in self._split.transfers if not groups[m.source].isdisjoint(groups[m.target])}
        return {t for b in self._split.boundaries for t in (*b.reads, *b.makes)} - kept

    def _jitted(self, number: int, meshes: Sequence[Mesh], jit: Callable[..., Any]) -> Any:
        placed, boundary = self.placed, self._split.boundaries[number]
        group = self._split.segments[number].group
        emit = ExplicitEmitter(placed.segments[number], meshes[group], placed.schedules[number])
        weak, shardings = [t in self._weak for t in boundary.makes], self._shardings[group]

        def run(*values: Any) -> list[Any]:
            return [_jax.weakly_typed(x) if w else x for x, w in zip(emit(*values), weak, strict=True)]

        run.__name__ = f"segment_{number}_of_group_{group}"
        return jit(
            run,
            in_shardings=[shardings[t] for t in boundary.reads],
            out_shardings=[shardings[t] for t in boundary.makes],
            donate_argnums=self._reused(number),
            keep_unused=True,
        )

    def _reused(self, number: int) -> tuple[int, ...]:
        """The arguments of a segment whose buffers its results take: nothing reads them after it."""
        boundary, group = self._split.boundaries[number], self._split.segments[number].group
        issue = next(i for i in self.placed.dispatch.issues if isinstance(i, Run) and i.segment == number)
        tensors, shardings = self._program.tensors, self._shardings[group]

        def block(t: int) -> tuple[Any, ...]:
            return shardings[t].shard_shape(tensors[t].shape), tensors[t].dtype

        wanted = [block(t) for t in boundary.makes]
        found: list[int] = []
        for n, t in enumerate(boundary.reads):
            if (group, t) in issue.last and t in self._owned and block(t) in wanted:
                wanted.remove(block(t))
                found.append(n)
        return tuple(found)


def _literal(output: Any, weak: bool) -> Any:
    """A result of the step that is a literal, as an array."""
    if not isinstance(output, Constant):
        return None
    x = jnp.asarray(np.asarray(output.value, dtype=jnp.dtype(output.dtype)))
    return _jax.weakly_typed(x) if weak else x


def placed_shardings(placed: PlacedStep, meshes: Sequence[Mesh]) -> tuple[dict[int, NamedSharding], ...]:
    """For each group, the sharding of each tensor of the step that enters or leaves its program."""
    found: list[dict[int, NamedSharding]] = []
    for part, own, mesh in zip(placed.split.group_parts, placed.groups, meshes, strict=True):
        names, layouts = tuple(f.name for f in own.factors), own.choices.bodies[()].layouts
        ends = {*part.program.inputs, *part.program.returned}
        found.append({part.tensors[n]: NamedSharding(mesh, partition_spec(layouts[n], names)) for n in sorted(ends)})
    return tuple(found)
