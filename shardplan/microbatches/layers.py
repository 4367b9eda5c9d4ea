"""A step whose loop over layers is cut into several loops, one after the other, so that a pipeline can run them in its stages.

A value with a dim of layers is held in *parts*. A loop over layers runs part by part, the backward pass from the last to the
first. A step may have several such loops, one after the other, as an encoder and a decoder. An op whose description allows a
cut along the dim of layers runs for each part, as the optimizer's ops do. A sum over that dim adds up the sums of the parts.
Any other op gets the whole value. Arguments that no op needs whole become one argument for each part.
"""

# pyright: basic
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardplan import _jax
from shardplan.constants import CONSTANTS
from shardplan.emit.blocks import Blocks
from shardplan.emit.reductions import TWO_TERMS
from shardplan.errors import PlacementError
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.graph.nodes import Signature
from shardplan.ir import Microbatches, Op, Operand, Partial, Program, Split
from shardplan.microbatches.accumulating import microbatched
from shardplan.microbatches.whole_ops import operand_of, whole_op
from shardplan.regions.layer_parts import LayerParts, scope_of
from shardplan.schedule import Cut
from shardplan.tdl import Strategy

_ON_ALL_DEVICES = "plan it without the axis 'stage', as a pipeline runs in microbatches, and with microbatches=1"


def in_layer_parts(
    program: Program, count: int, batch: Sequence[int] = (), replicate: Sequence[str] = ()
) -> tuple[Program, LayerParts] | None:
    """The step with its loops over layers in ``count`` parts; None if its forward pass has no such loop, or if none of its
    arguments can be in parts. ``batch`` are the numbers of the arguments that hold samples.

    Raises:
        PlacementError: for a number of layers that does not divide.
    """
    length = looped_layers(program, batch)
    if length == 1 or count == 1:
        return None
    lengths = {length, *_long_loops(program, batch, count)}
    split = frozenset(i for i in _stacked(program, lengths) if i not in batch)
    signatures = {node.op.id: node.signature for node in flatten(program, replicate=replicate).nodes if not node.where}
    if split and length % count:
        raise PlacementError(
            f"a loop over {length} layers does not divide into {count} stages: choose a number of stages that divides it"
        )
    while split:  # drops arguments that an op needs whole, and then those made with them
        step = _InParts(program, signatures, count, split, frozenset(program.inputs[i] for i in batch))
        made = trace(step, *step.shapes).program
        if not step.loops:
            return None
        if not step.needed_whole:
            return step.named(made), step.parts
        split -= step.needed_whole
    return None


@dataclass(frozen=True, slots=True)
class Staged:
    """A step in microbatches, to be cut into the stages of a pipeline. ``layers`` says how its arguments lie in them if its
    loop over layers is cut (else None).
    """

    program: Program
    layers: LayerParts | None


def staged_program(program: Program, parts: Microbatches, stages: int, replicate: Sequence[str] = ()) -> Staged:
    """The step in microbatches, for a pipeline of ``stages``.

    Raises:
        MicrobatchError: as `microbatched`.
        PlacementError: as `in_layer_parts`.
    """
    found = in_layer_parts(program, stages, parts.batch, replicate)
    if found is None:
        return Staged(microbatched(program, parts, replicate, _ON_ALL_DEVICES), None)
    program, layers = found
    parts = replace(parts, batch=layers.parts_of(parts.batch))
    return Staged(microbatched(program, parts, replicate, _ON_ALL_DEVICES), layers)


def looped_layers(program: Program, batch: Sequence[int] = ()) -> int:
    """The number of layers: the length of the loops that read the most elements of arguments slice by slice; 1 without a loop."""
    elements = _loop_elements(program, batch, program.ops)
    found = max(elements, key=lambda n: elements[n], default=1)
    return found if elements[found] else 1


