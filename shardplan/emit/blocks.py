"""An op on a device's own block: every cut in turn, halos from the neighbours, operands that are whole cut here."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardplan.errors import DescriptionError
from shardplan.ir import Partial, Reducer, Split
from shardplan.schedule import Cut
from shardplan.tdl import Call, Strategy, cut, describe
from shardplan.tdl.description import LoopInfo
from shardplan.tdl.localize import Local, counted_in, edge_value, evaluate, localize
from shardplan.tdl.rewrite import compilable, in_row_major_order
from shardplan.tdl.shrink import resized

Permute = Callable[[Any, tuple[str, ...], list[tuple[int, int]]], Any]
Place = Callable[[tuple[str, ...]], Any]


class Blocks:
    """Runs calls on blocks, on a mesh with axes of these names. ``place`` gives a block's place along some of them."""

    def __init__(self, names: Sequence[str], permute: Permute = lax.ppermute, place: Place = lax.axis_index) -> None:
        self.names, self.permute, self.place = tuple(names), permute, place
        self._places: dict[tuple[int, ...], Any] = {}

    @contextmanager
    def body(self) -> Iterator[None]:
        """While this lasts, a new body is traced: values of the outer one are not its own."""
        outer, self._places = self._places, {}
        try:
            yield
        finally:
            self._places = outer

    def run(
        self, call: Call, cuts: Sequence[Cut], operands: Sequence[Any], primitive: Any, scope: str = "halo"
    ) -> tuple[Any, ...]:
        """A device's results from its blocks; what neighbours exchange stands in named scopes that begin with ``scope``.

        Raises:
            DescriptionError: where the results are not of the shapes that the description promises.
        """
        results = self._run(call, list(enumerate(cuts)), operands, primitive, scope)
        expected = _local_shapes(call, cuts)
        got = [x.shape for x in results[: len(expected)]]
        if got != expected:
            raise DescriptionError(
                f"{call.primitive} on a block gives results of shapes {got}, not {expected} as described: "
                "correct the description or its run="
            )
        return results

    def _run(
        self, call: Call, cuts: Sequence[tuple[int, Cut]], operands: Sequence[Any], primitive: Any, scope: str
    ) -> tuple[Any, ...]:
        """The first cut, and within what it leaves the others."""
        if not cuts:
            results = evaluate(call, compilable(call.primitive, operands, call.params), primitive=primitive)
            return tuple(in_row_major_order(call.primitive, results))
        ((number, first), *rest) = cuts
        description = describe(call)
        assert description is not None, "only what is described is cut"
        if description.loops[first.loop].extent != first.extent:
            padded = cut(description, first.loop, first.ways, pad=True)
            assert padded is not None, "a plan pads what may be padded"
            operands = [
                self._filled(x, p.dim, description.loops[first.loop], first, whole=i in first.whole)
                if isinstance(p, Split)
                else x
                for i, (x, p) in enumerate(zip(operands, padded.operands, strict=True))
            ]
            true, call = call, resized(call, padded, first.extent)
            description = describe(call)
            assert description is not None
        else:
            true = call
        strategy = cut(description, first.loop, first.ways)
        assert strategy is not None, "a dim that was cut along another loop divides no more"
        share = counted_in(localize(call, strategy), true)
        worker = self._worker(first)
        given = self._given(share, first, operands, worker, f"{scope}.{number}")
        return share.run(lambda ops: self._run(share.call, rest, ops, primitive, scope), given, worker)

    def _filled(self, x: Any, dim: int, loop: LoopInfo, c: Cut, *, whole: bool) -> Any:
        """An operand of a padded loop: beyond the end of a reduction stands what changes nothing."""
        x = jnp.asarray(x)
        if whole:
            short = [(0, c.extent - loop.extent) if d == dim else (0, 0) for d in range(x.ndim)]
            return jnp.pad(x, short, constant_values=_identity(loop.reducer, x.dtype))
        if loop.reducer is None:
            return x
        at = lax.broadcasted_iota("int32", x.shape, dim) + self._worker(c) * x.shape[dim]
        return jnp.where(at < loop.extent, x, _identity(loop.reducer, x.dtype))

    def _worker(self, c: Cut) -> Any:
        """A device's place along the factors of a cut, computed once in each body."""
        if c.factors not in self._places:
            self._places[c.factors] = self.place(tuple(self.names[f] for f in c.factors))
        return self._places[c.factors]

    def _given(self, share: Local, made: Cut, operands: Sequence[Any], worker: Any, scope: str) -> list[Any]:
        """The operands of one cut, with their halos."""
        given: list[Any] = []
        for i, (x, place, edge) in enumerate(zip(operands, share.strategy.operands, share.edges, strict=False)):
            x = jnp.asarray(x)
            has_halo = isinstance(place, Split) and place.halo != (0, 0)
            beyond = edge_value(edge, x.dtype, operands) if has_halo else None
            match place:
                case Split(dim, (lo, hi)) if i in made.whole:
                    given.append(_block(x, dim, lo, hi, made.ways, worker, beyond))
                case Split(dim, (lo, hi)) if lo or hi:
                    given.append(
                        self._with_halo(x, dim, lo, hi, made, worker, None if edge == "zero" else beyond, f"{scope}.{i}")
                    )
                case Partial() if i not in made.terms:
                    given.append(jnp.where(worker == 0, x, jnp.zeros((), x.dtype)))
                case _:
                    given.append(x)
        return given

    def _with_halo(self, x: Any, dim: int, lo: int, hi: int, made: Cut, worker: Any, beyond: Any, scope: str) -> Any:
        """The block with the neighbours' edges; beyond the ends zeros (as nobody sends any), or the value ``beyond``."""
        axes = tuple(self.names[f] for f in made.factors)
        size, parts = x.shape[dim], [x]

        def ended(halo: Any, last: int) -> Any:
            return halo if beyond is None else jnp.where(worker == last, beyond, halo)

        if lo:
            last = lax.slice_in_dim(x, size - lo, size, axis=dim)
            with jax.named_scope(f"{scope}.lo"):
                sent = self.permute(last, axes, [(w, w + 1) for w in range(made.ways - 1)])
            parts.insert(0, ended(sent, 0))
        if hi:
            first = lax.slice_in_dim(x, 0, hi, axis=dim)
            with jax.named_scope(f"{scope}.hi"):
                sent = self.permute(first, axes, [(w + 1, w) for w in range(made.ways - 1)])
            parts.append(ended(sent, made.ways - 1))
        return jnp.concatenate(parts, dim)


