"""Plans with ops on groups of devices: reads ``placement=``, and plans each group."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, assert_never, runtime_checkable

from shardplan.constants import CONSTANTS
from shardplan.dag.pipeline_orders import one_f_one_b
from shardplan.dag.pipelines import folded, looped
from shardplan.errors import ClusterError, MemoryLimitError, PlacementError, ShardplanError
from shardplan.graph import flatten
from shardplan.ir import Program
from shardplan.mesh import Cluster
from shardplan.microbatches.counts import nearest_divisors
from shardplan.microbatches.layers import Staged, looped_layers, staged_program
from shardplan.placement.device_groups import used_groups
from shardplan.placement.device_topology import machine_of
from shardplan.placement.grouping import operator_graph
from shardplan.placement.operators import OperatorGraph
from shardplan.placement.placement_problem import problem_of
from shardplan.placement.strategy_files import read_strategy_file
from shardplan.planning.planner import Made
from shardplan.plans.data import PlanData
from shardplan.plans.placed_data import PlacedData, group_choices, issued_rows
from shardplan.regions.assignment import Assignment, Group, on_devices, refuse_host_copies
from shardplan.regions.buffers import argument_bytes, peak_bytes
from shardplan.regions.cuts import Cut, cut_of, donated_tensors, graph_of, group_parts, step_of
from shardplan.regions.dispatch import dispatched_beside
from shardplan.regions.group_plans import GroupPlanner
from shardplan.regions.group_programs import StepSplit, split
from shardplan.regions.layer_parts import LayerParts
from shardplan.regions.loops import LoopSplit, loop_of
from shardplan.regions.placed import PlacedStep
from shardplan.regions.stages import stages_of
from shardplan.regions.virtual_stages import two_chunks
from shardplan.search.coarsening.layers import equal_blocks
from shardplan.search.inference import anytime
from shardplan.shell.axis_causes import naming_microbatches
from shardplan.shell.made_plans import Asked, plan_data
from shardplan.shell.placed_plan import PlacedPlan

_log = logging.getLogger("shardplan")

_Way = TypeVar("_Way")


@runtime_checkable
class Placed(Protocol):
    """An object that says where the ops of a step run, such as the result of `shardplan.place`."""

    def assignment_of(self, program: Program, cluster: Cluster) -> Assignment:
        """The group of devices of each op of a traced step."""
        ...


PlacementLike = str | os.PathLike[str] | Placed


def on_groups(asked: Asked, stages: int, each: int | None, placement: PlacementLike) -> PlacedPlan:
    """The plan of a step on groups of devices: as a pipeline, with ``each`` as in `staged_plan`, or as a placement says.

    Raises:
        ShardplanError: for a pipeline beside a placement, or for options that a placement does not take.
        PlacementError: as `staged_plan` and `placed_plan`.
    """
    wanted = asked.searcher.wanted
    refuse_with_groups({"backend": wanted.backend != "explicit"})
    if stages > 1:
        refuse_with_groups({"placement": placement != "one"})
        warn_of_chunks(asked, stages, each)
        return staged_plan(asked, stages, each)
    refuse_with_groups({"microbatches": asked.microbatches.count > 1, "axes": wanted.axes, "factors": wanted.factors})
    origin = placement if isinstance(placement, str) else type(placement).__name__
    return placed_plan(asked, _assignment(asked, placement), origin)


def placed_plan(asked: Asked, assignment: Assignment, origin: str) -> PlacedPlan:
    """The plan of a step with the ops of each group of devices planned together. ``origin`` says where the groups come from.

    Raises:
        PlacementError: for a step that names mesh axes.
        MemoryLimitError: if the ops of a group fit its devices in no layout, or those of all groups together do not fit.
    """
    return _plan(asked, split(assignment), origin)[0]


def staged_plan(asked: Asked, stages: int, each: int | None = None, staged: Staged | None = None) -> PlacedPlan:
    """The fastest plan of a step as a pipeline of stages, on equal groups of consecutive devices.

    A stage is ``each`` chunks of the layers (None: one, or two where that is faster). Where the step loops over layers, a stage
    is one chunk of each loop. ``staged`` is the step cut into microbatches and stages, if it is known.

    Raises:
        PlacementError: if the step has fewer places to cut than chunks need, names mesh axes, or has a loop over layers that
            does not divide into the stages, or not into ``each`` chunks.
        MemoryLimitError: if a stage fits its devices in no layout, or not with its microbatches in flight.
        MicrobatchError: if the step cannot be cut into microbatches.
    """
    if asked.traced.program.meshed:
        raise PlacementError("the step names mesh axes, which the groups of a pipeline do not have: remove its constraints")
    refuse_host_copies(asked.traced.program)
    groups = stage_groups(asked.searcher.cluster, stages)
    staged = staged or staged_program(asked.traced.program, asked.microbatches, stages, asked.searcher.replicate)
    if staged.layers is not None:
        loops = staged.layers.loops
        if each not in (None, loops):
            raise PlacementError(
                f"axes: chunk={each} is not supported for {loops} loop{'s' * (loops > 1)} over layers: the weights of a loop are "
                "one array, of which each stage holds one part; leave out 'chunk', or unroll the loops"
            )
        plan = chunked_plan(asked, staged, groups, looped(stages, loops))
        return plan if each is None else plan.asked_for_chunks(each)
    if each is not None and each > 1:
        ways = (looped(stages, each), folded(stages)) if each == 2 else (looped(stages, each),)
        return _fastest(lambda chunks: (chunked_plan(asked, staged, groups, chunks), True), ways).asked_for_chunks(each)
    plan = chunked_plan(asked, staged, groups, looped(stages, 1))
    return plan.asked_for_chunks(1) if each == 1 else _in_two_chunks(asked, staged, groups, plan)


def _in_two_chunks(asked: Asked, staged: Staged, groups: Sequence[Group], plan: PlacedPlan) -> PlacedPlan:
    """The faster of ``plan``, which has one chunk for each group, and a pipeline with two chunks for each."""
    if plan.stopped or anytime.late(asked.searcher.wanted.deadline):
        return plan
    try:
        chunks = two_chunks(plan.placed.graph, plan.placed.dispatch, machine_of(asked.searcher.cluster))
        if chunks is None or len(chunks) > equal_blocks(flatten(asked.traced.program, replicate=asked.searcher.replicate)):
            return plan
        other = chunked_plan(asked, staged, groups, chunks)
        return min(plan, other, key=_step_s).chosen_among((), other.stopped)
    except (MemoryLimitError, PlacementError):
        return plan
    except KeyboardInterrupt:
        return plan.chosen_among((), "interrupted")


def chunked_plan(asked: Asked, staged: Staged, groups: Sequence[Group], chunks: tuple[int, ...]) -> PlacedPlan:
    """The fastest plan that fits for a pipeline of these chunks; ``chunks`` has the group of each.

    Stages are planned for the microbatches in flight under 1F1B. Where memory is short, their number is also halved, as long as
    that is faster or a stage does not fit alone. If nothing fits, they are planned for all microbatches at once. The deadline or
    an interrupt ends this with the best so far.

    Raises:
        PlacementError: if the step has fewer places to cut than chunks need.
        MemoryLimitError: if no plan fits.
    """
    program, loop = staged.program, loop_of(staged.program)
    where = stages_of(program, loop, chunks, asked.searcher.cluster.device, asked.searcher.replicate)
    replicate = tuple(asked.searcher.replicate)
    cut = cut_of(program, groups, where.outer, where.inner, chunks, layers=staged.layers, replicate=replicate)
    assert isinstance(cut, LoopSplit)
    each = len(chunks) // len(groups)
    origin = f"{len(groups)} stages" + (f" of {each} chunks" if each > 1 else "")

    before: tuple[Made, ...] = ()
    fastest_s = math.inf

    def planned(in_flight: tuple[int, ...] | None) -> tuple[PlacedPlan, bool]:
        nonlocal before, fastest_s
        last = in_flight is None or max(in_flight) == 1
        plan, before, memory = _plan(asked, replace(cut, in_flight=in_flight), origin, staged.layers, before, names_least=last)
        faster = plan.step_time_s < fastest_s * (1 - CONSTANTS.refinement_gain)
        fastest_s = min(plan.step_time_s, fastest_s)
        return plan, (memory == "refused" or (memory == "short" and faster)) and not last

    few = one_f_one_b(len(chunks), cut.count).most_held
    fewer = [tuple(min(n, max(few) >> halvings) for n in few) for halvings in range(max(few).bit_length())]
    with naming_microbatches(asked.traced.program, asked.microbatches):
        return _fastest(planned, (*dict.fromkeys(fewer), None))


def _fastest(planned: Callable[[_Way], tuple[PlacedPlan, bool]], ways: Sequence[_Way]) -> PlacedPlan:
    """The fastest plan of several ways. ``planned`` makes the plan of one way, and says whether later ways may be better.

    An interrupt or the deadline ends this with the best so far.

    Raises:
        MemoryLimitError: if no way fits: the one with the smallest need, among those that count all groups if there are any.
    """
    found: list[PlacedPlan] = []
    refused: list[MemoryLimitError] = []
    try:
        for way in ways:
            try:
                plan, more = planned(way)
            except MemoryLimitError as error:
                refused.append(error)
                continue
            found.append(plan)
            if plan.stopped or not more:
                break
    except KeyboardInterrupt:
        if not found:
            raise
        return min(found, key=_step_s).chosen_among((), "interrupted")
    if not found:
        raise min(refused, key=lambda error: (not error.grouped, error.smallest_bytes))
    return min(found, key=_step_s).chosen_among((), found[-1].stopped)


def _step_s(plan: PlacedPlan) -> float:
    return plan.step_time_s


def blocks_of(program: Program, replicate: Sequence[str] = ()) -> int:
    """The number of consecutive equal blocks in the forward pass of a step, or of layers in its loop."""
    return max(equal_blocks(flatten(program, replicate=replicate)), looped_layers(program))


def warn_of_chunks(asked: Asked, stages: int, each: int | None) -> None:
    """Warns of a pipeline with more chunks of layers than there are equal blocks: some chunks may be parts of a block."""
    blocks, chunks = blocks_of(asked.traced.program, asked.searcher.replicate), stages * (each or 1)
    if not 1 < blocks < chunks:
        return
    fewer = max(n for n in range(1, blocks + 1) if asked.searcher.cluster.size % n == 0)
    if blocks >= stages:
        other = f"chunk={blocks // stages}"
    else:
        other = f"stage={fewer}" if fewer > 1 else "a plan without 'stage'"
    _log.warning(
        "axes: the forward pass has %d equal blocks in a row, and %d chunks may cut through them, so that more bytes cross and "
        "stages wait more often: compare plan.step_time_s with %s",
        blocks,
        chunks,
        other,
    )


def stage_groups(cluster: Cluster, stages: int) -> tuple[Group, ...]:
    """The devices of each stage: consecutive ones, so that stages differ at the slowest levels.

    Raises:
        ClusterError: for a number of stages that does not divide the devices.
    """
    if cluster.size % stages:
        fitting = nearest_divisors(cluster.size, stages)
        raise ClusterError(f"axes: stage={stages} does not divide the {cluster.size} devices of {cluster.name!r}: give {fitting}")
    size = cluster.size // stages
    return tuple(tuple(range(g * size, (g + 1) * size)) for g in range(stages))


def _plan(
    asked: Asked,
    cut: Cut,
    origin: str,
    layers: LayerParts | None = None,
    before: Sequence[Made] = (),
    *,
    names_least: bool = True,
) -> tuple[PlacedPlan, tuple[Made, ...], _Memory]:
    """(the plan of a step with the ops of each group planned together, the groups' plans, what the memory limit costs in a group
    or in the schedule). ``before`` and ``names_least`` as in `GroupPlanner`.
    """
    match cut:
        case LoopSplit(program, _, groups, outer, inner, chunks, in_flight):
            pass
        case StepSplit(Assignment(program, groups, outer)):
            inner, chunks, in_flight = None, (), None
        case _:
            assert_never(cut)
    (made, plans, placed, *_), memory = _fitting(asked, cut, groups, layers, before, names_least=names_least)
    data = PlacedData(
        origin=origin,
        cluster=asked.searcher.cluster,
        devices=groups,
        groups=plans,
        outer=outer,
        inner=inner,
        chunks=chunks,
        in_flight=in_flight,
        array_of=_array_of(layers, asked.traced.program.input_paths, program.input_paths),
        group_of={path: group for path, (group, _) in zip(program.input_paths, placed.graph.inputs, strict=True)},
        issues=issued_rows(placed.graph, placed.dispatch),
        trace_s=plans[0].trace_s,
        search_s=max(d.search_s for d in plans),
        stopped=_first_stop(plans),
    )
    sessions = tuple(own.session for own in made)
    return PlacedPlan(data, placed, traced=asked.traced, step=asked.step, sessions=sessions), made, memory


_Memory = Literal["enough", "short", "refused"]
"""What the memory limit does to a plan. Where memory is "enough", the limit costs next to nothing. Where it is "short", it costs
time, so fewer microbatches in flight may be faster. If it is "refused", a group does not fit alone with so many microbatches in
flight, and the groups were planned without the limit."""


class _Tried(NamedTuple):
    """The plans of groups, their step in an order that fits, its peak, and the peak of the fastest order of all."""

    made: tuple[Made, ...]
    plans: tuple[PlanData, ...]
    placed: PlacedStep
    peak: int
    free_peak: int

    @property
    def limit_costs(self) -> float:
        """The part of a group's seconds that its memory limit costs, of the group where it is largest."""
        return max(own.planned.found[1].limit_costs for own in self.made)


