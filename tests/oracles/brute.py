"""The minimum by trying every assignment: the oracle of the search on small problems.

Nothing of the search's tables or elimination is used. An op's price is found strategy by strategy, a resharding's by adding up
the steps of its program, and the minimum over all assignments by writing every one of them down. `uncoarsened` asks the
same of the problem in which every tensor has a layout of its own, which says what coarsening gives up.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.step import Step
from shardplan.cost.overlap import NO_WINDOW, Window
from shardplan.graph.nodes import Graph, Link, Node
from shardplan.ir import Collective, Layout, Tensor
from shardplan.search.coarsening.coarsen import FREE, Coarse, Variable
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem

MOST_ASSIGNMENTS = 200_000_000
"""More than these are not tried."""

_AT_ONCE = 4_000_000
_STEP_S = 1e-12  # the search prefers the shorter of equal programs by a picosecond a step


@dataclass(frozen=True, slots=True)
class Found:
    """The cheapest assignment: ``states`` in the order of the variables, ``seconds`` of compute and communication."""

    seconds: float
    states: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Summand:
    """A part of the cost: ``seconds(states)`` for states of the variables in ``scope``."""

    scope: tuple[int, ...]
    seconds: Callable[[Sequence[int]], float]


class Oracle:
    """The summands of a problem, each priced from its parts."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._programs: dict[tuple[tuple[int, ...], int, int, int], float] = {}

    def seconds(self, states: Sequence[int]) -> float:
        """The cost of one assignment."""
        return sum(s.seconds([states[v] for v in s.scope]) for s in self.summands())

    def minimum(self, domains: Sequence[Domain] | None = None) -> Found:
        """The cheapest assignment of these domains (by default all layouts).

        Raises:
            ValueError: if there are more assignments than anyone would try.
        """
        own = self.problem.domains if domains is None else domains
        return cheapest(list(self.summands()), own)

    def summands(self) -> Iterator[Summand]:
        """Every part of the cost."""
        problem = self.problem
        for n in problem.coarse.joins:
            yield from self._op(problem.graph.nodes[n])
        for v, inside in problem.interior.items():
            each = problem.objective.weights.compute
            yield Summand((v,), lambda at, i=inside, k=each: k * (i.seconds * self._part(i.shape, at[0]) + i.launches_s))
        for link in problem.graph.links:
            yield from self._link(link)
        for variable in problem.coarse.variables:
            if variable.kind != "stored":
                yield self._view(variable)

    def reshard_seconds(self, shape: tuple[int, ...], size: int, before: int, after: int) -> float:
        """The sum over the steps of the best program; infinite where a layout is not possible."""
        key = (shape, size, before, after)
        if key not in self._programs:
            resharder = self.problem.resharder
            legal = resharder.legal(shape, pad=True)
            space = resharder.space(shape)
            leads = set(space.state(after)[1]) <= set(space.state(before)[1])  # nothing becomes a partial sum
            if legal[before] and legal[after] and leads:
                steps = resharder.program(shape, size, before, after)
                self._programs[key] = sum(step.seconds + _STEP_S for step in steps)
            else:
                self._programs[key] = math.inf
        return self._programs[key]

    def moved(self, tensor: Tensor, before: int, after: int, window: Window) -> float:
        """The cost of a movement, alone with the copies beside it or as its part of a bundle."""
        shape, size = tensor.shape, tensor.nbytes
        seconds = self.reshard_seconds(shape, size, before, after)
        if math.isinf(seconds) or not self.problem.objective.overlaps:
            return seconds
        resharder, device = self.problem.resharder, self.problem.cluster.device
        read = self.problem.windows.read(tensor.id)
        steps = resharder.program(shape, size, before, after)
        ways = [self._weighed(seconds, window)]
        if len(steps) == 1:
            (step,), n = steps, math.prod(resharder.sizes[f] for f in steps[0].factors)
            ways = [ways[0] + sum(self._copy_s(nbytes) for nbytes in self._ordered(shape, step, n, image=read.image))]
            bundled_s = (
                resharder.bundled_s(step.kind, step.over, step.nbytes, window.company / size)
                if window.company > size
                else math.inf
            )
            if math.isfinite(bundled_s):
                packed = step.nbytes / n if step.kind == Collective.ALL_GATHER else step.nbytes
                unpacked = step.nbytes / n if step.kind == Collective.REDUCE_SCATTER else step.nbytes
                out_s = 0.0 if read.sliced else self._copy_s(unpacked)
                ways.append(self._weighed(bundled_s, window) + self._copy_s(packed) - device.launch_s + out_s)
        return min(ways)

    def _weighed(self, seconds: float, window: Window) -> float:
        """The cost of a movement of which as many seconds as the window are hideable."""
        hidden = min(seconds, window.seconds)
        return seconds - hidden + self.problem.objective.weights.hideable * hidden

    def _copy_s(self, nbytes: float) -> float:
        device = self.problem.cluster.device
        return device.launch_s + 2 * nbytes / (device.memory_bytes_per_s * device.memory_efficiency)

    def _ordered(self, shape: tuple[int, ...], step: Step, ways: int, *, image: bool) -> Iterator[float]:
        """The bytes of each copy that puts a block into the order that a collective alone wants, or leaves."""
        sizes = self.problem.resharder.sizes

        def behind(layout: Layout, dim: int) -> bool:
            return dim < len(shape) and any(n > math.prod(sizes[f] for f in layout.dims[d]) for d, n in enumerate(shape[:dim]))

        rank = max(len(step.before.dims), len(step.after.dims))
        before, after = ([*layout.dims, *[()] * (rank - len(layout.dims))] for layout in (step.before, step.after))
        gone = [d for d in range(rank) if len(after[d]) < len(before[d])]
        new = [d for d in range(rank) if len(after[d]) > len(before[d])]
        if step.kind == Collective.ALL_GATHER and behind(step.after, gone[0]):
            yield step.nbytes / ways
            yield from [step.nbytes] if image else []
        if step.kind == Collective.REDUCE_SCATTER and behind(step.before, new[0]):
            yield step.nbytes / ways
        if step.kind == Collective.ALL_TO_ALL:
            yield from [step.nbytes] * (behind(step.before, new[0]) + behind(step.after, gone[0]))

    def _part(self, shape: tuple[int, ...], state: int) -> float:
        return float(self.problem.resharder.space(shape).local[state])

    def _op(self, node: Node) -> Iterator[Summand]:
        """An op at its best strategy."""
        problem, of, read = self.problem, self.problem.coarse.of, self.problem.coarse.read
        call = node.signature.call
        operands = [(i, read.get((node.id, i), of[t])) for i, t in enumerate(node.inputs) if t >= 0 and of[t] != FREE]
        results = [(r, of[t]) for r, t in enumerate(node.outputs)]
        scope = tuple(dict.fromkeys([*(v for _, v in operands), *(v for _, v in results if v != FREE)]))
        if not scope:
            return
        options = problem.ops.options(node)

        def partial(shape: tuple[int, ...], at: int) -> bool:
            return bool(problem.resharder.space(shape).partial[at])

        def price(at: Sequence[int]) -> float:
            """Seconds of the op in these states, everything that it reads and makes resharded."""
            state = dict(zip(scope, at, strict=True))
            best = math.inf
            for s in range(len(options.loops)):
                if not options.terms[s] and any(v != FREE and partial(call.results[r], state[v]) for r, v in results):
                    continue
                total = float(problem.objective.weights.compute * options.compute_s[s] + options.halo_s[s])
                for i, v in operands:
                    tensor = problem.graph.tensors[node.inputs[i]]
                    window = problem.windows.operands.get((node.id, i), NO_WINDOW)
                    total += self.moved(tensor, state[v], int(options.needs[s, i]), window)
                for r, v in results:
                    shape, gives = call.results[r], int(options.gives[s, r])
                    space = problem.resharder.space(shape)
                    if v == FREE and not space.partial[gives]:
                        continue
                    tensor = problem.graph.tensors[node.outputs[r]]
                    after = problem.resharder.state(shape, Layout(((),) * len(shape))) if v == FREE else state[v]
                    total += self.moved(tensor, gives, after, problem.windows.results.get((node.id, r), NO_WINDOW))
                best = min(best, total)
            return best * node.weight

        yield Summand(scope, price)

    def _link(self, link: Link) -> Iterator[Summand]:
        of, tensors = self.problem.coarse.of, self.problem.graph.tensors
        a, b, outer = of[link.source], of[link.target], tensors[link.target if link.lift < 0 else link.source]
        if a == FREE or (a == b and not link.lift):
            return
        inner = tensors[link.target].shape
        whole = self.problem.resharder.state(inner, Layout(((),) * len(inner)))

        def price(at: Sequence[int]) -> float:
            (before,), (after,) = self.problem.outside(link, (at[0],), (whole if b == FREE else at[-1],))
            window = self.problem.windows.links.get((link.source, link.target), NO_WINDOW)
            return self.moved(outer, before, after, window) * link.weight

        yield Summand((a, b) if b not in (a, FREE) else (a,), price)

    def _view(self, view: Variable) -> Summand:
        problem = self.problem
        tensor = problem.graph.tensors[view.tensors[0]]
        weight = problem.view_weight[view.id]
        origins = (view.of, view.sibling) if view.kind == "backward" else (view.of,)

        def price(at: Sequence[int]) -> float:
            *before, after = at
            return weight * min(self.moved(tensor, b, after, problem.view_window[view.id]) for b in before)

        return Summand((*origins, view.id), price)


