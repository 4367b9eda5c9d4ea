"""Copies between the memories of a device and its host.

An argument in host memory comes to the device where the step first reads it, and its new value leaves at once. Values that the
step itself copies leave and come back where it says so.

Barriers keep a compiler from fetching all values when the step begins, and from sending them only before they are fetched. A
fetch waits for the value that was made last before it, as a gradient is; the fetch of an argument also waits for the copy that
left last. A value that leaves, and all that reads it later, waits for the copy that left before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Literal

from shardplan.schedule.instructions import (
    Barrier,
    Block,
    Compute,
    HostCopy,
    Instruction,
    Schedule,
    Source,
    numbers_of,
    results_of,
)
from shardplan.schedule.passes.prune import reads
from shardplan.schedule.passes.renaming import Renaming
from shardplan.schedule.planned import PlannedProgram


def with_host_copies(schedule: Schedule, planned: PlannedProgram) -> Schedule:
    """A schedule whose parameters, values and results lie where the program says."""
    graph, body = planned.graph, schedule.body
    if any(node.signature.part == "copy" for node in graph.nodes):
        body = _BetweenMemories(planned, max(numbers_of(body)) + 1).block(body)
        schedule = replace(schedule, body=body)
    if not graph.offloaded:
        return schedule
    fetched = {body.parameters[i]: graph.inputs[i] for i in graph.offloaded}
    sent = {o: t for o, (t, i) in enumerate(zip(graph.outputs, graph.feedback, strict=True)) if i in graph.offloaded}
    return replace(schedule, body=_Copying(body, fetched, sent).copied())


class _BetweenMemories(Renaming):
    """Blocks in which the step's own ops between memories are copies."""

    def __init__(self, planned: PlannedProgram, first: int) -> None:
        super().__init__()
        self.tensors = planned.graph.tensors
        self.new = count(first)

    def block(self, block: Block) -> Block:
        """The block with its copies, and the blocks in it with theirs."""
        out: list[Instruction] = []
        made: list[int] = []
        left: int | None = None
        last = {v: place for place, i in enumerate(block.instructions) for v in reads(i)}
        for place, instruction in enumerate(block.instructions):
            if not isinstance(instruction, Compute) or instruction.node.signature.part != "copy":
                out.append(self.renamed(instruction))
                made += results_of(instruction)
            elif self.tensors[instruction.node.outputs[0]].hosted:
                out += self.copy(instruction, left, "pinned_host")
                # XLA takes only what comes straight from its copy into a loop's stack in host memory
                left = None if instruction.results[0] in block.results else instruction.results[0]
            else:
                held = next((v for v in reversed(made) if last.get(v, -1) > place), None)
                out += self.copy(instruction, held, "device")
        return Block(block.parameters, tuple(out), tuple(self.source(s) for s in block.results))

    def copy(self, op: Compute, after: int | None, memory: Literal["device", "pinned_host"]) -> list[Instruction]:
        """The copy that an op is, and before it a barrier where it waits for the value ``after``.

        All that later reads the value that leaves waits too: the device holds few values whose copies have not ended.
        """
        (tensor,), (source,) = op.node.outputs, op.inputs
        assert isinstance(source, int), "a literal is on the device"
        before = self.number(source)
        if after is None:
            return [HostCopy(before, op.results[0], tensor, memory)]
        waited = Barrier((before, self.number(after)), (next(self.new), next(self.new)))
        self.same |= {after: waited.results[1]}
        if memory == "pinned_host":
            self.same[source] = waited.results[0]
        return [waited, HostCopy(waited.results[0], op.results[0], tensor, memory)]


class _Copying(Renaming):
    """One body; ``fetched`` are the tensors of parameters in host memory, ``sent`` those of results, by number."""

    def __init__(self, body: Block, fetched: Mapping[int, int], sent: Mapping[int, int]) -> None:
        super().__init__()
        self.body, self.fetched = body, fetched
        self.new = count(max(numbers_of(body)) + 1)
        self.host = {p: next(self.new) for p in fetched}
        self.leaving: dict[int, list[int]] = {}  # by value: the results that it becomes
        for o in sent:
            source = body.results[o]
            assert isinstance(source, int), "a literal replaces nothing in host memory"
            self.leaving.setdefault(source, []).append(o)
        self.sent = sent
        self.left = {o: self.host[p] for p in fetched for o in self.leaving.get(p, ())}  # given back as it came
        self.out: list[Instruction] = []
        self.made: list[int] = []
        self.latest: int | None = None

    def copied(self) -> Block:
        """The body with its copies."""
        body, waiting = self.body, dict(self.host)
        last = {v: place for place, i in enumerate(body.instructions) for v in reads(i)}
        for place, instruction in enumerate(body.instructions):
            for p in sorted(reads(instruction) & waiting.keys()):
                self.fetch(p, waiting.pop(p), next((v for v in reversed(self.made) if last.get(v, -1) >= place), None))
            self.out.append(self.renamed(instruction))
            for value in results_of(instruction):
                self.made.append(value)
                self.send(value)
        results: list[Source] = [
            self.number(self.left[o]) if o in self.left else self.source(s) for o, s in enumerate(body.results)
        ]
        return Block(tuple(self.host.get(p, p) for p in body.parameters), tuple(self.out), tuple(results))

    def fetch(self, parameter: int, host: int, held: int | None) -> None:
        """Brings an array to the device, behind the value ``held`` and the copy that left last."""
        after = [v for v in (held, self.latest) if v is not None]
        if after:
            results = tuple(next(self.new) for _ in (host, *after))
            self.out.append(Barrier((host, *(self.number(v) for v in after)), results))
            self.same |= dict(zip(after, results[1:], strict=True))
            host = results[0]
        self.out.append(HostCopy(host, parameter, self.fetched[parameter], "device"))

    def send(self, value: int) -> None:
        """Sends a value to host memory where it is a result that lies there."""
        for o in self.leaving.get(value, ()):
            self.latest = self.left[o] = next(self.new)
            self.out.append(HostCopy(value, self.latest, self.sent[o], "pinned_host"))
