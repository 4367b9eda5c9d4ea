"""Which arguments may stay in host memory: those that only the update of the step reads, and that it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from shardplan.errors import OffloadError, nearest
from shardplan.ir import Program
from shardplan.offload.update_order import backward, feeds_backward
from shardplan.remat.recomputed import free


def matching(program: Program, globs: Sequence[str]) -> frozenset[int]:
    """The arguments, by number, whose paths match the globs; those without dims stay on the device.

    Raises:
        OffloadError: for a glob that matches no array with dims, or an argument that cannot stay in host memory.
    """
    kept = on_device(program)
    found: set[int] = set()
    for glob in globs:
        own = [i for i, path in enumerate(program.input_paths) if _has_dims(program, i) and fnmatchcase(path, glob)]
        if not own:
            raise OffloadError(repr(glob), f"matches no argument that has dims{nearest(glob, program.input_paths)}")
        for i in own:
            if i in kept:
                raise OffloadError(program.input_paths[i], kept[i])
        found.update(own)
    return frozenset(found)


def on_device(program: Program) -> Mapping[int, str]:
    """The arguments, by number, that cannot stay in host memory, each with the reason."""
    returned = {i: o for o, i in zip(program.outputs, program.feedback, strict=True) if i is not None}
    several = [o for o in program.outputs if isinstance(o, int)]
    before, differentiated = feeds_backward(program), any(map(backward, program.ops))
    unread, result = free(program), dict[int, str]()
    for i, t in enumerate(program.inputs):
        if not _has_dims(program, i):
            result[i] = "has no dims: what it holds is not worth a transfer"
        elif not isinstance(returned.get(i), int):
            result[i] = "is not given back by the step in its place"
        elif not differentiated:
            result[i] = "is read by a step that has no backward pass"
        elif t in before:
            result[i] = f"is read by the forward or the backward pass ({before[t]})"
        elif returned[i] in unread:
            result[i] = "is replaced by a value that depends on no argument"
        elif t in several and (several.count(t) > 1 or returned[i] != t):
            result[i] = "is itself another result of the step"
    return result


def _has_dims(program: Program, argument: int) -> bool:
    tensor = program.tensors[program.inputs[argument]]
    return bool(tensor.shape) and not tensor.dtype.startswith("key")