def _fitting(
    asked: Asked, cut: Cut, groups: Sequence[Group], layers: LayerParts | None, before: Sequence[Made], *, names_least: bool
) -> tuple[_Tried, _Memory]:
    """(the plans of groups with the fastest step that fits, what the memory limit costs). ``before`` and ``names_least`` as in
    `GroupPlanner`.

    Raises:
        MemoryLimitError: if no plan fits.
    """
    program = cut.program if isinstance(cut, LoopSplit) else cut.assignment.program
    owned = donated_tensors(program, asked.searcher.wanted.donated, layers)
    arrays = {} if layers is None else {program.inputs[part]: array for part, array in layers.arrays.items()}
    limit, parts, cluster = asked.searcher.wanted.memory, group_parts(cut), asked.searcher.cluster

    def within(memory: int, before: Sequence[Made], *, names_least: bool = False) -> _Tried:
        searcher = replace(asked.searcher, wanted=replace(asked.searcher.wanted, memory=memory))
        made = GroupPlanner(groups, parts, cluster, searcher, owned, asked.limit.origin, arrays, before, names_least).made()
        made = tuple(replace(own, session=replace(own.session, memory_limit=limit)) for own in made)
        plans = tuple(plan_data(asked, own) for own in made)
        choices = group_choices(plans, (own.session.problem for own in made))
        graph = graph_of(cut, choices, asked.searcher.replicate, owned)
        dispatch, free = dispatched_beside(graph, machine_of(cluster), limit)
        return _Tried(made, plans, step_of(cut, graph, dispatch, layers), peak_bytes(graph, dispatch), free)

    refused: MemoryLimitError | None = None
    try:
        tried = [within(limit, before, names_least=names_least)]
    except MemoryLimitError as error:  # the order of the step may need less than a group's own plan knows
        refused = error.with_traceback(None)
        tried = [within(sys.maxsize, before)]
    for memory in _other_limits(tried[0], limit):
        with contextlib.suppress(MemoryLimitError):  # the groups' own: so little is not enough
            tried.append(within(memory, tried[0].made))
            break
    fitting = [own for own in tried if own.peak <= limit]
    if not fitting:
        smallest = min(own.peak for own in tried)
        if refused is not None and refused.smallest_bytes <= smallest:
            raise refused
        raise MemoryLimitError(limit, smallest, grouped=True, origin=asked.limit.origin)
    best = min(fitting, key=lambda own: own.placed.dispatch.step_time_s)
    if refused is not None:
        return best, "refused"
    return best, "short" if tried[0].free_peak > limit or best.limit_costs >= CONSTANTS.refinement_gain else "enough"