def _long_loops(program: Program, batch: Sequence[int], count: int) -> list[int]:
    """The lengths of loops of the forward pass that divide into ``count`` stages and are too large for one stage: it would hold
    more elements than its share, by over `CONSTANTS.whole_loop`.
    """
    late: set[int] = set()
    forward = [op for op in program.ops if not _is_late(op, late)]
    elements = _loop_elements(program, batch, forward)
    much = CONSTANTS.whole_loop * elements.total()
    return [n for n, own in elements.items() if n > 1 and n % count == 0 and own * (count - 1) > much]


def _is_late(op: Op, late: set[int]) -> bool:
    """Whether an op is of the backward pass or depends on it. ``late`` are the results of such ops, to which it adds its own."""
    found = op.backward or not late.isdisjoint(op.tensors)
    if found:
        late.update(op.outputs)
    return found


def _loop_elements(program: Program, batch: Sequence[int], ops: Iterable[Op]) -> Counter[int]:
    """The elements of arguments that the loops of each length among ``ops`` read slice by slice."""
    from_argument = {t: t for i, t in enumerate(program.inputs) if i not in batch}
    elements: Counter[int] = Counter()
    for op in ops:
        if op.control == "scan":
            first = int(op.params["num_consts"]) + int(op.params["num_carry"])
            own = {from_argument[t] for t in op.inputs[first:] if isinstance(t, int) and t in from_argument}
            elements[int(op.params["length"])] += sum(program.tensors[t].size for t in own)
        elif op.control is None and len(op.tensors) == 1 and op.tensors[0] in from_argument:  # such as a conversion of a weight
            from_argument.update(dict.fromkeys(op.outputs, from_argument[op.tensors[0]]))
    return elements


def _stacked(program: Program, lengths: Collection[int]) -> list[int]:
    """The arguments whose dim 0 may be the dim of layers."""
    tensors = [program.tensors[t] for t in program.inputs]
    return [i for i, t in enumerate(tensors) if t.shape and t.shape[0] in lengths and not t.dtype.startswith("key")]


@dataclass(frozen=True, slots=True)
class _Parts:
    """A value in parts along a dim, the arguments in parts from which it is made, and the loops over layers that made it."""

    values: tuple[Any, ...]
    dim: int
    made_from: frozenset[int]
    loops: frozenset[int] = frozenset()

    @property
    def length(self) -> int:
        """The extent of the dim."""
        return sum(int(x.shape[self.dim]) for x in self.values)


