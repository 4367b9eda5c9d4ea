"""The schedule of a planned step: spelled out op by op (`shardplan.schedule.build`), then improved by the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardplan.ir import Constant, Layout
from shardplan.schedule.build import Builder
from shardplan.schedule.changes import in_single_steps
from shardplan.schedule.frame import Frame
from shardplan.schedule.host_copies import with_host_copies
from shardplan.schedule.instructions import Block, Schedule, Source
from shardplan.schedule.passes.barriers import waited
from shardplan.schedule.passes.bundles import bundled
from shardplan.schedule.passes.dedupe import shared
from shardplan.schedule.passes.extents import with_extents
from shardplan.schedule.passes.prune import pruned
from shardplan.schedule.passes.transposes import transposed_first
from shardplan.schedule.planned import PlannedProgram


@dataclass(frozen=True, slots=True)
class Ends:
    """The layouts in which inputs come and results are left, by tensor of the program, where they are not those of the plan."""

    ins: Mapping[int, Layout | None]
    outs: Mapping[int, Layout | None]


def build(planned: PlannedProgram, ends: Ends | None = None) -> Schedule:
    """The schedule of a planned step, as each device runs it."""
    spelled, _ = spelled_out(planned, ends)
    body = transposed_first(shared(pruned(waited(in_single_steps(spelled.body)))), planned)
    shapes = [planned.graph.tensors[t].shape for t in planned.graph.inputs]
    return with_host_copies(replace(spelled, body=bundled(with_extents(body, planned.sizes, shapes), planned)), planned)


def spelled_out(planned: PlannedProgram, ends: Ends | None = None) -> tuple[Schedule, Mapping[int, Layout | None]]:
    """(the schedule before its passes, the layouts in which its parameters, ops without a use, and control flow leave values)."""
    builder, program = Builder(planned), planned.program
    frame = Frame((), planned.graph.bodies[()], [])
    parameters = tuple(builder.new() for _ in program.inputs)
    builder.arguments = frozenset(parameters)
    ends = ends or Ends({}, {})
    arguments: list[Source] = list(parameters)
    for n, t in enumerate(program.inputs):
        if t in ends.ins:
            own = builder.layout(frame, t)
            arguments[n] = builder.move(frame, parameters[n], frame.ids[t], ends.ins[t], own, "the start of a segment")
    results: list[Source] = builder.run(frame, program, arguments)
    layouts = [builder.layout(frame, o) if isinstance(o, int) else None for o in program.outputs]
    for n, o in enumerate(program.outputs):
        if isinstance(o, int) and o in ends.outs and not isinstance(results[n], Constant):
            results[n] = builder.move(frame, results[n], frame.ids[o], layouts[n], ends.outs[o], "the end of a segment")
            layouts[n] = ends.outs[o]
    return Schedule(Block(parameters, tuple(frame.out), tuple(results)), tuple(layouts)), builder.layouts
