"""The way from a traced program to the solution that becomes its plan: searched, scheduled, chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardplan.constants import CONSTANTS
from shardplan.errors import ClusterError, MemoryLimitError, ShardplanError, size_text
from shardplan.graph.updates import described, value_names
from shardplan.ir import Program, spec_text
from shardplan.planning.choose import Fastest
from shardplan.planning.recomputation import recomputed
from shardplan.planning.scheduled import Scheduled
from shardplan.planning.searcher import Searcher
from shardplan.planning.wanted import Found, Planned, Wanted
from shardplan.search.coarsening.coarsen import FREE
from shardplan.search.inference.anytime import Part, Stopped
from shardplan.search.inference.garbage import uncollected
from shardplan.search.memory import liveness as memory
from shardplan.search.memory.contents import held_at_peak
from shardplan.search.problem.cost_tables import LONGEST_S
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Problem
from shardplan.search.problem.solution import Solution
from shardplan.search.session import Session
from shardplan.search.strategy.pins import held_by_pins, pinned_domains, smallest_conflict
from shardplan.search.strategy.solve import in_seconds


@dataclass(frozen=True, slots=True)
class Made:
    """The result of planning: the searches that led to the plan, the session with its solution, its schedule where the explicit
    backend runs it, and what stopped planning early.
    """

    planned: Planned
    session: Session
    run: Scheduled | None
    stopped: Stopped


def planned(program: Program, searcher: Searcher, origin: str, *, recompute: bool) -> Made:
    """The plan of a program. ``origin`` says where the memory limit comes from; with ``recompute`` activations may be computed
    again.

    Raises:
        MemoryLimitError: if no plan fits.
        ClusterError: if the step takes `LONGEST_S` or more in every layout.
    """
    way = _Way(searcher)
    with uncollected():
        try:
            way.search(program, origin, recompute=recompute)
            way.choose()
        except KeyboardInterrupt:
            if not way.cut_short():
                raise
    return way.made()


_DESCRIBED, _SEARCHED = 0.05, 0.9
"""The progress that is told before and after the search."""


class _Way:
    """How far planning has come: ``planned`` once a search has ended, ``fastest`` once its solution is scheduled.

    An interrupt (`KeyboardInterrupt`) may come anywhere. It is caught here, and by `host_memory`, which has a plan by then.
    """

    def __init__(self, searcher: Searcher) -> None:
        self._searcher, self._wanted = searcher, searcher.wanted
        self._planned: Planned | None = None
        self._fastest: Fastest | None = None
        self._stopped: Stopped = ""

    def search(self, program: Program, origin: str, *, recompute: bool) -> None:
        """Searches for the best solution.

        Raises:
            MemoryLimitError: if no solution fits.
            ClusterError: if the step takes too long to be priced.
        """
        self._found(_searched(program, self._searcher, origin, recompute=recompute))

    def _found(self, planned: Planned) -> None:
        wanted, (problem, outcome) = self._wanted, planned.found
        if outcome.best.seconds >= LONGEST_S:
            raise _too_slow_error(problem)
        self._planned = replace(planned, found=in_seconds(problem, outcome, wanted.donated, wanted.timed))
        self._stopped = outcome.stopped

    def choose(self) -> None:
        """Schedules the solution of the search, and the others that may be faster as scheduled.

        If the user has given the purposes of factors, no baseline may take the plan's place: baselines have other purposes. The
        same holds for the objective "bytes", whose premise baselines do not share.
        """
        assert self._planned is not None
        wanted, planned = self._wanted, self._planned
        if wanted.backend == "explicit":
            if not self._stopped:
                wanted.observer("scheduling", _SEARCHED)
            deadline = None if self._stopped else wanted.deadline
            fastest = self._fastest = Fastest(self._session(planned.found), deadline, wanted.best)
            if not fastest.session.objective.everything_split:
                others = map(self._session, planned.found[1].others)
                fastest.among(others, 1 if self._stopped else CONSTANTS.patience)
                if wanted.axes is None and not self._stopped:
                    fastest.among_baselines()
                if fastest.unfinished:
                    self._stopped = "time budget"
            if self._stopped:
                fastest.session.rivals.close()
        if not self._stopped:
            wanted.observer("done", 1.0)

    def cut_short(self) -> bool:
        """Goes on with the results from before an interrupt. Returns whether a plan fits."""
        self._stopped = "interrupted"
        if self._planned is None:
            if (best := self._searcher.fallback.best(self._wanted.memory)) is None:
                return False
            self._found(best)
        if self._fastest is None:
            self.choose()
        else:
            self._fastest.session.rivals.close()
        return True

    def made(self) -> Made:
        """The result of planning."""
        assert self._planned is not None
        session = self._session(self._planned.found) if self._fastest is None else self._fastest.session
        run = None if self._fastest is None else self._fastest.run
        return Made(_of(self._planned, session), session, run, self._stopped)

    def _session(self, found: Found) -> Session:
        assert self._planned is not None
        return session_of(self._planned.program, found, self._wanted, tuple(self._searcher.replicate))


def _searched(program: Program, searcher: Searcher, origin: str, *, recompute: bool) -> Planned:
    """The best outcome over all factorings; with ``recompute``, also over what to recompute."""
    wanted = searcher.wanted
    wanted.observer("describing", 0.0)
    tell = Part(wanted.observer, _DESCRIBED, _SEARCHED)
    rescaled = replace(wanted, observer=lambda what, part: tell("scheduling" if what == "done" else what, part))
    searcher = replace(searcher, wanted=rescaled)
    planned = recomputed(searcher, program) if recompute else searcher.plain(program)
    problem, outcome = planned.found
    if not outcome.best.fits(wanted.memory):
        smallest = outcome.smallest or outcome.best
        raise _memory_error(
            planned.program, problem, smallest, wanted, origin, stopped=bool(outcome.stopped), recompute=recompute
        )
    return planned


def session_of(program: Program, found: Found, wanted: Wanted, replicate: tuple[str, ...]) -> Session:
    """A session with the best solution of an outcome."""
    problem, outcome = found
    return Session(
        program=program,
        problem=problem,
        solution=outcome.best,
        rivals=outcome.rivals,
        bound=outcome.bound,
        extractor=Extractor.of(problem),
        donated=wanted.donated,
        pins=wanted.pins,
        memory_limit=wanted.memory,
        objective=problem.objective if wanted.objective.counts_time else wanted.objective,
        replicate=replicate,
    )


def _of(planned: Planned, session: Session) -> Planned:
    """The planned program, with the outcome of the session's own factoring."""
    problem, outcome = planned.found
    if session.problem is problem:
        return planned
    own = next(o for p, o in outcome.others if p is session.problem)
    return replace(planned, found=(session.problem, replace(own, tried=outcome.tried)))