class _InParts:
    """The step on flat arguments in parts. Tracing it fills ``needed_whole``: the arguments in parts that an op needs whole."""

    def __init__(
        self, program: Program, signatures: Mapping[int, Signature], count: int, split: frozenset[int], samples: frozenset[int]
    ) -> None:
        self.program, self.signatures, self.count, self.split = program, signatures, count, split
        self.samples = samples or frozenset(program.inputs)  # the tensors of the batch
        self.needed_whole: set[int] = set()
        self.loops = 0
        self._loop_of: dict[int, int] = {}  # the last loop of the forward pass that takes slices of an argument
        self._inputs, self._outputs = (
            _numbered([count if i in split else 1 for i in range(len(program.inputs))]),
            _numbered([count if i in split else 1 for i in program.feedback]),
        )

    @property
    def parts(self) -> LayerParts:
        """The arguments and results in parts, once the step is traced."""
        return LayerParts(self.count, self._inputs, self._outputs, self.loops)

    @property
    def shapes(self) -> list[Any]:
        """The types of the arguments in parts."""
        found: list[Any] = []
        for i, t in enumerate(self.program.inputs):
            shape, dtype = self.program.tensors[t].shape, self.program.tensors[t].dtype
            own = (shape[0] // self.count, *shape[1:]) if i in self.split else shape
            found += [_jax.shape_struct(own, dtype)] * len(self._inputs[i])
        return found

    def named(self, made: Program) -> Program:
        """The traced program with the paths of the step."""
        inputs, outputs, program = self._inputs, self._outputs, self.program
        feedback = program.feedback
        return replace(
            made,
            input_paths=self._paths(program.input_paths, program.inputs, inputs),
            output_paths=self._paths(program.output_paths, program.outputs, outputs),
            feedback=tuple(None if i is None else inputs[i][n] for i, own in zip(feedback, outputs, strict=True)
                           for n in range(len(own))),
        )  # fmt: skip

    def _paths(self, paths: Sequence[str], values: Sequence[Operand], parts: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        found: list[str] = []
        for path, value, own in zip(paths, values, parts, strict=True):
            if len(own) == 1:
                found.append(path)
                continue
            assert isinstance(value, int)
            each = self.program.tensors[value].shape[0] // self.count
            found += [f"{path}[{n * each}:{(n + 1) * each}]" for n in range(self.count)]
        return tuple(found)

    def __call__(self, *flat: Any) -> list[Any]:
        """The flat results in parts."""
        values: dict[int, Any] = dict(self.program.constants)
        self.loops, late, sampled = 0, set[int](), set(self.samples)
        for i, (t, own) in enumerate(zip(self.program.inputs, self._inputs, strict=True)):
            xs = tuple(flat[n] for n in own)
            values[t] = _Parts(xs, 0, frozenset({i})) if i in self.split else xs[0]
        for op in self.program.ops:
            operands = [operand_of(values, x) for x in op.inputs]
            if depends := not sampled.isdisjoint(op.tensors):
                sampled.update(op.outputs)
            forward = not _is_late(op, late) and depends
            with _jax.traced_at(op.handle, op.scope):
                values.update(zip(op.outputs, self._results(op, operands, forward), strict=True))
        found: list[Any] = []
        for output, i in zip(self.program.outputs, self.program.feedback, strict=True):
            x = operand_of(values, output)
            if i not in self.split:
                found.append(self._whole(x) if i is not None else _joined(x) if isinstance(x, _Parts) else x)
            elif isinstance(x, _Parts) and x.dim == 0:
                found += x.values
            else:
                self.needed_whole.add(i)
                found += _slices(self._whole(x), self.count)
        return found

    def _whole(self, x: Any) -> Any:
        """A value that an op needs whole."""
        if not isinstance(x, _Parts):
            return x
        self.needed_whole |= x.made_from
        return _joined(x)

    def _results(self, op: Op, operands: Sequence[Any], forward: bool) -> Sequence[Any]:
        if any(isinstance(x, _Parts) for x in operands):
            if op.control == "scan" and self._takes_parts(op, operands):
                return self._scan(op, operands, forward)
            if (found := self._by_part(op, operands)) is not None:
                return found
        return whole_op(op, [self._whole(x) for x in operands])

    @staticmethod
    def _takes_parts(op: Op, operands: Sequence[Any]) -> bool:
        """Whether a loop goes over slices of a value in parts."""
        stacked = operands[int(op.params["num_consts"]) + int(op.params["num_carry"]) :]
        return any(isinstance(x, _Parts) and x.dim == 0 for x in stacked)

    def _number(self, stacked: Sequence[Any], forward: bool) -> int:
        """The number of a loop over layers of the forward pass of a batch. A loop of the backward pass, of an optimizer after it,
        or over weights alone has the number of the last loop that made its operands, or that reads the same arguments.
        """
        parts = [x for x in stacked if isinstance(x, _Parts) and x.dim == 0]
        arguments = frozenset[int]().union(*(x.made_from for x in parts))
        if not forward:
            loops = frozenset[int]().union(*(x.loops for x in parts)) or {self._loop_of.get(i, 0) for i in arguments} or {0}
            return max(loops)
        self.loops += 1
        self._loop_of.update(dict.fromkeys(arguments, self.loops - 1))
        return self.loops - 1

    def _scan(self, op: Op, operands: Sequence[Any], forward: bool) -> Sequence[Any]:
        """A loop over layers, part by part."""
        consts, carries = int(op.params["num_consts"]), int(op.params["num_carry"])
        fixed = [self._whole(x) for x in operands[:consts]]
        state = [self._whole(x) for x in operands[consts : consts + carries]]
        stacks = [self._parts(x) for x in operands[consts + carries :]]
        loop = self._number(operands[consts + carries :], forward)
        order = range(self.count)[::-1] if op.params["reverse"] else range(self.count)
        made: dict[int, Sequence[Any]] = {}
        for n in order:
            with jax.named_scope(scope_of(n, loop)):
                own = whole_op(op, [*fixed, *state, *(xs[n] for xs in stacks)], length=int(op.params["length"]) // self.count)
            state, made[n] = own[:carries], own[carries:]
        ys = zip(*(made[n] for n in range(self.count)), strict=True)
        return [*state, *(_Parts(tuple(y), 0, frozenset(), frozenset({loop})) for y in ys)]

    def _parts(self, x: Any) -> Sequence[Any]:
        """The parts of a value that a loop takes slice by slice."""
        return x.values if isinstance(x, _Parts) and x.dim == 0 else _slices(self._whole(x), self.count)

    def _by_part(self, op: Op, operands: Sequence[Any]) -> Sequence[Any] | None:
        """The results of an op that runs for each part; None for one that cannot be cut so."""
        signature = self.signatures.get(op.id)
        if signature is None or signature.description is None or op.acts or signature.multiplies:
            return None  # the terms of a product over layers would be needed in one stage
        for loop, info in enumerate(signature.description.loops):
            strategy = signature.cut(loop, self.count) if info.extent % self.count == 0 else None
            if strategy is None or not _follows(strategy, operands):
                continue
            whole = {i for i, (x, p) in enumerate(zip(operands, strategy.operands, strict=True))
                     if isinstance(p, Split) and not isinstance(x, _Parts)}  # fmt: skip
            cut = Cut(loop, (0,), self.count, whole=frozenset(whole), extent=info.extent)
            parts = [x for x in operands if isinstance(x, _Parts)]
            made_from, loops = (frozenset[int]().union(*own) for own in ([x.made_from for x in parts], [x.loops for x in parts]))
            made = [self._part(op, signature, cut, operands, n) for n in range(self.count)]
            results = zip(zip(*made, strict=True), strategy.results, strict=True)
            return [_together(xs, place, made_from, loops) for xs, place in results]
        return None

    def _part(self, op: Op, signature: Signature, cut: Cut, operands: Sequence[Any], number: int) -> Sequence[Any]:
        blocks = Blocks(("layers",), _no_neighbour, lambda _: number)
        own = [x.values[number] if isinstance(x, _Parts) else x for x in operands]
        with _jax.settings_of(op.handle), blocks.body(), jax.named_scope(scope_of(number)):
            return blocks.run(signature.call, [cut], own, op.handle.primitive)


def _follows(strategy: Strategy, operands: Sequence[Any]) -> bool:
    """Whether a cut takes operands in parts as they are, needs nothing of neighbours, and leaves parts or terms."""
    for x, place in zip(operands, strategy.operands, strict=True):
        if isinstance(place, Partial) or (isinstance(place, Split) and place.halo != (0, 0)):
            return False
        if isinstance(x, _Parts) and place != Split(x.dim):
            return False
    return all(
        place.halo == (0, 0) if isinstance(place, Split) else isinstance(place, Partial) and place.reducer in TWO_TERMS
        for place in strategy.results
    )


def _together(xs: Sequence[Any], place: Any, made_from: frozenset[int], loops: frozenset[int]) -> Any:
    """The value that all parts make: in parts, or their terms reduced."""
    if isinstance(place, Split):
        return _Parts(tuple(xs), place.dim, made_from, loops)
    total = xs[0]
    for x in xs[1:]:
        total = TWO_TERMS[place.reducer](total, x)
    return total


def _joined(x: _Parts) -> Any:
    return jnp.concatenate(x.values, x.dim)


def _slices(x: Any, count: int) -> list[Any]:
    each = x.shape[0] // count
    return [lax.slice_in_dim(x, n * each, (n + 1) * each) for n in range(count)]


def _numbered(sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Consecutive numbers in groups of these sizes."""
    first, found = 0, list[tuple[int, ...]]()
    for size in sizes:
        found.append(tuple(range(first, first + size)))
        first += size
    return tuple(found)


def _no_neighbour(*_: Any) -> Any:
    raise AssertionError("an op that runs for each part needs nothing of its neighbours")
