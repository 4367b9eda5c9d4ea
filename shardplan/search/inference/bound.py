"""Lower bounds by dual ascent: how far a plan can be from the best, where no exact minimum is known.

The cost is a sum of terms that share variables. Moving costs from terms to variables and back changes no assignment's cost, and
after any such move the sum of all minima is a lower bound. Sweeps over the variables, forwards and backwards, raise the bound
(sequential reweighted message passing: Kolmogorov, IEEE TPAMI 2015) towards that of the local-polytope relaxation. An op's table
is a minimum over strategies, each a sum of one price per variable. It is kept as that *star* and never written out: with three
levels the joint tables would have millions of entries.

Where memory binds, bytes are priced at the points where memory peaks, and the price of a plan at the limit is subtracted (a
Lagrangean bound): no plan that fits costs less than this bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.mesh import Device
from shardplan.search.memory import liveness as memory
from shardplan.search.memory.lifetimes import Lifetime
from shardplan.search.problem.compute_prices import least_compute_s
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.summands import Summand

Floats = NDArray[np.float64]
Column = NDArray[np.float64] | NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Star:
    """One term: the minimum over hidden states s of ``base[s]`` plus, for each variable, ``columns[j][s, x_j]``.

    A one-dimensional column gives the state that the variable must have: ``columns[j][s]``.
    """

    scope: tuple[int, ...]
    base: Floats  # [S]
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds per byte held at each of these points of the step; no points where memory has no price."""

    points: tuple[int, ...] = ()
    seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Stars:
    """A problem on some domains: stars, the cost of each state of each variable by itself [D], and a constant in seconds."""

    unary: tuple[Floats, ...]
    stars: tuple[Star, ...]
    constant_s: float


def stars(
    problem: Problem,
    domains: Sequence[Domain],
    *,
    worst_s: float,
    live: memory.Liveness | None = None,
    prices: Prices = Prices(),
    limit: float = 0,
) -> Stars:
    """The summands of a problem as stars. Infeasible states cost ``worst_s``: lower costs keep a lower bound sound.

    With ``prices`` an assignment also pays for the bytes that it holds at their points, less the price of ``limit`` bytes.
    """
    return _Builder(problem, domains, worst_s, live, prices).build(limit)


