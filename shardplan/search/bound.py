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

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.search import memory
from shardplan.search.coarsen import FREE
from shardplan.search.graph import Link
from shardplan.search.pricing import Domain
from shardplan.search.problem import Problem

Floats = NDArray[np.float64]

SWEEPS = 200
"""No more than so many sweeps: what they gain by then is below a thousandth of the bound a sweep."""

ENOUGH = 1e-5
"""The ascent ends when two sweeps gain less than this part of the bound."""

_ROUNDED_S = 1e-12  # tables are rounded to picoseconds: by so much an assignment may be cheaper for each of its terms


@dataclass(frozen=True, slots=True, eq=False)
class Star:
    """One term: the minimum over hidden states s of ``base[s]`` plus, for each variable, ``columns[j][s, x_j]``.

    A column of one dimension says in which state the variable must be: ``columns[j][s]``.
    """

    scope: tuple[int, ...]
    base: Floats  # [S]
    columns: tuple[Floats | NDArray[np.int64], ...]


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
    limit: int = 0,
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
        self._memo: dict[tuple[object, ...], tuple[Floats, tuple[Floats | NDArray[np.int64], ...]]] = {}

    def build(self, limit: int) -> Stars:
        problem = self.problem
        unary = [np.zeros(len(d)) for d in self.domains]
        for v, (seconds, _) in problem.interior.items():
            unary[v] += seconds * self._local(v)
        constant = self._price_memory(unary, limit)
        found: list[Star] = []
        for n in problem.coarse.joins:
            node = problem.graph.nodes[n]
            scope, slots, free = problem.slots(node)
            if scope:
                own, late = tuple(self.domains[v] for v in scope), problem.deferring.get(n)
                key = ("op", node.signature.id, slots, free, node.weight, late, own)
                if key not in self._memo:
                    base, columns = problem.pricer.strategy_costs(node.signature, slots, free, own, late=late)
                    self._memo[key] = self._finite(base * node.weight), tuple(self._finite(c * node.weight) for c in columns)
                found.append(Star(scope, *self._memo[key]))
        for link in problem.graph.links:
            self._link(link, unary, found)
        for variable in problem.coarse.variables:
            if variable.kind != "stored":
                found.append(self._view(variable.id))
        return Stars(tuple(unary), tuple(found), constant)

    def _finite(self, costs: Floats) -> Floats:
        return np.minimum(costs, self.worst_s)

    def _local(self, v: int) -> Floats:
        """[D]: the part of a variable's tensors that one device holds in each of its states."""
        space = self.problem.resharder.space(len(self.problem.coarse.variables[v].shape))
        return space.local[list(self.domains[v])]

    def _price_memory(self, unary: list[Floats], limit: int) -> float:
        """Charges what `memory.profile` counts at the points; the constant is what has no variable, less the limit's price."""
        points, price = self.prices.points, self.prices.seconds_per_byte
        if not points or price == 0.0:
            return 0.0
        assert self.live is not None
        live, constant = self.live, 0.0
        for p in points:
            at = (live.birth <= p) & (live.death >= p)
            weight = np.zeros(len(unary))
            np.add.at(weight, live.variable[at & (live.variable >= 0)], live.nbytes[at & (live.variable >= 0)])
            for v in np.flatnonzero(weight):
                unary[int(v)] += price * weight[v] * self._local(int(v))
            constant += price * (float(live.nbytes[at & (live.variable < 0)].sum()) - limit)
            for v, nbytes, first, last in live.copies:
                self.held[v] = self.held.get(v, 0.0) + price * nbytes * (first <= p <= last)
            for v, nbytes, first, last in live.kept:
                self.kept[v] = self.kept.get(v, 0.0) + price * nbytes * (first < p < last)
        return constant

    def _link(self, link: Link, unary: list[Floats], found: list[Star]) -> None:
        problem = self.problem
        a, b = problem.coarse.of[link.source], problem.coarse.of[link.target]
        if FREE in (a, b) or (a == b and link.lift == 0):
            return
        source, target = problem.graph.tensors[link.source], problem.graph.tensors[link.target]
        outer = target if link.lift < 0 else source
        before = problem.lifted(self.domains[a], source.shape, link.lift < 0)
        after = problem.lifted(self.domains[b], target.shape, link.lift > 0)
        costs = self._finite(problem.prices(outer.shape, outer.nbytes, before)[:, list(after)] * link.weight)
        if a == b:
            unary[a] += np.diag(costs)
        else:
            found.append(Star((a, b), np.zeros(len(after)), (np.ascontiguousarray(costs.T), np.arange(len(after)))))

    def _view(self, v: int) -> Star:
        """The hidden state of a view is its own state; of a backward one that, and whether the forward copy is kept."""
        problem, variable = self.problem, self.problem.coarse.variables[v]
        mine = self.domains[v]
        key = (
            "view", variable.shape, problem.graph.tensors[variable.tensors[0]].itemsize, problem.view_weight[v], mine,
            self.domains[variable.of], self.domains[variable.sibling] if variable.kind == "backward" else (),
            self.held.get(v, 0.0), self.kept.get(v, 0.0),
        )  # fmt: skip
        if key not in self._memo:
            again = self._made(v, self.domains[variable.of])
            other = np.array([[a != b for a in self.domains[variable.of]] for b in mine], float) * self._local(v)[:, None]
            held = self.held.get(v, 0.0) * other
            at = np.arange(len(mine))
            if variable.kind == "view":
                self._memo[key] = np.zeros(len(mine)), (again + held, at)
            else:
                kept = self._made(v, self.domains[variable.sibling])
                of = np.concatenate([again + held, held + self.kept.get(v, 0.0) * other])
                first = np.concatenate([np.zeros_like(kept), kept])
                self._memo[key] = np.zeros(2 * len(mine)), (of, first, np.concatenate([at, at]))
        scope = (variable.of, v) if variable.kind == "view" else (variable.of, variable.sibling, v)
        return Star(scope, *self._memo[key])

    def _made(self, v: int, origin: Domain) -> Floats:
        """[D, D_origin]: seconds to make each state of a view from each of an origin's."""
        tensor = self.problem.graph.tensors[self.problem.coarse.variables[v].tensors[0]]
        costs = self.problem.prices(tensor.shape, tensor.nbytes, origin)[:, list(self.domains[v])]
        return np.ascontiguousarray(self._finite(costs * self.problem.view_weight[v]).T)


