"""The layouts that XLA's partitioner infers for the values of a step from the shardings of its arguments.

The step is lowered without a plan's constraints, with each op in a named scope of its own, and Shardy's propagation, which XLA
runs before it partitions, says where each result lies. Nothing is compiled, and no devices are needed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.cost import Network
from shardplan.emit.walk import Walk, where_rows
from shardplan.frontend.trace import Traced
from shardplan.graph import Graph, Node
from shardplan.ir import Constraint, Layout, Manual
from shardplan.schedule import Compute, Fill, Move, PlannedProgram, Schedule, While
from shardplan.schedule.spelling import spelled_out
from shardplan.tdl.proof.cudnn_reference import FUNCTIONS


class UnconstrainedEmitter(Walk):
    """The ops of a step on whole arrays, under the step's own sharding constraints alone.

    An op has the source line and the named scope that it has in the step. With ``named``, it stands in a named scope of its own,
    and a function that the step itself runs on each device (`jax.shard_map`) is left out: values with the layouts of its operands
    and results take its place.
    """

    def __init__(self, planned: PlannedProgram, mesh: Any, *, named: bool = False) -> None:
        self.planned, self.mesh, self.named = planned, mesh, named
        self.axes = level_axes(planned)
        self.schedule: Schedule = spelled_out(planned)[0]

    def __call__(self, *flat: Any) -> list[Any]:
        """The step on flat arguments; flat results."""
        with _jax.on_mesh(self.mesh) if hasattr(self.mesh, "abstract_mesh") else jax.sharding.use_abstract_mesh(self.mesh):
            return self.block(self.schedule.body, flat, {})

    def compute(self, compute: Compute, inputs: Sequence[Any]) -> list[Any]:
        """An op's results."""
        node, signature = compute.node, compute.node.signature
        if self.named and not node.outputs:
            return []  # the propagation does not know the calls of Python's functions
        with jax.named_scope(f"{_SCOPE}{node.id}") if self.named else _jax.traced_at(node.op.handle, node.op.scope):
            if self.named and signature.manual is not None:
                return self.manual(compute, inputs, signature.manual)
            made = self.bound(compute, inputs)
            if signature.constraint is not None:
                made = [lax.with_sharding_constraint(made[0], NamedSharding(self.mesh, self.spec(signature.constraint)))]
        return made[: len(node.outputs)]

    def bound(self, compute: Compute, inputs: Sequence[Any]) -> list[Any]:
        """The results of an op's primitive."""
        op = compute.node.op
        formula = FUNCTIONS.get(op.primitive.removesuffix("_wrapper")) if self.named else None
        if formula is not None:  # JAX lowers cuDNN's kernels for devices alone
            return list(formula(*inputs, **op.handle.params))
        params = op.handle.params if "manual" not in op.params else {**op.handle.params, "mesh": self.mesh}
        with _jax.settings_of(op.handle):
            return list(_jax.bound(op.handle, list(inputs), params))

    def manual(self, compute: Compute, inputs: Sequence[Any], manual: Manual) -> list[Any]:
        """Values in the layouts of a `jax.shard_map`'s results, behind its operands in theirs."""
        tensors = [self.planned.graph.tensors[t] for t in compute.node.outputs]
        zeros = [jax.numpy.zeros(t.shape, t.dtype) for t in tensors]
        ins = [self.laid(x, dims) for x, dims in zip(inputs, manual.ins, strict=True)]
        made = lax.optimization_barrier([*ins, *zeros])[len(ins) :]
        return [self.laid(x, dims) for x, dims in zip(made, manual.outs, strict=True)]

    def laid(self, x: Any, dims: Sequence[Sequence[str]]) -> Any:
        """A value whose dims are split over these axes."""
        spec = PartitionSpec(*(tuple(dim) or None for dim in dims))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)) if np.ndim(x) else x

    def spec(self, constraint: Constraint) -> PartitionSpec:
        """The PartitionSpec of a constraint over the mesh."""
        dims = [None if d is None else tuple(axis for name in d for axis in self.axes[name]) for d in constraint.dims]
        return PartitionSpec(*(PartitionSpec.UNCONSTRAINED if d is None else d or None for d in dims))

    def move(self, x: Any, move: Move, extreme: Any) -> Any:
        """The value itself."""
        return x

    def zeros(self, fill: Fill) -> Any:
        """Zeros."""
        tensor = self.planned.graph.tensors[fill.tensor]
        return jax.numpy.zeros(fill.shape, tensor.dtype)

    def chosen(self, on: Any, x: Any, otherwise: Any, loop: While, carry: int) -> Any:
        """A selection along the leading dims of a value."""
        return where_rows(on, x, otherwise)


_SCOPE = "inferred_op"
LOWERED_FOR = "cpu"
"""What steps are lowered for: the platform that every JAX has, and for which kernels have stand-ins."""
_NUMBER = re.compile(rf"{_SCOPE}(\d+)")


