"""How a hierarchy maps to mesh axes, and the tables with which a program runs as the same code on all devices. No JAX here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cost.network import Network
from ..ir import Collective
from .dsl import Instruction, Master, Reduction, ReductionError, Refusal, advance, groups, replay
from .ranking import entries
from .states import StateSpace

Part = tuple[int, int, int]  # index of an axis, size and stride within the axis
SMALL = 64  # up to this many devices a program is replayed on its true sizes, beyond with every level at two


@dataclass(frozen=True, slots=True)
class Laying:
    """How a hierarchy maps to mesh axes: the parts of each entry, major first.

    Neighbouring mesh axes may count as one, major first: each of ``axes`` is a tuple of names.
    """

    axes: tuple[tuple[str, ...], ...]
    sizes: tuple[int, ...]
    entries: tuple[tuple[Part, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all mesh axes."""
        return tuple(name for axis in self.axes for name in axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the entries."""
        return tuple(math.prod(size for _, size, _ in entry) for entry in self.entries)

    def positions(self) -> list[int]:
        """The index along all axes together of each device, in the hierarchy's order."""
        parts = [part for entry in self.entries for part in entry]
        sizes = [size for _, size, _ in parts]
        along = np.zeros((len(self.axes), math.prod(sizes)), np.int64)
        for (axis, _, stride), at in zip(parts, np.indices(sizes).reshape(len(parts), -1 if parts else 1), strict=True):
            along[axis] += at * stride
        return np.ravel_multi_index(tuple(along), self.sizes).tolist()

    def offsets(self) -> list[int]:
        """The index along all axes together of each setting of the parts outside the hierarchy; [0] if there are none."""
        gaps: list[Part] = []
        for axis, size in enumerate(self.sizes):
            at = 1
            for _, count, stride in sorted((p for entry in self.entries for p in entry if p[0] == axis), key=lambda p: p[2]):
                if stride > at:
                    gaps.append((axis, stride // at, at))
                at = stride * count
            if at < size:
                gaps.append((axis, size // at, at))
        outside = Laying(self.axes, self.sizes, (tuple(gaps),))
        return outside.positions()

    def groups(self, step: Instruction) -> list[list[int]]:
        """The groups of an instruction as indices along all axes together."""
        position = self.positions()
        return [[position[d] + offset for d in group] for offset in self.offsets() for group in groups(self.shape, step)]

    def whole_axes(self, low: int, high: int) -> tuple[str, ...] | None:
        """The axes that make up entries [low, high), in their order; None unless these are whole axes."""
        parts = [part for entry in self.entries[low:high] for part in entry]
        merged: list[list[int]] = []
        for axis, size, stride in parts:
            if merged and merged[-1][0] == axis and merged[-1][2] == stride * size:
                merged[-1][1:] = [merged[-1][1] * size, stride]
            else:
                merged.append([axis, size, stride])
        if any(size != self.sizes[axis] or stride != 1 for axis, size, stride in merged):
            return None
        return tuple(name for axis, _, _ in merged for name in self.axes[axis])


def laying_over(network: Network, over: Sequence[int], axes: Mapping[str, Sequence[int]]) -> Laying:
    """The `Laying` of a reduction over some factors of a network.

    ``axes`` maps each mesh axis, in the mesh's order, to its factors, major first. Axes without a factor in ``over`` are left
    out. An axis may also hold factors that are not reduced.
    """
    mine = {name: group for name, group in axes.items() if set(group) & set(over)}
    part_of: dict[int, Part] = {}
    for axis, group in enumerate(mine.values()):
        stride = math.prod(network.factors[i].size for i in group)
        for i in group:
            stride //= network.factors[i].size
            part_of[i] = (axis, network.factors[i].size, stride)
    sizes = tuple(math.prod(network.factors[i].size for i in group) for group in mine.values())
    of_entries = (tuple(part_of[i] for i in entry) for entry in entries(network, over))
    return Laying(tuple((name,) for name in mine), sizes, tuple(of_entries))


def check(program: Reduction, shape: Sequence[int], names: Sequence[str] = ()) -> None:
    """Refuse a program that does not compute the sum, or that cannot run as the same code on all devices."""
    sizes = tuple(shape) if math.prod(shape) <= SMALL else (2,) * len(shape)
    replay(program, sizes, names=names)
    _check_same_code(program, sizes, names)


def smallest_part(program: Reduction, shape: Sequence[int]) -> int:
    """The number of parts that the data must be cut into so that every step divides evenly."""
    parts = scattered = 1
    for step in program.steps:
        low, high = step.span(len(shape))
        members = math.prod(shape[low:high])
        if step.collective == Collective.REDUCE_SCATTER:
            scattered *= members
        elif step.collective == Collective.ALL_GATHER:
            scattered //= members
        parts = math.lcm(parts, scattered)
    return parts


@lru_cache(maxsize=4096)
def reorderings(program: Reduction, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """For each step, the permutation that sorts the parts that a device gathered; None where they arrive sorted.

    Parts arrive in the order of the group's members, and are numbered in the order of the scatters. These differ where levels
    are gathered in another order than they were scattered in.
    """
    held = np.tile(np.arange(smallest_part(program, shape)), (math.prod(shape), 1))  # parts by number  [devices, parts held]
    result: list[tuple[int, ...] | None] = []
    for step in program.steps:
        among = np.array(groups(shape, step))
        order = None
        if step.collective == Collective.REDUCE_SCATTER:
            mine = held.reshape(len(held), among.shape[1], -1)
            held = mine[:, 0].copy()  # devices outside the masters' groups hold leftovers of the right size
            held[among] = mine[among, np.arange(among.shape[1])[None, :]]
        elif step.collective == Collective.ALL_GATHER:
            gathered = held[among].reshape(len(among), -1)
            orders = np.argsort(gathered, axis=1)
            assert (orders == orders[0]).all(), "all groups gather in the same order"
            held = np.repeat(held[:, :1], gathered.shape[1], axis=1)
            held[among] = np.sort(gathered, axis=1)[:, None, :]
            if not np.array_equal(orders[0], np.arange(gathered.shape[1])):
                order = tuple(int(i) for i in orders[0])
        elif step.collective == Collective.BROADCAST:
            held[among] = held[among[:, :1]]
        result.append(order)
    return tuple(result)


def _check_same_code(program: Reduction, shape: tuple[int, ...], names: Sequence[str]) -> None:
    """Refuse a program that fails when it is replayed as lowered.

    Where masters scatter or gather, the other devices' buffers change size, and their contents are void.
    """
    space = StateSpace(math.prod(shape))
    context = space.initial()
    for number, step in enumerate(program.steps):
        among = groups(shape, step)
        alive = tuple(g for g in among if any(context[d] for d in g))
        after = advance(space, step.collective, alive, context)
        if isinstance(after, Refusal):
            label = step.text(names or [f"level{i}" for i in range(len(shape))])
            why = "devices outside the masters' groups would need data of another size"
            raise ReductionError(f"step {number + 1}, {label}, cannot run as the same code on all devices: {why}", step=number)
        if isinstance(step.form, Master) and step.collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
            inside = {d for g in among for d in g}
            after = tuple(state if d in inside else 0 for d, state in enumerate(after))
        context = after
