"""The memory of a placed step: which results take the buffers of arguments, and the most bytes that a device holds."""

from __future__ import annotations

import math

from shardplan.regions.issues import Dispatch
from shardplan.regions.tasks import Key, PlacedTaskGraph, Task, Transfer


def peak_bytes(graph: PlacedTaskGraph, dispatch: Dispatch) -> int:
    """The most bytes that a device holds: the sum over the groups that it belongs to."""
    held: dict[int, int] = {}
    taken = reused(graph, dispatch)
    for g, group in enumerate(graph.groups):
        own = _most_held(graph, dispatch, g, taken, inside=True)
        for d in group.devices:
            held[d] = held.get(d, 0) + own
    return max(held.values())


def most_held(graph: PlacedTaskGraph, dispatch: Dispatch, group: int, *, inside: bool = False) -> int:
    """The most bytes that a device of a group holds of values that enter or leave its programs; with ``inside``, also those
    that a program needs while it runs. The caller holds the arguments to the end, except for those whose buffers results take.
    """
    return _most_held(graph, dispatch, group, reused(graph, dispatch), inside=inside)


def argument_bytes(graph: PlacedTaskGraph, group: int) -> int:
    """The bytes of the step's arguments on one device of a group."""
    return sum(_local_bytes(graph, group, key[0]) for g, key in graph.inputs if g == group)


def reused(graph: PlacedTaskGraph, dispatch: Dispatch) -> dict[int, dict[int, int]]:
    """By piece, the positions of the arguments whose buffers results take, each with the position of its result.

    Nothing reads such an argument after any task of the piece, and the two have equal blocks on a device. Arguments of the step
    that are not donated are not reused, nor are values sent to a device that has them already: they may share a buffer there.
    """
    groups = [frozenset(g.devices) for g in graph.groups]
    kept = {key for _, key in graph.inputs if key[0] not in graph.donated}
    kept |= {m.key for m in graph.transfers if not groups[m.source].isdisjoint(groups[m.target])}
    free: dict[int, set[int]] = {}  # by piece, the positions that may be reused
    for issue in dispatch.issues:
        if isinstance(task := issue.what, Task):
            group, last = graph.pieces[task.piece].group, frozenset(issue.last)
            among = free.get(task.piece, range(len(task.reads)))
            free[task.piece] = {n for n in among if (group, task.reads[n]) in last and task.reads[n] not in kept}
    return {piece: _taken(graph, piece, sorted(own)) for piece, own in free.items() if own}


def _taken(graph: PlacedTaskGraph, number: int, arguments: list[int]) -> dict[int, int]:
    """The arguments that may be reused and whose blocks are equal to blocks of results."""
    piece = graph.pieces[number]
    free: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for n, t in reversed(list(enumerate(piece.makes))):
        free.setdefault(_block(graph, piece.group, t), []).append(n)
    found: dict[int, int] = {}
    for n in arguments:
        if results := free.get(_block(graph, piece.group, piece.reads[n])):
            found[n] = results.pop()
    return found


def _block(graph: PlacedTaskGraph, group: int, tensor: int) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of the block of a tensor on a device of a group."""
    own, mesh = graph.tensors[tensor], graph.groups[group]
    layout = mesh.layouts.get(tensor)
    if layout is None:
        return own.shape, own.dtype
    shape = (n // math.prod(mesh.factors[f].size for f in dim) for n, dim in zip(own.shape, layout.dims, strict=True))
    return (*(1,) * len(layout.partial), *shape), own.dtype


def _most_held(graph: PlacedTaskGraph, dispatch: Dispatch, group: int, taken: dict[int, dict[int, int]], *, inside: bool) -> int:
    """`most_held`, given the buffers that results take."""
    held = {key: _local_bytes(graph, group, key[0]) for g, key in graph.inputs if g == group}
    arguments = frozenset(held)
    most = total = sum(held.values())
    works, leaving = 0, list[Key]()  # of the task that runs
    for issue in dispatch.issues:
        made: tuple[Key, ...] = ()
        like: int | None = None
        ended = [key for g, key in issue.last if g == group and key not in arguments]
        replaced: dict[Key, Key] = {}
        match issue.what:
            case Task() as task if graph.pieces[task.piece].group == group:
                total -= sum(held.pop(key, 0) for key in leaving)
                works, leaving, made = graph.pieces[task.piece].inside_bytes, ended, task.makes
                replaced = {task.makes[n]: task.reads[i] for i, n in taken.get(task.piece, {}).items()}
            case Transfer(key, _, target, own) if target == group:
                made, like = (key,), own
            case _:
                pass
        for key in made:
            if key not in held:
                held[key] = _local_bytes(graph, group, key[0] if like is None else like)
                total += held[key]
            if key in replaced:
                total -= held.pop(replaced[key], 0)
        most = max(most, total + (works if inside else 0))
        if isinstance(issue.what, Transfer):
            total -= sum(held.pop(key, 0) for key in ended)
    return most


def _local_bytes(graph: PlacedTaskGraph, group: int, tensor: int) -> int:
    """The bytes of a tensor on one device of a group."""
    own = graph.groups[group]
    layout = own.layouts.get(tensor)
    ways = 1 if layout is None else math.prod(own.factors[f].size for f in layout.used)
    return graph.tensors[tensor].nbytes // ways