@dataclass(slots=True)
class Ascent:
    """Costs moved between stars and variables. ``moved[k][j]`` [D] is what star k has given its j-th variable."""

    given: Stars
    moved: list[list[Floats]] = field(init=False)
    _own: list[Floats] = field(init=False)  # [D] of each variable: what it costs by now
    _least: list[list[Floats]] = field(init=False)  # [S] of each star and variable: its least price in each hidden state
    _around: list[list[tuple[int, int]]] = field(init=False)
    _order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        given = self.given
        self._own = [u.copy() for u in given.unary]
        self._around = [[] for _ in given.unary]
        for k, star in enumerate(given.stars):
            for j, v in enumerate(star.scope):
                self._around[v].append((k, j))
        self.moved = [[np.zeros(len(given.unary[v])) for v in star.scope] for star in given.stars]
        self._least = [[_least(c, m) for c, m in zip(s.columns, ms, strict=True)] for s, ms in zip(given.stars, self.moved, strict=True)]
        # by the first term that a variable is in: the order of the program
        self._order = sorted(range(len(given.unary)), key=lambda v: (self._around[v][:1], v))

    def bound_s(self) -> float:
        """The sum of all least values: no assignment costs less."""
        total = self.given.constant_s + sum(float(u.min()) for u in self._own)
        for star, least in zip(self.given.stars, self._least, strict=True):
            total += float((star.base + sum(least)).min())
        rounding = _ROUNDED_S * (len(self.given.stars) + len(self.given.unary))
        return total - rounding - 1e-12 * abs(total)

    def sweep(self, *, backwards: bool) -> None:
        """Once over all variables: each takes what its terms can give, and hands it to those whose other variables come later."""
        rank = {v: i for i, v in enumerate(self._order)}
        sign = -1 if backwards else 1
        for v in reversed(self._order) if backwards else self._order:
            around = self._around[v]
            own = self._own[v]
            later: list[tuple[int, int]] = []
            earlier = 0
            for k, j in around:
                others = [sign * (rank[u] - rank[v]) for u in self.given.stars[k].scope if u != v]
                if any(o > 0 for o in others):
                    later.append((k, j))
                earlier += any(o < 0 for o in others)
                gain = self._marginal(k, j)
                own += gain
                self.moved[k][j] += gain
            share = own / max(len(later), earlier, 1)
            for k, j in later:
                self.moved[k][j] -= share
                own -= share
            for k, j in around:
                self._least[k][j] = _least(self.given.stars[k].columns[j], self.moved[k][j])

    def _marginal(self, k: int, j: int) -> Floats:
        """[D]: the least that a star can cost by now in each state of its j-th variable."""
        star, least = self.given.stars[k], self._least[k]
        rest = star.base.copy()
        for i, other in enumerate(least):
            if i != j:
                rest += other
        column = star.columns[j]
        if column.ndim == 1:
            states = len(self.moved[k][j])
            return rest.reshape(-1, states).min(axis=0) - self.moved[k][j]
        return (column + rest[:, None]).min(axis=0) - self.moved[k][j]


def _least(column: Floats | NDArray[np.int64], moved: Floats) -> Floats:
    """[S]: the least price of a variable in each hidden state, after what was moved to the variable."""
    if column.ndim == 1:
        return -moved[column]
    return (column - moved).min(axis=1)


def ascend(given: Stars, *, deadline: float | None = None, known_s: float = float("inf")) -> tuple[Ascent, float]:
    """(the ascent, its bound in seconds). It ends when little is gained, at ``deadline`` (a `time.monotonic` instant), or within
    ``ENOUGH`` of ``known_s``, the cost of an assignment.
    """
    ascent = Ascent(given)
    bound = ascent.bound_s()
    for n in range(SWEEPS):
        ascent.sweep(backwards=n % 2 == 1)
        if n % 2 == 0 and n:
            continue
        now = ascent.bound_s()
        small = now - bound < ENOUGH * abs(now) and n > 1
        bound = max(bound, now)
        if small or bound >= known_s * (1 - ENOUGH) or (deadline is not None and time.monotonic() > deadline):
            break
    return ascent, bound
