"""Sums over the whole batch that depend on the data alone: they are computed once, before the microbatches.

A loss that is a mean over the unmasked tokens divides by their number, and so does every gradient: no microbatch can begin its
backward pass before the number over all microbatches is known. It depends on no weight, so it costs a pass over the mask.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from shardplan.ir import Op, Program
from shardplan.schedule import PlannedProgram


def early_sums(program: Program, planned: PlannedProgram) -> tuple[int, ...]:
    """The tensors that are terms of a sum in each microbatch, and depend on no weight, on no matrix product, and only on ops
    that may run twice.

    ``planned`` is the cut of the program over microbatches (`time_cut`). Weights are the arguments with floats that the step
    replaces.
    """
    state = {program.inputs[i] for i in program.feedback if i is not None}
    weights = {t for t in state if program.tensors[t].dtype.startswith(("float", "bfloat", "complex"))}
    late: set[int] = set(weights)
    found: list[int] = []
    for op in program.ops:
        node = planned.nodes.get(((), op.id))
        if node is None or not op.repeatable or node.signature.multiplies or not late.isdisjoint(op.tensors):
            late.update(op.outputs)
            continue
        use = planned.uses.get(node.id)
        if use is not None and any(layout.partial for layout in use.gives):
            found += op.outputs
    return tuple(found)


def without(program: Program, given: tuple[int, ...]) -> tuple[tuple[Op, ...], Program]:
    """(the ops that make these tensors, the program that takes them as arguments after its own)."""
    first = _needed(program, given, (), acts=False)
    later = _needed(program, program.returned, given, acts=True)
    rest = replace(
        program,
        ops=tuple(op for op in program.ops if op.id in later),
        inputs=(*program.inputs, *given),
        input_paths=(*program.input_paths, *(f"the sum over the batch {n}" for n in range(len(given)))),
    )
    return tuple(op for op in program.ops if op.id in first), rest


def _needed(program: Program, wanted: Collection[int], given: Collection[int], *, acts: bool) -> set[int]:
    """The ops that make the ``wanted`` tensors from ``given`` ones and others; with ``acts``, also the ops with effects."""
    needed, found = set(wanted) - set(given), set[int]()
    for op in reversed(program.ops):
        if (acts and op.acts) or not needed.isdisjoint(op.outputs):
            found.add(op.id)
            needed.update(t for t in op.tensors if t not in given)
    return found
