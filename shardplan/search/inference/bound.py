"""Lower bounds by dual ascent: how far from the best a plan is at most, where no exact minimum is at hand.

The cost is a sum of terms that share variables. Moving costs from terms to variables and back changes no assignment's cost, and
the sum of all least values is a bound for any such move. Sweeps over the variables, forwards and backwards, raise it (sequential
reweighted message passing: Kolmogorov, IEEE TPAMI 2015) towards that of the local-polytope relaxation. An op's table is a minimum
over strategies, each a sum of one price for each variable, so it is used as that *star* and never written down: with three levels
the joint tables would have millions of entries.

Where memory binds, bytes are priced at the points where it peaks, and what a plan at the limit would pay is taken off again (a
Lagrangean bound): no plan that fits is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.search.memory import liveness as memory
from shardplan.search.memory.lifetimes import Lifetime
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.problem.summands import Summand

Floats = NDArray[np.float64]
Column = NDArray[np.float64] | NDArray[np.int64]

ENOUGH = 5e-5
"""The ascent ends when two sweeps gain less than this part of the bound, or it is so near to a known cost."""

WORK = 2e9
"""Table entries that an ascent looks at, at most: three or four seconds. Counted, not timed: a bound is the same every time."""

MOST_SWEEPS = 400

_CALL = 10_000  # looking at a small table costs as much as at so many entries

_WORST = 4.0  # what cannot be is charged so many times the cost of the plan: the best plan has none of it

_PRICES = 6  # so many prices on bytes are tried


@dataclass(frozen=True, slots=True, eq=False)
class Star:
    """One term: the minimum over hidden states s of ``base[s]`` plus, for each variable, ``columns[j][s, x_j]``.

    A column of one dimension says in which state the variable must be: ``columns[j][s]``.
    """

    scope: tuple[int, ...]
    base: Floats  # [S]
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds a byte that is held at each of these points of the step; none where memory is not looked at."""

    points: tuple[int, ...] = ()
    seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Stars:
    """A problem on some domains as stars, with what each state of a variable costs by itself [D], and a constant in seconds."""

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
    """The summands of a problem. What cannot be costs ``worst_s``, which is sound: it is no more than it costs.

    With ``prices`` every assignment pays for the bytes that it holds at their points, and gets back what ``limit`` bytes cost.
    """
    return _Builder(problem, domains, worst_s, live, prices).build(limit)


