"""The time of a compiled program by its schedule: kernels in order, and collectives beside them.

The instructions of a scheduled module (``is_scheduled=true``) stand in the order in which a device issues them. Kernels run one
after another. An asynchronous collective runs beside the kernels from its ``-start`` on; its ``-done`` waits for it. A collective
of a single instruction delays the kernels until it has ended. Bodies of loops run as often as their known trip count says.
"""

# pyright: strict
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from benchmarks.hlo_kernels import kernels_of
from benchmarks.hlo_streams import Flight, Spent, Streams
from shardplan.cost.network import Network
from shardplan.errors import HloError
from shardplan.hlo.meter import HloCollective, collectives_of
from shardplan.hlo.text import Computation, HloInstruction, Module, parse_module, trip_count
from shardplan.mesh import Device
from shardplan.mesh.factoring import device_order

Price = Callable[[HloCollective], tuple[float, frozenset[int]]]
"""The seconds of a collective that runs alone, and the links that it holds."""

_Value = Flight | tuple["_Value", ...] | None
"""A value during the walk: a collective under way, a tuple of values, or anything else (None)."""

_State = tuple[object, ...]


def timeline(
    hlo_text: str,
    device: Device,
    price: Price,
    *,
    contention: float | None = None,
    kernel_s: Mapping[tuple[str, str], float] | None = None,
) -> Spent:
    """The seconds of one run of a scheduled module on one device, each kernel by `Kernel.seconds`.

    ``contention`` is the factor by which kernels and collectives slow each other while both run (by default the device's).
    ``kernel_s`` gives the seconds of kernels by the names of their computation and instruction in place of the roofline.
    Kernels of an ``async-start`` run on the stream of kernels, at the place of the start. A loop of unknown trip count counts as
    one iteration, a conditional as its most expensive branch.

    Raises:
        HloError: for text that is not HLO or not scheduled, and for a ``send`` or ``recv``.
    """
    module = parse_module(hlo_text)
    header = hlo_text.partition("\n")[0]
    if "is_scheduled=true" not in header:
        raise HloError("the module is not scheduled: pass the text of compiled.as_text()", line=1, text=header[:200])
    given = kernel_s or {}
    kernel_s = {place: given.get(place, kernel.seconds(device)) for place, kernel in kernels_of(module).items()}
    prices = {(c.name, i.name): price(collective) for c, i, collective in collectives_of(module)}
    walk = _Walk(module, kernel_s, prices, Streams(device.contention if contention is None else contention))
    walk.computation(module.entry, [None] * len(module.computations[module.entry].parameters))
    walk.streams.drain()
    return walk.streams.spent


def network_price(network: Network) -> Price:
    """The prices of a network by the kind, groups and bytes of a collective. Its links are the levels that it crosses.

    The program numbers devices in row-major order over the network's factors.
    """
    order = device_order(network.cluster, network.factors, [(i,) for i in range(len(network.factors))]).ravel().tolist()

    def price(collective: HloCollective) -> tuple[float, frozenset[int]]:
        nbytes = max(collective.operand_bytes, collective.result_bytes)  # an all-gather's result, else the operand
        groups = [[order[member] for member in group] for group in collective.groups]
        return network.among(collective.kind, groups, nbytes)

    return price


