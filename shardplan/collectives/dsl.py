"""The reduction language (P2, section 3.3): programs of instructions (slice, form, collective) over a synthesis hierarchy.

A hierarchy is a tree of levels under a root, slowest level first. The slice names a level, and the devices under each of its
nodes form a group. The form says which devices communicate: those inside each group (InsideGroup), the first (second, ...)
devices of all groups under a common ancestor (Parallel), or only the first devices (Master). So a pattern is a range of levels
to reduce over, and whether the levels below the range are fixed at their first member.

>>> program = parse("(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (node, InsideGroup, Broadcast)", ("node", "gpu"))
>>> program.text(("node", "gpu"))
'(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (node, InsideGroup, Broadcast)'
>>> [groups((2, 2), step) for step in program.steps]
[((0, 1), (2, 3)), ((0, 2),), ((0, 1), (2, 3))]
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from ..errors import ReductionError, nearest
from ..ir import Collective
from .states import COLLECTIVES, Clash, Context, Goal, P2Collective, State, StateSpace

Shape = tuple[int, ...]
_REMEDY = "`shardplan reduce` lists the correct programs"


@dataclass(frozen=True, slots=True)
class InsideGroup:
    """All devices of each group of the slice."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """The first devices of the groups under one node of ``level``, the second devices, and so on."""

    level: int


@dataclass(frozen=True, slots=True)
class Master:
    """Only the first devices of the groups under one node of ``level``."""

    level: int


Form = InsideGroup | Parallel | Master


@dataclass(frozen=True, slots=True)
class Instruction:
    """One step. Levels are counted from the root, which is 0; level ``i`` is entry ``i - 1`` of the hierarchy's shape."""

    slice: int
    form: Form
    collective: P2Collective

    def span(self, depth: int) -> tuple[int, int]:
        """The entries [low, high) that the groups span in a hierarchy of ``depth`` entries."""
        match self.form:
            case InsideGroup():
                return self.slice, depth
            case Parallel(level) | Master(level):
                return level, self.slice
            case _:
                assert_never(self.form)

    def text(self, names: Sequence[str]) -> str:
        """The instruction as the paper writes it, with these level names."""
        level_names = ("root", *names)
        match self.form:
            case InsideGroup():
                form = "InsideGroup"
            case Parallel(level):
                form = f"Parallel({level_names[level]})"
            case Master(level):
                form = f"Master({level_names[level]})"
            case _:
                assert_never(self.form)
        return f"({level_names[self.slice]}, {form}, {self.collective.p2})"


@dataclass(frozen=True, slots=True)
class Reduction:
    """A program: its steps in order, for hierarchies of ``depth`` entries of any sizes."""

    steps: tuple[Instruction, ...]
    depth: int

    def text(self, names: Sequence[str]) -> str:
        """The program as the paper writes it."""
        return " ".join(step.text(names) for step in self.steps)

    @property
    def short(self) -> str:
        """The names of the collectives: ``ReduceScatter-AllReduce-AllGather``."""
        return "-".join(step.collective.p2 for step in self.steps)


@lru_cache(maxsize=4096)
def groups(shape: Shape, step: Instruction) -> tuple[tuple[int, ...], ...]:
    """The device groups of an instruction on a hierarchy of this shape; groups of one device are left out."""
    low, high = step.span(len(shape))
    if not 0 <= low <= high <= len(shape):
        raise ReductionError(f"{step}: the form's level must be above the slice, within the {len(shape)} levels of {list(shape)}")
    inner = math.prod(shape[low:high])
    if inner < 2:
        return ()
    below = math.prod(shape[high:])
    suffixes = range(1) if isinstance(step.form, Master) else range(below)
    starts = (p * inner * below + s for p, s in itertools.product(range(math.prod(shape[:low])), suffixes))
    return tuple(tuple(start + i * below for i in range(inner)) for start in starts)


