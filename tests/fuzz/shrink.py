"""A failing program made small, greedily: whatever can be left out without the failure going away is left out."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tests.fuzz.draw import MAKERS, inferred
from tests.fuzz.program import Argument, Instruction, Program, Value
from tests.machines import SHAPES

TRIES = 120
SECONDS = 400.0
Fails = Callable[[Program], bool]
Pass = Callable[[Program], Iterator[Program]]


@dataclass(slots=True)
class Budget:
    """How many candidates may still be tried, and until when."""

    tries: int
    until_s: float

    def spent(self) -> bool:
        """Whether nothing may be tried any more."""
        return self.tries <= 0 or time.monotonic() > self.until_s


def shrunk(program: Program, fails: Fails, *, tries: int = TRIES, seconds: float = SECONDS) -> Program:
    """A smaller program for which ``fails`` holds, as it does for ``program``; ``fails`` is asked ``tries`` times at most."""
    budget = Budget(tries, time.monotonic() + seconds)
    seen: set[Program] = {program}
    before = None
    while program != before and not budget.spent():
        before = program
        for candidates in PASSES:
            program = _pass(program, candidates, fails, budget, seen)
    return program


def _pass(program: Program, candidates: Pass, fails: Fails, budget: Budget, seen: set[Program]) -> Program:
    """Takes each candidate that still fails, and goes on from there, until none does."""
    moved = True
    while moved and not budget.spent():
        moved = False
        for candidate in map(pruned, candidates(program)):
            if candidate in seen or not candidate.instructions:
                continue
            if budget.spent():
                break
            seen.add(candidate)
            budget.tries -= 1
            if fails(candidate):
                program, moved = candidate, True
                break
    return program


def pruned(program: Program) -> Program:
    """Without the lines and arguments that nothing depends on."""
    live = {*program.returned, *[new for _, new in program.state]}
    kept: list[Instruction] = []
    for x in reversed(program.instructions):
        if x.name in live:
            live.update(x.operands)
            kept.append(x)
    arguments = tuple(a for a in program.arguments if a.name in live)
    names = {a.name for a in arguments}
    return replace(
        program,
        arguments=arguments,
        instructions=tuple(reversed(kept)),
        state=tuple((a, x) for a, x in program.state if a in names),
        pins=tuple((a, entries) for a, entries in program.pins if a in names),
    )


# -- candidates --------------------------------------------------------------------------------------------------------


def fewer_results(program: Program) -> Iterator[Program]:
    """Half of what is returned, a quarter, and so on down to one result less."""
    whole = program.returned
    if program.state:
        yield replace(program, state=(), returned=(*whole, *[new for _, new in program.state]))
    size = (len(whole) + 1) // 2
    while size and len(whole) > 1:
        for start in range(0, len(whole), size):
            yield replace(program, returned=whole[:start] + whole[start + size :])
        size //= 2


def earlier_results(program: Program) -> Iterator[Program]:
    """What a result is made of in its place."""
    made = {x.name: x for x in program.instructions}
    for name in program.returned:
        for operand in made[name].operands if name in made else ():
            if operand in made:
                yield replace(program, returned=tuple(dict.fromkeys(operand if n == name else n for n in program.returned)))


def fewer_options(program: Program) -> Iterator[Program]:
    """Without a memory limit, pins, training and the like; on another cluster."""
    plain = replace(program, pins=(), memory_part=None, remat="none", objective="time", donate=False, state=(), layouts=None)
    untrained = replace(program, form="plain", arguments=tuple(replace(a, trained=False) for a in program.arguments))
    yield replace(plain, form="plain", arguments=untrained.arguments)
    yield plain
    yield untrained
    if program.form == "adam":
        yield replace(program, form="sgd")
    for i in range(len(program.pins)):
        yield replace(program, pins=program.pins[:i] + program.pins[i + 1 :])
    yield replace(program, memory_part=None, remat="none")
    yield replace(program, objective="time")
    yield replace(program, donate=False)
    yield replace(program, layouts=None)
    yield replace(program, state=())


def simpler_machines(program: Program) -> Iterator[Program]:
    """On one level, then on two; pins may not fit there."""
    shape, colon, kind = program.cluster.partition(":")
    for other in ("2", "4", "2x2", *SHAPES):
        if other == shape:
            return
        levels = len(shape.split("x"))
        if len(other.split("x")) <= levels:
            yield replace(program, cluster=f"{other}{colon}{kind}")


def cut_short(program: Program) -> Iterator[Program]:
    """With lines turned into arguments: many at once, then one by one, the last lines' operands first."""
    names = [x.name for x in program.instructions]
    size = len(names) // 2
    while size >= 1:
        for start in range(0, len(names), size):
            yield _given(program, set(names[start : start + size]))
        size //= 2


