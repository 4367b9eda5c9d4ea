"""The conditions of a search, the protocol of a generator, and the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from shardplan.cost import TIME, Objective
from shardplan.graph.nodes import Graph
from shardplan.ir import Backend, Factor, Program
from shardplan.mesh import Cluster
from shardplan.offload import HostedValue
from shardplan.remat import Remat
from shardplan.search.coarsening.coarsen import Coarse
from shardplan.search.inference.anytime import Best, Observer, Stopped, ignored, unheard
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Company, Problem
from shardplan.search.strategy.pins import Pins
from shardplan.search.strategy.purposes import Purpose
from shardplan.search.strategy.solve import Outcome

Found = tuple[Problem, Outcome]

Known = dict[tuple[Factor, ...], Problem]
"""The problems of one graph by their factors, each at the weights at which it was last searched: others share its prices."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The conditions of a search: bytes per device, donated leaves, pins, a deadline (an instant of `anytime.now_s`), an observer
    of its progress, and the objective to minimise; ``timed`` prices the plan where that is not time. ``factors`` fixes the
    factoring; without ``refine``, levels are taken apart only where no dim divides by them. ``axes`` fixes the sizes of purposes.
    ``again`` has what was found at another multiplier over the factorings that may still win: the search begins with those, from
    these solutions, and leaves out the factorings ``slower``. ``backend`` is what will run the plan. ``company`` are the bytes
    that travel together, where they are known. ``offer`` is called with what the search has found so far: an interrupt loses
    only what was not offered. ``best`` hears of the best plan so far. ``microbatched``: the batch is cut over time already.
    """

    memory: int
    donated: frozenset[int]
    pins: Pins
    deadline: float | None
    observer: Observer
    objective: Objective
    factors: tuple[Factor, ...] | None = None
    refine: bool = True
    axes: Mapping[Purpose, int] | None = None
    timed: Objective = TIME
    backend: Backend = "explicit"
    company: Company | None = None
    again: Mapping[tuple[Factor, ...], Found] = field(default_factory=dict[tuple[Factor, ...], Found])
    slower: frozenset[tuple[Factor, ...]] = frozenset()
    offer: Callable[[Found], None] = ignored
    best: Best = unheard
    microbatched: bool = False


class Generator(Protocol):
    """A generator of candidates: problems over factors of its own choice, each solved, the best of them first.

    A candidate is known by its factors: of two over the same factors, others keep only one.

    It reads all of `Wanted`:

    - `candidate_problem` makes every problem, with ``objective``, ``company``, ``pins`` and the prices of those ``known``.
    - ``factors``, where given, are the only ones searched, and ``axes`` says what each is for.
    - ``again``, where not empty, is searched first, from its solutions, and nothing of ``slower`` is searched.
    - Each outcome is passed to ``offer`` as soon as it is there, with its own row of ``tried``. ``observer`` is told of progress.
    - After ``deadline`` it returns the best so far, as soon as there is one, with ``stopped`` set and ``exact`` false.

    The result is the problem and outcome that rank first (what fits in ``memory``, then the least cost; the smallest if none
    fits). Of that outcome it fills ``others`` with the outcomes that fit too, the fastest first (`multiplier` and `choose` look
    at all of them), ``tried`` with a row for everything searched or left out, with the reason, and ``limit_costs``
    (`solve.limit_costs`).

    Raises:
        PinError: if no candidate can hold the pins.
        ClusterError: if there is no candidate, or a value has too many layouts in all of them.
    """

    def __call__(self, graph: Graph, coarse: Coarse, cluster: Cluster, wanted: Wanted, known: Known, /) -> Found:
        """The best candidate for these variables, on this cluster, under these conditions."""
        ...


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of a search, with its program, the parts of the step that the program recomputes, and the activations that it
    keeps in host memory.
    """

    program: Program
    found: Found
    remat: Remat
    hosted: tuple[HostedValue, ...] = ()

    def rank(self, limit: int) -> tuple[bool, float]:
        """An outcome that fits into ``limit`` bytes comes first, then the shorter step (the smaller one if neither fits)."""
        return self.found[1].best.rank(limit, step_time_s(self.found))


def step_time_s(found: Found) -> float:
    """The seconds of a step under the best solution of an outcome."""
    problem, outcome = found
    return Extractor.of(problem).decide(outcome.best).step_time_s


def cut_short(found: Found, by: Stopped) -> Found:
    """An outcome that a search which was stopped leaves; nothing more is solved for it."""
    problem, outcome = found
    outcome.rivals.close()
    return problem, replace(outcome, stopped=by, exact=False)