class _Builder:
    def __init__(
        self, problem: Problem, domains: Sequence[Domain], worst_s: float, live: memory.Liveness | None, prices: Prices
    ) -> None:
        self.problem, self.domains, self.worst_s, self.live, self.prices = problem, domains, worst_s, live, prices
        self.held: dict[int, float] = {}  # for each view: the seconds that its whole copies cost at the points
        self.kept: dict[int, float] = {}  # the same for each backward view that keeps the forward copy
        self._memo: dict[tuple[object, ...], tuple[Floats, tuple[Column, ...]]] = {}

    def build(self, limit: float) -> Stars:
        """All stars; with prices, the price of ``limit`` bytes is subtracted."""
        problem = self.problem
        unary, result = [np.zeros(len(d)) for d in self.domains], list[Star]()
        constant = self._price_memory(unary, result, limit)
        for summand in problem.summands:
            at = summand.at
            match summand.kind:
                case "interior":
                    unary[at] += problem.objective.weights.compute * problem.interior[at].seconds_at(self._local(at))
                case "host":
                    unary[at] += problem.host[at].seconds_at(self._local(at))
                case "op":
                    result.append(self._op(summand))
                case "link":
                    self._link(summand, unary, result)
                case "view":
                    result.append(self._view(summand))
                case _:
                    assert_never(summand.kind)
        # a plan is priced with rounded tables, so it may be cheaper by the rounding
        return Stars(tuple(unary), tuple(_merged(result)), constant - self.problem.rounding_s)

    def _finite(self, costs: Floats) -> Floats:
        return np.minimum(costs, self.worst_s)

    def _local(self, v: int) -> Floats:
        """[D]: the fraction of a variable's tensors that one device holds in each of its states."""
        return self.problem.local(v, self.domains[v])

    def _price_memory(self, unary: list[Floats], result: list[Star], limit: float) -> float:
        """Charges the bytes that `memory.profile` counts at the points; returns the constant part.

        It leaves out the buffers of ops (`_op` charges them) and the copies kept between loops, so it never charges too much. The
        constant is the price of bytes that have no variable, less the price of ``limit`` bytes.
        """
        points, price = self.prices.points, self.prices.seconds_per_byte
        if not points or price == 0.0:
            return 0.0
        assert self.live is not None
        live, constant = self.live, 0.0
        for p in points:
            *stored, rest = live.lifetimes.stored_at(p, len(unary)).tolist()
            for v, nbytes in enumerate(stored):
                if nbytes:
                    unary[v] += price * nbytes * self._local(v)
            constant += price * (rest - limit)
        for life in live.lifetimes.conditional:
            self._charge(life, price * life.times(points), unary, result)
        return constant

    def _charge(self, life: Lifetime, price: float, unary: list[Floats], result: list[Star]) -> None:
        """Charges a conditional lifetime ``price`` seconds per byte."""
        if not price:
            return
        if life.kind == "copy":
            self.held[life.variable] = self.held.get(life.variable, 0.0) + price * life.nbytes
        elif life.kind == "kept":
            self.kept[life.variable] = self.kept.get(life.variable, 0.0) + price * life.nbytes
        elif life.kind == "entering":
            costs = price * life.held(self.problem, self.domains)
            if costs.ndim == 1:
                unary[life.variable] += costs
            else:
                result.append(_pair(life.source, life.variable, costs))

    def _op(self, summand: Summand) -> Star:
        """The star of an op; its hidden state is the strategy."""
        problem, n, weight = self.problem, summand.at, summand.weight
        node = problem.graph.nodes[n]
        scope, slots, free = problem.ops.slots(node)
        own, late = tuple(self.domains[v] for v in scope), problem.ops.deferring.get(n)
        held_s = self.prices.points.count(n) * self.prices.seconds_per_byte
        key = ("op", node.costed.id, slots, free, weight, late, own, held_s)
        if key not in self._memo:
            base, columns = problem.pricer.strategy_costs(node.costed, slots, free, own, late=late)
            weighted = [c * weight for c in columns]
            if held_s and self.live is not None:
                op_bytes = self.live.buffers.by_strategy(node, self.domains)
                weighted = [c + held_s * m for c, m in zip(weighted, op_bytes, strict=True)]
            self._memo[key] = self._finite(base * weight), tuple(self._finite(c) for c in weighted)
        return Star(scope, *self._memo[key])

    def _link(self, summand: Summand, unary: list[Floats], result: list[Star]) -> None:
        link = self.problem.graph.links[summand.at]
        seconds = self.problem.crossing_seconds(link, [self.domains[v] for v in summand.scope])
        costs = self._finite(seconds * summand.weight)
        if len(summand.scope) == 1:
            unary[summand.scope[0]] += costs
        else:
            first, last = summand.scope
            result.append(_pair(first, last, costs))

    def _view(self, summand: Summand) -> Star:
        """The star of a view; its hidden state is the view's state and, for a backward view, whether the forward copy is kept."""
        v, weight = summand.at, summand.weight
        problem, variable = self.problem, self.problem.coarse.variables[v]
        domain = self.domains[v]
        key = (
            "view", variable.shape, problem.graph.tensors[variable.tensors[0]].itemsize, weight, problem.view_window[v],
            problem.windows.read(variable.tensors[0]), domain, self.domains[variable.of],
            self.domains[variable.sibling] if variable.kind == "backward" else (), self.held.get(v, 0.0), self.kept.get(v, 0.0),
        )  # fmt: skip
        if key not in self._memo:
            gathered_s = self._resharding_s(v, weight, self.domains[variable.of])
            other = np.not_equal.outer(np.array(domain), np.array(self.domains[variable.of])) * self._local(v)[:, None]
            held = self.held.get(v, 0.0) * other
            at = np.arange(len(domain))
            if variable.kind == "view":
                self._memo[key] = np.zeros(len(domain)), (gathered_s + held, at)
            else:
                kept = self._resharding_s(v, weight, self.domains[variable.sibling])
                of = np.concatenate([gathered_s + held, held + self.kept.get(v, 0.0) * other])
                first = np.concatenate([np.zeros_like(kept), kept])
                self._memo[key] = np.zeros(2 * len(domain)), (of, first, np.concatenate([at, at]))
        return Star(summand.scope, *self._memo[key])

    def _resharding_s(self, v: int, weight: float, origin: Domain) -> Floats:
        """[D, D_origin]: seconds to make each state of a view from each state of its origin."""
        costs = self.problem.copying_s(v, origin, self.domains[v])
        return np.ascontiguousarray(self._finite(costs * weight).T)