def _given(program: Program, names: set[str]) -> Program:
    """Those of the lines that are read by others become arguments; results among them are left out where others stay."""
    new = tuple(_argument(x.name, x.value, i) for i, x in enumerate(program.instructions) if x.name in names)
    return replace(
        program,
        arguments=program.arguments + new,
        instructions=tuple(x for x in program.instructions if x.name not in names),
        returned=tuple(n for n in program.returned if n not in names),
        state=tuple((a, x) for a, x in program.state if x not in names),
    )


def _argument(name: str, value: Value, seed: int) -> Argument:
    kind = MAKERS.get(value.dtype, "ints")
    if value.exact and value.inexact and value.dtype != "complex64":
        kind = "spread"
    return Argument(name, kind, seed, value, limit=4)


def passed_over(program: Program) -> Iterator[Program]:
    """With a line left out: its readers take one of its operands, or any earlier value of the same type, in its place."""
    values = program.values
    for at, x in reversed(list(enumerate(program.instructions))):
        early = [*x.operands, *[a.name for a in program.arguments], *[y.name for y in program.instructions[:at]]]
        fits = [n for n in early if values[n].like == x.value.like]
        for other in list(dict.fromkeys(fits))[:2]:
            yield _renamed(program, x.name, other)


def _renamed(program: Program, old: str, new: str) -> Program:
    swap = {old: new}
    left = (x for x in program.instructions if x.name != old)
    return replace(
        program,
        instructions=tuple(replace(x, operands=tuple(swap.get(n, n) for n in x.operands)) for x in left),
        returned=tuple(dict.fromkeys(swap.get(n, n) for n in program.returned if swap.get(n, n) not in _inputs(program))),
        state=tuple((a, x) for a, x in program.state if x != old),
    )


def _inputs(program: Program) -> set[str]:
    return {a.name for a in program.arguments}


def smaller_dims(program: Program) -> Iterator[Program]:
    """With a number smaller wherever it is written, where the lines still fit together."""
    sizes = sorted({n for v in program.values.values() for n in v.shape if n > 1}, reverse=True)
    for n in sizes:
        for less in sorted({1, 2, 4, 8, n // 2} & set(range(1, n))):
            candidate = _resized(program, n, less)
            if candidate is not None:
                yield candidate


def _resized(program: Program, old: int, new: int) -> Program | None:
    word = re.compile(rf"(?<![\w.{{]){old}(?![\w.}}])")
    values: dict[str, Value] = {}
    arguments: list[Argument] = []
    for a in program.arguments:
        value = replace(a.value, shape=tuple(new if n == old else n for n in a.value.shape))
        values[a.name] = value
        arguments.append(replace(a, value=value, limit=new if a.limit == old else a.limit))
    lines: list[Instruction] = []
    for x in program.instructions:
        text = word.sub(str(new), x.text)
        try:
            value = inferred(text, tuple(values[n] for n in x.operands))
        except (TypeError, ValueError, IndexError, ZeroDivisionError):
            return None
        values[x.name] = replace(value, exact=x.value.exact)
        lines.append(replace(x, text=text, value=values[x.name]))
    state = tuple((a, x) for a, x in program.state if values[a].like == values[x].like)
    lost = tuple(x for a, x in program.state if (a, x) not in state)
    return replace(
        program, arguments=tuple(arguments), instructions=tuple(lines), state=state, returned=(*program.returned, *lost)
    )


PASSES: tuple[Pass, ...] = (
    fewer_results,
    earlier_results,
    cut_short,
    fewer_options,
    passed_over,
    smaller_dims,
    simpler_machines,
)