def _identity(reducer: Reducer | None, dtype: Any) -> Any:
    """The value that changes no reduction."""
    match reducer:
        case "max" | "argmax":
            return edge_value("lowest", dtype, ())
        case "min" | "argmin":
            return edge_value("highest", dtype, ())
        case "prod":
            return np.ones((), dtype)
        case "and":
            return np.asarray(True) if dtype == np.bool_ else np.asarray(-1).astype(dtype)
        case _:
            return np.zeros((), dtype)


def _block(x: Any, dim: int, lo: int, hi: int, ways: int, worker: Any, beyond: Any) -> Any:
    """A worker's block, and its halo, of an operand that is whole."""
    size = x.shape[dim] // ways
    if lo or hi:
        widths = [(lo, hi, 0) if d == dim else (0, 0, 0) for d in range(x.ndim)]
        x = lax.pad(x, jnp.asarray(beyond, x.dtype), widths)
    return lax.dynamic_slice_in_dim(x, worker * size, size + lo + hi, dim)


def strategy_of(call: Call, c: Cut) -> Strategy:
    """The placements that a cut of a whole call requires of its operands, and gives its results."""
    description = describe(call)
    strategy = None if description is None else cut(description, c.loop, c.ways, pad=True)
    assert strategy is not None, "a plan cuts what may be cut"
    return strategy


def _local_shapes(call: Call, cuts: Sequence[Cut]) -> list[tuple[int, ...]]:
    """The shapes of a device's results: dims that are read at the loop's own index have its padded extent."""
    description = describe(call)
    shapes = [list(s) for s in call.results]
    for c in cuts:
        assert description is not None, "only what is described is cut"
        extent = description.loops[c.loop].extent
        for shape, place in zip(shapes, strategy_of(call, c).results, strict=True):
            if isinstance(place, Split):
                shape[place.dim] = shape[place.dim] * c.extent // (extent * c.ways)
    return [tuple(s) for s in shapes]
