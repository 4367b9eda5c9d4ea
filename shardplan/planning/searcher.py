"""The search of one program: flattened, its variables coarsened, equal layers tied, and its candidates generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardplan.constants import CONSTANTS
from shardplan.graph.flattening import flatten
from shardplan.graph.nodes import Graph
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.planning.factorings import best_of_factorings
from shardplan.planning.fallback import Fallback
from shardplan.planning.multiplier import best_overlapped
from shardplan.planning.purpose_matrices import best_of_matrices
from shardplan.planning.wanted import Found, Generator, Known, Planned, Wanted, cut_short, step_time_s
from shardplan.remat import Remat
from shardplan.search.coarsening.coarsen import Coarse, coarsen
from shardplan.search.coarsening.variables import OneChoice
from shardplan.search.problem.problem import Problem
from shardplan.search.strategy.pins import Pins, all_or_none_pinned


@dataclass(frozen=True, slots=True)
class Searcher:
    """Searches programs of one step under the same conditions. ``replicate`` as in `shardplan.plan`; ``shared`` is its
    ``one_choice``, or None for "auto". Its results are offered to ``fallback``. ``like`` is a problem on such a
    cluster, also of another program: its prices of collectives are shared.
    """

    replicate: Sequence[str]
    shared: OneChoice | None
    cluster: Cluster
    wanted: Wanted
    fallback: Fallback = field(default_factory=Fallback)
    like: Problem | None = None

    def plain(self, program: Program) -> Planned:
        """The best plan of the unchanged step."""
        return self.planned(program, self.flat(program), self.wanted, Remat())

    def flat(self, program: Program) -> Graph:
        """A program with its bodies laid open."""
        return flatten(program, replicate=self.replicate, backend=self.wanted.backend)

    def planned(self, program: Program, graph: Graph, wanted: Wanted, remat: Remat) -> Planned:
        """The best plan of one program; all that is found on the way is offered to the fallback."""

        def offer(found: Found) -> None:
            self.fallback.offer(Planned(program, found, remat))
            self.fallback.tell(wanted)

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
        if outcome.stopped or outcome.limit_costs == 0:
            return found
        again = replace(_in_half(wanted, 0.5), factors=problem.factors)
        loose = self._among(graph, coarse, again)
        if loose[1].stopped:
            found = cut_short(found, loose[1].stopped)
        return min(loose, found, key=lambda f: f[1].best.rank(wanted.memory, step_time_s(f)))

    def _among(self, graph: Graph, coarse: Coarse, wanted: Wanted) -> Found:
        """The best outcome over all candidates, for the given variables."""
        generate, known = generator_of(wanted), Known() if self.like is None else {self.like.factors: self.like}

        def search(at: Wanted) -> Found:
            return generate(graph, coarse, self.cluster, at, known)

        contention = self.cluster.device.contention
        return best_overlapped(search, contention, wanted) if wanted.objective.overlaps else search(wanted)


def generator_of(wanted: Wanted) -> Generator:
    """The generator of the candidates of a search: matrices if the sizes of purposes are given, else factorings.

    One generator answers a search. A generator whose candidates compete with another's calls that generator, and ranks the
    results of both.
    """
    return best_of_factorings if wanted.axes is None else best_of_matrices


def _in_half(wanted: Wanted, first: float) -> Wanted:
    """The conditions for one of two searches: its progress is the half from ``first`` on."""
    return replace(wanted, observer=lambda what, part: wanted.observer(what, first + part / 2))


def _tied(graph: Graph, coarse: Coarse, pins: Pins) -> Coarse | None:
    """The variables where equal layers share one choice; None if those are many, or if a pin of one layer would bind another."""
    tied = coarsen(graph, "layers")
    few = len(tied.variables) <= CONSTANTS.deep_share * len(coarse.variables)
    return tied if few and all_or_none_pinned(graph, tied, pins) else None
