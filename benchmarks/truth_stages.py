"""The seconds of a pipeline's parts: its layers, what its first and last chunk add, and the step that its schedule makes of them.

One step of two layers is traced for one microbatch and priced on the devices of a stage under the written sharding, as
`truth_price` prices other rows. Its ops and collectives are told apart by pass, and by whether they come before, in or behind the
layers; chunks have as many layers as the row says. The schedule, its bubble included, is that of `shardplan.dag.pipelines` in the
order that the row ran. (`shardplan.plan` would search the layouts of each stage, which rows have fixed; `truth_pipelines.py
--whole` prints its steps beside these.)

A row's transfers take the seconds of one, as in `shardplan.regions.schedules`. When its device is done, a stage reduces its
gradients over data parallel devices; the update follows when all have. A tied table is in the first and in the last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from benchmarks.truth_eager import call_of
from benchmarks.truth_price import scheduled_row
from benchmarks.truth_rows import PipelineRow, Row
from shardplan.collectives.issued import Issued
from shardplan.dag.pipeline_orders import interleaved, one_f_one_b
from shardplan.dag.pipelines import Seconds, run
from shardplan.graph.nodes import Node
from shardplan.ir import itemsize
from shardplan.placement.device_topology import machine_of
from shardplan.planning.scheduled import Scheduled
from shardplan.schedule import Compute
from shardplan.schedule.sends import issuer

Place = Literal["first", "layers", "last"]
Pass = Literal["forward", "backward", "update"]
PLACES: tuple[Place, ...] = ("first", "layers", "last")
PASSES: tuple[Pass, ...] = ("forward", "backward", "update")
LAYERS = 2
"""Layers that are priced: two, as kernels at the ends of a layer may fuse with those of the next."""


class Kernel(NamedTuple):
    """A kernel or collective of a device: its seconds there, how many launches it counts as, and whether it is a collective."""

    seconds: float
    launches: float
    collective: bool

    def part(self, share: float) -> Kernel:
        """So large a part of it."""
        return Kernel(self.seconds * share, self.launches * share, self.collective)


Work = tuple[Kernel, ...]
"""What a device does in one pass, in its order."""


def launched_s(work: Iterable[Kernel], launch_s: float) -> float:
    """Seconds of work, one kernel after the other: each starts when the host, which launches all in a row, has launched it.

    A pass starts when its operand has come from another stage, for which the host waits: nothing is launched ahead.
    """
    host_s = device_s = 0.0
    for kernel in work:
        host_s += launch_s * kernel.launches
        device_s = max(device_s, host_s) + kernel.seconds
    return device_s


def collective_s(work: Iterable[Kernel]) -> float:
    """Seconds of the collectives of work."""
    return sum(kernel.seconds for kernel in work if kernel.collective)


@dataclass(frozen=True, slots=True)
class Parts:
    """The work of a microbatch by place and pass ("update": of the step), for one layer, and what the first and last chunk add.

    ``data_s`` are the seconds of collectives over data parallel devices, once a step, by place.
    """

    work: Mapping[tuple[Place, Pass], Work]
    data_s: Mapping[Place, float]

    def of(self, passed: Pass, layers: int, *, first: bool, last: bool) -> Work:
        """The work of one pass in a chunk."""
        start = self.work["first", passed] if first else ()
        end = self.work["last", passed] if last else ()
        middle = self.work["layers", passed] * layers
        return (*end, *middle, *start) if passed == "backward" else (*start, *middle, *end)

    def reduced_s(self, layers: int, *, first: bool, last: bool) -> float:
        """Seconds in which a stage reduces its gradients."""
        return self.data_s["layers"] * layers + self.data_s["first"] * first + self.data_s["last"] * last


@dataclass(frozen=True, slots=True)
class Step:
    """The seconds of a step by what the device that ends last spends them on. ``bubble_s``: it waits for others."""

    compute_s: float
    tensor_s: float
    bubble_s: float
    data_s: float
    update_s: float

    @property
    def seconds(self) -> float:
        """The step."""
        return self.compute_s + self.tensor_s + self.bubble_s + self.data_s + self.update_s


def parts_of(row: Row) -> Parts:
    """The work of the parts of a row's model on the devices of one stage.

    Raises:
        UnpricedError: where its sharding does not divide the step.
    """
    found, _ = scheduled_row(replace(row, options={**row.options, "layers": LAYERS}))
    _, roles = row.sharding.on(row.cluster)
    at, of = _Places(found, eager=row.eager), issuer(found.planned)
    work: dict[tuple[Place, Pass], list[Kernel]] = {(p, q): [] for p in PLACES for q in PASSES}
    data_s: dict[Place, float] = dict.fromkeys(PLACES, 0.0)
    each: Mapping[Place, float] = {"first": 1.0, "layers": 1 / LAYERS, "last": 1.0}
    backward = False
    for instruction in found.schedule.body.instructions:
        if isinstance(instruction, Compute):
            node = instruction.node
            backward = backward or node.backward
            launches = node.costed.traffic.launches if node.costed.traffic else 0.0
            for place in at.places(node):
                kernel = Kernel(found.planned.op_seconds[node.id], launches, collective=False)
                cast_again = node.backward and at.casts(node)  # as layers are computed again
                if (kernel.seconds or kernel.launches) and not cast_again:
                    work[place, at.passed(node)].append(kernel.part(each[place] * node.weight))
        for sent in of(instruction):
            updated = at.makers.get(sent.tensor) in at.updates
            passed: Pass = "update" if updated else "backward" if backward else "forward"
            for place, share in at.shares(sent):
                kernel = Kernel(sent.seconds, 1.0, collective=True).part(share * each[place] * sent.times)
                if set(sent.step.factors) <= set(roles["tensor"]):
                    work[place, passed].append(kernel)
                else:
                    data_s[place] += kernel.seconds
    return Parts({key: tuple(own) for key, own in work.items()}, data_s)


class _Places:
    """Where in the model, and in which pass, the ops of a step are.

    What comes before the layers is in the first chunk, what comes behind them in the last; a table that both read is in both.
    ``eager``: weights are cast by the optimizer, once a step, as PyTorch's mixed precision keeps them in both types.
    """

    def __init__(self, found: Scheduled, *, eager: bool) -> None:
        graph = found.planned.graph
        self.graph = graph
        self.cast = {graph.inputs[n] for n in graph.feedback if n is not None} if eager else set[int]()
        self.updates = {node.id for node in graph.nodes if call_of(node) == "optimizer"}
        forward = [node for node in graph.nodes if node.id not in self.updates and not node.backward]
        backward = [node for node in graph.nodes if node.backward]
        self.place: dict[int, Place] = {}
        ends: tuple[tuple[list[Node], Place, Place], ...] = ((forward, "first", "last"), (backward, "last", "first"))
        for nodes, before, behind in ends:
            inside = [n for n, node in enumerate(nodes) if _in_layer(node)]
            for n, node in enumerate(nodes):
                self.place[node.id] = before if n < inside[0] else behind if n > inside[-1] else "layers"
        self.makers = {t: node.id for node in graph.nodes for t in node.outputs}
        readers: dict[int, set[Place]] = {}
        for node in forward:
            for t in set(node.inputs).intersection(graph.inputs):
                readers.setdefault(t, set()).add(self.place[node.id])
        self.of_shape: dict[tuple[int, ...], tuple[Place, ...]] = {}
        for t, own in readers.items():  # vectors of a layer and of the last norm count as the layer's
            places: tuple[Place, ...] = tuple(p for p in PLACES if p in own)
            if self.of_shape.get(graph.tensors[t].shape) != ("layers",):
                self.of_shape[graph.tensors[t].shape] = places

    def casts(self, node: Node) -> bool:
        """Whether an op casts a weight that the optimizer casts."""
        return node.op.primitive == "convert_element_type" and node.inputs[0] in self.cast

    def passed(self, node: Node) -> Pass:
        """The pass of an op."""
        if node.id in self.updates or self.casts(node):
            return "update"
        return "backward" if node.backward else "forward"

    def places(self, node: Node) -> tuple[Place, ...]:
        """The places of an op: of the optimizer's, those that read the weight, which has the shape of its result."""
        if node.id not in self.updates:
            return (self.place[node.id],)
        alone: tuple[Place, ...] = ("last",)
        return self.of_shape.get(self.graph.tensors[node.outputs[0]].shape, alone)

    def shares(self, sent: Issued) -> Iterator[tuple[Place, float]]:
        """The places of what travels in a collective, each with its part of the bytes; a table of two places counts in both."""
        tensors = [self.graph.tensors[t] for t in (sent.tensor, *(t for t, _ in sent.along))]
        whole = sum(t.nbytes for t in tensors)
        for t in tensors:
            maker = self.makers.get(t.id)
            node = None if maker is None else self.graph.nodes[maker]
            own: tuple[Place, ...] = ("last",) if node is None else self.places(node)
            tied = self.of_shape.get(t.shape, own) if node is not None and node.backward else own
            for place in tied if len(tied) > 1 else own:
                yield place, t.nbytes / whole