def _other_limits(tried: _Tried, limit: int) -> tuple[int, ...]:
    """The limits of groups' own plans with which their step may fill the memory limit, where ``tried`` needs more, or needs less
    and pays for it in time.

    A group's own plan does not know the order in which all programs run. What that order holds beside arguments is assumed to be
    in proportion to what the plans hold.
    """
    most = max(plan.peak_bytes for plan in tried.plans)
    fixed = max(argument_bytes(tried.placed.graph, g) for g in range(len(tried.plans)))
    needed = tried.free_peak if tried.free_peak > limit else tried.peak
    if needed <= fixed:
        return ()
    share = fixed + (most - fixed) * (limit - fixed) // (needed - fixed)
    if needed > limit:
        return share, (share + most) // 2
    pays = tried.limit_costs >= CONSTANTS.refinement_gain and share > limit * (1 + CONSTANTS.refinement_gain)
    return (share,) if pays else ()


def _array_of(layers: LayerParts | None, paths: Sequence[str], part_paths: Sequence[str]) -> dict[str, str]:
    """The path of the argument that each part of layers is cut from, by the part's path."""
    return {} if layers is None else {part_paths[part]: paths[i] for part, i in layers.arrays.items()}


def _first_stop(plans: Sequence[PlanData]) -> anytime.Stopped:
    """What ended the search of a group early: an interrupt, even if the deadline ended other groups."""
    stopped = {plan.stopped for plan in plans}
    return "interrupted" if "interrupted" in stopped else "time budget" if "time budget" in stopped else ""