class _Walk:
    """Runs the computations of a module on the streams of a device."""

    def __init__(
        self,
        module: Module,
        kernel_s: Mapping[tuple[str, str], float],
        prices: dict[tuple[str, str], tuple[float, frozenset[int]]],
        streams: Streams,
    ) -> None:
        self.module, self.kernel_s, self.prices, self.streams = module, kernel_s, prices, streams

    def computation(self, name: str, arguments: Sequence[_Value]) -> _Value:
        """The result of a computation, run now."""
        computation = self.module.computations[name]
        values: dict[str, _Value] = {}
        for i in computation.instructions.values():
            values[i.name] = self.instruction(computation, i, [values.get(o) for o in i.operands], arguments)
        return values[computation.root.name]

    def instruction(
        self, computation: Computation, i: HloInstruction, operands: Sequence[_Value], arguments: Sequence[_Value]
    ) -> _Value:
        """The result of an instruction, issued now."""
        place = computation.name, i.name
        match i.opcode:
            case "parameter":
                return arguments[int(i.inner)]
            case "tuple":
                return tuple(operands)
            case "get-tuple-element":
                whole = operands[0]
                return whole[int(i.attribute(r"index=(\d+)") or 0)] if isinstance(whole, tuple) else None
            case "bitcast" | "opt-barrier" | "add-dependency" | "async-update":
                return operands[0]
            case "while":
                return self.loop(i, operands[0])
            case "conditional":
                return self.dearest(i, operands[1:])
            case "call":
                return self.computation(_called(i), operands)
            case "async-start":
                return self.begun(i, operands)
            case "send" | "recv" | "send-done" | "recv-done":
                raise i.error("a timeline has no single sends")
            case _ if place in self.prices:
                return self.collective(i, place)
            case _ if i.opcode.endswith("-done"):
                return self.ended(i, operands)
            case _:
                self.streams.compute(self.kernel_s.get(place, 0.0))
                return None

    def collective(self, i: HloInstruction, place: tuple[str, str]) -> _Value:
        """Starts a collective. One of a single instruction, or one that is marked as synchronous, is waited for at once."""
        flight = self.streams.start(*self.prices[place])
        if not i.opcode.endswith("-start") or '"is_sync":true' in i.attributes:
            self.streams.wait(flight)
        return flight

    def ended(self, i: HloInstruction, operands: Sequence[_Value]) -> _Value:
        """The second half of an asynchronous instruction: that of a collective waits, that of a kernel or copy does nothing."""
        flight = operands[0] if operands else None
        if isinstance(flight, Flight):
            self.streams.wait(flight)
        elif i.opcode not in ("copy-done", "fusion-done", "async-done"):
            raise i.error("the second half of a collective whose start is not known")
        return None

    def begun(self, i: HloInstruction, operands: Sequence[_Value]) -> _Value:
        """The first half of an asynchronous call: its kernels run now, and its collectives start as one over all their links."""
        name = _called(i)
        mine = [self.prices[name, own] for own in self.module.computations[name].instructions if (name, own) in self.prices]
        if not mine:
            self.computation(name, operands)
            return None
        for own in self.module.computations[name].instructions:
            self.streams.compute(self.kernel_s.get((name, own), 0.0))
        return self.streams.start(sum(s for s, _ in mine), frozenset[int]().union(*(links for _, links in mine)))

    def dearest(self, i: HloInstruction, operands: Sequence[_Value]) -> _Value:
        """Runs the branch that takes longest, collectives under way included."""
        ends: list[tuple[float, str, _Value]] = []
        for number, (_, name) in enumerate(call for call in i.called if call[0] == "branch"):
            mark, own = self.streams.mark(), operands[number]
            self.computation(name, [own])
            self.streams.drain()
            ends.append((self.streams.spent.seconds, name, own))
            self.streams.back(mark)
        _, name, own = max(ends, key=lambda end: end[0])
        return self.computation(name, [own])

    def loop(self, i: HloInstruction, carried: _Value) -> _Value:
        """Runs a while loop: iterations until the streams are in a state seen before; the remaining ones repeat these."""
        bodies = dict(i.called)
        trips = trip_count(i)
        left = 1 if trips is None else trips
        seen: dict[_State, tuple[int, Spent]] = {}
        while left:
            state = self.state(carried)
            if state in seen:
                earlier, spent = seen[state]
                period = earlier - left
                whole = left // period
                once = self.streams.spent.plus(spent, -1.0)
                self.streams.spent = self.streams.spent.plus(once, whole)
                left, seen = left - whole * period, {}
                continue
            seen[state] = left, self.streams.spent
            if trips is None:  # the runtime ends a loop of known trip count without its condition
                self.computation(bodies["condition"], [carried])
            carried = self.computation(bodies["body"], [carried])
            left -= 1
        return carried

    def state(self, carried: _Value) -> _State:
        """The state that the next iteration depends on: the collectives under way, and their places in the carried tuple."""
        flights = self.streams.flights
        remaining = tuple((round(f.remaining_s, 14), tuple(sorted(f.links))) for f in flights)

        def places(value: _Value) -> object:
            if isinstance(value, tuple):
                return tuple(map(places, value))
            return flights.index(value) if value in flights else None

        return remaining, places(carried)


def _called(i: HloInstruction) -> str:
    """The computation that a call runs."""
    return next(name for role, name in i.called if role in ("to_apply", "calls"))
