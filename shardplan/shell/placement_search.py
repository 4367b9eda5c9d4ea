"""``placement="auto"``: the plan on all devices, or a pipeline or branches on groups of devices.

A pipeline keeps reductions of gradients off the links between its stages, but its devices wait for each other. Independent
branches run side by side, and their ops are cut into fewer parts. Promising candidates are planned whole and priced by their
schedule. A candidate must beat the plan on all devices by more than the model's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

from shardplan.constants import CONSTANTS
from shardplan.errors import MemoryLimitError, MicrobatchError, ShardplanError
from shardplan.frontend.argnums import positions
from shardplan.graph import flatten
from shardplan.ir import Microbatches, Program
from shardplan.mesh import Cluster
from shardplan.microbatches.accumulating import checked_microbatches
from shardplan.microbatches.counts import batch_rows
from shardplan.microbatches.layers import Staged, staged_program
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.placement_problem import PlacementProblem, problem_of
from shardplan.placement.region_search import candidates_of
from shardplan.placement.starts import from_plan
from shardplan.planning.fallback import Fallback
from shardplan.plans.data import TriedPlacement
from shardplan.plans.placed_data import AutoPlacement
from shardplan.report.tables import seconds, size
from shardplan.search.inference import anytime
from shardplan.search.inference.bound import least_s
from shardplan.shell.made_plans import Asked
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placements import assignment_of, blocks_of, placed_plan, refuse_with_groups, staged_plan, warn_of_chunks
from shardplan.shell.plan_of_step import Plan

BatchArgnums = Sequence[int] | int | None

_ALL = "all devices"
_PIPELINES, _BRANCHES = "pipelines", "branches"


def best_placement(asked: Asked, plan_on_all_devices: Callable[[Asked], Plan], batch_argnums: BatchArgnums) -> Plan | PlacedPlan:
    """The plan on all devices; or one on groups of devices, if it is faster by more than `Constants.model_error` or only it
    fits in memory.

    An interrupt returns the best plan so far; before there is one, it is raised.

    Raises:
        MemoryLimitError: if no plan fits.
    """
    search = _Search(asked, batch_argnums)
    search.over(partial(search.all_devices, plan_on_all_devices), search.pipelines, search.branches)
    batch = None if batch_argnums is None else positions(batch_argnums, len(asked.traced.in_tree.children()), "batch_argnums")
    return search.result(AutoPlacement(asked.microbatches.count, batch))


def best_microbatches(asked: Asked, stages: int, each: int | None, batch_argnums: BatchArgnums) -> Plan | PlacedPlan:
    """The fastest pipeline of this many stages, over several numbers of microbatches; ``each`` as in `staged_plan`.

    An interrupt returns the best plan so far; before there is one, it is raised.

    Raises:
        ShardplanError: the first candidate's error, if there is no plan.
    """
    refuse_with_groups({"backend": asked.searcher.wanted.backend != "explicit"})
    warn_of_chunks(asked, stages, each)
    search = _Search(asked, batch_argnums)
    search.over(partial(search.stages, stages, each))
    return search.result(None)


def stage_counts(cluster: Cluster, blocks: int) -> tuple[int, ...]:
    """The numbers of stages that divide the slowest level with several devices, up to the number of blocks."""
    slowest = next((level.size for level in cluster.levels if level.size > 1), 1)
    return tuple(n for n in range(2, min(slowest, blocks) + 1) if slowest % n == 0)


def microbatch_counts(program: Program, batch: Sequence[int], stages: int) -> tuple[int, ...]:
    """The numbers of microbatches to try with S stages: divisors of the batch from S to 8 S, each at least twice the last."""
    rows = batch_rows(program, batch)
    found: list[int] = []
    for m in range(stages, min(rows, 8 * stages) + 1):
        if rows % m == 0 and m >= 2 * (found[-1] if found else 0):
            found.append(m)
    return tuple(found)


class _Search:
    """The candidates tried so far, and the best plan of them, which fits in memory."""

    def __init__(self, asked: Asked, batch_argnums: BatchArgnums) -> None:
        self.best: Plan | PlacedPlan | None = None
        self._asked, self._batch_argnums = asked, batch_argnums
        self._everywhere: Plan | None = None
        self._error: ShardplanError | None = None
        self._tried: dict[str, Plan | PlacedPlan | TriedPlacement] = {}
        self._programs: dict[tuple[int, int], Staged] = {}  # (stages, microbatches)
        self._stopped: anytime.Stopped = ""

    def over(self, *ways: Callable[[], None]) -> None:
        """Tries candidates in these ways until time is up or an interrupt arrives, which is raised if there is no plan yet."""
        try:
            for way in ways:
                way()
        except anytime.OutOfTimeError:
            self._stop("time budget")
        except KeyboardInterrupt:
            if self.best is None:
                raise
            self._stop("interrupted")

    # -- candidates ----------------------------------------------------------------------------------------------------

    def all_devices(self, make: Callable[[Asked], Plan]) -> None:
        """Makes the plan on all devices; where it does not fit, makes plans in microbatches."""
        try:
            self._everywhere = make(self._heard(_ALL, 0.0, 0.5))
        except MemoryLimitError as error:
            self._leave_out(_ALL, error)
        else:
            self._take(_ALL, self._everywhere)
            return
        if self._asked.microbatches.count == 1:
            self._with_counts(2, f"{_ALL} in microbatches", partial(self._accumulating, make))

    def _accumulating(self, make: Callable[[Asked], Plan], parts: Microbatches) -> Plan | PlacedPlan | None:
        what = f"{_ALL}, {parts.count} microbatches"
        here = replace(self._heard(what, 0.5), microbatches=parts)
        return self._try(what, lambda: make(here))

    @cached_property
    def _blocks(self) -> int:
        return blocks_of(self._asked.traced.program, self._asked.searcher.replicate)

    def pipelines(self) -> None:
        """Tries pipelines."""
        cluster = self._asked.searcher.cluster
        counts = stage_counts(cluster, self._blocks)
        if not counts:
            self._leave_out(_PIPELINES, f"{cluster.name} is not cut into stages of {self._blocks} equal blocks in a row")
        for n, stages in enumerate(counts):
            self.stages(stages, None, 0.5 + 0.4 * n / len(counts))

    def stages(self, stages: int, each: int | None, progress: float = 0.0) -> None:
        """Tries pipelines of this many stages; ``each`` as in `staged_plan`."""
        self._with_counts(stages, f"{stages} stages", partial(self._pipeline, stages, each, progress))

    def _pipeline(self, stages: int, each: int | None, progress: float, parts: Microbatches) -> Plan | PlacedPlan | None:
        """Tries a pipeline.

        Raises:
            MicrobatchError: if the step cannot be cut into microbatches.
        """
        count = parts.count
        what, least_s = f"{stages} stages, {count} microbatches", self._estimate_s(stages, count)
        if least_s >= self._to_beat_s(on_groups=True):
            self._leave_out(what, f"estimated at {seconds(least_s)} or more")
            return None
        here = replace(self._heard(what, progress), microbatches=parts)
        return self._try(what, lambda: staged_plan(here, stages, each, self._staged(stages, parts)))

    def _staged(self, stages: int, parts: Microbatches) -> Staged:
        """The step in these microbatches for this many stages. Without a loop over layers, it does not depend on ``stages``."""
        program, replicate = self._asked.traced.program, self._asked.searcher.replicate
        for key in ((0, parts.count), (stages, parts.count)):
            if key in self._programs:
                return self._programs[key]
        staged = staged_program(program, parts, stages, replicate)
        return self._programs.setdefault((0 if staged.layers is None else stages, parts.count), staged)

    def _with_counts(self, least: int, what: str, attempt: Callable[[Microbatches], Plan | PlacedPlan | None]) -> None:
        """Tries the number of microbatches that was given; else ``least``, and more as long as that is faster."""
        asked, fastest_s = self._asked, math.inf
        try:
            batch = asked.microbatches.batch or checked_microbatches(asked.traced, least, self._batch_argnums).batch
            counts = microbatch_counts(asked.traced.program, batch, least)
            if asked.microbatches.count > 1:
                counts = (asked.microbatches.count,)
            elif not counts:
                raise MicrobatchError(f"the batch does not divide into {least} to {8 * least} microbatches: give their number")
            for count in counts:
                self._check()
                plan = attempt(Microbatches(count, batch))
                if plan is not None and plan.step_time_s >= fastest_s:
                    return
                fastest_s = fastest_s if plan is None else plan.step_time_s
        except MicrobatchError as error:  # no number of microbatches works
            self._leave_out(what, error)

    def _estimate_s(self, stages: int, count: int) -> float:
        """A low estimate of a pipeline's seconds: the least compute of any plan, and the least time that devices wait.

        Stages run an op in at least as many parts as there are devices (``count`` microbatches, each on 1 / ``stages`` of
        them), and a part costs at least its share of the op. Only ops outside of the loop may have fewer launches. ZB-H1 (Qi et
        al. 2023, section 2.3) waits a third as long as 1F1B, which waits (S - 1) / M of the compute; two chunks a stage halve
        that.
        """
        if self._everywhere is None:
            return 0.0
        problem, each = self._everywhere.session.problem, 2 if 2 * stages <= self._blocks else 1
        return least_s(problem) / problem.objective.weights.compute * (1 + (stages - 1) / count / 3 / each)

    def branches(self) -> None:
        """Tries the branches of the step on disjoint groups of devices."""
        asked = self._asked
        self._check()
        if asked.microbatches.count > 1:
            self._leave_out(_BRANCHES, "they run the whole batch at once, and microbatches were given")
            return
        try:
            self._branches(asked)
        except ShardplanError as error:
            self._leave_out(_BRANCHES, error)

    def _branches(self, asked: Asked) -> None:
        program, cluster, wanted = asked.traced.program, asked.searcher.cluster, asked.searcher.wanted
        graph = operator_graph(flatten(program, replicate=asked.searcher.replicate), program)
        problem = problem_of(graph, machine_of(cluster))
        found = candidates_of(problem, math.inf if wanted.deadline is None else wanted.deadline, stages=False)
        if not found:
            self._leave_out(
                _BRANCHES, "no branches run beside each other, or devices are too few; shardplan.place tries other groups"
            )
            return
        limit_s = self._simulated_s(problem)
        promising = [c for c in found if c.seconds < limit_s][: CONSTANTS.branches_planned]
        for n, candidate in enumerate(promising):
            self._check()
            origin, where = candidate.origin, assignment_of(program, graph, candidate.groups)
            here = self._heard(origin, 0.9 + 0.1 * n / len(promising))
            self._try(origin, partial(placed_plan, here, where, origin))
        if len(found) == len(promising):
            return
        best = min(c.seconds for c in found if c not in promising)
        why = f"simulated data parallel on their groups: {seconds(best)} or more"
        why += f", the plan on all devices: {seconds(limit_s)}" if math.isfinite(limit_s) else ""
        self._leave_out(f"{len(found) - len(promising)} other groupings of branches", why)

    def _simulated_s(self, problem: PlacementProblem) -> float:
        """The seconds of the plan on all devices in the simulator that ranks branches."""
        if self._everywhere is None:
            return math.inf
        return problem.seconds(from_plan(problem, self._everywhere.choices, self._everywhere.factors))

    # -- the best ------------------------------------------------------------------------------------------------------

    def _to_beat_s(self, *, on_groups: bool) -> float:
        """The step time to beat: the best so far, less the model's error if only the candidate runs on groups of devices."""
        if self.best is None:
            return math.inf
        return self.best.step_time_s / (1 + CONSTANTS.model_error if on_groups and isinstance(self.best, Plan) else 1)

    def _try(self, what: str, make: Callable[[], Plan | PlacedPlan]) -> Plan | PlacedPlan | None:
        """Makes a plan, and keeps it if it is the best; None if it cannot be made.

        Raises:
            MicrobatchError: if the step cannot be cut into microbatches.
        """
        try:
            plan = make()
        except MicrobatchError:
            raise
        except ShardplanError as error:
            self._leave_out(what, error)
            return None
        self._take(what, plan)
        return plan

    def _take(self, what: str, plan: Plan | PlacedPlan) -> None:
        self._tried[what] = plan
        if plan.step_time_s < self._to_beat_s(on_groups=isinstance(plan, PlacedPlan)):
            self.best = plan
            self._asked.searcher.wanted.best(plan.step_time_s, 0.0)
        if plan.stopped == "interrupted":
            raise KeyboardInterrupt
        self._check()

    def _leave_out(self, what: str, why: str | ShardplanError) -> None:
        peak = why.smallest_bytes if isinstance(why, MemoryLimitError) else None
        self._error = why if self._error is None and isinstance(why, ShardplanError) else self._error
        text = f"the smallest layout found holds {size(peak)}" if peak is not None else " ".join(str(why).split())
        self._tried[what] = TriedPlacement(what, None, peak, text)

    # -- progress ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        """Ends the search if its time is up and there is a plan."""
        if self.best is not None and anytime.late(self._asked.searcher.wanted.deadline):
            raise anytime.OutOfTimeError

    def _heard(self, what: str, low: float, high: float | None = None) -> Asked:
        """The same request, with an observer that reports ``what`` and progress from ``low`` to ``high``."""
        searcher = self._asked.searcher
        tell, width = searcher.wanted.observer, 0.0 if high is None else high - low

        def heard(activity: str, part: float) -> None:
            tell(f"{what}: {activity}", low + width * part)

        wanted = replace(searcher.wanted, observer=heard)
        return replace(self._asked, searcher=replace(searcher, wanted=wanted, fallback=Fallback()))

    def _stop(self, why: anytime.Stopped) -> None:
        """Records what ended the search early."""
        self._stopped = why
        self._leave_out("others", f"not tried: {'the time budget is over' if why == 'time budget' else why}")

    # -- the result ----------------------------------------------------------------------------------------------------

    def result(self, auto: AutoPlacement | None) -> Plan | PlacedPlan:
        """The best plan, with the candidates that it was chosen among, and the request of ``placement="auto"``.

        Raises:
            ShardplanError: the first candidate's error, if there is no plan.
        """
        if self.best is None:
            assert self._error is not None, "a candidate that is no plan has an error"
            raise self._error
        if not self._stopped:
            self._asked.searcher.wanted.observer("done", 1.0)
        rows = [
            own if isinstance(own, TriedPlacement) else TriedPlacement(what, own.step_time_s, own.peak_bytes, self._why_not(own))
            for what, own in self._tried.items()
        ]
        if isinstance(self.best, Plan):
            return self.best.chosen_among(rows, self._stopped)
        return self.best.chosen_among(rows, self._stopped, auto)

    def _why_not(self, plan: Plan | PlacedPlan) -> str:
        if plan is self.best:
            return ""
        assert self.best is not None
        if plan.step_time_s >= self.best.step_time_s:
            return "slower"
        return f"not faster by more than the model's error, {CONSTANTS.model_error:.1%}"
