"""Whether a pipeline is faster if its groups run two chunks of layers each, judged by the tasks of its schedule alone.

The stages of a planned pipeline are halved, on paper: looped or folded over the same groups (the virtual stages of Narayanan et
al. 2021, section 2.2; Qi et al. 2024, section 3), with as many microbatches in flight as the plan has.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.constants import CONSTANTS
from shardplan.dag.pipeline_search import PipelineProblem, shortest_start
from shardplan.dag.pipelines import Seconds, folded, looped
from shardplan.placement.device_topology import DeviceTopology
from shardplan.regions.issues import Dispatch
from shardplan.regions.schedules import Chunk, chunks_of, transfer_s
from shardplan.regions.tasks import WHOLE, PlacedTaskGraph, Task


def two_chunks(graph: PlacedTaskGraph, dispatch: Dispatch, machine: DeviceTopology) -> tuple[int, ...] | None:
    """The group of each chunk, if two chunks for each group promise a shorter step than this pipeline of one each; else None."""
    chunks = chunks_of(graph)
    groups, count = len(chunks), len(chunks[0].tasks)
    wholes, most = _seconds(chunks), most_in_flight(graph, dispatch)
    send_s = max((transfer_s(graph, t, machine) for t in graph.transfers if t.key[1] != WHOLE), default=0.0)
    halves = tuple(Seconds(*(s / 2 for s in whole)) for whole in wholes for _ in range(2))
    best, best_s = None, shortest_start(PipelineProblem(looped(groups, 1), wholes, count, most, send_s))
    for device in (folded(groups), looped(groups, 2)):
        step_s = shortest_start(PipelineProblem(device, halves, count, 2 * most, send_s))
        if step_s < best_s * (1 - CONSTANTS.chunk_gain):
            best, best_s = device, step_s
    return None if best is None else tuple(chunks[d].group for d in best)


def _seconds(chunks: Sequence[Chunk]) -> tuple[Seconds, ...]:
    """The seconds of each chunk. The last one runs its forward and backward pass as one task, whose seconds are divided in the
    ratio of the others.
    """
    *others, last = (chunk.seconds for chunk in chunks)
    forward, backward = sum(s.forward for s in others), sum(s.backward for s in others)
    share = forward / (forward + backward) if forward + backward else 1.0
    passes = last.forward + last.backward
    return *others, Seconds(passes * share, passes * (1 - share), last.weight)


def most_in_flight(graph: PlacedTaskGraph, dispatch: Dispatch) -> int:
    """The most microbatches that a chunk has in flight at once, from the first of its tasks to the last."""
    runs: dict[tuple[int, int], list[int]] = {}  # the places of the tasks of a microbatch in the order of the dispatch
    for n, issue in enumerate(dispatch.issues):
        if isinstance(issue.what, Task) and graph.pieces[issue.what.piece].kind is not None:
            runs.setdefault((graph.pieces[issue.what.piece].chunk, issue.what.microbatch), []).append(n)
    spans: dict[int, list[tuple[int, int]]] = {}
    for (chunk, _), places in runs.items():
        spans.setdefault(chunk, []).append((places[0], places[-1]))
    return max(sum(a <= start <= b for a, b in own) for own in spans.values() for start, _ in own)