def _pair(a: int, b: int, costs: NDArray[Any]) -> Star:
    """A table [a, b] as a star whose hidden state is the state of ``b``."""
    columns: Floats = np.ascontiguousarray(costs.T)
    return Star((a, b), np.zeros(len(columns)), (columns, np.arange(len(columns))))


def _merged(stars: Sequence[Star]) -> Iterator[Star]:
    """Merges equal stars over the same variables, such as those of unrolled timesteps, into one."""
    alike: dict[tuple[tuple[int, ...], int], list[Star]] = {}
    for star in stars:
        alike.setdefault((star.scope, id(star.base)), []).append(star)
    for (scope, _), (first, *more) in alike.items():
        n = 1 + len(more)
        columns = tuple(c if c.ndim == 1 or n == 1 else c * n for c in first.columns)
        yield Star(scope, first.base * n if more else first.base, columns)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One variable in a sweep: the (star, position) pairs that hold it, those that get costs back, and the number of shares."""

    variable: int
    around: tuple[tuple[int, int], ...]
    later: tuple[tuple[int, int], ...]
    parts: int


class Ascent:
    """Dual ascent on stars: ``moved[k][j]`` [D] is the cost that star k has given to its j-th variable so far."""

    def __init__(self, given: Stars, moved: Sequence[Sequence[Floats]] | None = None) -> None:
        self.given = given
        start = moved or [[np.zeros(len(given.unary[v])) for v in star.scope] for star in given.stars]
        self.moved = [[m.copy() for m in ms] for ms in start]
        self._unary = [u.copy() for u in given.unary]
        around: list[list[tuple[int, int]]] = [[] for _ in given.unary]
        for k, star in enumerate(given.stars):
            for j, v in enumerate(star.scope):
                around[v].append((k, j))
                self._unary[v] += self.moved[k][j]
        # [S] for each star and variable: the variable's least price in each hidden state
        self._least = [
            [_least(c, m) for c, m in zip(star.columns, ms, strict=True)]
            for star, ms in zip(given.stars, self.moved, strict=True)
        ]
        # variables in the order of their first star, which is program order
        order = sorted(range(len(given.unary)), key=lambda v: (around[v][:1], v))
        self._turns = _turns(given, around, order), _turns(given, around, order[::-1])
        self.work = sum(len(s.base) * len(given.unary[v]) + CONSTANTS.bound_call for s in given.stars for v in s.scope)

    def bound_s(self) -> float:
        """The sum of all minima: no assignment costs less."""
        total = self.given.constant_s + sum(float(u.min()) for u in self._unary)
        for star, least in zip(self.given.stars, self._least, strict=True):
            total += float((star.base + sum(least)).min())
        return total - 1e-12 * abs(total)  # a margin for floating-point rounding of the sums

    def sweep(self, *, backwards: bool) -> None:
        """One pass over all variables: each takes what its stars can give and hands it to the stars with later variables."""
        for turn in self._turns[backwards]:
            own = self._unary[turn.variable]
            for k, j in turn.around:
                gain = self._marginal(k, j)
                own += gain
                self.moved[k][j] += gain
            share = own / turn.parts
            for k, j in turn.later:
                self.moved[k][j] -= share
                own -= share
            for k, j in turn.around:
                self._least[k][j] = _least(self.given.stars[k].columns[j], self.moved[k][j])

    def decoded(self) -> tuple[int, ...]:
        """An assignment (an index into each domain): each variable in turn takes its best state, given those before it."""
        least = [list(ls) for ls in self._least]
        result = [0] * len(self._unary)
        for turn in self._turns[False]:
            total = self._unary[turn.variable].copy()
            for k, j in turn.around:
                total += self._marginal(k, j, least[k])
            at = result[turn.variable] = int(total.argmin())
            for k, j in turn.around:
                column, moved = self.given.stars[k].columns[j], self.moved[k][j]
                least[k][j] = (np.where(column == at, 0.0, np.inf) if column.ndim == 1 else column[:, at]) - moved[at]
        return tuple(result)

    def at_least_s(self) -> tuple[Floats, ...]:
        """For each variable [D]: a lower bound on all assignments with the variable in that state."""
        bound, tops = self.bound_s(), [0.0] * len(self.given.stars)
        for k, (star, least) in enumerate(zip(self.given.stars, self._least, strict=True)):
            tops[k] = float((star.base + sum(least)).min())
        result: list[Floats] = []
        for turn in sorted(self._turns[False], key=lambda t: t.variable):
            own = self._unary[turn.variable]
            total = own + bound - float(own.min())
            for k, j in turn.around:
                total = total + self._marginal(k, j) - tops[k]
            result.append(total - 1e-12 * abs(bound))
        return tuple(result)

    def _marginal(self, k: int, j: int, least: Sequence[Floats] | None = None) -> Floats:
        """[D]: the least current cost of a star in each state of its j-th variable; ``least`` replaces the star's own minima."""
        star = self.given.stars[k]
        rest = star.base.copy()
        for i, other in enumerate(self._least[k] if least is None else least):
            if i != j:
                rest += other
        column = star.columns[j]
        if column.ndim == 1:
            result = rest.reshape(-1, len(self.moved[k][j])).min(axis=0)
        else:
            result = (column + rest[:, None]).min(axis=0)
        return result - self.moved[k][j]


