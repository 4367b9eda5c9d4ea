"""A solution as the explicit backend runs it."""

from __future__ import annotations

from dataclasses import dataclass

from shardplan.collectives.issued import StepCost
from shardplan.schedule import PlannedProgram, Schedule, build, issued, planned_program, windows
from shardplan.search.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(StepCost):
    """A solution as the explicit backend runs it, with the cost of its schedule."""

    planned: PlannedProgram
    schedule: Schedule


def scheduled(session: Session) -> Scheduled:
    """The program of each device under the solution of a session, and what it sends."""
    problem = session.problem
    choices = session.extractor.choices(session.decisions)
    planned = planned_program(
        session.program, problem.graph, choices, problem.cluster, problem.factors, problem.objective.overlaps, problem.programs
    )
    schedule = build(planned)
    beside = windows(schedule, planned) if problem.objective.overlaps else None
    sent = issued(schedule, planned, beside)
    return Scheduled(
        planned=planned,
        schedule=schedule,
        issued=sent,
        compute_s=session.decisions.compute_s,
        contention=problem.cluster.device.contention,
        host_s=session.decisions.host_s,
    )
