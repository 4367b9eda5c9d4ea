"""Small changes that bring a plan within the memory limit: prices on bytes find only plans on the convex hull of time and bytes.

Where the next plan on the hull is much slower than one slightly over the limit, `repaired` changes a few layouts of the latter:
at each step the change at the peak that saves the most bytes per second lost, until the plan fits. A price moves all equal layers
at once and jumps over plans between two of its optima. Therefore `faster` exchanges, one by one, the parts in which two solutions
on both sides of the limit differ. Then it changes single layouts, and pairs of layouts that meet in an op, as long as the plan
gets faster and fits. `smaller` does the same to save bytes if nothing fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.search.coarsening.variables import Sets
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.cost_tables import BIG, seconds_of_each
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.solution import Solution
from shardplan.search.strategy.polish import near


@dataclass(frozen=True, slots=True)
class _Move:
    """Another state of a variable, or (``state`` None) a backward view that no longer keeps the forward copy."""

    variable: int
    state: int | None
    seconds: float
    saved: float


def repaired(solver: Solver, domains: Sequence[Domain], start: Solution, limit: int) -> Solution | None:
    """``start`` with layouts changed until it fits, or None where ``repair_steps`` changes are not enough."""
    current, known = start, _Savings(solver, domains)
    for _ in range(CONSTANTS.repair_steps):
        if current.fits(limit):
            return current
        excess = current.peak_bytes - limit
        moves = list(_moves(solver, known, current, excess))
        if not moves:
            return None
        best = min(moves, key=lambda m: (m.seconds / min(m.saved, excess), -m.saved, m.variable))
        before, current = current, _moved(solver, current, best)
        known.changed({best.variable, *(before.keep ^ current.keep)})
    return None


class _Savings:
    """For each variable, the states that need less memory and their extra seconds. An entry is dropped when a neighbouring
    variable changes.
    """

    def __init__(self, solver: Solver, domains: Sequence[Domain]) -> None:
        self._solver, self._domains = solver, domains
        self._known: dict[int, tuple[Domain, NDArray[np.float64], NDArray[np.float64]]] = {}

    def of(self, v: int, now: Solution) -> tuple[Domain, NDArray[np.float64], NDArray[np.float64]]:
        """(the states in which less of a variable is held, the fraction that each saves, the extra seconds of each)."""
        if v not in self._known:
            problem, here = self._solver.problem, now.states[v]
            saved = memory.local_part(problem, v, here) - problem.local(v, self._domains[v])
            less = tuple(itertools.compress(self._domains[v], (saved > 0).tolist()))
            if less:
                domains = [*self._domains[:v], (here, *less), *self._domains[v + 1 :]]
                by_state = seconds_of_each(costs(self._solver, domains, now, (v,)))
                self._known[v] = less, saved[saved > 0], by_state[1:] - by_state[0]
            else:
                self._known[v] = (), np.zeros(0), np.zeros(0)
        return self._known[v]

    def changed(self, variables: Collection[int]) -> None:
        """Drops the entries of these variables and of their neighbours."""
        for s in (summand for v in variables for summand in self._solver.problem.around.get(v, ())):
            for v in s.scope:
                self._known.pop(v, None)


def _moves(solver: Solver, known: _Savings, current: Solution, excess: int) -> Iterator[_Move]:
    problem, live, peak = solver.problem, solver.live, solver.peak_point(current)
    problem.tidy()
    held = live.lifetimes.stored_at(peak, len(current.states))[:-1]
    for life in live.lifetimes.of("copy"):
        if peak in life and life.holds(problem, current.states, current.keep):
            held[life.variable] += life.nbytes
    fractions = np.array([memory.local_part(problem, v, s) for v, s in enumerate(current.states)])
    largest: list[int] = np.argsort(-held * fractions, kind="stable")[: CONSTANTS.repair_variables].tolist()
    for v in largest:
        if held[v] * fractions[v] < CONSTANTS.repair_share * excess:
            break
        for state, saved, seconds in zip(*known.of(v, current), strict=True):
            if math.isfinite(seconds) and held[v] > 0:
                yield _Move(v, state, float(seconds), float(held[v] * saved))
    for life in live.lifetimes.of("kept"):
        v = life.variable
        if v in current.keep and peak in life:
            saved = life.nbytes * memory.local_part(problem, v, current.states[v])
            if saved >= CONSTANTS.repair_share * excess:
                yield _Move(v, None, _gathering_s(solver, current, v), saved)


def _gathering_s(solver: Solver, current: Solution, v: int) -> float:
    """The extra seconds of gathering a backward view again rather than making it from the kept copy."""
    problem, states = solver.problem, current.states
    variable = problem.coarse.variables[v]
    regather_s = problem.copying_s(v, (states[variable.of],), (states[v],))[0, 0]
    kept = problem.kept_seconds(v, (states[variable.sibling],), (states[v],), 0.0)[0, 0]
    return float(regather_s - kept) * problem.view_weight[v]


def _moved(solver: Solver, current: Solution, move: _Move) -> Solution:
    states, keep = list(current.states), current.keep
    if move.state is None:
        keep = keep - {move.variable}
    else:
        states[move.variable] = move.state
    return solver.rate("plan", tuple(states), solver.problem.regathered(keep), current.regather, current.limits)


# -- exchanges ---------------------------------------------------------------------------------------------------------


def faster(solver: Solver, domains: Sequence[Domain], limit: int, solutions: Sequence[Solution]) -> Solution | None:
    """The fastest solution within ``limit`` bytes that is built from these; None if none of them fits."""
    fitting = sorted((s for s in solutions if s.fits(limit)), key=lambda s: s.seconds)
    if not fitting:
        return None
    best = fitting[0]
    left = _Budget(CONSTANTS.repair_trials)
    over = sorted({s for s in solutions if not s.fits(limit) and s.seconds < best.seconds}, key=lambda s: s.seconds)
    for other in over[: CONSTANTS.exchanges]:
        best = min((best, _exchanged(solver, limit, fitting[0], other, left)), key=lambda s: s.seconds)
    return _descended(solver, domains, limit, best, left)


def smaller(solver: Solver, domains: Sequence[Domain], start: Solution) -> Solution:
    """A solution with fewer bytes than ``start``, if changing a few layouts at a time finds one; else ``start``."""
    best, left = start, _Budget(CONSTANTS.repair_trials)
    while left.more():
        trial = _smallest_step(solver, domains, best, left)
        if trial is None:
            break
        best = trial
    return best


class _Budget:
    def __init__(self, trials: int) -> None:
        self._left = trials

    def more(self) -> bool:
        """Whether one more change may be tried; counts it."""
        self._left -= 1
        return self._left >= 0


def _rated(solver: Solver, like: Solution, states: Sequence[int], keep: frozenset[int]) -> Solution:
    return solver.rate(like.name, tuple(states), solver.problem.regathered(keep), like.regather, like.limits)


# -- between two solutions ---------------------------------------------------------------------------------------------


def _exchanged(solver: Solver, limit: int, fits: Solution, fast: Solution, left: _Budget) -> Solution:
    """``fits`` with as many parts of ``fast`` as the limit allows; the parts that gain the most go first."""
    parts = _parts(solver, fits, fast)
    if len(parts) < 2:
        return fits
    singly: list[tuple[float, list[int]]] = []
    for part in parts:
        if left.more():
            trial = _with(solver, fits, fast, part)
            singly.append((fits.seconds - trial.seconds, part))
    best, taken = fits, list[int]()
    for gain, part in sorted(singly, key=lambda row: (-row[0], row[1])):
        if gain > 0 and left.more():
            trial = _with(solver, fits, fast, [*taken, *part])
            if trial.fits(limit) and trial.seconds < best.seconds:
                best, taken = trial, [*taken, *part]
    return best


def _with(solver: Solver, base: Solution, other: Solution, variables: Sequence[int]) -> Solution:
    chosen = set(variables)
    states = [b if v in chosen else a for v, (a, b) in enumerate(zip(base.states, other.states, strict=True))]
    return _rated(solver, base, states, frozenset((base.keep - chosen) | (other.keep & chosen)))


def _parts(solver: Solver, a: Solution, b: Solution) -> list[list[int]]:
    """The variables in which two solutions differ, in groups that no term connects: each may be exchanged alone."""
    differing = {v for v, (s, t) in enumerate(zip(a.states, b.states, strict=True)) if s != t} | (a.keep ^ b.keep)
    sets = Sets(len(a.states))
    for scope in solver.problem.scopes:
        mine = [v for v in scope if v in differing]
        for v in mine[1:]:
            sets.union(mine[0], v)
    groups: dict[int, list[int]] = {}
    for v in sorted(differing):
        groups.setdefault(sets.find(v), []).append(v)
    return list(groups.values())


# -- one layout, or two ------------------------------------------------------------------------------------------------


def _descended(solver: Solver, domains: Sequence[Domain], limit: int, start: Solution, left: _Budget) -> Solution:
    """Changes one or two layouts, or a copy kept for the backward pass, the best change first, as long as that helps."""
    best = start
    while True:
        improved = _one_pass(solver, domains, limit, best, left)
        if improved is best:
            return best
        best = improved


def _one_pass(solver: Solver, domains: Sequence[Domain], limit: int, now: Solution, left: _Budget) -> Solution:
    """One pass over the changes that each save time from ``now``; each is tried on top of those already accepted."""
    if len(solver.problem.sizes) > 2:  # as in a polish, one factor changes at a time
        domains = near(solver.problem, domains, now)
    changes = sorted(
        (c for group in _neighbours(solver, domains) for c in _gains(solver, domains, now, group)), key=lambda c: (-c[0], c[1:])
    )
    for _, variables, states in changes:
        if not left.more():
            return now
        changed = list(now.states)
        for v, s in zip(variables, states, strict=True):
            changed[v] = s
        trial = _rated(solver, now, changed, now.keep)
        if trial.fits(limit) and trial.seconds < now.seconds:
            now = trial
    for v in solver.problem.backward_views:
        if v not in now.keep and left.more():
            trial = _rated(solver, now, now.states, now.keep | {v})
            if trial.fits(limit) and trial.seconds < now.seconds:
                now = trial
    return now


def _neighbours(solver: Solver, domains: Sequence[Domain]) -> Iterator[tuple[int, ...]]:
    """The variables to choose anew: each one with a choice, and on small problems each pair that shares a table."""
    free = [v for v, d in enumerate(domains) if len(d) > 1]
    yield from ((v,) for v in free)
    if len(free) <= CONSTANTS.repair_pairs:
        pairs = {pair for scope in solver.problem.scopes for pair in itertools.combinations(sorted(set(scope)), 2)}
        yield from sorted(p for p in pairs if all(len(domains[v]) > 1 for v in p))


def _gains(
    solver: Solver, domains: Sequence[Domain], now: Solution, variables: tuple[int, ...]
) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """(picoseconds saved, variables, their new states) of all changes of these variables that save time."""
    total = costs(solver, domains, now, variables)
    here = tuple(domains[v].index(now.states[v]) for v in variables)
    saved = np.where(total >= BIG, -1, int(total[here]) - total)
    return [
        (float(saved[at]), variables, tuple(domains[v][i] for v, i in zip(variables, at, strict=True)))
        for at in (tuple(int(i) for i in row) for row in np.argwhere(saved > 0))
    ]


def costs(solver: Solver, domains: Sequence[Domain], now: Solution, variables: Sequence[int]) -> NDArray[np.int64]:
    """[*domain sizes of the variables]: picoseconds of their terms, all others fixed; at least `tables.BIG` where infeasible."""
    own: list[Domain] = [(s,) for s in now.states]
    for v in variables:
        own[v] = domains[v]
    regather_s = solver.problem.regathered(now.keep)
    total = np.zeros([len(domains[v]) for v in variables], np.int64)
    for n, v in enumerate(variables):
        for term in solver.problem.terms_of(v, own, regather_s, now.limits):
            if not set(term.scope) & set(variables[:n]):  # counted already
                total = total + _spread(solver.problem.store.tables[term.table], term.scope, variables) + term.constant
    return total


def _spread(table: NDArray[np.int64], scope: Sequence[int], variables: Sequence[int]) -> NDArray[np.int64]:
    """A table over ``scope`` as an array over ``variables``; all other variables have one state."""
    kept = [v for v in scope if v in variables]
    squeezed = table.reshape([n for v, n in zip(scope, table.shape, strict=True) if v in variables])
    moved = squeezed.transpose(sorted(range(len(kept)), key=lambda i: variables.index(kept[i])))
    shape = iter(moved.shape)
    return moved.reshape([next(shape) if v in kept else 1 for v in variables])


# -- the fewest bytes --------------------------------------------------------------------------------------------------


def _smallest_step(solver: Solver, domains: Sequence[Domain], now: Solution, left: _Budget) -> Solution | None:
    """The smallest solution after one change at the peak: one layout (two on small problems), or a kept copy dropped. None if no
    such change holds fewer bytes.
    """
    problem, live = solver.problem, solver.live
    held = memory.profile(problem, live, now.states, now.keep, now.limits)
    peak = int(held.argmax())
    here = set(map(int, np.flatnonzero(live.lifetimes.stored_at(peak, len(domains))[:-1])))
    here |= {life.variable for life in live.lifetimes.of("copy") if peak in life}
    node = problem.graph.nodes[peak] if peak < len(problem.graph.nodes) else None
    here |= set(problem.ops.slots(node)[0]) if node is not None and node.id in set(problem.coarse.joins) else set[int]()
    kept = (life.variable for life in live.lifetimes.of("kept") if peak in life)
    trials = [(now.states, now.keep - {v}) for v in kept if v in now.keep]
    for v in sorted(here):
        for state in _smallest(solver, domains, v):
            changed = (*now.states[:v], state, *now.states[v + 1 :])
            trials.append((changed, now.keep))
            for u in _met(solver, v) if len(domains) <= CONSTANTS.repair_pairs else ():
                trials += [
                    ((*changed[:u], s, *changed[u + 1 :]), now.keep) for s in _smallest(solver, domains, u) if s != changed[u]
                ]
    other = [trial for trial in trials if trial != (now.states, now.keep) and left.more()]
    peaks = [memory.peak(problem, live, states, keep, now.limits)[0] for states, keep in other]
    for n in sorted(range(len(other)), key=peaks.__getitem__):
        if peaks[n] >= now.peak_bytes:
            break
        trial = _rated(solver, now, *other[n])
        if math.isfinite(trial.seconds):
            return trial
    return None


def _smallest(solver: Solver, domains: Sequence[Domain], v: int) -> list[int]:
    """The few states of a variable in which a device holds the least of it."""
    local = solver.problem.resharder.space(solver.problem.coarse.variables[v].shape).local
    return sorted(domains[v], key=lambda s: (local[s], s))[:4]


def _met(solver: Solver, v: int) -> list[int]:
    """The variables that share a table with this one."""
    return sorted({u for scope in solver.problem.scopes if v in scope for u in scope} - {v})
