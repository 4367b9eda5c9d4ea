"""Checks a plan on the user's own arguments: compares one step under the plan with one on one device, leaf by leaf.

`shardplan.verify.judge` says what equal means, as for `shardplan.verify.verify`. Both runs take copies, so the arguments remain
as they are, donated or not. Under the plan of a shrunken copy (`shardplan.verify.fewer`), both run on the first samples and
layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from shardplan.errors import CheckError, UncheckedError, size_text
from shardplan.frontend.deleted import refuse_deleted
from shardplan.verify.fewer import Fewer, first_of
from shardplan.verify.judge import Judged, furthest, ran, require_results
from shardplan.verify.on_host import on_host
from shardplan.verify.op_by_op import unmerged_bytes
from shardplan.verify.reference import by_reference
from shardplan.verify.runs import Noise, Runnable, Sharded, alone, loop_of


def check(
    plan: Runnable,
    jitted: Any,
    leaves: Sequence[Any],
    tree: Any,
    devices: Sequence[Any] | None = None,
    fewer: Sequence[Fewer] = (),
) -> Judged:
    """Runs the planned step on one device and, ``jitted`` under its plan, on all; ``leaves`` are those of its arguments,
    objects split. A plan may be for a copy with ``fewer`` samples or layers, which runs on the first of each.

    Raises:
        CheckError: if a leaf of the result differs, or if no number of it is finite.
        UncheckedError: if the check cannot run: a device lacks the memory, or this process does not have all values.
        ShardplanError: if the step returns no array, or for a deleted argument.
    """
    require_results(plan.traced.program)
    _require_values(leaves)
    refuse_deleted(plan.traced.program.input_paths, leaves)
    first = plan.mesh(devices).devices.flat[0]
    loop = loop_of(plan.traced, tree, 1)
    one, perturbed = alone(plan, plan.step, None if devices is None else [first], loop)
    held = _held(leaves, first)
    _require_memory(plan, held, sum(map(_nbytes, plan.traced.in_shapes)), first)
    _require_memory(plan, held, max(one.peak_bytes(plan.traced.in_shapes), int(plan.peak_bytes)), first)
    host = [on_host(first_of(x, shape.shape)) for x, shape in zip(leaves, plan.traced.in_shapes, strict=True)]
    single, found = one.run(host), Sharded(plan, jitted, devices, loop).run(host)
    paths = plan.traced.program.output_paths
    noise, wanted, unknown = Noise(perturbed.again, [host], single), single, ""
    judged = noise.judged(paths, single, found)
    if judged.unequal:
        try:
            _require_memory(plan, held, unmerged_bytes(one.lines(host)), first)
            judged, wanted = by_reference(one, noise, paths, found, judged)
        except UncheckedError as error:
            unknown = f"; whether the step compiled for one device is right was not checked: op by op, {error.reason}"
    judged = replace(judged, fewer=tuple(fewer))
    if judged.unequal:
        at = paths.index(judged.worst.path)
        raise _difference(judged, wanted[0][at], found[0][at], unknown)
    if judged.numbers and not judged.compared:
        raise CheckError(
            f"the check proves nothing: on one device no number of the step's result is finite{_within(fewer)}", unequal=()
        )
    return judged


def _require_values(leaves: Sequence[Any]) -> None:
    """Refuses leaves whose values this process does not have."""
    if any(isinstance(x, Tracer) for x in leaves):
        raise UncheckedError("the step is called inside a traced function, where its arguments have no values")
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise UncheckedError("the arguments are shapes without values: give arrays (shardplan verify draws them)")
    if not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        raise UncheckedError("the arguments are spread over several processes, and none has all of their values")


def _require_memory(plan: Runnable, held: int, needed: int, device: Any) -> None:
    """Refuses a step that needs more bytes on the first device than the plan's limit and the device's allocator leave it."""
    stats = device.memory_stats() or {}
    limit = min(int(plan.memory_limit), int(stats.get("bytes_limit", plan.memory_limit)))
    held = max(held, int(stats.get("bytes_in_use", 0)))
    if held + needed > limit:
        raise UncheckedError(
            f"the step on one device needs at least {size_text(needed)} beside {size_text(held)} that are held there, "
            f"and a device has {size_text(limit)}",
            needed_bytes=held + needed,
            limit_bytes=limit,
        )


def _held(leaves: Sequence[Any], device: Any) -> int:
    """The bytes of the arguments that a device already holds."""
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    return sum(_nbytes(s.data) for x in arrays for s in x.addressable_shards if s.device == device)


def _within(fewer: Sequence[Fewer]) -> str:
    return f", in {ran(fewer)}" if fewer else ""


def _nbytes(x: Any) -> int:
    return int(np.prod(x.shape, dtype=np.int64)) * int(x.dtype.itemsize)


def _difference(judged: Judged, single: Any, sharded: Any, unknown: str) -> CheckError:
    """The error that names the worst leaf, with its values where they differ most; ``unknown`` says what was not checked."""
    worst = judged.worst
    place = furthest(single, sharded, worst.error)
    here, there = single[place].item(), sharded[place].item()
    where = f"{worst.path}[{', '.join(map(str, place))}]" if place else worst.path
    others = [path for path in judged.unequal if path != worst.path]
    more = f"; {len(others)} more differ: {', '.join(others[:4])}{' ...' if len(others) > 4 else ''}" if others else ""
    how = "op by op on one device" if judged.reference else "on one device"
    too = f"; {judged.reference}" if judged.reference else unknown
    return CheckError(
        f"the step under its plan differs from the step {how}{_within(judged.fewer)}: {where} is {here!r} {how} "
        f"and {there!r} under the plan (at most {worst.tolerance:.3g} apart is rounding){more}{too}; do not train with this "
        "plan: another backend (backend='specs') or other pins may avoid the fault, and `shardplan verify` says more",
        path=worst.path,
        index=place,
        single=here,
        sharded=there,
        tolerance=worst.tolerance,
        unequal=judged.unequal,
        reference=judged.reference,
    )
