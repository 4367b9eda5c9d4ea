"""A walk over the instructions of a schedule: control flow, which both backends share; each says how ops run and values move."""

# pyright: basic
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan.ir import Constant
from shardplan.schedule import Barrier, Block, Compute, Cond, Fill, HostCopy, Instruction, Move, Scan, Source, While
from shardplan.schedule.instructions import blocks_of, results_of

Values = dict[int, Any]


class Walk(ABC):
    """Runs blocks of instructions; a backend says how ops run and values move."""

    @abstractmethod
    def compute(self, compute: Compute, inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of an op; of a reduction of pairs, the extreme too unless it is reduced already."""

    @abstractmethod
    def move(self, x: Any, move: Move, extreme: Any) -> Any:
        """A value after a move."""

    @abstractmethod
    def zeros(self, fill: Fill) -> Any:
        """Zeros in a layout."""

    @abstractmethod
    def chosen(self, on: Any, x: Any, otherwise: Any, loop: While, carry: int) -> Any:
        """A carry of a loop where the mask ``on`` of its leading dims holds, else ``otherwise``."""

    def barred(self, xs: Sequence[Any], barrier: Barrier) -> Sequence[Any]:
        """Values behind an optimization barrier."""
        return lax.optimization_barrier(xs)

    def copied(self, x: Any, copy: HostCopy) -> Any:
        """A value in another memory, cut as it is."""
        space = jax.memory.Space
        return jax.device_put(x, space.Host if copy.memory == "pinned_host" else space.Device)

    def placed(self, x: Any, number: int) -> Any:
        """A parameter of a block, or a result of control flow, in its layout."""
        return x

    # -- blocks ------------------------------------------------------------------------------------------------------

    def block(self, block: Block, arguments: Sequence[Any], outer: Mapping[int, Any]) -> list[Any]:
        """The results of a block."""
        values: Values = {**outer}
        values.update((p, self.placed(x, p)) for p, x in zip(block.parameters, arguments, strict=True))
        for instruction in block.instructions:
            self.instruction(instruction, values)
        return [self.value(values, source) for source in block.results]

    def value(self, values: Mapping[int, Any], source: Source) -> Any:
        """A value, or a literal as an array."""
        return literal(source) if isinstance(source, Constant) else values[source]

    def instruction(self, instruction: Instruction, values: Values) -> None:
        """Runs one instruction."""
        # a reduction of pairs that is complete already has no extreme to hand on
        pairs = isinstance(instruction, Compute) and len(instruction.results) > len(instruction.node.outputs)
        made = zip(results_of(instruction), self.results(instruction, values), strict=not pairs)
        values.update((r, self.placed(x, r)) if blocks_of(instruction) else (r, x) for r, x in made)

    def results(self, instruction: Instruction, values: Values) -> Sequence[Any]:
        """The results of an instruction."""
        match instruction:
            case Compute():
                return self.compute(instruction, [self.value(values, i) for i in instruction.inputs])
            case Move():
                extreme = None if instruction.extreme is None else values.get(instruction.extreme)
                return [self.move(values[instruction.source], instruction, extreme)]
            case Fill(value=None):
                return [self.zeros(instruction)]
            case Fill(value=Constant() as known):
                return [jnp.asarray(self.value(values, known))]
            case HostCopy():
                return [self.copied(values[instruction.source], instruction)]
            case Barrier():
                return self.barred([values[v] for v in instruction.values], instruction)
            case Scan():
                return self.scan(instruction, values)
            case While():
                return self.while_(instruction, values)
            case Cond():
                return self.cond(instruction, values)
            case _:
                raise AssertionError("only the explicit backend bundles and pads")

    # -- control flow ------------------------------------------------------------------------------------------------

    def scan(self, scan: Scan, values: Values) -> list[Any]:
        """A scan of the body; carries keep their types."""
        start, stacked = ([jnp.asarray(self.value(values, s)) for s in own] for own in (scan.start, scan.stacked))
        carry, params = len(start), scan.op.params

        def iteration(state: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results = self.block(scan.body, [*state, *slices], values)
            return [_as(x, s) for x, s in zip(results[:carry], state, strict=True)], results[carry:]

        end, ys = lax.scan(
            iteration, start, stacked, length=params["length"], reverse=params["reverse"], unroll=params.get("unroll", 1)
        )
        return [*end, *ys]

    def while_(self, loop: While, values: Values) -> list[Any]:
        """A while loop: the test has the same value on every device."""
        start = [jnp.asarray(self.value(values, s)) for s in loop.start]

        def holds(state: Sequence[Any]) -> Any:
            return self.block(loop.test, state, values)[0]

        def iteration(state: Sequence[Any]) -> list[Any]:
            after = [_as(x, s) for x, s in zip(self.block(loop.body, state, values), state, strict=True)]
            if not loop.batched:
                return after
            on = holds(state)
            return [self.chosen(on, x, s, loop, n) for n, (x, s) in enumerate(zip(after, state, strict=True))]

        return list(lax.while_loop(lambda state: jnp.any(holds(state)), iteration, start))

    def cond(self, cond: Cond, values: Values) -> list[Any]:
        """A conditional: the index has the same value on every device. JAX chooses among branches for platforms."""
        arguments = [self.value(values, a) for a in cond.arguments]

        def branch(block: Block) -> Callable[..., list[Any]]:
            return lambda *own: [jnp.asarray(x) for x in self.block(block, own, values)]

        branches = [branch(b) for b in cond.branches]
        platforms = cond.op.params.get("branches_platforms")
        if platforms is not None:  # a branch for another platform is not even lowered: it may have kernels of that one
            named = {name: made for names, made in zip(platforms, branches, strict=True) for name in names or ("default",)}
            return list(lax.platform_dependent(*arguments, **named))
        assert cond.index is not None
        return list(lax.switch(jnp.asarray(self.value(values, cond.index)).astype("int32"), branches, *arguments))


def literal(constant: Constant) -> Any:
    """A literal as an array."""
    if constant.dtype.startswith("key") or np.ndim(constant.value):
        return constant.value
    return np.asarray(constant.value, dtype=jnp.dtype(constant.dtype))


def _as(x: Any, like: Any) -> Any:
    """A carry keeps its type; only weakness of type can differ here."""
    return x if getattr(x, "dtype", None) == like.dtype else lax.convert_element_type(x, like.dtype)


def where_rows(on: Any, x: Any, otherwise: Any) -> Any:
    """``x`` in the rows where ``on`` holds, which has the leading dims of both, else ``otherwise``."""
    return lax.select(jnp.broadcast_to(on.reshape(on.shape + (1,) * (np.ndim(x) - on.ndim)), np.shape(x)), x, otherwise)