def _in_layer(node: Node) -> bool:
    found = node.op.handle.source_info.traceback
    return any(frame.function_name.startswith("Block.") for frame in (found.frames if found else ()))


def step_of(row: PipelineRow, parts: Parts, launch_s: float) -> Step:
    """The step of a row at the seconds of its parts."""
    layers, chunks = row.stage.options["layers"] // row.chunks, range(row.chunks)
    works: list[dict[Pass, Work]] = [
        {passed: parts.of(passed, layers, first=c == 0, last=c == row.chunks - 1) for passed in PASSES} for c in chunks
    ]
    took = [{passed: launched_s(work, launch_s) for passed, work in own.items()} for own in works]
    seconds = [Seconds(own["forward"], own["backward"], 0.0) for own in took]
    order = (
        one_f_one_b(row.stages, row.stage.microbatches)
        if row.chunks == row.stages
        else interleaved(row.stages, row.stage.microbatches, row.chunks // row.stages)
    )
    found = run(order, seconds, sent_s(row))
    ends: list[tuple[float, int, float]] = []
    for d in range(row.stages):
        own = [c for c in chunks if order.device[c] == d]
        first, last = 0 in own, row.chunks - 1 in own
        reduced_s = parts.reduced_s(layers * len(own), first=first, last=last)
        ends.append((found.end_s[d][-1] + reduced_s, d, reduced_s))
    end_s, d, reduced_s = max(ends)
    update_s = max(sum(own["update"] for own, at in zip(took, order.device, strict=True) if at == n) for n in range(row.stages))
    runs: list[tuple[int, Pass]] = [(c, q) for c in chunks if order.device[c] == d for q in ("forward", "backward")]
    tensor_s = row.stage.microbatches * sum(collective_s(works[c][passed]) for c, passed in runs)
    busy_s = row.stage.microbatches * sum(took[c][passed] for c, passed in runs)
    return Step(busy_s - tensor_s, tensor_s, end_s - reduced_s - busy_s, reduced_s, update_s)


def sent_s(row: PipelineRow) -> float:
    """Seconds in which a stage sends the activations of a microbatch to the next: every device its share, at once."""
    machine = machine_of(row.whole)
    a, b = 0, row.stage.cluster.size
    options = row.stage.options
    nbytes = options["batch"] * options["sequence"] * options["width"] * itemsize(options["dtype"])
    return float(machine.latency_s[a, b] + nbytes / b / machine.bytes_per_s[a, b])
