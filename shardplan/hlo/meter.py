"""The meter: collectives in compiled HLO text, and the bytes that they put on the wire.

Wire bytes are per device and follow the ring convention (`shardplan.cost.wire_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.cost import priced_bytes, wire_bytes
from shardplan.hlo.groups import Groups, id_lists, replica_groups
from shardplan.hlo.text import Computation, HloInstruction, Module, Shape, parse_module
from shardplan.hlo.undo import Undo
from shardplan.ir import Collective

KINDS = (
    Collective.ALL_REDUCE,
    Collective.ALL_GATHER,
    Collective.REDUCE_SCATTER,
    Collective.ALL_TO_ALL,
    Collective.PERMUTE,
    Collective.BROADCAST,
    Collective.RAGGED_ALL_TO_ALL,
)
"""The collectives that compiled programs have."""


@dataclass(frozen=True, slots=True)
class HloCollective:
    """One collective instruction, or one part of it after `measure` has undone what the CPU compiler did.

    ``operand_bytes`` are per device; ``groups`` lists the devices of each group, for a permute the (source, target) pairs.
    ``trips`` is how often it runs in a step; ``trips_known`` is false where an unknown trip count of a loop was taken as one.
    ``dtype`` is that of the first operand.
    """

    kind: Collective
    operand_bytes: int
    group_size: int
    groups: Groups
    trips: int
    name: str
    op_name: str
    dtype: str
    line: int
    trips_known: bool = True

    @property
    def result_bytes(self) -> int:
        """Bytes of the result of one device."""
        match self.kind:
            case Collective.ALL_GATHER:
                return self.operand_bytes * self.group_size
            case Collective.REDUCE_SCATTER:
                return self.operand_bytes // self.group_size
            case _:
                return self.operand_bytes

    @property
    def wire_bytes(self) -> float:
        """Bytes that one device sends in one execution."""
        return wire_bytes(self.kind, self.group_size, priced_bytes(self.kind, self.group_size, self.operand_bytes))


@dataclass(frozen=True, slots=True)
class KindTotal:
    """All collectives of one kind in a step: how often they run, and their wire bytes per device."""

    count: int
    wire_bytes: float


@dataclass(frozen=True, slots=True)
class Measured:
    """The collectives of a compiled step. ``wire_bytes`` sums ``kinds``; ``raw_wire_bytes`` is the text's sum, nothing undone."""

    kinds: Mapping[Collective, KindTotal]
    wire_bytes: float
    raw_wire_bytes: float
    collectives: tuple[HloCollective, ...]


def joined(programs: Sequence[Measured], runs: Sequence[int]) -> Measured:
    """The collectives of several programs of one step, each with the number of its runs; ``collectives`` has each once."""
    kinds: dict[Collective, KindTotal] = {}
    for m, times in zip(programs, runs, strict=True):
        for kind, total in m.kinds.items():
            before = kinds.get(kind, KindTotal(0, 0.0))
            kinds[kind] = KindTotal(before.count + times * total.count, before.wire_bytes + times * total.wire_bytes)
    return Measured(
        kinds,
        sum(m.wire_bytes * times for m, times in zip(programs, runs, strict=True)),
        sum(m.raw_wire_bytes * times for m, times in zip(programs, runs, strict=True)),
        tuple(c for m in programs for c in m.collectives),
    )


def parse(hlo_text: str) -> tuple[HloCollective, ...]:
    """Every collective that a compiled module runs, in the order of the text, nothing undone.

    Raises `HloError` on a collective of an unknown form.
    """
    module = parse_module(hlo_text)
    return tuple(collective for _, _, collective in collectives_of(module))