def _turns(given: Stars, around: Sequence[Sequence[tuple[int, int]]], order: Sequence[int]) -> tuple[_Turn, ...]:
    rank = {v: i for i, v in enumerate(order)}
    result: list[_Turn] = []
    for v in order:
        later = tuple(at for at in around[v] if any(rank[u] > rank[v] for u in given.stars[at[0]].scope))
        earlier = sum(any(rank[u] < rank[v] for u in given.stars[k].scope) for k, _ in around[v])
        result.append(_Turn(v, tuple(around[v]), later, max(len(later), earlier, 1)))
    return tuple(result)


def _least(column: Column, moved: Floats) -> Floats:
    """[S]: the least price of a variable in each hidden state, less the costs moved to the variable."""
    if column.ndim == 1:
        return -moved[column.astype(np.int64, copy=False)]
    return (column - moved).min(axis=1)


def ascend(
    ascent: Ascent, *, known_s: float, work: float = CONSTANTS.bound_work, enough: float = CONSTANTS.bound_enough
) -> float:
    """Sweeps until the gain is small, the bound is near ``known_s`` (an assignment's cost), or ``work`` is done.

    Returns the bound in seconds.
    """
    best = ascent.bound_s()
    for _ in range(min(CONSTANTS.bound_sweeps // 2, max(1, round(work / (2 * ascent.work))))):
        ascent.sweep(backwards=False)
        ascent.sweep(backwards=True)
        now = ascent.bound_s()
        done = now - best < enough * abs(now) or now >= known_s * (1 - enough)
        best = max(best, now)
        if done:
            break
    return best


def narrowed(ascent: Ascent, domains: Sequence[Domain], known_s: float) -> tuple[Domain, ...]:
    """The states of each variable that an assignment of at most ``known_s`` may have; every optimum lies in them."""
    return tuple(
        tuple(s for s, least in zip(d, at_least, strict=True) if least <= known_s)
        for d, at_least in zip(domains, ascent.at_least_s(), strict=True)
    )


def least_s(problem: Problem) -> float:
    """The cost of the compute alone, spread evenly over all devices: a bound for every factoring."""
    device = problem.objective.device(problem.cluster)
    if device is None:
        return 0.0
    key = "least compute", problem.cluster.size, device
    return problem.objective.weights.compute * problem.coarse.once(key, lambda: _least_compute_s(problem, device))


def _least_compute_s(problem: Problem, device: Device) -> float:
    devices = problem.cluster.size
    total = sum(inside.seconds_at(1 / devices) for inside in problem.interior.values())
    for summand in problem.summands:
        if summand.kind == "op":
            total += summand.weight * least_compute_s(problem.graph.nodes[summand.at].costed, device, devices)
    return total


def entries(problem: Problem, domains: Sequence[Domain]) -> int:
    """The number of entries in the tables of the distinct ops."""
    sizes: dict[tuple[object, ...], int] = {}
    for summand in problem.summands:
        if summand.kind == "op":
            node = problem.graph.nodes[summand.at]
            own = tuple(domains[v] for v in summand.scope)
            key = node.costed.id, problem.ops.deferring.get(summand.at), own
            if key not in sizes:
                sizes[key] = len(problem.ops.options(node).compute_s) * sum(map(len, own))
    return sum(sizes.values())


class Bound:
    """A lower bound on the seconds of every plan within the pins and the memory limit, computed on first use.

    ``unlimited_s`` is the optimum without a memory limit, where it is known.
    """

    def __init__(
        self,
        problem: Problem,
        live: memory.Liveness,
        domains: Sequence[Domain],
        *,
        free: Solution,
        chosen: Solution,
        limit: int,
        unlimited_s: float | None,
        known_s: float = 0.0,
        work: float = CONSTANTS.bound_work,
    ) -> None:
        """``free`` is the best solution without a memory limit, ``chosen`` the best within the limit; ``work`` is as in
        `ascend`.

        ``known_s`` is a lower bound that is known already.
        """
        self.unlimited_s = unlimited_s
        self._problem, self._live, self._domains = problem, live, domains
        self._free, self._chosen, self._limit, self._known_s, self._work = free, chosen, limit, known_s, work

    @property
    def at_once_s(self) -> float:
        """What of the bound is known without work."""
        return max(self.unlimited_s or 0.0, self._known_s, least_s(self._problem))

    @cached_property
    def seconds(self) -> float:
        """The optimum (or a bound) without a memory limit; where memory binds, the larger of that and the bound at the limit."""
        best = self.unlimited_s if self.unlimited_s is not None else self._without_limit()
        return best if self._free.peak_bytes <= self._limit else max(best, self._at_limit())

    def _without_limit(self) -> float:
        if entries(self._problem, self._domains) > CONSTANTS.bound_entries:
            return max(self._known_s, least_s(self._problem))
        given = stars(self._problem, self._domains, worst_s=CONSTANTS.bound_worst * self._chosen.seconds)
        return max(self._known_s, ascend(Ascent(given), known_s=self._free.seconds, work=self._work))

    def _at_limit(self) -> float:
        """The bound at the best price on bytes; 0 where the tables would be too large.

        The search starts at the price at which the unlimited and the chosen plan cost the same.
        """
        if entries(self._problem, self._domains) > CONSTANTS.bound_entries:
            return 0.0
        points = tuple(sorted({self._peak(self._free), self._peak(self._chosen)}))
        saved = max(self._free.peak_bytes - self._chosen.peak_bytes, 1) * len(points)
        start = max(self._chosen.seconds - self._free.seconds, 1e-9 * self._chosen.seconds) / saved
        result: dict[int, float] = {}
        last: list[list[Floats]] | None = None

        def at(power: int) -> float:
            """The bound at ``2**power`` times the first price on bytes."""
            nonlocal last
            if power not in result:
                given = stars(
                    self._problem,
                    self._domains,
                    worst_s=CONSTANTS.bound_worst * self._chosen.seconds,
                    live=self._live,
                    prices=Prices(points, start * 2.0**power),
                    limit=self._limit + CONSTANTS.rounding_bytes,
                )
                ascent = Ascent(given, last)
                result[power] = ascend(ascent, known_s=self._chosen.seconds, work=self._work / CONSTANTS.bound_prices)
                last = ascent.moved
            return result[power]

        step = 1 if at(1) > at(0) else -1
        power = max(step, 0)
        while len(result) < CONSTANTS.bound_prices and at(power + step) > at(power):
            power += step
        return max(result.values())

    def _peak(self, held: Solution) -> int:
        return int(memory.profile(self._problem, self._live, held.states, held.keep, held.limits).argmax())
