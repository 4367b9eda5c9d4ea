"""Tofu's Op-Placement (section 7.1): the layers of an RNN round-robin over GPUs, simulated.

A product with a weight runs where the weight lies, and so does the update. Other forward ops run with the highest layer that they
read, other backward ops with the lowest, but for products (gradients of weights): these with the highest. A value that an op of
another GPU reads is sent once to each GPU, over the link of the GPU that sends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.tofu_blocks import Trace, trace_of
from shardplan.graph import Graph
from shardplan.graph.nodes import Node
from shardplan.simulate.engine import Stream, TaskGraph, simulate
from shardplan.simulate.tasks import Growing

ANYWHERE = -1
"""The layer of an op that reads nothing of any layer."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A step with layers on GPUs: its seconds, and the peak bytes of the fullest GPU in program order."""

    seconds: float
    peak_bytes: float


def placed(plan: Any, layers: int, gpus: int, *, bytes_per_s: float, latency_s: float) -> Placed:
    """Simulates the step of a plan on one GPU with its ``layers`` round-robin over ``gpus``."""
    graph, trace = plan.session.graph, trace_of(plan)
    gpu_of = [max(0, layer) % gpus for layer in layers_of(graph, layers)]
    seconds = makespan_s(trace, gpu_of, gpus, bytes_per_s=bytes_per_s, latency_s=latency_s)
    return Placed(seconds, max(_peaks(trace, gpu_of, gpus)))


def makespan_s(trace: Trace, gpu_of: Sequence[int], gpus: int, *, bytes_per_s: float, latency_s: float) -> float:
    """The seconds of a trace whose kernel of node n runs on GPU ``gpu_of[n]`` as soon as all that it reads is there."""
    return simulate(_Tasks(trace, gpu_of, gpus, bytes_per_s, latency_s).graph()).seconds


def layers_of(graph: Graph, layers: int) -> list[int]:
    """The layer of each op. The embedding counts to the first layer, the head to the last."""
    of: dict[int, int] = {}  # by tensor
    weights: set[int] = set()
    for path, t in zip(graph.input_paths, graph.inputs, strict=True):
        found = re.search(r"layer_(\d+)", path)
        if found or "embedding" in path or "head" in path:
            of[t] = int(found[1]) if found else 0 if "embedding" in path else layers - 1
            weights.add(t)
    result: list[int] = []
    for node in graph.nodes:
        at = _layer(node, of, weights)
        weights.update(t for t in node.outputs if node.signature.moves and node.inputs[0] in weights)
        of.update(dict.fromkeys(node.outputs, at) if at != ANYWHERE else {})
        result.append(at)
    return result


def _layer(node: Node, of: dict[int, int], weights: set[int]) -> int:
    own = [of[t] for t in node.inputs if t in weights]
    read = own or [of[t] for t in node.inputs if t in of]
    if not read:
        return ANYWHERE
    return min(read) if node.backward and not node.signature.contracts else max(read)


@dataclass(slots=True)
class _Tasks:
    """The tasks of a trace on GPUs. Stream g computes on GPU g, stream gpus + g sends from it."""

    trace: Trace
    gpu_of: Sequence[int]
    gpus: int
    bytes_per_s: float
    latency_s: float
    all: Growing = field(default_factory=Growing)
    made: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # by block: (task, GPU)
    sent: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])  # (block, GPU): task

    def graph(self) -> TaskGraph:
        """All kernels with what they wait for."""
        for kernel in self.trace.kernels:
            gpu = self.gpu_of[kernel.node]
            waits = [self.arrival(b, gpu) for b in kernel.touches if b in self.made]
            task = self.all.task(kernel.seconds, gpu, -1, tuple(dict.fromkeys(waits)))
            for b in kernel.writes:
                self.made[b] = task, gpu
                for other in range(self.gpus):
                    self.sent.pop((b, other), None)
        kinds = (("compute", "GPU"), ("link", "link of GPU"))
        streams = tuple(Stream(f"{name} {g}", kind, g) for kind, name in kinds for g in range(self.gpus))  # type: ignore[arg-type]
        return self.all.finished(streams, ()).graph

    def arrival(self, block: int, gpu: int) -> int:
        """The task after which a block is on a GPU."""
        task, source = self.made[block]
        if source == gpu:
            return task
        if (block, gpu) not in self.sent:
            seconds = self.latency_s + self.trace.nbytes[block] / self.bytes_per_s
            self.sent[block, gpu] = self.all.task(seconds, self.gpus + source, -1, (task,))
        return self.sent[block, gpu]


def _peaks(trace: Trace, gpu_of: Sequence[int], gpus: int) -> list[float]:
    """The peak bytes of each GPU in program order; a block that another GPU reads is on both."""
    first: dict[tuple[int, int], int] = {}  # by block and GPU
    last: dict[tuple[int, int], int] = {}
    for i, kernel in enumerate(trace.kernels):
        for b in kernel.touches:
            first.setdefault((b, gpu_of[kernel.node]), i)
            last[b, gpu_of[kernel.node]] = i
    changes = [[0.0] * (len(trace.kernels) + 1) for _ in range(gpus)]
    for (b, gpu), i in first.items():
        lives = b < trace.arguments
        changes[gpu][0 if lives else i] += trace.nbytes[b]
        changes[gpu][-1 if lives else last[b, gpu] + 1] -= trace.nbytes[b]
    return [_highest(row) for row in changes]


def _highest(changes: list[float]) -> float:
    now = most = 0.0
    for change in changes:
        now += change
        most = max(most, now)
    return most
