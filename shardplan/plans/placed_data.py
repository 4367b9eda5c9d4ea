"""A plan with groups of devices as plain data: the plan of each group, the group of each op, and the order of the tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from shardplan.collectives.reshard import Programs, Resharder
from shardplan.cost import Network
from shardplan.ir import Factor
from shardplan.mesh import Cluster
from shardplan.plans.codec import Least
from shardplan.plans.data import PlanData, Seconds, TriedPlacement
from shardplan.regions.issues import Dispatch
from shardplan.regions.segment_plans import GroupChoices
from shardplan.regions.tasks import PlacedTaskGraph, Task
from shardplan.search.inference.anytime import Stopped
from shardplan.search.problem.problem import Problem

Number = Annotated[int, Least(0)]


@dataclass(frozen=True, slots=True)
class IssuedRow:
    """A task or a transfer of a placed step by its number, with predicted seconds from the start of the step."""

    kind: Literal["task", "transfer"]
    number: Number
    start_s: Seconds
    end_s: Seconds


@dataclass(frozen=True, slots=True)
class AutoPlacement:
    """What ``placement="auto"`` was asked for: the microbatches of all candidates (1: any), and the arguments that are the batch
    (None: those that `shardplan.plan` finds).
    """

    microbatches: Annotated[int, Least(1)]
    batch_argnums: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class PlacedData:
    """Everything that a plan with groups of devices says, as `PlanData` does for one on all devices. It holds no program.

    Group n runs on ``devices[n]`` by the plan ``groups[n]``, whose program has the ops of this group; what was asked for (memory
    limit, microbatches, donated arguments and so on) stands there, the same in each group. ``outer`` is the group of each op of
    the step, by id; in a pipeline, of each op outside of the loop over microbatches. ``inner`` is then the chunk of layers of
    each op in its body, ``chunks`` the group that runs each chunk, and ``in_flight`` how many microbatches of each the plans of
    groups count (None: all). Where a loop over layers is cut into the stages, an
    argument of the step is held in parts: ``array_of`` gives its path by the path of each part. ``group_of`` is the group that
    holds each argument, by path, in their order. ``issues`` is what is issued, in order. ``origin`` says where the groups come
    from, ``chunks_asked`` how many chunks each stage was to have (None: the planner chose), ``auto`` what ``placement="auto"``
    was asked for, if it chose the groups, and ``placements_tried`` what it chose them among.

    The last fields are filled before the plan is saved: ``fingerprint`` and ``marks`` are those of the traced step, and
    ``explanations`` has a text for each path and, under ``""``, one for the whole plan.
    """

    origin: str
    cluster: Cluster
    devices: tuple[tuple[Number, ...], ...]
    groups: tuple[PlanData, ...]
    outer: Mapping[int, Number] = field(repr=False)
    inner: Mapping[int, Number] | None = field(repr=False)
    chunks: tuple[Number, ...]
    in_flight: tuple[Number, ...] | None
    array_of: Mapping[str, str] = field(repr=False)
    group_of: Mapping[str, Number] = field(repr=False)
    issues: tuple[IssuedRow, ...] = field(repr=False)
    trace_s: Seconds
    search_s: Seconds
    stopped: Stopped
    chunks_asked: Annotated[int, Least(1)] | None = None
    auto: AutoPlacement | None = None
    placements_tried: tuple[TriedPlacement, ...] = ()
    fingerprint: str | None = None
    marks: tuple[str, ...] | None = None
    explanations: Mapping[str, str] | None = None

    @property
    def inner_groups(self) -> dict[int, int]:
        """The group of each op in the body of the loop over microbatches, by id."""
        return {op: self.chunks[chunk] for op, chunk in (self.inner or {}).items()}

    @property
    def argument_types(self) -> dict[str, str]:
        """The type of each argument, by path: ``{"params/up": "float32[512, 2048]"}``."""
        own = [plan.argument_types for plan in self.groups]
        return {path: own[group][path] for path, group in self.group_of.items()}


def conditions(data: PlanData | PlacedData) -> PlanData:
    """The data with the conditions of a plan: the data of the first group stand for all."""
    return data.groups[0] if isinstance(data, PlacedData) else data


def group_choices(plans: Sequence[PlanData], problems: Iterable[Problem] = ()) -> tuple[GroupChoices, ...]:
    """The choices of the plans of groups. ``problems`` are those that were searched for them, whose prices are shared."""
    known = {_network(p.cluster, p.factors): p.programs for p in problems if p.objective.counts_time}
    found: list[GroupChoices] = []
    for p in plans:
        key = _network(p.cluster, p.factors)
        if key not in known:
            known[key] = Programs(Resharder(Network(p.cluster, p.factors), [f.size for f in p.factors]))
        found.append(GroupChoices(p.cluster, p.factors, p.choices, p.time_model == "overlap", known[key]))
    return tuple(found)


def _network(cluster: Cluster, factors: tuple[Factor, ...]) -> tuple[str, tuple[Factor, ...]]:
    """Equal for groups whose collectives take equally long."""
    return replace(cluster, name="group").fingerprint(), factors


def issued_rows(graph: PlacedTaskGraph, dispatch: Dispatch) -> tuple[IssuedRow, ...]:
    """The tasks and transfers that a dispatch issues, by number."""
    numbers = {id(what): n for own in (graph.tasks, graph.transfers) for n, what in enumerate(own)}
    return tuple(
        IssuedRow("task" if isinstance(i.what, Task) else "transfer", numbers[id(i.what)], i.start_s, i.end_s)
        for i in dispatch.issues
    )