@lru_cache(maxsize=64)
def instructions(depth: int) -> tuple[Instruction, ...]:
    """One instruction for each distinct pattern and collective on a hierarchy of ``depth`` entries, all larger than one."""
    forms: list[tuple[int, Form]] = []
    for low in range(depth):
        forms.append((low, InsideGroup()))
        for high in range(low + 1, depth):
            forms += [(high, Parallel(low)), (high, Master(low))]
    return tuple(Instruction(s, form, c) for s, form in forms for c in COLLECTIVES)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A step that a context does not allow: the number of the first group that clashes, and why."""

    group: int
    clash: Clash


def advance(space: StateSpace, collective: P2Collective, among: Sequence[Sequence[int]], context: Context) -> Context | Refusal:
    """The context after one step, or the reason that the step is refused.

    Information must increase strictly: a step in which a group learns nothing is refused too.
    """
    states = list[State]()
    for number, group in enumerate(among):
        before = tuple([context[d] for d in group])
        after = space.apply(collective, before)
        if isinstance(after, Clash):
            return Refusal(number, after)
        if after == before:  # also where the group holds no data
            return Refusal(number, Clash(collective, "nothing new", tuple(range(len(group)))))
        states = states or list(context)
        for device, state in zip(group, after, strict=True):
            states[device] = state
    return tuple(states or context)


def replay(
    program: Reduction,
    shape: Shape,
    goal: Goal = Collective.ALL_REDUCE,
    order: Sequence[int] | None = None,
    names: Sequence[str] = (),
) -> tuple[Context, ...]:
    """The contexts before, between and after the steps.

    Raises `ReductionError` where a step's precondition fails, where the program is for another depth, and where it ends short of
    the goal.
    """
    names = names or tuple(f"level{i}" for i in range(len(shape)))
    if program.depth != len(shape):
        raise ReductionError(f"a program for {program.depth} levels does not fit the {len(shape)} levels of {list(shape)}")
    space = StateSpace(math.prod(shape))
    contexts = [space.initial(goal, order)]
    for number, step in enumerate(program.steps):
        among = groups(shape, step)
        place = f"step {number + 1}, {step.text(names)}"
        if not among:
            raise ReductionError(f"{place}: its groups are single devices", step=number)
        after = advance(space, step.collective, among, contexts[-1])
        if isinstance(after, Refusal):
            group, clash = among[after.group], after.clash
            states = [space.show(contexts[-1][d]) for d in group]
            clashing = "; ".join(f"device {group[m]} has {brief(states[m])}" for m in clash.members[:4])
            message = f"{place}: among devices {list(group)}, {clash.reason} ({clashing}); {_REMEDY}"
            raise ReductionError(message, step=number, devices=group, states=states)
        contexts.append(after)
    short = [d for d, (have, want) in enumerate(zip(contexts[-1], space.target(goal, order), strict=True)) if have != want]
    if short:
        d = short[0]
        raise ReductionError(
            f"the program ends short of its goal, {goal}: device {d} has {brief(space.show(contexts[-1][d]))}; {_REMEDY}",
            step=len(program.steps),
            devices=short,
            states=[space.show(contexts[-1][d]) for d in short],
        )
    return tuple(contexts)


def brief(state: str) -> str:
    """A state as `StateSpace.show` writes it, with runs of equal rows counted.

    >>> brief("1100/1100/0000/0011")
    '2 x 1100/0000/0011'
    """
    runs = [(row, len(list(same))) for row, same in itertools.groupby(state.split("/"))]
    return "/".join(f"{n} x {row}" if n > 1 else row for row, n in runs)


_COLLECTIVES: dict[str, P2Collective] = {collective.p2: collective for collective in COLLECTIVES}
_INSTRUCTION = re.compile(r"\(\s*([^\s,()]+)\s*,\s*(InsideGroup|(?:Parallel|Master)\(\s*([^\s,()]+)\s*\))\s*,\s*(\w+)\s*\)")


def shortened(text: str) -> str:
    """The names of the collectives in a program's text.

    >>> shortened("(gpu, InsideGroup, Reduce) (gpu, InsideGroup, Broadcast)")
    'Reduce-Broadcast'
    """
    return "-".join(match[4] for match in _INSTRUCTION.finditer(text))


def parse(text: str, names: Sequence[str]) -> Reduction:
    """The program of a text like ``(node, Master(root), AllReduce) ...``, over levels with these names."""
    levels = ("root", *names)

    def level(name: str) -> int:
        if name not in levels:
            parts = name.endswith((".0", ".1")) and name[:-2] in levels
            remedy = ": plans alone run programs that take a level apart" if parts else nearest(name, levels)
            raise ReductionError(f"no level {name!r} in the hierarchy {', '.join(levels)}{remedy}")
        return levels.index(name)

    steps: list[Instruction] = []
    for match in _INSTRUCTION.finditer(text):
        name, form, above, collective = match.groups()
        if collective not in _COLLECTIVES:
            raise ReductionError(
                f"no collective {collective!r}{nearest(collective, tuple(_COLLECTIVES))}: use one of {', '.join(_COLLECTIVES)}"
            )
        if above is not None and level(above) >= level(name):
            raise ReductionError(f"in {match[0]}: {above!r} is not above {name!r}")
        shape = InsideGroup() if above is None else Parallel(level(above)) if form[0] == "P" else Master(level(above))
        steps.append(Instruction(level(name), shape, _COLLECTIVES[collective]))
    unparsed = _INSTRUCTION.sub("", text).strip(" ;,\n")
    if unparsed or not steps:
        raise ReductionError(
            f"not a reduction program: {unparsed or text!r}; "
            "write (level, InsideGroup | Parallel(level) | Master(level), collective)"
        )
    return Reduction(tuple(steps), len(names))