def uncoarsened(problem: Problem) -> Oracle:
    """The oracle of the same step without coarsening: only what must be one tensor (state that feeds back) shares a layout."""
    graph, coarse = problem.graph, problem.coarse
    merged = _must_be_one(graph)
    variables: list[Variable] = []
    of = [FREE] * len(graph.tensors)
    new_id: dict[int, int] = {}
    for t, old in enumerate(coarse.of):
        if old == FREE:
            continue
        root = merged[t]
        if root not in new_id:
            new_id[root] = len(variables)
            members = tuple(u for u in range(len(graph.tensors)) if merged[u] == root and coarse.of[u] != FREE)
            variables.append(Variable(new_id[root], graph.tensors[t].shape, members))
        of[t] = new_id[root]
    late = {t for v in coarse.variables if v.deferred for t in v.tensors}
    variables = [replace(v, deferred=late.issuperset(v.tensors)) for v in variables]
    views: dict[tuple[int, int], int] = {}
    for view in coarse.variables:
        for t in view.tensors if view.kind != "stored" else ():
            views[view.id, t] = len(variables)
            sibling = views[view.sibling, t] if view.sibling != FREE else FREE
            variables.append(Variable(len(variables), view.shape, (t,), view.kind, of[t], sibling))
    read = {(n, slot): views[v, graph.nodes[n].inputs[slot]] for (n, slot), v in coarse.read.items()}
    joins = tuple(n.id for n in graph.nodes if any(of[t] != FREE for t in (*n.inputs, *n.outputs) if t >= 0))
    fine = Coarse(tuple(variables), tuple(of), read, joins, coarse.free, coarse.weights, coarse.parameters, coarse.zero)
    return Oracle(Problem(graph, fine, problem.cluster, problem.factors, objective=problem.objective))


