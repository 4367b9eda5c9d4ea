"""State matrices, and the effect of the five collectives on them (P2, section 3.2 and Figure 8).

A reduction over ``k`` devices cuts the data into ``k`` chunks. The state of a device is a ``k`` by ``k`` boolean matrix. Row
``r`` says which devices have contributed to its copy of chunk ``r``; an empty row means that it has no copy. Here a state is one
integer of ``k * k`` bits, with row ``r`` at bits ``r * k`` and up, so that a collective is a few integer operations.

>>> space = StateSpace(2)
>>> context = space.initial()
>>> [space.show(s) for s in space.apply(Collective.ALL_REDUCE, context)]
['11/11', '11/11']
>>> space.apply(Collective.ALL_REDUCE, (space.parse("10/00"), space.parse("00/01"))).reason
'AllReduce: members 0 and 1 hold different chunks, {0} and {1}'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, assert_never, get_args

from ..ir import Collective

P2Collective = Literal[
    Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER, Collective.REDUCE, Collective.BROADCAST
]
"""The collectives of the reduction language."""
COLLECTIVES: tuple[P2Collective, ...] = get_args(P2Collective)
_ADDING: tuple[P2Collective, ...] = (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE)
"""The collectives that add up the data of a group, whose members all hold the same chunks."""
Goal = Literal[Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.ALL_GATHER]
State = int
Context = tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Clash:
    """A precondition that fails, the members of the group that clash, and their chunk (None where it is not about one).

    Searches create many of these and read few, so `reason` is composed only on request.
    """

    collective: P2Collective
    premise: Literal["chunks differ", "twice", "indivisible", "overlap", "numbers differ", "root ignorant", "nothing new"]
    members: tuple[int, ...]
    chunk: int | None = None
    values: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """The precondition that fails, in words."""
        first, last = self.members[0], self.members[-1]
        match self.premise:
            case "chunks differ":
                why = f"members {first} and {last} hold different chunks, {_set(self.values[0])} and {_set(self.values[1])}"
            case "twice":
                which = f"the contribution of device {self.values[0]} to chunk {self.chunk}"
                why = f"members {first} and {last} both hold {which}, which would be reduced twice"
            case "indivisible":
                why = f"{self.values[0]} chunks do not divide among {len(self.members)} members"
            case "overlap":
                why = f"members {first} and {last} both hold chunk {self.chunk}"
            case "numbers differ":
                why = f"members {first} and {last} hold {self.values[0]} and {self.values[1]} chunks, not the same number"
            case "root ignorant":
                why = f"member {last} holds contributions to chunk {self.chunk} that the root lacks"
            case "nothing new":
                why = "nobody in the group learns anything"
            case _:
                assert_never(self.premise)
        return f"{self.collective.p2}: {why}"


@dataclass(frozen=True, slots=True)
class StateSpace:
    """States of ``k`` devices."""

    k: int
    _rows: tuple[State, ...] = field(init=False, repr=False, compare=False)
    _chunks: dict[State, int] = field(default_factory=dict[State, int], init=False, repr=False, compare=False)
    _masks: dict[int, int] = field(default_factory=dict[int, int], init=False, repr=False, compare=False)
    _applied: dict[tuple[P2Collective, Context], Context | Clash] = field(
        default_factory=lambda: dict[Any, Any](), init=False, repr=False, compare=False
    )
    _outcomes: dict[Context, dict[P2Collective, Context]] = field(
        default_factory=lambda: dict[Any, Any](), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rows", tuple(((1 << self.k) - 1) << (r * self.k) for r in range(self.k)))

    @property
    def full(self) -> State:
        """The state with every chunk complete."""
        return (1 << (self.k * self.k)) - 1

    def own(self, device: int) -> State:
        """The first state of a device: every chunk with its own contribution alone."""
        return self.column(1 << device)

    def column(self, contributors: int) -> State:
        """Every chunk with these contributors (a bitset of devices)."""
        return sum(contributors << (row * self.k) for row in range(self.k))

    def initial(self, goal: Goal = Collective.ALL_REDUCE, order: Sequence[int] | None = None) -> Context:
        """The states at the start. For an all-gather, each device has one complete chunk: ``order[i]`` for device ``i``."""
        if goal == Collective.ALL_GATHER:
            return self._scattered(order)
        return tuple(self.own(device) for device in range(self.k))

    def target(self, goal: Goal = Collective.ALL_REDUCE, order: Sequence[int] | None = None) -> Context:
        """The states at the end. For a reduce-scatter, each device has one complete chunk: ``order[i]`` for device ``i``."""
        if goal == Collective.REDUCE_SCATTER:
            return self._scattered(order)
        return (self.full,) * self.k

    def chunks(self, state: State) -> int:
        """The chunks with any contribution in a state, as a bitset of rows."""
        known = self._chunks.get(state)
        if known is None:
            known = 0
            for r, row in enumerate(self._rows):
                if state & row:
                    known |= 1 << r
            self._chunks[state] = known
        return known

    def only(self, chunks: int) -> State:
        """The mask that selects the rows of these chunks."""
        known = self._masks.get(chunks)
        if known is None:
            row = (1 << self.k) - 1
            known = sum(row << (r * self.k) for r in range(self.k) if chunks >> r & 1)
            self._masks[chunks] = known
        return known

    def apply(self, collective: P2Collective, states: Sequence[State]) -> Context | Clash:
        """The states of a group's members after a collective among them, or the precondition of Figure 8 that fails."""
        key = collective, tuple(states)
        result = self._applied.get(key)
        if result is None:
            result = self._applied[key] = self._apply(collective, states)
        return result

    def outcomes(self, states: Context) -> Mapping[P2Collective, Context]:
        """`apply` of every collective whose precondition holds and which changes some state."""
        known = self._outcomes.get(states)
        if known is None:
            result: dict[P2Collective, Context] = {}
            for collective in self._possible(states):
                after = self._apply(collective, states)
                if not isinstance(after, Clash) and after != states:
                    result[collective] = after
            known = self._outcomes[states] = result  # assigned last, so that an interrupt leaves no partial entry
        return known

    def _possible(self, states: Context) -> tuple[P2Collective, ...]:
        """The collectives whose preconditions may hold; a few integer operations rule out most."""
        size = contributions = 0
        for state in states:
            size += state.bit_count()
            contributions |= state
        if size == contributions.bit_count():  # no contribution is held twice
            held = [self.chunks(state) for state in states]
            if held.count(held[0]) == len(held):
                return _ADDING
            counts = [chunks.bit_count() for chunks in held]
            if counts.count(counts[0]) == len(counts):
                return (Collective.ALL_GATHER,)
        return (Collective.BROADCAST,) if contributions == states[0] else ()

    def _apply(self, collective: P2Collective, states: Sequence[State]) -> Context | Clash:
        match collective:
            case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER | Collective.REDUCE:
                return self._reduce(collective, states)
            case Collective.ALL_GATHER:
                return self._gather(states)
            case Collective.BROADCAST:
                return self._broadcast(states)
            case _:
                assert_never(collective)

    def _reduce(self, collective: P2Collective, states: Sequence[State]) -> Context | Clash:
        held, total = self.chunks(states[0]), 0
        for member, state in enumerate(states):
            if self.chunks(state) != held:
                return Clash(collective, "chunks differ", (0, member), None, (held, self.chunks(state)))
            if state & total:
                return self._twice(collective, states, member)
            total |= state
        if collective == Collective.ALL_REDUCE:
            return (total,) * len(states)
        if collective == Collective.REDUCE:
            return (total,) + (0,) * (len(states) - 1)
        if held.bit_count() % len(states):
            return Clash(collective, "indivisible", tuple(range(len(states))), None, (held.bit_count(),))
        return tuple(total & self.only(block) for block in _blocks(held, len(states)))

    def _gather(self, states: Sequence[State]) -> Context | Clash:
        total, seen, count = 0, 0, self.chunks(states[0]).bit_count()
        for member, state in enumerate(states):
            held = self.chunks(state)
            if held & seen:
                other = next(m for m in range(member) if self.chunks(states[m]) & held)
                return Clash(Collective.ALL_GATHER, "overlap", (other, member), _first(held & self.chunks(states[other])))
            if held.bit_count() != count:
                return Clash(Collective.ALL_GATHER, "numbers differ", (0, member), None, (count, held.bit_count()))
            total, seen = total | state, seen | held
        return (total,) * len(states)

    def _broadcast(self, states: Sequence[State]) -> Context | Clash:
        root = states[0]
        for member, state in enumerate(states):
            if state & ~root:
                return Clash(Collective.BROADCAST, "root ignorant", (0, member), _first(state & ~root) // self.k)
        if all(state == root for state in states):
            return Clash(Collective.BROADCAST, "nothing new", tuple(range(len(states))))
        return (root,) * len(states)

    def _twice(self, collective: P2Collective, states: Sequence[State], member: int) -> Clash:
        other = next(m for m in range(member) if states[m] & states[member])
        chunk, device = divmod(_first(states[other] & states[member]), self.k)
        return Clash(collective, "twice", (other, member), chunk, (device,))

    def _scattered(self, order: Sequence[int] | None) -> Context:
        return tuple(self.full & self.only(1 << chunk) for chunk in (order or range(self.k)))

    def show(self, state: State) -> str:
        """A state matrix as rows of 0 and 1 between slashes, contributions of device 0 leftmost."""
        rows = (state >> (r * self.k) & ((1 << self.k) - 1) for r in range(self.k))
        return "/".join("".join(str(row >> j & 1) for j in range(self.k)) for row in rows)

    def parse(self, text: str) -> State:
        """The inverse of `show`."""
        rows = text.split("/")
        return sum(1 << (r * self.k + j) for r, row in enumerate(rows) for j, bit in enumerate(row) if bit == "1")


def _blocks(held: int, parts: int) -> list[int]:
    """The held chunks in ``parts`` consecutive blocks of equal size, as bitsets."""
    rows = [r for r in range(held.bit_length()) if held >> r & 1]
    size = len(rows) // parts
    return [sum(1 << r for r in rows[i * size : (i + 1) * size]) for i in range(parts)]


def _first(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _set(chunks: int) -> str:
    return "{" + ", ".join(str(r) for r in range(chunks.bit_length()) if chunks >> r & 1) + "}"
