"""Checks the reference of a proof: compares the step compiled for one device with the same step evaluated op by op.

A compiler may be wrong about ops that it merges, even on one device. If both differ by more than rounding, the compiled step is
at fault, and the sharded step is judged by the evaluation op by op. The op at fault is found by bisection: programs of the
first ops of the step, each with the results that later ops read, are compiled and judged like the step.

Op by op, each op rounds its results. Where a compiler merges ops, it may keep results that are narrower than float32 in float32.
So the change that one unit of each such result causes is rounding, too. It is measured op by op, because a fault of the compiler
that comes and goes with the perturbation would count as a change of the compiled step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shardplan.verify.judge import Judged, ReferenceFault
from shardplan.verify.on_host import as_numbers, on_host
from shardplan.verify.op_by_op import Line, Lines, OpByOp, Prepared
from shardplan.verify.perturb import rounds_narrow
from shardplan.verify.runs import Noise, Single, StateFeedback

Results = Sequence[Sequence[np.ndarray]]
"""The leaves of a step's results after each step."""


def by_reference(
    one: Single,
    noise: Noise,
    paths: Sequence[str],
    results: Results,
    judged: Judged,
    tell: Callable[[str, float], None] = lambda _what, _part: None,
) -> tuple[Judged, Results]:
    """Checks the step compiled for ``one`` device, by which a plan's ``results`` were ``judged``. Returns the final judgement,
    and the results that it compares with.

    Both stay the same if the compiled step is right. Else the results are judged by the step op by op, and ``reference`` of the
    judgement describes the fault of the compiled step.
    """
    starts, single = noise.starts, noise.single
    tell("the step op by op", 0.85)
    steps = _Steps(one, starts)
    exact = [steps.again(n, start) for n, start in enumerate(starts)]
    if any(map(_rounds_narrow, steps.lines)):
        noise = Noise(steps.again, starts, exact, tell, integers=True, at_once=1)
    against = noise.judged(paths, exact, single)
    if not against.unequal:
        return judged, single
    tell("the op at fault", 0.88)
    worst = against.worst
    lines = steps.lines[worst.step - 1]
    line = Bisection(one).departure(lines, starts[worst.step - 1])
    actual = noise.judged(paths, exact, results)
    fault = ReferenceFault(
        path=worst.path,
        step=worst.step,
        error=worst.error,
        tolerance=worst.tolerance,
        unequal=against.unequal,
        primitive=line.primitive if line else "",
        source=line.source if line else "",
        sharded="wrong" if actual.unequal and judged.unequal else "same" if actual.unequal else "right",
        ops=() if line else tuple(dict.fromkeys(map(_text, lines.for_outputs([paths.index(worst.path)]).lines))),
        whole=tuple(steps.whole),
    )
    return replace(actual, reference=fault), exact


class _Steps:
    """The steps of a run op by op. ``whole`` names the loops that ran as one program."""

    def __init__(self, one: Single, starts: Sequence[Sequence[Any]]) -> None:
        self._one, self._prepared = one, Prepared()
        self.lines = [one.lines(start, later=n > 0) for n, start in enumerate(starts)]
        self.whole: dict[str, None] = {}

    def again(self, step: int, start: Sequence[Any], seed: int | None = None) -> list[np.ndarray]:
        """The results of the step of this number on arguments; with a seed, each op is perturbed."""
        run = OpByOp(seed=seed, prepared=self._prepared)
        with self._one.alone():
            results = run(self.lines[step], self._one.arguments(start, later=step > 0))
        self.whole |= dict.fromkeys(map(_text, run.whole))
        return [as_numbers(x) for x in results]


def _rounds_narrow(lines: Lines) -> bool:
    return any(rounds_narrow(line.eqn) for line in lines.lines)


def _text(line: Line) -> str:
    return f"{line.primitive} at {line.source}"


class Bisection:
    """Searches for the first op of a program whose compiled value differs from its value op by op.

    A program of fewer ops is compiled anew, and the compiler may merge other ops in it, so the search may find nothing.
    """

    def __init__(self, one: Single) -> None:
        self._one, self._prepared = one, Prepared()
        self._compiled: dict[int, tuple[Lines, Single]] = {}

    def departure(self, lines: Lines, host: Sequence[Any]) -> Line | None:
        """The line whose value departs first; None if the program, compiled without its effects, is right."""
        judged = self.judged(lines, host)
        if not judged.unequal:
            return None
        part = lines.for_outputs([int(judged.worst.path)])
        part = part if self.judged(part, host).unequal else lines
        right, wrong = 0, part
        while len(wrong.lines) - right > 1:
            middle = (right + len(wrong.lines)) // 2
            fewer = part.first(middle)
            if self.judged(fewer, host).unequal:
                wrong = fewer
            else:
                right = middle
        departed = {wrong.outputs[int(number)] for number in self.judged(wrong, host).unequal}
        line = next(line for line in wrong.lines if departed.intersection(line.outputs))
        return self.inside(part, line, host) or line

    def judged(self, lines: Lines, host: Sequence[Any], exact: Sequence[Any] | None = None) -> Judged:
        """The compiled outputs of lines, judged by their ``exact`` outputs op by op."""
        if id(lines) not in self._compiled:
            loop = StateFeedback(jax.tree.structure((0,) * len(host)), (), [False] * len(host), [False] * len(host), 1)
            self._compiled[id(lines)] = lines, Single(jax.jit(lines), self._one.device, loop)
        _, compiled = self._compiled[id(lines)]
        single = [compiled.once(host)]
        wanted = [[as_numbers(x) for x in (self.op_by_op(lines, host) if exact is None else exact)]]

        def again(_step: int, start: Sequence[Any], seed: int) -> list[np.ndarray]:
            return [as_numbers(x) for x in self.op_by_op(lines, start, seed)]

        narrow = _rounds_narrow(lines)
        noise = Noise(again, [host], wanted, integers=True, at_once=1) if narrow else Noise(compiled.again, [host], single)
        return noise.judged([str(n) for n in range(len(lines.outputs))], wanted, single)

    def op_by_op(self, lines: Lines, host: Sequence[Any], seed: int | None = None) -> list[Any]:
        """The outputs of lines op by op; with a seed, each op is perturbed."""
        with self._one.alone():
            return OpByOp(seed=seed, prepared=self._prepared)(lines, [self._one.put(x) for x in host])

    def inside(self, lines: Lines, line: Line, host: Sequence[Any]) -> Line | None:
        """The line that departs in a body of ``line``, if that body, compiled alone for its operands here, is wrong."""
        before = replace(lines, lines=lines.lines[: lines.lines.index(line)], outputs=line.inputs)
        found: list[Line] = []

        def watch(body: Lines, args: Sequence[Any], results: Sequence[Any]) -> None:
            if not found:
                own = [on_host(x) for x in args]
                found.extend(filter(None, [self.departure(body, own)] if self.judged(body, own, results).unequal else []))

        inputs = self.op_by_op(before, host)
        with self._one.alone():
            OpByOp(watch, prepared=self._prepared).line(line, inputs)
        return found[0] if found else None