def level_axes(planned: PlannedProgram) -> dict[str, tuple[str, ...]]:
    """The axes of a plan's mesh by the names that constraints use: those of its factors, and of whole levels."""
    network = planned.programs.resharder.network
    assert isinstance(network, Network)
    cluster, levels = network.cluster, dict[str, tuple[str, ...]]()
    for factor in planned.factors:
        name = cluster.levels[factor.level].name
        levels[name] = (*levels.get(name, ()), factor.name)
    return levels | {name: (name,) for name in planned.names}


def inferred_layouts(planned: PlannedProgram, traced: Traced, specs: Sequence[PartitionSpec]) -> dict[int, Layout]:
    """The layouts of the graph's tensors, by number, as XLA infers them from the ``specs`` of the step's leaves.

    State comes back as it went in. Tensors that XLA lays out in parts of axes, or has no op for, are left out.

    Raises:
        UnknownShardyError: if this JAX does not tell, or not for all products of the step.
    """
    mesh = AbstractMesh(planned.sizes, planned.names, axis_types=(AxisType.Auto,) * len(planned.sizes))
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    out = [None if i is None else shardings[i] for i in traced.program.feedback]
    emit = UnconstrainedEmitter(planned, mesh, named=True)
    jitted = jax.jit(emit, in_shardings=shardings, out_shardings=out, keep_unused=True)
    traced_anew = jitted.trace(*traced.in_shapes)
    try:
        with _jax.on_no_device():
            lowered = traced_anew.lower(lowering_platforms=(LOWERED_FOR,))
    except (NotImplementedError, ValueError) as error:
        raise _jax.UnknownShardyError(str(error).partition("\n")[0]) from error
    graph, names = planned.graph, planned.names
    given = {t: _layout(spec, len(graph.tensors[t].shape), names) for t, spec in zip(graph.inputs, specs, strict=True)}
    return _filled(given | _by_tensor(_jax.inferred(lowered, names, planned.sizes), graph, names), graph)


def _layout(spec: PartitionSpec, rank: int, names: Sequence[str]) -> Layout:
    """A PartitionSpec over axes of these names as a layout."""
    dims = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    return Layout(tuple(tuple(names.index(axis) for axis in dim) for dim in (*dims, *[()] * (rank - len(dims)))))


def _by_tensor(ops: Sequence[_jax.InferredOp], graph: Graph, names: Sequence[str]) -> dict[int, Layout | None]:
    """The layouts by tensor, None where they split by parts of axes.

    The last op of a node's scope with its results' shapes makes them. Where a node is lowered to ops with one result each, the
    last of them with a result's shape makes it.

    Raises:
        UnknownShardyError: if no op is named after a product of the step: the locations do not say what is inferred.
    """
    found: dict[int, Layout | None] = {}
    for op in ops:
        numbers = _NUMBER.findall(op.location)
        if not numbers:
            continue
        outputs = graph.nodes[int(numbers[-1])].outputs
        shapes = [graph.tensors[t].shape for t in outputs]
        match [shape for shape, _ in op.results]:
            case own if own == shapes:
                made = list(zip(outputs, op.results, strict=True))
            case [shape]:
                made = [(t, op.results[0]) for t, other in zip(outputs, shapes, strict=True) if other == shape]
            case _:
                made = []
        for t, (_, axes) in made:
            found[t] = None if axes is None else Layout(tuple(tuple(names.index(axis) for axis in dim) for dim in axes))
    products = [node for node in graph.nodes if node.signature.contracts]  # no compiler removes one, or makes another op of it
    lost = [node.op for node in products if not any(t in found for t in node.outputs)]
    if lost:
        raise _jax.UnknownShardyError(f"{len(lost)} of {len(products)} products are not found, such as that at {lost[0].source}")
    return found


def _filled(found: Mapping[int, Layout | None], graph: Graph) -> dict[int, Layout]:
    """The layouts, and those of values for which XLA has no named op.

    A stack that enters or leaves a loop lies as its slices do, whole along the iterations: XLA slices and stacks in ops of its
    own, which stand for none of the step. The result of an elementwise op that is lowered to nothing (a product with one) is its
    operand.
    """
    known = dict(found)
    while True:
        before = len(known)
        for link in graph.links:
            for one, other, lift in ((link.source, link.target, link.lift), (link.target, link.source, -link.lift)):
                if (layout := known.get(one)) is not None and other not in known:
                    known[other] = Layout(((), *layout.dims) if lift < 0 else layout.dims[lift:])
        for node in graph.nodes:
            if node.signature.elementwise:
                known |= _as_its_operand(node, known, graph)
        if len(known) == before:
            return {t: layout for t, layout in known.items() if layout is not None}


def _as_its_operand(node: Node, known: Mapping[int, Layout | None], graph: Graph) -> dict[int, Layout | None]:
    """The layout of the first known operand of its shape for each unknown result of an op."""
    unknown = [t for t in node.outputs if t not in known]
    alike = [t for t in node.inputs if unknown and t in known and graph.tensors[t].shape == graph.tensors[unknown[0]].shape]
    return dict.fromkeys(unknown, known[alike[0]]) if alike else {}