def _too_slow_error(problem: Problem) -> ShardplanError:
    """The error for a step that takes `LONGEST_S` or more in every layout tried: tables do not tell such times apart."""
    if problem.objective.everything_split:
        return ShardplanError(
            "objective='bytes' found no layout that splits everything and sends less than a petabyte: use objective='time'"
        )
    return ClusterError(
        f"on {problem.cluster.name or 'this cluster'} the step takes {LONGEST_S:,.0f} s or more in every layout, too long "
        "to compare layouts: check the units of the cluster's figures (bytes and flops per second), or plan a smaller step"
    )


def _memory_error(
    program: Program, problem: Problem, smallest: Solution, wanted: Wanted, origin: str, *, stopped: bool, recompute: bool
) -> MemoryLimitError:
    """The error for a step that does not fit, with the smallest solution found and the pins in the way."""
    live = memory.liveness(problem, wanted.donated)

    def may_fit(globs: Sequence[str]) -> bool:
        domains = pinned_domains(problem, {glob: wanted.pins[glob] for glob in globs})
        return memory.floor_bytes(problem, live, domains) <= wanted.memory

    conflict = smallest_conflict(tuple(wanted.pins), may_fit) if may_fit(()) else ()
    held = sorted(held_by_pins(problem, wanted.pins).items(), key=lambda row: (-row[1], row[0]))
    return MemoryLimitError(
        wanted.memory,
        smallest.peak_bytes,
        detail=_largest(problem, smallest, live, program),
        together=bool(conflict),
        unfinished=stopped,
        rematerialised=recompute,
        microbatched=wanted.microbatched,
        offloaded=any(t.hosted for t in problem.graph.tensors) or bool(problem.graph.offloaded),
        origin=origin,
        pins={
            f"{glob!r} = {spec_text(wanted.pins[glob])}": int(nbytes) for glob, nbytes in held if not conflict or glob in conflict
        },
    )


def _largest(problem: Problem, solution: Solution, live: memory.Liveness, program: Program) -> str:
    """The bytes per device of a solution's arguments, and the three largest, as text; the same of the values between ops where
    these hold more at the peak.
    """
    graph = problem.graph
    rows: list[tuple[float, str]] = []
    for t, path in zip(graph.inputs, graph.input_paths, strict=True):
        v = problem.coarse.of[t]
        part = 1.0 if v == FREE else memory.local_part(problem, v, solution.states[v])
        rows.append((graph.tensors[t].nbytes * part, path))
    text = f"arguments take {size_text(sum(n for n, _ in rows))}, the largest are {_three(rows)}"
    _, held = held_at_peak(problem, live, solution.states, solution.keep, solution.limits)
    arguments, names = frozenset(graph.inputs), described(graph) | value_names(graph, program.output_paths)
    between = [(h.nbytes, names.get(h.tensor, "a constant")) for h in held if h.kind == "stored" and h.tensor not in arguments]
    if (total := sum(n for n, _ in between)) <= sum(n for n, _ in rows):
        return text
    return f"{text}; values between ops take {size_text(total)} at the peak, the largest are {_three(between)}"


def _three(rows: Sequence[tuple[float, str]]) -> str:
    """The three largest of (bytes, name), as text."""
    return ", ".join(f"{name} {size_text(nbytes)}" for nbytes, name in sorted(rows, reverse=True)[:3])