def _assignment(asked: Asked, placement: PlacementLike) -> Assignment:
    program, cluster = asked.traced.program, asked.searcher.cluster
    if isinstance(placement, Placed):
        return placement.assignment_of(program, cluster)
    if isinstance(placement, str | os.PathLike) and os.fspath(placement).endswith(".json"):
        graph = operator_graph(flatten(program, replicate=asked.searcher.replicate), program)
        strategy = read_strategy_file(os.fspath(placement), problem_of(graph, machine_of(cluster)))
        return assignment_of(program, graph, used_groups(strategy))
    raise PlacementError(
        f"unsupported placement {placement!r}: use 'one', 'auto', the result of shardplan.place, or the file that it saved"
    )


def placement_text(placement: Any, program: Program, cluster: Cluster) -> str:
    """A placement as text that is the same in every process: the groups of the step's ops, or the content of its file."""
    if isinstance(placement, Placed):
        found = placement.assignment_of(program, cluster)
        return repr((found.groups, sorted(found.of.items())))
    if isinstance(placement, str | os.PathLike) and (file := Path(os.fspath(placement))).suffix == ".json" and file.is_file():
        return repr(file.read_bytes())
    return repr(placement)


def assignment_of(program: Program, graph: OperatorGraph, groups: Sequence[Group]) -> Assignment:
    """The group of each op of a step whose operators run on these groups.

    An op that computes values again in the backward pass belongs to one operator, although its body may hold ops of several.
    """
    return on_devices(program, {op: groups[j] for op, j in graph.owners})


def refuse_with_groups(given: Mapping[str, Any]) -> None:
    """Refuses options of `shardplan.plan` that a plan with groups of devices does not take.

    Raises:
        ShardplanError: naming the first one that was given.
    """
    for name, value in given.items():
        if value:
            raise ShardplanError(
                f"{name} cannot be given where ops run on groups of devices, each with axes of its own: leave it out"
            )
