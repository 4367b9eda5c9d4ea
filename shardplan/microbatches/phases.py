"""When each instruction of a step that is cut into microbatches runs: once before them, in each of them, or once after all.

A value is *same* for all microbatches, a *block* of the batch, or a *term* of a sum over all of them. An instruction that reads
a block or a term runs in each microbatch. A sum over the microbatches is complete after the last; its readers run then, and so
may read no block. Conversions and other moves of a term's elements run before terms are added up, so that a gradient is added
up in the dtype in which it is used. Inside a loop, sums are complete only after the loop; there, an op may read terms in which
its results are linear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import IntEnum

from shardplan.errors import MicrobatchError
from shardplan.ir import PAIRS, Collective, Constant, Layout, Reducer, itemsize
from shardplan.schedule import Barrier, Block, Compute, Cond, Fill, Instruction, Move, Scan, Source, While
from shardplan.schedule.instructions import blocks_of, results_of
from shardplan.tdl import linear_sets
from shardplan.tdl.kernels import casts, drops_ones


class When(IntEnum):
    """When an instruction runs, or when a value is there."""

    BEFORE = 0
    EACH = 1
    AFTER = 2


@dataclass(frozen=True, slots=True)
class Phases:
    """The instructions of a step by when they run.

    ``totals``: the sums to which each microbatch adds a term, with how terms are reduced; ``blocks``: results that are blocks,
    with the dim along which they are joined; ``kept``: values made in each microbatch, the same in all, that are read later.
    """

    before: tuple[Instruction, ...]
    each: tuple[Instruction, ...]
    after: tuple[Instruction, ...]
    totals: Mapping[int, Reducer]
    blocks: Mapping[int, int]
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Value:
    """The known facts about a value. ``line`` is the source line of the sum over all microbatches that it depends on, if any."""

    when: When
    same: bool = True
    term: Reducer | None = None
    line: str = ""


_FIXED = _Value(When.BEFORE)
_BLOCK = _Value(When.EACH, same=False)


def phases(body: Block, layouts: Sequence[Layout | None], results: Sequence[Layout | None]) -> Phases:
    """The phases of a step. ``layouts`` are those of its parameters, ``results`` those of its results.

    Raises:
        MicrobatchError: for an op that needs values of several microbatches at once, with its source line.
    """
    sorter = _Sorter()
    for p, layout in zip(body.parameters, layouts, strict=True):
        sorter.values[p] = _BLOCK if layout is not None and layout.used else _FIXED
    order = sorter.block(body)
    rows: dict[When, list[Instruction]] = {w: [] for w in When}
    for instruction, when in order:
        rows[when].append(instruction)
    blocks: dict[int, int] = {}
    for source, layout in zip(body.results, results, strict=True):
        if isinstance(source, int) and not sorter.values[source].same:
            assert layout is not None
            assert layout.used, "a result that is no block is the same in all microbatches"
            blocks[source] = next(d for d, factors in enumerate(layout.dims) if factors)
    read = {v for i in rows[When.AFTER] for v in reads_of(i)} | {s for s in body.results if isinstance(s, int)}
    made = {r for i in rows[When.EACH] for r in results_of(i)}
    kept = sorted(v for v in read & made if sorter.values[v].same and v not in sorter.totals)
    totals: dict[int, Reducer] = {v: r for v, r in sorter.totals.items() if v in read}
    before, each, after = (tuple(rows[w]) for w in When)
    return Phases(before, each, after, totals, blocks, tuple(kept))


@dataclass(slots=True)
class _Sorter:
    """Sorts instructions. ``totals`` are the values that are complete after the microbatches, made in each as terms."""

    values: dict[int, _Value] = field(default_factory=dict[int, _Value])
    totals: dict[int, Reducer] = field(default_factory=dict[int, Reducer])
    inside: int = 0

    def block(self, block: Block) -> list[tuple[Instruction, When]]:
        """The instructions of a block, each with when it runs; notes their values."""
        readers = Counter(v for i in block.instructions for v in reads_of(i))
        moved = {v for i in block.instructions if _only_moves(i) for v in reads_of(i)}
        handed = Counter(s for s in block.results if isinstance(s, int))
        found: list[tuple[Instruction, When]] = []
        for i in block.instructions:
            if isinstance(i, Barrier):
                found += self.barrier(i)
                continue
            found.append((i, self.instruction(i)))
            for r in results_of(i):
                value = self.values[r]
                once = readers[r] == 1 and not handed[r] and r in moved
                if value.term is not None and not (value.term == "sum" and (once or self.inside)):
                    self.complete(r, value)
        return found

    def complete(self, number: int, value: _Value) -> None:
        """Notes that the terms of a value are added up before it is read."""
        assert value.term is not None
        if self.inside:
            raise _early(value)
        self.totals[number] = value.term
        self.values[number] = _Value(When.AFTER, line=value.line)

    def instruction(self, i: Instruction) -> When:
        """When an instruction runs."""
        known = [self.values[v] for v in reads_of(i)]
        when = max((v.when for v in known), default=When.BEFORE)
        if self.inside and (term := next((v for v in known if v.term is not None), None)) is not None:
            terms = {n for n, s in enumerate(i.inputs) if self._of(s).term is not None} if isinstance(i, Compute) else set[int]()
            if not isinstance(i, Compute) or i.once or not (_only_moves(i, inside=True) or _is_linear(i, terms)):
                raise _early(term)
        match i:
            case Move():
                return self.move(i)
            case Compute():
                return self.compute(i, known, when)
            case Fill():
                self.values[i.result] = _FIXED if i.layout is None or not i.layout.used else _BLOCK
                return self.values[i.result].when
            case Scan() | While() | Cond():
                return self.control(i, known)
            case _:
                raise AssertionError(f"{type(i).__name__} stands in no schedule that is not bundled")

    def barrier(self, barrier: Barrier) -> list[tuple[Barrier, When]]:
        """A barrier for each time, which holds together the values of that time."""
        pairs = list(zip(barrier.values, barrier.results, strict=True))
        self.values.update((r, self.values[v]) for v, r in pairs)
        found: list[tuple[Barrier, When]] = []
        for when in When:
            own = [(v, r) for v, r in pairs if self.values[v].when is when]
            if own:
                found.append((Barrier(tuple(v for v, _ in own), tuple(r for _, r in own)), when))
        return found

    def move(self, move: Move) -> When:
        """A value that changes its layout over the microbatches."""
        value = self.values[move.source]
        if value.same and move.before.partial:  # the result of an op with effects, which runs once: there is nothing to add up
            self.values[move.result] = value
            return value.when
        kinds = {step.kind for step in move.steps}
        if kinds == {Collective.SLICE}:
            if value.when is When.AFTER:
                raise _mixed(move.line, f"each microbatch reads its part of the sum of {value.line}")
            self.values[move.result] = _BLOCK
            return When.EACH
        if kinds != {Collective.ALL_REDUCE} or move.reducer in PAIRS:
            raise _mixed(move.line, "it needs the values of all microbatches at once")
        self.values[move.result] = _Value(When.EACH, same=False, term=move.reducer, line=move.line)
        return When.EACH

    def compute(self, compute: Compute, known: Sequence[_Value], when: When) -> When:
        """An op: it runs in each microbatch if it reads a block or a term, or is cut."""
        line = str(compute.node.op.source)
        terms = [v for v in known if v.term is not None]
        if compute.cuts or any(not v.same for v in known):
            done = next((v for v in known if v.when is When.AFTER), None)
            if done is not None:
                raise _mixed(line, f"it reads the sum of {done.line} over all microbatches")
            if compute.once:
                raise _mixed(line, "its effects would come once for each microbatch")
            value = terms[0] if terms else _BLOCK
            self.values.update(dict.fromkeys(compute.results, value))
            return When.EACH
        line = next((v.line for v in known if v.line), "")
        self.values.update(dict.fromkeys(compute.results, _Value(when, line=line)))
        return when

    def control(self, i: Scan | While | Cond, known: Sequence[_Value]) -> When:
        """Control flow runs in each microbatch if any of it does."""
        before = dict(self.values)
        self.inside += 1
        results = self._loops(i)
        self.inside -= 1
        whens = [v.when for v in known] + [v.when for v in results]
        inner = [self.values[r].when for b in blocks_of(i) for j in b.instructions for r in results_of(j)]
        when = max([*whens, *inner], default=When.BEFORE)
        cut = When.EACH in inner or any(not v.same for v in (*known, *results))
        if cut and when is When.AFTER:
            done = next(v for v in (*known, *self.values.values()) if v.when is When.AFTER)
            raise _mixed(str(i.op.source), f"it reads the sum of {done.line} over all microbatches")
        self.values = before
        for r, v in zip(results_of(i), results, strict=True):
            self.values[r] = _Value(when, v.same, v.term, v.line or next((k.line for k in known if k.line), ""))
        return when

    def _loops(self, i: Scan | While | Cond) -> list[_Value]:
        """The known facts about the results of control flow."""
        match i:
            case Scan():
                start = [self._of(s) for s in i.start]
                stacked = [self._of(s) for s in i.stacked]
                after = self._carried(i.body, start, stacked)
                return [*after, *(self._of(s) for s in i.body.results[len(start) :])]
            case While():
                start = self._carried(i.body, [self._of(s) for s in i.start], ())
                self.values.update(zip(i.test.parameters, start, strict=True))
                self.block(i.test)
                if not all(self._of(s).same for s in i.test.results):
                    raise _mixed(str(i.op.source), "how often the loop runs depends on the microbatch")
                return start
            case Cond():
                branches: list[list[_Value]] = []
                for b in i.branches:
                    self.values.update(zip(b.parameters, map(self._of, i.arguments), strict=True))
                    self.block(b)
                    branches.append([self._of(s) for s in b.results])
                if i.index is not None and not self._of(i.index).same:
                    raise _mixed(str(i.op.source), "which branch runs depends on the microbatch")
                return [_joined(own) for own in zip(*branches, strict=True)]

    def _carried(self, body: Block, start: Sequence[_Value], stacked: Sequence[_Value]) -> list[_Value]:
        """The known facts about the carries of a loop, at its start and after every iteration."""
        carries = list(start)
        while True:
            self.values.update(zip(body.parameters, (*carries, *stacked), strict=True))
            self.block(body)
            after = [_joined([c, self._of(s)]) for c, s in zip(carries, body.results, strict=False)]
            if after == carries:
                return carries
            carries = after

    def _of(self, source: Source) -> _Value:
        return _FIXED if isinstance(source, Constant) else self.values[source]


def _joined(values: Sequence[_Value]) -> _Value:
    """The known facts about a value that may be any of these."""
    terms = {v.term for v in values if v.term is not None}
    if terms:
        raise _mixed(next(v.line for v in values if v.term is not None), "its sum over all microbatches is carried by a loop")
    return _Value(max(v.when for v in values), all(v.same for v in values), None, next((v.line for v in values if v.line), ""))


def _is_linear(compute: Compute, terms: Set[int]) -> bool:
    """Whether the results of an op that is not cut are linear in these operands together."""
    signature = compute.node.signature
    if compute.cuts or signature.description is None:
        return False
    zeros = {n for n, source in enumerate(compute.inputs) if isinstance(source, Constant) and not source.value}
    return any(terms <= set(members) <= terms | zeros for members in linear_sets(signature.description))


def _only_moves(i: Instruction, *, inside: bool = False) -> bool:
    """Whether an instruction moves the elements of its only operand, to a dtype that holds sums of them as well.

    ``inside`` a loop, where sums are never complete, terms are converted to narrower floats too.
    """
    if not isinstance(i, Compute) or i.cuts:
        return False
    call = i.node.signature.call
    if drops_ones(call):
        return True
    if (
        len(call.dtypes) != 1
        or len(call.result_dtypes) != 1
        or not call.result_dtypes[0].startswith(("float", "bfloat", "complex"))
    ):
        return False
    narrower = itemsize(call.result_dtypes[0]) < itemsize(call.dtypes[0])
    return (i.node.signature.moves and not narrower) or (inside and casts(call))


def reads_of(instruction: Instruction) -> Iterator[int]:
    """The values from outside that an instruction and its bodies read."""
    match instruction:
        case Compute():
            sources: Sequence[Source] = instruction.inputs
        case Move():
            sources = (instruction.source, *(() if instruction.extreme is None else (instruction.extreme,)))
        case Barrier():
            sources = instruction.values
        case Scan():
            sources = (*instruction.start, *instruction.stacked)
        case While():
            sources = instruction.start
        case Cond():
            sources = (*instruction.arguments, *(() if instruction.index is None else (instruction.index,)))
        case _:
            sources = ()
    yield from (s for s in sources if isinstance(s, int))
    for block in blocks_of(instruction):
        made = set(block.parameters)
        for inner in block.instructions:
            yield from (v for v in reads_of(inner) if v not in made)
            made.update(results_of(inner))
        yield from (s for s in block.results if isinstance(s, int) and s not in made)


def _early(value: _Value) -> MicrobatchError:
    return _mixed(value.line, "inside a loop, its sum over all microbatches is read before they are done")


def _mixed(line: str, what: str) -> MicrobatchError:
    return MicrobatchError(f"the step cannot be cut into microbatches: at {line}, {what}")
