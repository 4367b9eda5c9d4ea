"""The best plan of a step, unchanged or, where the memory limit costs time, with activations recomputed.

Each choice of parts to recompute is a program of its own (`shardplan.remat`), searched like any other: all parts, all but
contractions, and as few parts as pay of the better of these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardplan.constants import CONSTANTS
from shardplan.cost import compute
from shardplan.graph.flattening import flatten
from shardplan.graph.nodes import Graph
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.planning.candidates import Candidates, Planned
from shardplan.planning.factorings import best_of_factorings
from shardplan.planning.matrices import best_of_matrices
from shardplan.planning.multiplier import best_overlapped, cut_short, step_time_s
from shardplan.planning.wanted import Found, Known, Wanted
from shardplan.remat import (
    Part,
    Policy,
    Remat,
    Without,
    find,
    rematerialised,
)
from shardplan.search.coarsening.coarsen import Coarse, coarsen
from shardplan.search.coarsening.variables import OneChoice
from shardplan.search.inference import anytime
from shardplan.search.strategy.pins import Pins, all_or_none_pinned


@dataclass(frozen=True, slots=True)
class Searcher:
    """Searches programs of one step under the same conditions. ``replicate`` as in `shardplan.plan`; ``shared`` is its
    ``one_choice``, or None for "auto". What it finds is offered to ``candidates``.
    """

    replicate: Sequence[str]
    shared: OneChoice | None
    cluster: Cluster
    wanted: Wanted
    candidates: Candidates = field(default_factory=Candidates)

    def plain(self, program: Program) -> Planned:
        """The best plan of the unchanged step."""
        return self._planned(program, self._flat(program), self.wanted, Remat())

    def auto(self, program: Program) -> Planned:
        """The best plan of the step, unchanged or with parts recomputed; none where the limit costs nothing."""
        graph = self._flat(program)
        unfinished = Remat(note="the search was interrupted before")
        plain = self._planned(program, graph, self._part(0, 0.4, half=True), unfinished)
        outcome = plain.found[1]
        if not outcome.limit_costs and not outcome.stopped:
            return _annotated(plain, None, "the memory limit costs nothing")
        parts = _all_parts(program, graph)
        if not parts:
            return _annotated(plain, None, "the step keeps nothing for a backward pass that could be computed again")
        without = Without(step_time_s(plain.found), outcome.best.peak_bytes, outcome.best.fits(self.wanted.memory))
        self.candidates.settle(plain)
        best = self._over(plain)._with_parts(plain, parts, without)
        note = "" if best.remat.parts else "computing activations again was not faster"
        return _annotated(best, without, note)

    def _over(self, plain: Planned) -> Searcher:
        """The same search over the factors of a plan alone."""
        if self.wanted.axes is not None:
            return self
        return replace(self, wanted=replace(self.wanted, factors=plain.found[0].factors))

    def _with_parts(self, plain: Planned, parts: dict[Policy, tuple[Part, ...]], without: Without) -> Planned:
        best, last = plain, plain
        step = 0.6 / (len(parts) + CONSTANTS.fewer_parts)
        start = 0.4
        for policy, choice in parts.items():
            last = self._try(plain.program, self._part(start, start + step, half=True), Remat(choice, policy, without))
            start += step
            best = self._better(last, best)
            self.candidates.settle(best)
        chosen = best.remat.parts
        low, high = 0, len(chosen)
        while high - low > 1 and start < 1.0 - step / 2 and not self._expired():
            middle = (low + high) // 2
            fewer = replace(best.remat, parts=chosen[:middle])
            last = self._try(plain.program, self._part(start, start + step), fewer)
            start += step
            if self._better(last, best) is last:
                best, high = last, middle
            else:
                low = middle
            self.candidates.settle(best)
        return best

    def _try(self, program: Program, wanted: Wanted, remat: Remat) -> Planned:
        recomputed = rematerialised(program, remat.parts)
        return self._planned(recomputed, self._flat(recomputed), wanted, remat)

    def _flat(self, program: Program) -> Graph:
        return flatten(program, replicate=self.replicate, backend=self.wanted.backend)

    def _planned(self, program: Program, graph: Graph, wanted: Wanted, remat: Remat) -> Planned:
        """The best plan of one program; all that is found on the way is offered to the candidates."""

        def offer(found: Found) -> None:
            self.candidates.offer(Planned(program, found, remat))

        return Planned(program, self._best(graph, replace(wanted, offer=offer)), remat)

    def _best(self, graph: Graph, wanted: Wanted) -> Found:
        """The best outcome. Equal layers of a deep step share one choice (`_tied`) unless memory is short, or the user says what
        factors are for: then layers that differ may be the only way.
        """
        wanted.observer("coarsening", 0.0)
        coarse = coarsen(graph, self.shared or "timesteps")
        free = self.shared is None and wanted.axes is None
        tied = _tied(graph, coarse, wanted.pins) if free else None
        if tied is None:
            return self._among(graph, coarse, wanted)
        found = self._among(graph, tied, _in_half(wanted, 0.0))
        problem, outcome = found
        if outcome.stopped or not outcome.limit_costs:
            return found
        again = replace(_in_half(wanted, 0.5), factors=problem.factors)
        loose = self._among(graph, coarse, again)
        if loose[1].stopped:
            found = cut_short(found, loose[1].stopped)
        return min(loose, found, key=lambda f: f[1].best.rank(wanted.memory, step_time_s(f)))

    def _among(self, graph: Graph, coarse: Coarse, wanted: Wanted) -> Found:
        """The best outcome over all factorings or matrices, for the given variables."""
        best, known = best_of_factorings if wanted.axes is None else best_of_matrices, Known()
        if not wanted.objective.overlaps:
            return best(graph, coarse, self.cluster, wanted, known)
        search = partial(best, graph, coarse, self.cluster, known=known)
        return best_overlapped(search, self.cluster.device.contention, wanted)

    def _better(self, a: Planned, b: Planned) -> Planned:
        """The one that comes first; of equals the second."""
        return a if a.rank(self.wanted.memory) < b.rank(self.wanted.memory) else b

    def _expired(self) -> bool:
        return self.wanted.deadline is not None and anytime.now_s() >= self.wanted.deadline

    def _part(self, first: float, end: float, *, half: bool = False) -> Wanted:
        """The conditions for a share of the whole search: its progress and, with ``half``, half of the time left."""
        deadline = self.wanted.deadline
        if half and deadline is not None:
            deadline -= max(0.0, deadline - anytime.now_s()) / 2

        def tell(what: str, part: float) -> None:
            self.wanted.observer(what, first + (end - first) * part)

        return replace(self.wanted, deadline=deadline, observer=tell)


def _in_half(wanted: Wanted, first: float) -> Wanted:
    """The conditions for one of two searches: its progress is the half from ``first`` on."""
    return replace(wanted, observer=lambda what, part: wanted.observer(what, first + part / 2))


def _tied(graph: Graph, coarse: Coarse, pins: Pins) -> Coarse | None:
    """The variables where equal layers share one choice; None if those are many, or if a pin of one layer would bind another."""
    tied = coarsen(graph, "layers")
    few = len(tied.variables) <= CONSTANTS.deep_share * len(coarse.variables)
    return tied if few and all_or_none_pinned(graph, tied, pins) else None


def _all_parts(program: Program, graph: Graph) -> dict[Policy, tuple[Part, ...]]:
    """The parts that may be recomputed under each policy; policies with equal parts are listed once."""
    heavy = {
        (n.where, n.op.id)
        for n in graph.nodes
        if n.signature.description is not None and compute.is_contraction(n.signature.description)
    }
    found: dict[Policy, tuple[Part, ...]] = {}
    for policy in ("all", "light"):
        parts = find(program, lambda where, op_id: (where, op_id) in heavy, policy)
        if parts and parts not in found.values():
            found[policy] = parts
    return found


def _annotated(planned: Planned, without: Without | None, note: str) -> Planned:
    return replace(planned, remat=replace(planned.remat, without=without, note=note))
