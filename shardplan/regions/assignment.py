"""The group of devices that runs each op of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from shardplan.errors import PlacementError
from shardplan.ir import Constant, Op, Operand, Program

Group = tuple[int, ...]
"""Devices of the cluster, ascending."""


@dataclass(frozen=True)
class Assignment:
    """The groups, and the number of the group that runs each op of a program, by op id.

    Ops that depend on no input belong to no group: each group that reads them runs them itself. ``held`` are the groups that
    hold inputs, by tensor (None: they follow from the ops); ``everywhere`` are inputs that each group has. ``chunk`` is the
    chunk of layers of each op, by op id, where a group runs several chunks one after the other (None: each group runs one).
    """

    program: Program
    groups: tuple[Group, ...]
    of: Mapping[int, int]
    held: Mapping[int, int] | None = None
    everywhere: frozenset[int] = frozenset()
    chunk: Mapping[int, int] | None = None

    @cached_property
    def chunk_of(self) -> Mapping[int, int]:
        """The chunk of each op that has a group, by op id."""
        return self.of if self.chunk is None else self.chunk

    @cached_property
    def made_in(self) -> Mapping[int, int]:
        """The chunk that makes each tensor that depends on an input and is the result of an op."""
        return {t: self.chunk_of[op.id] for op in self.program.ops if op.id in self.of for t in op.outputs}

    def is_foreign(self, tensor: int, op: Op) -> bool:
        """Whether a tensor that an op reads comes from another group or chunk."""
        group, chunk = self.of[op.id], self.chunk_of[op.id]
        return self.at.get(tensor, group) != group or self.made_in.get(tensor, chunk) != chunk

    @cached_property
    def maker(self) -> Mapping[int, int]:
        """The group that makes each tensor that depends on an input and is the result of an op."""
        return {t: self.of[op.id] for op in self.program.ops if op.id in self.of for t in op.outputs}

    @cached_property
    def home(self) -> Mapping[int, int]:
        """The group that holds each input, by tensor: the one that makes its next value, or the first that reads it.

        An input that nothing reads or replaces is held by group 0.
        """
        program = self.program
        if self.held is not None:
            return self.held
        homes: dict[int, int] = {}
        for result, i in zip(program.outputs, program.feedback or (None,) * len(program.outputs), strict=True):
            if i is not None and isinstance(result, int) and result in self.maker:
                homes.setdefault(program.inputs[i], self.maker[result])
        inputs = set(program.inputs)
        for op in program.ops:
            if op.id in self.of:
                for t in op.tensors:
                    if t in inputs:
                        homes.setdefault(t, self.of[op.id])
        return {t: homes.get(t, 0) for t in program.inputs}

    @cached_property
    def at(self) -> Mapping[int, int]:
        """The group in which each tensor that depends on an input is first present."""
        return {**self.home, **self.maker}


def assigned(program: Program, groups: tuple[Group, ...], of: Mapping[int, int]) -> Assignment:
    """An assignment, checked: every op that depends on an input has a group that exists.

    Raises:
        PlacementError: if an op has no group, or if the step itself names mesh axes, which groups do not have.
    """
    if program.meshed:
        raise PlacementError(
            "the step names mesh axes (a sharding constraint or jax.shard_map), which groups of devices do not have: remove "
            "them, or plan with placement='one'"
        )
    refuse_host_copies(program)
    free = free_ops(program)
    for op in program.ops:
        if op.id in free:
            continue
        if op.id not in of or not 0 <= of[op.id] < len(groups):
            raise PlacementError(f"the placement has no group for {op.primitive} at {op.source}: give it one of {len(groups)}")
    return Assignment(program, groups, {op.id: of[op.id] for op in program.ops if op.id not in free})


def refuse_host_copies(program: Program) -> None:
    """Refuses a step that keeps values in host memory: one group may make them, and another read them.

    Raises:
        PlacementError: naming the op.
    """
    if (copy := program.to_host) is not None:
        raise PlacementError(
            f"the step copies a value between device and host memory at {copy.source}, which plans on groups of devices do not: "
            "remove the offload policy of jax.checkpoint, or plan with placement='one'"
        )


def on_devices(program: Program, devices: Mapping[int, Group]) -> Assignment:
    """The assignment of ops to devices, by op id. An op without devices runs where its first reader runs; without a reader,
    where its first operand is made; without operands, where the first op of the step runs.

    Raises:
        PlacementError: as `assigned`, or if no op has devices.
    """
    found = {i: tuple(sorted(set(own))) for i, own in devices.items()}
    free = free_ops(program)
    ops = [op for op in program.ops if op.id not in free]
    reader: dict[int, Group] = {}
    for op in reversed(ops):
        wanted = [reader[t] for t in op.outputs if t in reader]
        if op.id not in found and wanted:
            found[op.id] = wanted[0]
        if op.id in found:
            reader.update(dict.fromkeys(op.tensors, found[op.id]))
    maker: dict[int, Group] = {}
    first = next((found[op.id] for op in ops if op.id in found), None)
    if first is None:
        raise PlacementError("the placement has devices for no op of this step: give it one of this step")
    for op in ops:
        own = found.setdefault(op.id, next((maker[t] for t in op.tensors if t in maker), first))
        maker.update(dict.fromkeys(op.outputs, own))
    groups = tuple(dict.fromkeys(found[op.id] for op in ops))
    return assigned(program, groups, {op.id: groups.index(found[op.id]) for op in ops})


def free_ops(program: Program) -> frozenset[int]:
    """The ops whose results depend on no input and are the same wherever they are computed."""
    fixed = {t for t, _ in program.constants}
    found: set[int] = set()
    for op in program.ops:
        if all(_is_free(i, fixed) for i in op.inputs) and _repeats(op):
            fixed.update(op.outputs)
            found.add(op.id)
    return frozenset(found)


def _is_free(operand: Operand, fixed: set[int]) -> bool:
    return isinstance(operand, Constant) or operand in fixed


def _repeats(op: Op) -> bool:
    """Whether an op may run in several groups."""
    if not op.bodies:
        return op.repeatable
    return not op.acts and all(_repeats(inner) for body in op.bodies for inner in body.ops)
