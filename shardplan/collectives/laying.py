"""How a hierarchy lies on mesh axes, and what a program needs to run as one code on all devices. No JAX here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..cost.network import Network
from .dsl import Instruction, Master, Reduction, ReductionError, Refusal, advance, groups, replay
from .ranking import entries
from .states import Space

Part = tuple[int, int, int]  # an axis by its index, a size and a stride within the axis
SMALL = 64  # replay a program on its true sizes up to so many devices; on two a level beyond


@dataclass(frozen=True, slots=True)
class Laying:
    """How a hierarchy lies on mesh axes: for each entry its parts, major first."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    entries: tuple[tuple[Part, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the entries."""
        return tuple(math.prod(size for _, size, _ in entry) for entry in self.entries)

    def positions(self) -> list[int]:
        """For each device of the hierarchy, in its own order, its index along all axes together."""
        parts = [part for entry in self.entries for part in entry]
        result: list[int] = []
        for at in itertools.product(*(range(size) for _, size, _ in parts)):
            along = [0] * len(self.axes)
            for (axis, _, stride), c in zip(parts, at, strict=True):
                along[axis] += c * stride
            result.append(int(np.ravel_multi_index(along, self.sizes)))
        return result

    def offsets(self) -> list[int]:
        """The index along all axes together of each setting of what the hierarchy leaves out of them; [0] if that is nothing."""
        gaps: list[Part] = []
        for axis, size in enumerate(self.sizes):
            at = 1
            for _, count, stride in sorted((p for entry in self.entries for p in entry if p[0] == axis), key=lambda p: p[2]):
                if stride > at:
                    gaps.append((axis, stride // at, at))
                at = stride * count
            if at < size:
                gaps.append((axis, size // at, at))
        rest = Laying(self.axes, self.sizes, (tuple(gaps),))
        return rest.positions()

    def groups(self, step: Instruction) -> list[list[int]]:
        """The groups of an instruction as indices along all axes together."""
        position = self.positions()
        return [[position[d] + offset for d in group] for offset in self.offsets() for group in groups(self.shape, step)]

    def whole_axes(self, low: int, high: int) -> tuple[str, ...] | None:
        """The axes that entries [low, high) are made of, in their order, if these are whole axes."""
        parts = [part for entry in self.entries[low:high] for part in entry]
        merged: list[list[int]] = []
        for axis, size, stride in parts:
            if merged and merged[-1][0] == axis and merged[-1][2] == stride * size:
                merged[-1][1:] = [merged[-1][1] * size, stride]
            else:
                merged.append([axis, size, stride])
        if any(size != self.sizes[axis] or stride != 1 for axis, size, stride in merged):
            return None
        return tuple(self.axes[axis] for axis, _, _ in merged)


def laying_over(network: Network, over: Sequence[int], axes: Mapping[str, Sequence[int]]) -> Laying:
    """The laying of a reduction over some factors of a network on mesh axes, each made of factors, major first.

    ``axes`` are in the mesh's order; those without a factor in ``over`` are left out. An axis may hold factors that are
    not reduced.
    """
    mine = {name: group for name, group in axes.items() if set(group) & set(over)}
    where: dict[int, Part] = {}
    for axis, group in enumerate(mine.values()):
        stride = math.prod(network.factors[i].size for i in group)
        for i in group:
            stride //= network.factors[i].size
            where[i] = (axis, network.factors[i].size, stride)
    sizes = tuple(math.prod(network.factors[i].size for i in group) for group in mine.values())
    return Laying(tuple(mine), sizes, tuple(tuple(where[i] for i in entry) for entry in entries(network, over)))


def check(program: Reduction, shape: Sequence[int], names: Sequence[str] = ()) -> None:
    """Refuse a program that does not compute the sum, or that needs what a device no longer has once all run the same code."""
    sizes = tuple(shape) if math.prod(shape) <= SMALL else (2,) * len(shape)
    replay(program, sizes, names=names)
    _check_same_code(program, sizes, names)


def smallest_part(program: Reduction, shape: Sequence[int]) -> int:
    """Into how many parts the data has to be cut for every step to divide."""
    parts = now = 1
    for step in program.steps:
        low, high = step.span(len(shape))
        members = math.prod(shape[low:high])
        if step.collective == "ReduceScatter":
            now *= members
        elif step.collective == "AllGather":
            now //= members
        parts = math.lcm(parts, now)
    return parts


@lru_cache(maxsize=4096)
def reorderings(program: Reduction, shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, ...]:
    """For each step, the order into which a device has to put the parts that it gathered, None where they come in order.

    Members come in the order of their group, parts in the order of the scatters: they differ where levels are gathered in another
    order than they were scattered in.
    """
    held = np.tile(np.arange(smallest_part(program, shape)), (math.prod(shape), 1))  # parts by number  [devices, parts held]
    result: list[tuple[int, ...] | None] = []
    for step in program.steps:
        among = np.array(groups(shape, step))
        order = None
        if step.collective == "ReduceScatter":
            mine = held.reshape(len(held), among.shape[1], -1)
            held = mine[:, 0].copy()  # who is outside the masters' groups holds leftovers of the right size
            held[among] = mine[among, np.arange(among.shape[1])[None, :]]
        elif step.collective == "AllGather":
            gathered = held[among].reshape(len(among), -1)
            orders = np.argsort(gathered, axis=1)
            assert (orders == orders[0]).all(), "all groups gather alike"
            held = np.repeat(held[:, :1], gathered.shape[1], axis=1)
            held[among] = np.sort(gathered, axis=1)[:, None, :]
            if not np.array_equal(orders[0], np.arange(gathered.shape[1])):
                order = tuple(int(i) for i in orders[0])
        elif step.collective == "Broadcast":
            held[among] = held[among[:, :1]]
        result.append(order)
    return tuple(result)


def _check_same_code(program: Reduction, shape: tuple[int, ...], names: Sequence[str]) -> None:
    """Replay with what the lowering loses: where masters scatter or gather, the others' buffers change size and are void."""
    space = Space(math.prod(shape))
    context = space.initial()
    for number, step in enumerate(program.steps):
        among = groups(shape, step)
        alive = tuple(g for g in among if any(context[d] for d in g))
        after = advance(space, step.collective, alive, context)
        if isinstance(after, Refusal):
            what = step.text(names or [f"level{i}" for i in range(len(shape))])
            why = "devices outside the masters' groups would need data of another size"
            raise ReductionError(f"step {number + 1}, {what}, cannot run as one code on all devices: {why}", step=number)
        if isinstance(step.form, Master) and step.collective in ("ReduceScatter", "AllGather"):
            inside = {d for g in among for d in g}
            after = tuple(state if d in inside else 0 for d, state in enumerate(after))
        context = after
