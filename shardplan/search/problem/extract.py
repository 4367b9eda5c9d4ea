"""Turns an assignment into decisions: the strategy of each op, the layout of each use, and the resulting collectives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.issued import Issued, StepCost
from shardplan.collectives.reshard import Programs
from shardplan.collectives.step import Step
from shardplan.cost import wire_bytes
from shardplan.cost.overlap import NO_WINDOW, Window
from shardplan.graph.nodes import Node
from shardplan.ir import BodyChoices, Choices, Collective, Copy, Layout, Use, Where
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.problem.pricing import Allowed
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.summands import Summand

_Moves = tuple[tuple[Step, ...], int, bool]
"""(the collectives of one operand or result, its slot, whether it is a result)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions(StepCost):
    """A solution as concrete choices, with its cost in the search's tables.

    ``layouts[t]`` is the stored layout of tensor t (None where it is free). ``uses`` are by op, ``views`` by variable. ``kept``
    are the backward views that reuse the forward copy.
    """

    layouts: tuple[Layout | None, ...]
    uses: Mapping[int, Use]
    views: Mapping[int, Layout]
    kept: frozenset[int]


@dataclass
class Extractor:
    """Turns solutions of one problem into decisions. Equal ops in equal layouts are worked out once."""

    problem: Problem
    _uses: dict[object, Use] = field(default_factory=dict[object, Use])
    _moves: dict[int, tuple[_Moves, ...]] = field(default_factory=dict[int, "tuple[_Moves, ...]"])
    _decided: dict[object, tuple[Solution, Decisions]] = field(default_factory=dict[object, tuple[Solution, Decisions]])
    programs: Programs = field(init=False)

    def __post_init__(self) -> None:
        self.programs = Programs(self.problem.resharder)

    @classmethod
    def of(cls, problem: Problem) -> Extractor:
        """The extractor that all who ask for this problem's share."""
        if "extractor" not in problem.derived:
            problem.derived["extractor"] = cls(problem)
        return problem.derived["extractor"]

    def decide(self, solution: Solution) -> Decisions:
        """The decisions of a solution, memoised."""
        key = solution.states, solution.keep, id(solution.limits)  # the solution beside it keeps the limits alive
        if key not in self._decided:
            self._decided[key] = solution, self._decide(solution)
        return self._decided[key][1]

    def _decide(self, solution: Solution) -> Decisions:
        problem, coarse = self.problem, self.problem.coarse
        states = solution.states
        layouts: list[Layout | None] = []
        of_shape: dict[tuple[int, tuple[int, ...]], Layout] = {}
        for t, v in zip(problem.graph.tensors, coarse.of, strict=True):
            if v != FREE and (v, t.shape) not in of_shape:
                of_shape[v, t.shape] = problem.resharder.layout(t.shape, states[v])
            layouts.append(None if v == FREE else of_shape[v, t.shape])
        issued: list[Issued] = []
        forward: set[tuple[int, Layout, Layout]] = set()  # (tensor, before, after) of the moves of the forward pass
        uses: dict[int, Use] = {}
        compute_s = host_s = 0.0
        for summand in problem.summands:
            match summand.kind:
                case "op":
                    node = problem.graph.nodes[summand.at]
                    use = uses[node.id] = self._use(node, states, solution.limits.of(node.id) if solution.limits else None)
                    compute_s += use.compute_s * summand.weight
                    self._operand_steps(node, use, states, issued, forward)
                case "interior":
                    compute_s += inside_s(problem, summand, states)
                case "host":
                    host_s += inside_s(problem, summand, states)
                case "link":
                    self._link_steps(summand, states, issued)
                case "view":
                    self._view_steps(summand, solution, issued)
                case _:
                    assert_never(summand.kind)
        views = {v.id: problem.resharder.layout(v.shape, states[v.id]) for v in coarse.variables if v.kind != "stored"}
        return Decisions(
            layouts=tuple(layouts),
            uses=uses,
            views=views,
            kept=solution.keep,
            issued=tuple(issued),
            compute_s=compute_s,
            contention=problem.cluster.device.contention,
            host_s=host_s,
        )

    def chosen(self, seconds: NDArray[np.float64]) -> int:
        """The strategy to run, given the seconds of each: the cheapest."""
        return int(np.argmin(seconds))

    def choices(self, decisions: Decisions) -> Choices:
        """The decisions by bodies and ops of the program, independent of this problem's variable numbers."""
        graph, coarse = self.problem.graph, self.problem.coarse
        number = {v: n for n, v in enumerate(decisions.views)}
        copies = tuple(
            Copy(
                layout,
                number[coarse.variables[v].sibling] if v in decisions.kept else None,
                coarse.variables[v].kind == "backward",
            )
            for v, layout in decisions.views.items()
        )
        uses: dict[Where, dict[int, Use]] = {where: {} for where in graph.bodies}
        reads: dict[Where, dict[tuple[int, int], int]] = {where: {} for where in graph.bodies}
        for n, use in decisions.uses.items():
            node = graph.nodes[n]
            uses[node.where][node.op.id] = use
        for (n, slot), v in coarse.read.items():
            node = graph.nodes[n]
            reads[node.where][node.op.id, slot] = number[v]
        bodies = {
            where: BodyChoices(tuple([decisions.layouts[t] for t in tensors]), uses[where], reads[where])
            for where, tensors in graph.bodies.items()
        }
        return Choices(bodies, copies)

    def _use(self, node: Node, states: tuple[int, ...], allowed: Allowed | None) -> Use:
        problem, coarse = self.problem, self.problem.coarse
        scope, slots, free = problem.ops.slots(node)
        key = problem.ops.key(node.id), tuple([states[v] for v in scope]), allowed
        found = self._uses.get(key)
        if found is not None:
            return found
        domains, late = tuple((states[v],) for v in scope), problem.ops.deferring.get(node.id)
        options = problem.ops.options(node, allowed)
        base, columns = problem.pricer.strategy_costs(node.costed, slots, free, domains, allowed, late=late)
        total = base + sum(c[:, 0] for c in columns)
        best = self.chosen(total)
        call = node.signature.call
        read = {slot.index for slot in slots if not slot.result}
        needs = tuple(
            problem.resharder.layout(s, int(options.needs[best, i])) if i in read else None for i, s in enumerate(call.operands)
        )
        gives = tuple(problem.resharder.layout(s, int(options.gives[best, r])) for r, s in enumerate(call.results))
        stored = tuple(
            None if coarse.of[t] == FREE else problem.resharder.layout(s, states[coarse.of[t]])
            for t, s in zip(node.outputs, call.results, strict=True)
        )
        found = self._uses[key] = Use(tuple(options.loops[best].tolist()), needs, gives, stored, float(options.compute_s[best]))
        return found

    def _operand_steps(
        self,
        node: Node,
        use: Use,
        states: tuple[int, ...],
        issued: list[Issued],
        forward: set[tuple[int, Layout, Layout]],
    ) -> None:
        moves = self._moves.get(id(use))  # `_uses` keeps every use alive, so no id is reused
        if moves is None:
            moves = self._moves[id(use)] = self._moved(node, use, states)
        windows = self.problem.windows
        for steps, slot, result in moves:
            tensor = node.outputs[slot] if result else node.inputs[slot]
            window = (windows.results if result else windows.operands).get((node.id, slot), NO_WINDOW)
            move = tensor, steps[0].before, steps[-1].after
            if not result and not node.backward:
                forward.add(move)
            again = not result and node.backward and move in forward and self._may_wait(node, tensor)
            self._add(issued, steps, node.weight, tensor, node.op.source, window, again=again)
        issued.extend(self._issued(s, s.seconds, node.weight, node.inputs[0], node.op.source) for s in self._halos(node, use))

    def _moved(self, node: Node, use: Use, states: tuple[int, ...]) -> tuple[_Moves, ...]:
        """The collectives of an op's operands and results."""
        problem, coarse = self.problem, self.problem.coarse
        found: list[_Moves] = []
        for i, need in enumerate(use.needs):
            if need is not None:
                tensor = problem.graph.tensors[node.inputs[i]]
                before = problem.resharder.layout(tensor.shape, states[coarse.read.get((node.id, i), coarse.of[tensor.id])])
                found.append((self.programs.between(tensor.shape, tensor.nbytes, before, need), i, False))
        for r, (give, after) in enumerate(zip(use.gives, use.stored, strict=True)):
            tensor = problem.graph.tensors[node.outputs[r]]
            if after is not None or give.partial:
                target = after if after is not None else Layout.whole(len(tensor.shape))
                found.append((self.programs.between(tensor.shape, tensor.nbytes, give, target), r, True))
        return tuple(one for one in found if one[0])

    def _halos(self, node: Node, use: Use) -> tuple[Step, ...]:
        """The exchanges inside an op."""
        problem = self.problem
        return problem.pricer.halo_steps(node.signature, use.loops) if problem.ops.options(node).halo_s.any() else ()

    def _issued(
        self,
        step: Step,
        seconds: float,
        times: float,
        tensor: int,
        source: str,
        hideable_s: float = 0.0,
        pool: str = "",
        *,
        again: bool = False,
    ) -> Issued:
        ways = math.prod(self.problem.sizes[f] for f in step.factors)
        return Issued(
            step=step,
            seconds=seconds,
            times=times,
            wire_bytes=wire_bytes(step.kind, ways, step.nbytes),
            tensor=tensor,
            source=source,
            hideable_s=hideable_s,
            pool=pool,
            again=again,
        )

    @cached_property
    def _held_back(self) -> frozenset[tuple[int, int]]:
        """The (backward view, tensor) that a schedule moves late: it ties the move to another operand of every reader."""
        read: dict[tuple[int, int], bool] = {}
        for (n, slot), v in self.problem.coarse.read.items():
            node = self.problem.graph.nodes[n]
            key = v, node.inputs[slot]
            read[key] = read.get(key, True) and self._may_wait(node, node.inputs[slot])
        return frozenset(key for key, tied in read.items() if tied)

    def _may_wait(self, node: Node, tensor: int) -> bool:
        """Whether an op has another operand, to which a schedule ties the move of a tensor that it reads."""
        return any(t >= 0 and t != tensor and self.problem.coarse.of[t] != FREE for t in node.inputs)

    def _view_steps(self, summand: Summand, solution: Solution, issued: list[Issued]) -> None:
        problem, states, v = self.problem, solution.states, summand.at
        variable = problem.coarse.variables[v]
        origin = variable.sibling if v in solution.keep else variable.of
        for t, times in problem.copies[v].items():
            tensor = problem.graph.tensors[t]
            before, after = (problem.resharder.layout(tensor.shape, states[u]) for u in (origin, v))
            steps = self.programs.between(tensor.shape, tensor.nbytes, before, after)
            again = variable.kind == "backward" and v not in solution.keep and (v, t) in self._held_back
            self._add(issued, steps, times, t, problem.view_sources[v, t], problem.view_window[v], again=again)

    def _link_steps(self, summand: Summand, states: tuple[int, ...], issued: list[Issued]) -> None:
        problem, link = self.problem, self.problem.graph.links[summand.at]
        first, last = summand.scope[0], summand.scope[-1]
        outer = problem.crossing_tensor(link)
        (before,), (after,) = problem.outside(link, (states[first],), problem.entering(link, (states[last],)))
        ends = (problem.resharder.layout(outer.shape, state) for state in (before, after))
        steps = self.programs.between(outer.shape, outer.nbytes, *ends)
        self._add(issued, steps, summand.weight, outer.id, "loop", problem.link_window(link))

    def _add(
        self,
        issued: list[Issued],
        steps: tuple[Step, ...],
        times: float,
        tensor: int,
        source: str,
        window: Window,
        *,
        again: bool = False,
    ) -> None:
        if len(steps) == 1 and steps[0].kind != Collective.SLICE:
            moved = self.problem.graph.tensors[tensor]
            read = self.problem.windows.read(tensor)
            seconds, hidden = self.problem.pricer.issued(moved.shape, moved.nbytes, steps[0], window, read)
            issued.append(self._issued(steps[0], seconds, times, tensor, source, hidden, window.pool, again=again))
            return
        window_s = window.seconds
        for step in steps:
            if step.kind != Collective.SLICE:
                hidden = min(step.seconds, window_s)
                window_s -= hidden
                issued.append(self._issued(step, step.seconds, times, tensor, source, hidden, again=again))


def inside_s(problem: Problem, summand: Summand, states: Sequence[int]) -> float:
    """The seconds of the ops and copies inside a variable under an assignment."""
    return problem.inside(summand).seconds_at(float(problem.space(summand.at).local[states[summand.at]]))