def operands(hlo_text: str) -> tuple[tuple[HloCollective, int], ...]:
    """Every collective that a compiled module runs, one row for each tensor: (the collective, the bytes of its operand).

    The collective has the type that it had before XLA's CPU compiler widened it; the bytes are those of the text.

    Raises `HloError` on a collective of an unknown form.
    """
    module = parse_module(hlo_text)
    undo = Undo(module)
    rows: list[tuple[HloCollective, int]] = []
    for computation, instruction, collective in collectives_of(module):
        shapes = operand_shapes(computation, instruction, collective.kind)
        each = [(s.size * undo.bits(computation, instruction, n, s) + 7) // 8 for n, s in enumerate(shapes)]
        parts = list(zip(each, (shape.nbytes for shape in shapes), strict=True))
        if collective.kind == Collective.ALL_TO_ALL:  # the CPU's has an operand for each member of its group
            parts = [(sum(each), sum(shape.nbytes for shape in shapes))]
        rows += [(_resized(collective, collective.kind, narrow, collective.group_size), text) for narrow, text in parts]
    return tuple(rows)


def measure(hlo_text: str, *, undo_cpu: bool = True) -> Measured:
    """The wire bytes of a step, by kind.

    With ``undo_cpu`` the figures are those of a compiler that keeps narrow types and has reduce-scatter. A collective that XLA's
    CPU compiler widened counts at its original width. If each device keeps only a slice of an all-reduce, it counts as a
    reduce-scatter, and an all-reduce of the slice over the rest of the group. The text leaves out constant tables for more than
    ten devices (``{...}``); they are assumed to give each device of a group its own slice where the sizes allow it.
    """
    module = parse_module(hlo_text)
    rows = collectives_of(module)
    raw = tuple(collective for _, _, collective in rows)
    undo = Undo(module)
    pieces = [p for c, i, collective in rows for p in pieces_of(undo, c, i, collective)] if undo_cpu else raw
    kinds = {kind: _total([p for p in pieces if p.kind == kind]) for kind in KINDS if any(p.kind == kind for p in pieces)}
    return Measured(kinds, sum(t.wire_bytes for t in kinds.values()), _total(raw).wire_bytes, tuple(pieces))


def _total(collectives: Sequence[HloCollective]) -> KindTotal:
    return KindTotal(sum(c.trips for c in collectives), float(sum(c.wire_bytes * c.trips for c in collectives)))


def collectives_of(module: Module) -> list[tuple[Computation, HloInstruction, HloCollective]]:
    """Every collective that a module runs, with its place, nothing undone. Raises `HloError` on one of an unknown form."""
    rows: list[tuple[Computation, HloInstruction, HloCollective]] = []
    for computation in module.computations.values():
        for instruction in computation.instructions.values():
            kind = _kind(instruction)
            if kind is not None and module.runs[computation.name].times:
                rows.append((computation, instruction, _collective(module, computation, instruction, kind)))
    return rows


def _kind(instruction: HloInstruction) -> Collective | None:
    """The kind of a collective or of its ``-start`` half; None for all else. Raises `HloError` on an unknown collective."""
    base = instruction.opcode.removesuffix("-start")
    for kind in KINDS:
        if base == kind:
            return kind
    if instruction.opcode in ("send", "recv"):
        if "is_host_transfer=true" in instruction.attributes:
            return None
        return Collective.PERMUTE if instruction.opcode == "send" else None
    later = instruction.opcode.endswith(("-done", "-update"))
    if not later and base.startswith(("all-", "collective-", "reduce-scatter", "ragged-all")):
        raise instruction.error(f"unknown collective {instruction.opcode!r}")
    return None


def _collective(module: Module, computation: Computation, instruction: HloInstruction, kind: Collective) -> HloCollective:
    shapes = operand_shapes(computation, instruction, kind)
    groups = _groups(module, instruction, kind)
    runs = module.runs[computation.name]
    return HloCollective(
        kind=kind,
        operand_bytes=sum(shape.nbytes for shape in shapes),
        group_size=max((len(group) for group in groups), default=1),
        groups=groups,
        trips=runs.times,
        name=instruction.name,
        op_name=instruction.op_name,
        dtype=shapes[0].dtype,
        line=instruction.line,
        trips_known=runs.known,
    )


def operand_shapes(computation: Computation, instruction: HloInstruction, kind: Collective) -> tuple[Shape, ...]:
    """The shapes of the data that a collective sends: for a ragged one or a send only the first operand, else all of them."""
    names = (
        instruction.operands[:1] if kind == Collective.RAGGED_ALL_TO_ALL or instruction.opcode == "send" else instruction.operands
    )
    if not names or any(name not in computation.instructions for name in names):
        raise instruction.error("a collective with operands that are not in its computation")
    return tuple(shape for name in names for shape in computation.instructions[name].leaves)


def _groups(module: Module, instruction: HloInstruction, kind: Collective) -> Groups:
    if kind != Collective.PERMUTE:
        if module.replica_count > 1 < module.num_partitions and "use_global_device_ids=true" not in instruction.attributes:
            raise instruction.error("replica_groups without use_global_device_ids=true in a module of replicas and partitions")
        return replica_groups(instruction, module)
    text = instruction.attribute(r"source_target_pairs=(\{[{}].*)$")
    if text is None:
        raise instruction.error("a permute without source_target_pairs")
    return () if text.startswith("{}") else id_lists(text)  # nobody sends


def pieces_of(
    undo: Undo, computation: Computation, instruction: HloInstruction, collective: HloCollective
) -> list[HloCollective]:
    """The parts of one collective, one or two for each operand; parts of the same kind and group size are merged."""
    shapes = operand_shapes(computation, instruction, collective.kind)
    pieces: list[HloCollective] = []
    for number, shape in enumerate(shapes):
        bits = undo.bits(computation, instruction, number, shape)
        nbytes = (shape.size * bits + 7) // 8
        ways = (
            undo.scattered(computation, instruction, number, collective.groups) if collective.kind == Collective.ALL_REDUCE else 1
        )
        pieces += _parts(collective, nbytes, ways)
    return [
        _merged([p for p in pieces if (p.kind, p.group_size) == key]) for key in sorted({(p.kind, p.group_size) for p in pieces})
    ]


def _parts(collective: HloCollective, nbytes: int, ways: int) -> list[HloCollective]:
    """One operand's parts; an all-reduce that leaves each device 1/ways is a reduce-scatter and an all-reduce of the slice."""
    if ways == 1:
        return [_resized(collective, collective.kind, nbytes, collective.group_size)]
    parts = [_resized(collective, Collective.REDUCE_SCATTER, nbytes, ways)]
    if collective.group_size > ways:
        parts.append(_resized(collective, Collective.ALL_REDUCE, nbytes // ways, collective.group_size // ways))
    return parts


def _resized(collective: HloCollective, kind: Collective, operand_bytes: int, group_size: int) -> HloCollective:
    return replace(collective, kind=kind, operand_bytes=operand_bytes, group_size=group_size)


def _merged(pieces: list[HloCollective]) -> HloCollective:
    return replace(pieces[0], operand_bytes=sum(p.operand_bytes for p in pieces))
