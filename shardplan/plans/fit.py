"""Whether the choices of a plan fit a program: before they are run, since what is wrong in them would be wrong numbers."""

from __future__ import annotations

from collections.abc import Sequence

from shardplan.errors import PlanFileError
from shardplan.graph import Graph, Signature
from shardplan.ir import Choices, Factor, Layout, Program, Use, spec_text


def check_choices(name: str, choices: Choices, program: Program, graph: Graph, factors: Sequence[Factor]) -> None:
    """Refuses choices that do not fit a program: another number of tensors, layouts of another rank, ops that are not there.

    Raises:
        PlanFileError: that says what does not fit; ``name`` is that of the file.
    """

    def need(holds: bool, what: str) -> None:
        if not holds:
            raise PlanFileError(f"{name}: {what}; plan this step anew")

    need(set(choices.bodies) == set(graph.bodies), f"the plan has {len(choices.bodies)} bodies, the step {len(graph.bodies)}")
    for where, body in choices.bodies.items():
        tensors = [graph.tensors[t] for t in graph.bodies[where]]
        need(len(tensors) == len(body.layouts), f"{len(body.layouts)} layouts for {len(tensors)} values")
        for tensor, layout in zip(tensors, body.layouts, strict=True):
            fits = layout is None or len(layout.dims) == len(tensor.shape)
            need(fits, f"a layout of rank {len(layout.dims) if layout else 0} for a value of shape {tensor.shape}")
    own, names, sizes = choices.bodies[()].layouts, [f.name for f in factors], [f.size for f in factors]
    for t, path in zip(program.inputs, program.input_paths, strict=True):
        layout, shape = own[t], program.tensors[t].shape
        if layout is not None:
            text = spec_text(layout.entries(names))
            need(_divides(layout, shape, sizes), f"the layout {text} of {path} of shape {shape} does not divide it")
    nodes = {(n.where, n.op.id): n for n in graph.nodes}
    for where, body in choices.bodies.items():
        for op, use in body.uses.items():
            need((where, op) in nodes, f"it cuts op {op}, which is not in this step")
            need(_fits(use, nodes[where, op].signature), f"op {op} ({nodes[where, op].op.primitive}) cannot be cut as it says")
        for op, slot in body.reads:
            inside = (where, op) in nodes and 0 <= slot < len(nodes[where, op].inputs)
            need(inside, f"op {op} reads operand {slot}, which is not in this step")
            tensor = graph.tensors[nodes[where, op].inputs[slot]]
            copy = choices.copies[body.reads[op, slot]].layout
            need(len(copy.dims) == len(tensor.shape), f"a copy of rank {len(copy.dims)} for a value of shape {tensor.shape}")


def _divides(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    for n, dim in zip(shape, layout.dims, strict=True):
        for f in dim:
            if n % sizes[f]:
                return False
            n //= sizes[f]
    return not layout.partial


def _fits(use: Use, signature: Signature) -> bool:
    """Whether a use is of an op with such operands, results and loops."""
    call, description = signature.call, signature.description
    loops = 0 if description is None else len(description.loops)
    ranks = [(use.needs, call.operands), (use.gives, call.results), (use.stored, call.results)]
    if any(len(layouts) != len(shapes) for layouts, shapes in ranks):
        return False
    pairs = [(layout, shape) for layouts, shapes in ranks for layout, shape in zip(layouts, shapes, strict=True)]
    # a buffer of a reduce-scatter shows as one dim more
    fits = all(layout is None or 0 <= len(layout.dims) - len(shape) <= 1 for layout, shape in pairs)
    return fits and all(loop < loops for loop in use.loops)
