"""Checks a plan on the user's arguments: the whole step, or a shrunken copy of it where that is too large for one device.

The copy is the step traced again, with the plan's own layouts and its cuts of every op: no search runs for it. First it has fewer
samples, and where the state itself is too large, also fewer of the layers that its loops run over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from shardplan.errors import ShardplanError, TraceError, UncheckedError
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph, flatten
from shardplan.plans.data import PlanData
from shardplan.plans.fitted import program_of
from shardplan.plans.placed_data import PlacedData
from shardplan.verify.check import check
from shardplan.verify.fewer import Fewer, Ways, fewer_layers, fewer_samples, parts_of, smaller
from shardplan.verify.judge import Judged, ran
from shardplan.verify.runs import Runnable


class Shrinkable(Runnable, Protocol):
    """The parts of a plan that a shrunken copy needs (`shardplan.Plan`, `shardplan.PlacedPlan`)."""

    @property
    def data(self) -> PlanData | PlacedData:
        """The plan as plain data."""
        ...

    def on_shapes(self, traced: Traced) -> Shrinkable:
        """The plan's choices for its step traced on other shapes."""
        ...


def checked(
    plan: Shrinkable,
    jitted: Any,
    jit: Callable[[Any], Any],
    leaves: Sequence[Any],
    tree: Any,
    devices: Sequence[Any] | None,
) -> Judged:
    """Checks a plan as `shardplan.verify.check.check` does, or a shrunken copy where the whole step does not fit. ``jit`` makes
    the jitted step of a copy, as ``jitted`` was made of the plan.

    Raises:
        CheckError: if a leaf of the result differs, or if no number of it is finite.
        UncheckedError: if neither can run.
    """
    try:
        return check(plan, jitted, leaves, tree, devices)
    except UncheckedError as error:
        if error.needed_bytes is None:
            raise
        whole, why_not = error, "it has no batch and no stacked layers that could be fewer"
    fewer: tuple[Fewer, ...] = ()
    for options in _options(plan):
        for more in options:
            try:
                copy = _copy(plan, (*fewer, *more))
            except ShardplanError as error:
                why_not = f"{ran((*fewer, *more))} cannot take its place: {error}"
                continue
            fewer = (*fewer, *more)
            try:
                return check(copy, jit(copy), leaves, tree, devices, fewer)
            except UncheckedError as error:
                why_not = f"{ran(fewer)} does not fit either: {error.reason}"
            break
    raise UncheckedError(f"{whole.reason}; {why_not}", needed_bytes=whole.needed_bytes, limit_bytes=whole.limit_bytes)


def _options(plan: Shrinkable) -> Iterator[list[tuple[Fewer, ...]]]:
    """The reductions to try: first the numbers of samples, one after the other, then the layers."""
    graph, ways = _ways(plan)
    yield [(samples,) for samples in fewer_samples(graph, ways)]
    layers = fewer_layers(graph, ways)
    yield [layers] if layers else []


def _copy(plan: Shrinkable, fewer: Sequence[Fewer]) -> Shrinkable:
    """The plan's choices for the step on smaller arguments.

    Raises:
        ShardplanError: if the step does not run on them or has other ops there, or if the choices do not fit.
    """
    traced = trace_step(plan.step, smaller(plan.traced, fewer), plan.donate_argnums)
    if [op.primitive for op in traced.program.every_op()] != [op.primitive for op in plan.traced.program.every_op()]:
        raise TraceError("on these shapes the step has other ops")
    return plan.on_shapes(traced)


def _ways(plan: Shrinkable) -> tuple[Graph, Ways]:
    """The graph of a plan, and how it cuts tensors."""
    data = plan.data
    if isinstance(data, PlacedData):
        graph = flatten(plan.traced.program, replicate=data.groups[0].replicate)
        return graph, list(_ways_of_groups(data, graph))
    graph = flatten(program_of("the plan", data, plan.traced), replicate=data.replicate, backend=data.backend)
    return graph, list(_ways_of_one(data, graph))


def _ways_of_one(data: PlanData, graph: Graph) -> Iterator[tuple[int, tuple[int, ...]]]:
    """How a plan on all devices cuts each tensor: as it is stored, read and made."""
    choices, sizes = data.choices, [f.size for f in data.factors]
    own = [pair for where, body in choices.bodies.items() for pair in zip(graph.bodies[where], body.layouts, strict=True)]
    for node in graph.nodes:
        use = choices.use(node.where, node.op.id)
        if use is not None:
            own += [*zip(node.inputs, use.needs, strict=True), *zip(node.outputs, use.gives, strict=True)]
    for t, dims in sorted({(t, layout.dims) for t, layout in own if t >= 0 and layout is not None}):
        yield t, parts_of(dims, sizes)


def _ways_of_groups(data: PlacedData, graph: Graph) -> Iterator[tuple[int, tuple[int, ...]]]:
    """How a plan on groups of devices cuts the step's arguments: into microbatches, each of which its group cuts."""
    layouts = [{a.path: a.layout for a in plan.arguments} for plan in data.groups]
    parts = data.groups[0].microbatches
    for i, (t, path) in enumerate(zip(graph.inputs, graph.input_paths, strict=True)):
        group = data.group_of[path]
        layout = layouts[group][path]
        if layout is not None and layout.dims:
            first, *others = parts_of(layout.dims, [f.size for f in data.groups[group].factors])
            yield t, (first * (parts.count if i in parts.batch else 1), *others)