class _Builder:
    def __init__(
        self, problem: Problem, domains: Sequence[Domain], worst_s: float, live: memory.Liveness | None, prices: Prices
    ) -> None:
        self.problem, self.domains, self.worst_s, self.live, self.prices = problem, domains, worst_s, live, prices
        self.held: dict[int, float] = {}  # for each view the seconds that its whole copies cost at the points
        self.kept: dict[int, float] = {}  # likewise for each backward view that keeps the forward copy
        self._memo: dict[tuple[object, ...], tuple[Floats, tuple[Column, ...]]] = {}

    def build(self, limit: float) -> Stars:
        """All stars; with prices, ``limit`` bytes are given back."""
        problem = self.problem
        unary, found = [np.zeros(len(d)) for d in self.domains], list[Star]()
        constant = self._price_memory(unary, found, limit)
        for summand in problem.summands:
            at = summand.at
            match summand.kind:
                case "interior":
                    unary[at] += problem.interior[at][0] * self._local(at)
                case "op":
                    found.append(self._op(summand))
                case "link":
                    self._link(summand, unary, found)
                case "view":
                    found.append(self._view(summand))
        # the tables that a plan is priced with are rounded: by so much it may be cheaper
        return Stars(tuple(unary), tuple(_merged(found)), constant - self.problem.rounding_s)

    def _finite(self, costs: Floats) -> Floats:
        return np.minimum(costs, self.worst_s)

    def _local(self, v: int) -> Floats:
        """[D]: the part of a variable's tensors that one device holds in each of its states."""
        return self.problem.local(v, self.domains[v])

    def _price_memory(self, unary: list[Floats], found: list[Star], limit: float) -> float:
        """Charges no more than `memory.profile` counts at the points, and all of it but the buffers of ops (`build` does) and
        copies kept between loops; the constant is what has no variable, less the limit's price.
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
            self._charge(life, price * life.times(points), unary, found)
        return constant

    def _charge(self, life: Lifetime, price: float, unary: list[Floats], found: list[Star]) -> None:
        """Charges a conditional lifetime ``price`` seconds a byte."""
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
                found.append(_pair(life.source, life.variable, costs))

    def _op(self, summand: Summand) -> Star:
        """The hidden state of an op is its strategy."""
        problem, n, weight = self.problem, summand.at, summand.weight
        node = problem.graph.nodes[n]
        scope, slots, free = problem.ops.slots(node)
        own, late = tuple(self.domains[v] for v in scope), problem.ops.deferring.get(n)
        held_s = self.prices.points.count(n) * self.prices.seconds_per_byte
        key = ("op", node.signature.id, slots, free, weight, late, own, held_s)
        if key not in self._memo:
            base, columns = problem.pricer.strategy_costs(node.signature, slots, free, own, late=late)
            weighed = [c * weight for c in columns]
            if held_s and self.live is not None:
                much = self.live.buffers.by_strategy(node, self.domains)
                weighed = [c + held_s * m for c, m in zip(weighed, much, strict=True)]
            self._memo[key] = self._finite(base * weight), tuple(self._finite(c) for c in weighed)
        return Star(scope, *self._memo[key])

    def _link(self, summand: Summand, unary: list[Floats], found: list[Star]) -> None:
        first, last = summand.scope[0], summand.scope[-1]
        link = self.problem.graph.links[summand.at]
        seconds = self.problem.crossing_seconds(link, self.domains[first], self.domains[last])
        costs = self._finite(seconds * summand.weight)
        if first == last:
            unary[first] += np.diag(costs)
        else:
            found.append(_pair(first, last, costs))

    def _view(self, summand: Summand) -> Star:
        """The hidden state of a view is its own state; of a backward one that, and whether the forward copy is kept."""
        v, weight = summand.at, summand.weight
        problem, variable = self.problem, self.problem.coarse.variables[v]
        mine = self.domains[v]
        key = (
            "view", variable.shape, problem.graph.tensors[variable.tensors[0]].itemsize, weight, mine,
            self.domains[variable.of], self.domains[variable.sibling] if variable.kind == "backward" else (),
            self.held.get(v, 0.0), self.kept.get(v, 0.0),
        )  # fmt: skip
        if key not in self._memo:
            again = self._made(v, weight, self.domains[variable.of])
            other = np.not_equal.outer(np.array(mine), np.array(self.domains[variable.of])) * self._local(v)[:, None]
            held = self.held.get(v, 0.0) * other
            at = np.arange(len(mine))
            if variable.kind == "view":
                self._memo[key] = np.zeros(len(mine)), (again + held, at)
            else:
                kept = self._made(v, weight, self.domains[variable.sibling])
                of = np.concatenate([again + held, held + self.kept.get(v, 0.0) * other])
                first = np.concatenate([np.zeros_like(kept), kept])
                self._memo[key] = np.zeros(2 * len(mine)), (of, first, np.concatenate([at, at]))
        return Star(summand.scope, *self._memo[key])

    def _made(self, v: int, weight: float, origin: Domain) -> Floats:
        """[D, D_origin]: seconds to make each state of a view from each of an origin's."""
        tensor = self.problem.graph.tensors[self.problem.coarse.variables[v].tensors[0]]
        costs = self.problem.prices(tensor.shape, tensor.nbytes, origin)[:, list(self.domains[v])]
        return np.ascontiguousarray(self._finite(costs * weight).T)


def _pair(a: int, b: int, costs: NDArray[Any]) -> Star:
    """A table [a, b] as a term whose hidden state is that of ``b``."""
    columns: Floats = np.ascontiguousarray(costs.T)
    return Star((a, b), np.zeros(len(columns)), (columns, np.arange(len(columns))))


def _merged(stars: Sequence[Star]) -> Iterator[Star]:
    """Equal terms of the same variables, such as those of unrolled timesteps, as one."""
    alike: dict[tuple[tuple[int, ...], int], list[Star]] = {}
    for star in stars:
        alike.setdefault((star.scope, id(star.base)), []).append(star)
    for (scope, _), (first, *more) in alike.items():
        n = 1 + len(more)
        columns = tuple(c if c.ndim == 1 or n == 1 else c * n for c in first.columns)
        yield Star(scope, first.base * n if more else first.base, columns)


