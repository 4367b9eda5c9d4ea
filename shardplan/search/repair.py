"""Into the memory limit by single steps: one price on bytes finds only the plans on the convex hull of seconds and bytes.

Where the next plan on the hull is much slower than one that holds a little too much, a few layouts of the latter are changed: at
its peak whatever gives the most bytes for the least seconds, until it fits. What is faster and still fits, `exchange` finds then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.search import memory
from shardplan.search.exchange import costs
from shardplan.search.pricing import Domain
from shardplan.search.solver import Solution, Solver
from shardplan.search.tables import BIG

STEPS = 40
"""So many changes at most."""

_LEAST = 0.02  # a variable that holds less than this part of what is too much is left as it is

_LARGEST = 24  # so many variables, those that hold the most at the peak, are looked at in a step


@dataclass(frozen=True, slots=True)
class _Move:
    """Another state of a variable, or (``state`` None) a backward view that no longer keeps the forward copy."""

    variable: int
    state: int | None
    seconds: float
    saved: float


def repaired(solver: Solver, domains: Sequence[Domain], start: Solution, limit: int) -> Solution | None:
    """A solution like ``start`` that fits, or None where ``STEPS`` changes do not get there."""
    current = start
    for _ in range(STEPS):
        if current.fits(limit):
            return current
        over = current.peak_bytes - limit
        moves = list(_moves(solver, domains, current, over))
        if not moves:
            return None
        best = min(moves, key=lambda m: (m.seconds / min(m.saved, over), -m.saved, m.variable))
        current = _moved(solver, current, best)
    return None


def _moves(solver: Solver, domains: Sequence[Domain], current: Solution, over: int) -> Iterator[_Move]:
    problem, live, peak = solver.problem, solver.live, solver.peak_point(current)
    held = live.stored_at(peak, len(domains))[:-1]
    for v, nbytes, first, last in live.copies:
        if first <= peak <= last and current.states[v] != current.states[problem.coarse.variables[v].of]:
            held[v] += nbytes
    owns = np.array([memory.local_bytes(problem, v, s) for v, s in enumerate(current.states)])
    largest: list[int] = np.argsort(-held * owns, kind="stable")[:_LARGEST].tolist()
    for v in largest:
        own = float(owns[v])
        if held[v] * own < _LEAST * over:
            break
        priced = costs(solver, domains, current, (v,))
        seconds_of = np.where(priced >= BIG, np.inf, priced / 1e12)
        now = seconds_of[domains[v].index(current.states[v])]
        for state, seconds in zip(domains[v], seconds_of.tolist(), strict=True):
            saved = held[v] * (own - memory.local_bytes(problem, v, state))
            if saved > 0 and math.isfinite(seconds):
                yield _Move(v, state, seconds - now, saved)
    for v, nbytes, first, last in live.kept:
        if v in current.keep and first < peak < last:
            saved = nbytes * memory.local_bytes(problem, v, current.states[v])
            if saved >= _LEAST * over:
                yield _Move(v, None, _gathering_s(solver, current, v), saved)


def _gathering_s(solver: Solver, current: Solution, v: int) -> float:
    """The seconds that making a backward view anew costs over making it from the copy that is kept."""
    problem, states = solver.problem, current.states
    variable = problem.coarse.variables[v]
    tensor = problem.graph.tensors[variable.tensors[0]]
    again = problem.prices(tensor.shape, tensor.nbytes, (states[variable.of],))[0, states[v]]
    kept = problem.kept_seconds(v, (states[variable.sibling],), (states[v],), 0.0)[0, 0]
    return float(again - kept) * problem.view_weight[v]


def _moved(solver: Solver, current: Solution, move: _Move) -> Solution:
    states, keep = list(current.states), current.keep
    if move.state is None:
        keep = keep - {move.variable}
    else:
        states[move.variable] = move.state
    return solver.rate("plan", tuple(states), solver.problem.regathered(keep), current.regather, current.limits)
