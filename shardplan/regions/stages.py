"""The stages of a pipeline: the group that runs each op of a step in microbatches.

The forward pass of one microbatch is cut into chunks, in the order of the step, where few bytes cross and chunks take about the
same time. Each group runs one chunk, or several of them (the virtual stages of Narayanan et al. 2021, section 2.2). An op of
the backward pass belongs to the chunk of the weight or saved value that it reads, and to no later chunk than the gradients that
it reads. An op that reads only values that are everywhere, such as zeros, belongs to the chunk that reads its result. The
optimizer's ops belong to the group whose gradients they read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.constants import CONSTANTS
from shardplan.cost import compute
from shardplan.errors import PlacementError
from shardplan.graph import Graph, flatten
from shardplan.ir import Op, Program
from shardplan.mesh import Device
from shardplan.regions.assignment import free_ops
from shardplan.regions.layer_parts import loop_in, part_in

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stages:
    """The group of each op outside of the loop, and the chunk of each op of its body, by op id."""

    outer: Mapping[int, int]
    inner: Mapping[int, int]


def stages_of(program: Program, loop: Op, chunks: Sequence[int], device: Device, replicate: Sequence[str] = ()) -> Stages:
    """The stages of a step. ``chunks`` is the group that runs each chunk.

    Raises:
        PlacementError: if the forward pass has fewer places to cut than chunks need.
    """
    body = loop.bodies[0]
    seconds = _seconds(flatten(body, replicate=replicate), device)
    shape = len(chunks), len(set(chunks))
    inner = _inner(body, int(loop.params["num_consts"]), int(loop.params["num_carry"]), shape, seconds)
    return Stages({op: chunks[c] for op, c in _outer(program, loop, inner).items()}, inner)


def _seconds(graph: Graph, device: Device) -> dict[int, float]:
    """The seconds of each op of a program on one device, by id; an op with bodies has the seconds of its bodies."""
    found: dict[int, float] = {}
    for node in graph.nodes:
        op = node.where[0][0] if node.where else node.op.id
        known = node.signature.description
        flops = compute.flops(known) if known is not None else 0.0
        moved = sum(graph.tensors[t].nbytes for t in (*node.inputs, *node.outputs) if t >= 0)
        peak = max(device.flops_per_s.values()) * device.flops_efficiency
        products = flops / peak if node.signature.multiplies else 0.0
        found[op] = found.get(op, 0.0) + node.weight * max(products, moved / device.memory_bytes_per_s)
    return found


def _inner(body: Program, consts: int, carries: int, shape: tuple[int, int], seconds: Mapping[int, float]) -> dict[int, int]:
    """The chunk of each op of the body. ``shape`` is (chunks, groups)."""
    count, groups = shape
    free = free_ops(body)
    ops = [op for op in body.ops if op.id not in free]
    behind = _behind(body, ops, body.inputs[consts : consts + carries])
    forward, backward = ([op for op in ops if (op.id in behind) == late] for late in (False, True))
    stage = _cut(body, forward, shape, seconds)
    _sink(forward, {*body.inputs[:consts], *_free(body)}, stage, min)
    stage |= {op.id: _own_chunk(op, stage[op.id], groups) for op in forward}
    present: dict[int, set[int]] = {}  # the stages in which a value of the forward pass, or a weight, is there anyway
    for op in forward:
        for t in (*op.tensors, *op.outputs):
            present.setdefault(t, set()).add(stage[op.id])
    reached = _reached(body, backward, consts, carries)
    gradients: dict[int, int] = {}
    for op in backward:
        own = min((gradients[t] for t in op.tensors if t in gradients), default=count - 1)
        saved = [present[t] for t in op.tensors if t in present and t not in gradients]
        at = own
        if saved and len({c for t in op.outputs for c in reached.get(t, ())}) != 1:
            together = set.intersection(*saved)
            at = max((a for a in together if a <= own), default=min(own, max(map(max, saved))))
        elif saved and not any(t in gradients for t in op.tensors):
            at = max(map(max, saved))
        at = _own_chunk(op, at, groups)
        stage[op.id] = at
        gradients.update(dict.fromkeys(op.outputs, at))
    held = {*present, *body.inputs[consts : consts + carries]}
    _sink(backward, {t for t in body.inputs if t not in held} | _free(body), stage, max)
    return stage


def _behind(body: Program, ops: Sequence[Op], accumulators: Sequence[int]) -> set[int]:
    """The ops of the backward pass, by id: those that depend on it or on accumulators, and those between them whose results are
    read only by ops that recompute values, such as the barrier before these ops.
    """
    after, added = set[int](), set(accumulators)  # values that depend on the backward pass, and on accumulators
    found, totals = set[int](), set[int]()
    for op in ops:
        if op.backward or not after.isdisjoint(op.tensors):
            after.update(op.outputs)
            found.add(op.id)
        elif not added.isdisjoint(op.tensors):
            added.update(op.outputs)
            totals.add(op.id)
    began = next((n for n, op in enumerate(ops) if op.id in found), len(ops))
    again, elsewhere = set[int](), set(body.returned)  # values that such ops read, and values that others or the caller read
    for n, op in reversed(list(enumerate(ops))):
        before = n > began and op.id not in totals and not again.isdisjoint(op.outputs) and elsewhere.isdisjoint(op.outputs)
        found.update({op.id} if before else ())
        (again if before or op.recomputed else elsewhere).update(op.tensors)
    return found | totals


def _own_chunk(op: Op, latest: int, groups: int) -> int:
    """The chunk of an op that runs for one part of the layers: a loop has its own chunk; another such op has the last chunk up
    to ``latest`` of the group that holds the part. Any other op is in the latest chunk.
    """
    if (part := part_in(op.scope)) is None:
        return latest
    if (loop := loop_in(op.scope)) is not None:
        return loop * groups + part
    return part + max(0, (latest - part) // groups) * groups


def _sink(ops: Sequence[Op], anywhere: set[int], stage: dict[int, int], choose: Callable[[Iterable[int]], int]) -> None:
    """Moves ops that read only values that are ``anywhere`` to a stage that reads their results; ``choose`` picks it."""
    alone: set[int] = set()
    for op in ops:
        if anywhere.issuperset(op.tensors):
            anywhere.update(op.outputs)
            alone.add(op.id)
    readers: dict[int, set[int]] = {}
    for op in reversed(ops):
        if op.id in alone and (wanted := {s for t in op.outputs for s in readers.get(t, ())}):
            stage[op.id] = choose(wanted)
        for t in op.tensors:
            readers.setdefault(t, set()).add(stage[op.id])


def _free(body: Program) -> set[int]:
    """The tensors that depend on no input."""
    free = free_ops(body)
    return {t for t, _ in body.constants} | {t for op in body.ops if op.id in free for t in op.outputs}


def _reached(body: Program, ops: Sequence[Op], consts: int, carries: int) -> dict[int, frozenset[int]]:
    """The carries that each value of the backward pass reaches, two at most."""
    found = {t: frozenset({n}) for n, t in enumerate(body.outputs[:carries]) if isinstance(t, int)}
    for op in reversed(ops):
        own = frozenset[int]().union(*(found.get(t, frozenset()) for t in op.outputs))
        for t in op.tensors:
            found[t] = frozenset(sorted(found.get(t, frozenset()) | own)[:2])
    return found


def _cut(body: Program, forward: Sequence[Op], shape: tuple[int, int], seconds: Mapping[int, float]) -> dict[int, int]:
    """The chunk of each op of the forward pass: consecutive ops, cut where few bytes cross so that the longest is shortest."""
    count = shape[0]
    cost = np.cumsum([seconds.get(op.id, 0.0) for op in forward])
    last: dict[int, int] = {}
    for n, op in enumerate(forward):
        last.update(dict.fromkeys(op.tensors, n))
    change = np.zeros(len(forward) + 1)
    for n, op in enumerate(forward):
        for t in op.outputs:
            if last.get(t, n) > n:
                change[n] += body.tensors[t].nbytes
                change[last[t]] -= body.tensors[t].nbytes
    crossing = np.cumsum(change)[: len(forward) - 1]
    inside = np.flatnonzero(crossing > 0)
    if len(inside) < count - 1:
        raise _too_few(forward, len(inside) + 1, shape)
    if (cuts := _between_layers(forward, crossing, shape)) is not None:
        return {op.id: int(np.searchsorted(cuts, n)) for n, op in enumerate(forward)}
    half = cost[-1] / count * CONSTANTS.stage_window
    low = np.searchsorted(cost[inside], cost[inside] - half, "left")
    high = np.searchsorted(cost[inside], cost[inside] + half, "right")
    least = np.array([crossing[inside[a:b]].min() for a, b in zip(low, high, strict=True)])
    narrow = inside[crossing[inside] <= least]
    cuts = _balanced(cost, narrow if len(narrow) >= count - 1 else inside, count)
    return {op.id: int(np.searchsorted(cuts, n)) for n, op in enumerate(forward)}


def _too_few(forward: Sequence[Op], most: int, shape: tuple[int, int]) -> PlacementError:
    """The refusal of a forward pass that has places for ``most`` chunks, with the lines that it runs over."""
    count, groups = shape
    lines = dict.fromkeys(str(op.source) for op in (*forward[:1], *forward[-1:]))
    where = f" ({' to '.join(lines)})" if lines else ""
    what = f"{groups} stages" + (f" of {count // groups} chunks" if count > groups else "")
    if most >= groups:
        remedy = f"give at most chunk={most // groups}"
    else:
        remedy = f"give at most stage={most}" if most > 1 else "plan it without the axis 'stage'"
    follow = f"only {most} ops follow" if most > 1 else "no ops follow"
    return PlacementError(f"the forward pass{where} cannot be cut into {what}, as {follow} each other: {remedy}")


def _between_layers(forward: Sequence[Op], crossing: Floats, shape: tuple[int, int]) -> Ints | None:
    """The places between the parts of loops over layers where the fewest bytes cross; None for a step without such parts.

    Raises:
        PlacementError: if a loop runs over its layers from the last to the first, or is not in the forward pass.
    """
    count, groups = shape
    loops = [(n, _own_chunk(op, 0, groups)) for n, op in enumerate(forward) if loop_in(op.scope) is not None]
    if not loops:
        return None
    for n, _ in loops:
        if forward[n].params.get("reverse"):
            raise PlacementError(
                f"the loop over layers at {forward[n].source} runs from the last layer to the first, and stage n holds the n-th "
                "part: keep the layers in the order in which they run, or plan without the axis 'stage'"
            )
    if len(loops) != count:
        raise PlacementError(
            f"of the {count // groups} loops over layers, {len(loops) // groups} run in the forward pass of a microbatch: unroll "
            "the others, or plan without the axis 'stage'"
        )
    return np.array([last + int(crossing[last:n].argmin()) for (last, _), (n, _) in itertools.pairwise(loops)])


def _balanced(cost: Floats, places: Ints, count: int) -> Ints:
    """The places after which ``count`` parts end so that the longest is shortest: a dynamic program over places."""
    at = np.concatenate(([0.0], cost[places], [cost[-1]]))  # seconds up to each place
    best = at
    choice: list[Ints] = []
    for _ in range(count - 1):
        longest = np.maximum(best[None, :], at[:, None] - at[None, :])  # [end, last cut]
        longest[np.arange(len(at))[:, None] <= np.arange(len(at))[None, :]] = np.inf
        longest[:, 0] = np.inf  # every part has an op
        choice.append(longest.argmin(axis=1))
        best = longest.min(axis=1)
    cuts: list[int] = []
    end = len(at) - 1
    for picks in reversed(choice):
        end = int(picks[end])
        cuts.append(int(places[end - 1]))
    return np.array(cuts[::-1])


def _outer(program: Program, loop: Op, inner: Mapping[int, int]) -> dict[int, int]:
    """The stage of each op outside of the loop."""
    body = loop.bodies[0]
    reader: dict[int, int] = {}
    for op in body.ops:
        for t in op.tensors if op.id in inner else ():
            reader.setdefault(t, inner[op.id])
    outside = dict(zip(body.inputs, loop.inputs, strict=True))
    first = {s: reader[t] for t, s in outside.items() if isinstance(s, int) and t in reader}
    makers = {t: inner[op.id] for op in body.ops if op.id in inner for t in op.outputs}
    # the stage of tensors
    known = {t: makers[o] for t, o in zip(loop.outputs, body.outputs, strict=True) if isinstance(o, int) and o in makers}
    free = free_ops(program)
    ops = [op for op in program.ops if op is not loop and op.id not in free]
    stage: dict[int, int] = {}
    for op in ops:  # forwards: the gradients' stages
        if (part := part_in(op.scope)) is not None:
            stage[op.id] = part
            known.update(dict.fromkeys(op.outputs, part))
            continue
        own = [(program.tensors[t].size, -n, known[t]) for n, t in enumerate(op.tensors) if t in known]
        if own:
            stage[op.id] = max(own)[2]
            known.update(dict.fromkeys(op.outputs, stage[op.id]))
    for op in reversed(ops):  # backwards: what only later ops or the loop reads
        if op.id not in stage:
            wanted = [first[t] for t in op.outputs if t in first]
            stage[op.id] = wanted[0] if wanted else 0
        for t in op.tensors:
            first[t] = stage[op.id]
    return stage