@dataclass(frozen=True, slots=True)
class _Turn:
    """One variable in a sweep: the (star, position) that it is in, those to hand costs to, and into how many parts."""

    variable: int
    around: tuple[tuple[int, int], ...]
    later: tuple[tuple[int, int], ...]
    parts: int


class Ascent:
    """Costs on their way between stars and variables: ``moved[k][j]`` [D] is what star k gave to its j-th variable so far."""

    def __init__(self, given: Stars, moved: Sequence[Sequence[Floats]] | None = None) -> None:
        self.given = given
        start = moved or [[np.zeros(len(given.unary[v])) for v in star.scope] for star in given.stars]
        self.moved = [[m.copy() for m in ms] for ms in start]
        self._own = [u.copy() for u in given.unary]
        around: list[list[tuple[int, int]]] = [[] for _ in given.unary]
        for k, star in enumerate(given.stars):
            for j, v in enumerate(star.scope):
                around[v].append((k, j))
                self._own[v] += self.moved[k][j]
        # [S] for each star and variable: its least price in each hidden state
        self._least = [
            [_least(c, m) for c, m in zip(star.columns, ms, strict=True)]
            for star, ms in zip(given.stars, self.moved, strict=True)
        ]
        # by the first term that a variable is in, which is the order of the program
        order = sorted(range(len(given.unary)), key=lambda v: (around[v][:1], v))
        self._turns = _turns(given, around, order), _turns(given, around, order[::-1])
        self.work = sum(len(s.base) * len(given.unary[v]) + _CALL for s in given.stars for v in s.scope)

    def bound_s(self) -> float:
        """The sum of all least values: no assignment costs less."""
        total = self.given.constant_s + sum(float(u.min()) for u in self._own)
        for star, least in zip(self.given.stars, self._least, strict=True):
            total += float((star.base + sum(least)).min())
        return total - 1e-12 * abs(total)  # of the sums in floating point

    def sweep(self, *, backwards: bool) -> None:
        """Once over all variables: each takes what its terms can give, and hands it to those whose other variables come later."""
        for turn in self._turns[backwards]:
            own = self._own[turn.variable]
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
        """An assignment (an index into each domain): one variable after the other at its best, those before it held."""
        least = [list(ls) for ls in self._least]
        found = [0] * len(self._own)
        for turn in self._turns[False]:
            total = self._own[turn.variable].copy()
            for k, j in turn.around:
                total += self._marginal(k, j, least[k])
            at = found[turn.variable] = int(total.argmin())
            for k, j in turn.around:
                column, moved = self.given.stars[k].columns[j], self.moved[k][j]
                least[k][j] = (np.where(column == at, 0.0, np.inf) if column.ndim == 1 else column[:, at]) - moved[at]
        return tuple(found)

    def at_least_s(self) -> tuple[Floats, ...]:
        """For each variable [D]: no assignment with it in that state costs less."""
        bound, tops = self.bound_s(), [0.0] * len(self.given.stars)
        for k, (star, least) in enumerate(zip(self.given.stars, self._least, strict=True)):
            tops[k] = float((star.base + sum(least)).min())
        found: list[Floats] = []
        for turn in sorted(self._turns[False], key=lambda t: t.variable):
            own = self._own[turn.variable]
            total = own + bound - float(own.min())
            for k, j in turn.around:
                total = total + self._marginal(k, j) - tops[k]
            found.append(total - 1e-12 * abs(bound))
        return tuple(found)

    def _marginal(self, k: int, j: int, least: Sequence[Floats] | None = None) -> Floats:
        """[D]: the least that a star can cost by now in each state of its j-th variable; ``least`` in place of the star's own."""
        star = self.given.stars[k]
        rest = star.base.copy()
        for i, other in enumerate(self._least[k] if least is None else least):
            if i != j:
                rest += other
        column = star.columns[j]
        if column.ndim == 1:
            found = rest.reshape(-1, len(self.moved[k][j])).min(axis=0)
        else:
            found = (column + rest[:, None]).min(axis=0)
        return found - self.moved[k][j]