def _must_be_one(graph: Graph) -> list[int]:
    root = list(range(len(graph.tensors)))

    def join(a: int, b: int) -> None:
        low, high = sorted((root[a], root[b]))
        root[:] = [low if r == high else r for r in root]

    for link in graph.links:
        if link.same:
            join(link.source, link.target)
    for o, i in zip(graph.outputs, graph.feedback, strict=True):
        if i is not None and o >= 0:
            join(o, graph.inputs[i])
    return root


def cheapest(summands: Sequence[Summand], domains: Sequence[Domain]) -> Found:
    """Adds the summands up over every assignment of the domains, a block of assignments at a time.

    Raises:
        ValueError: if there are more than `MOST_ASSIGNMENTS`.
    """
    sizes = [len(d) for d in domains]
    count = math.prod(sizes)
    if count > MOST_ASSIGNMENTS:
        raise ValueError(f"{count:.3g} assignments of {len(sizes)} variables are too many to try: at most {MOST_ASSIGNMENTS:.3g}")
    tables = [(s.scope, _written_down(s, domains)) for s in summands]
    inner = len(sizes)
    while inner and math.prod(sizes[inner - 1 :]) <= _AT_ONCE:
        inner -= 1
    best, at = math.inf, (0,) * len(sizes)
    for outer in itertools.product(*(range(n) for n in sizes[:inner])):
        total = np.zeros(sizes[inner:])
        for scope, table in tables:
            total += _fixed(scope, table, outer, len(sizes))
        low = int(np.argmin(total))
        if total.flat[low] < best:
            best, at = float(total.flat[low]), (*outer, *(int(i) for i in np.unravel_index(low, total.shape)))
    return Found(best, tuple(d[i] for d, i in zip(domains, at, strict=True)))


def _written_down(summand: Summand, domains: Sequence[Domain]) -> NDArray[np.float64]:
    own = [domains[v] for v in summand.scope]
    values = [summand.seconds(at) for at in itertools.product(*own)]
    return np.array(values).reshape([len(d) for d in own])


def _fixed(scope: tuple[int, ...], table: NDArray[np.float64], outer: tuple[int, ...], rank: int) -> NDArray[np.float64]:
    """The table with the outer variables' states put in, shaped to be added to a block over all other variables."""
    picked = table[tuple(outer[v] if v < len(outer) else slice(None) for v in scope)]
    left = [v for v in scope if v >= len(outer)]
    picked = picked.transpose(sorted(range(len(left)), key=left.__getitem__))
    shape = [1] * (rank - len(outer))
    for v, n in zip(sorted(left), picked.shape, strict=True):
        shape[v - len(outer)] = n
    return picked.reshape(shape)