def _turns(given: Stars, around: Sequence[Sequence[tuple[int, int]]], order: Sequence[int]) -> tuple[_Turn, ...]:
    rank = {v: i for i, v in enumerate(order)}
    found: list[_Turn] = []
    for v in order:
        later = tuple(at for at in around[v] if any(rank[u] > rank[v] for u in given.stars[at[0]].scope))
        earlier = sum(any(rank[u] < rank[v] for u in given.stars[k].scope) for k, _ in around[v])
        found.append(_Turn(v, tuple(around[v]), later, max(len(later), earlier, 1)))
    return tuple(found)


def _least(column: Column, moved: Floats) -> Floats:
    """[S]: the least price of a variable in each hidden state, after what was moved to the variable."""
    if column.ndim == 1:
        return -moved[column.astype(np.int64, copy=False)]
    return (column - moved).min(axis=1)


def ascend(ascent: Ascent, *, known_s: float, work: float = WORK, enough: float = ENOUGH) -> float:
    """The bound in seconds once little is gained, it is near ``known_s`` (an assignment's cost), or ``work`` is done."""
    best = ascent.bound_s()
    for _ in range(min(MOST_SWEEPS // 2, max(1, round(work / (2 * ascent.work))))):
        ascent.sweep(backwards=False)
        ascent.sweep(backwards=True)
        now = ascent.bound_s()
        done = now - best < enough * abs(now) or now >= known_s * (1 - enough)
        best = max(best, now)
        if done:
            break
    return best


def narrowed(ascent: Ascent, domains: Sequence[Domain], known_s: float) -> tuple[Domain, ...]:
    """The states of each variable that an assignment as good as one of ``known_s`` may have: every optimum is among them."""
    return tuple(
        tuple(s for s, least in zip(d, at_least, strict=True) if least <= known_s)
        for d, at_least in zip(domains, ascent.at_least_s(), strict=True)
    )


class Bound:
    """A lower bound on the seconds of every plan within the pins and the memory limit, found when it is first asked for.

    ``unlimited_s`` is the optimum without a memory limit, where that was found.
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
        work: float = WORK,
    ) -> None:
        """``free`` is the best solution without a memory limit, ``chosen`` the best within it, ``work`` as in `ascend`.

        ``known_s`` is a bound that is known without looking.
        """
        self.unlimited_s = unlimited_s
        self._problem, self._live, self._domains = problem, live, domains
        self._free, self._chosen, self._limit, self._known_s, self._work = free, chosen, limit, known_s, work

    @property
    def free_s(self) -> float:
        """Seconds of the best solution that was found without a memory limit."""
        return self._free.seconds

    @cached_property
    def seconds(self) -> float:
        """The optimum where nothing else binds, else the better of it and of what dual ascent finds."""
        best = self.unlimited_s if self.unlimited_s is not None else self._without_limit()
        return best if self._free.peak_bytes <= self._limit else max(best, self._at_limit())

    def _without_limit(self) -> float:
        given = stars(self._problem, self._domains, worst_s=_WORST * self._chosen.seconds)
        return max(self._known_s, ascend(Ascent(given), known_s=self._free.seconds, work=self._work))

    def _at_limit(self) -> float:
        """At the best price on bytes, looked for from the one at which the unlimited plan is worth as much as the chosen."""
        points = tuple(sorted({self._peak(self._free), self._peak(self._chosen)}))
        saved = max(self._free.peak_bytes - self._chosen.peak_bytes, 1) * len(points)
        start = max(self._chosen.seconds - self._free.seconds, 1e-9 * self._chosen.seconds) / saved
        found: dict[int, float] = {}
        last: list[list[Floats]] | None = None

        def at(power: int) -> float:
            """The bound at one price on bytes, this power of two times the first."""
            nonlocal last
            if power not in found:
                given = stars(
                    self._problem,
                    self._domains,
                    worst_s=_WORST * self._chosen.seconds,
                    live=self._live,
                    prices=Prices(points, start * 2.0**power),
                    limit=self._limit + memory.SLACK,
                )
                ascent = Ascent(given, last)
                found[power] = ascend(ascent, known_s=self._chosen.seconds, work=self._work / _PRICES)
                last = ascent.moved
            return found[power]

        step = 1 if at(1) > at(0) else -1
        power = max(step, 0)
        while len(found) < _PRICES and at(power + step) > at(power):
            power += step
        return max(found.values())

    def _peak(self, held: Solution) -> int:
        return int(memory.profile(self._problem, self._live, held.states, held.keep, held.limits).argmax())
