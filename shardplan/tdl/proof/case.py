# pyright: basic
"""Proof cases, and two ways to make one: bind a primitive to operands, or take it from a traced function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shardplan import _jax
from shardplan.tdl.cut_proof import ProofCounts, draw_array, verify
from shardplan.tdl.describe import is_absent, kernel_name
from shardplan.tdl.description import Call
from shardplan.tdl.proof import cudnn_reference, interpreted

T = TypeVar("T")
SIZES = (2, 4, 6, 12)
ODD = {1: 1, 2: 8, 3: 9, 4: 9, 6: 11, 12: 15}
"""The size that replaces each size in an odd draw."""
FLOATS = ("float32", "float32", "bfloat16")


class Draw(Protocol):
    """A source of choices: hypothesis in tests, NumPy elsewhere."""

    @property
    def rng(self) -> np.random.Generator:
        """The generator of the operands' elements."""
        ...

    @property
    def odd(self) -> bool:
        """Whether dims should seldom divide evenly."""
        ...

    def choose(self, options: Sequence[T]) -> T:
        """One of the options."""
        ...


class Drawn:
    """Choices from a seed. With ``odd``, dims seldom divide evenly but waste little when padded."""

    def __init__(self, seed: int, *, odd: bool = False) -> None:
        self._rng, self._odd = np.random.default_rng(seed), odd

    @property
    def odd(self) -> bool:
        """Whether dims should seldom divide evenly."""
        return self._odd

    @property
    def rng(self) -> np.random.Generator:
        """The generator of the operands' elements."""
        return self._rng

    def choose(self, options: Sequence[T]) -> T:
        """One of the options, each equally likely."""
        return options[int(self._rng.integers(len(options)))]


class UnboundCaseError(Exception):
    """A case that does not apply its primitive, as the installed JAX names or lowers it otherwise."""


@dataclass(frozen=True, slots=True)
class Case:
    """A call and operands to run it on."""

    call: Call
    operands: tuple[Any, ...]


CASES: dict[str, Callable[[Draw], Case]] = {}


def case(*primitives: str, package: str | None = None) -> Callable[[Callable[[str, Draw], Case]], Callable[[str, Draw], Case]]:
    """Registers ``function(primitive, draw)`` as the generator of these primitives.

    ``package``: one that need not be installed and without which these primitives do not exist; then nothing is registered.
    """
    absent = package is not None and find_spec(package) is None

    def register(function: Callable[[str, Draw], Case]) -> Callable[[str, Draw], Case]:
        for name in primitives:
            if absent or is_absent(name):
                continue
            CASES[name] = lambda draw, name=name: function(name, draw)
        return function

    return register


def prove(primitive: str, draw: Draw) -> ProofCounts:
    """Draws one case of a primitive and verifies its description.

    On CPUs, cuDNN's attention is run by its formula, and Pallas kernels in Pallas's interpreter.
    """
    functions = interpreted.functions() if primitive.startswith("pallas_call:") else cudnn_reference.FUNCTIONS
    with _jax.run_on_cpu(functions):
        instance = CASES[primitive](draw)
        return verify(instance.call, instance.operands, nested=2, seed=int(draw.rng.integers(2**31)))


def bound(primitive: str, *operands: Any, **params: Any) -> Case:
    """The case of a primitive on these operands; JAX gives the result shapes."""
    shaped = jax.eval_shape(lambda *ops: _jax.bind(primitive, ops, params), *operands)
    results = shaped if isinstance(shaped, list | tuple) else [shaped]
    return Case(_call(primitive, operands, results, params), operands)


def traced(primitive: str, function: Callable[..., Any], *operands: Any) -> Case:
    """The first application of a primitive, or of a kernel of this name, in a traced function, with its operands there."""
    closed = jax.make_jaxpr(function)(*operands)
    for eqn, values, results in _walk(closed.jaxpr, closed.consts, operands):
        if primitive in (eqn.primitive.name, kernel_name(eqn.primitive.name, eqn.params)):
            params = {**eqn.params, **_jax.own_params(eqn)}
            return Case(_call(primitive, values, results, params), tuple(values))
    raise UnboundCaseError(f"{primitive} does not occur in {closed}")


def applications(function: Callable[..., Any], *operands: Any) -> list[Case]:
    """Every application of a primitive in a traced function, with its operands there; calls are seen through."""
    closed = jax.make_jaxpr(function)(*operands)
    equations = _walk(closed.jaxpr, closed.consts, jax.tree.leaves(operands))
    return [Case(_call(eqn.primitive.name, values, results, eqn.params), tuple(values)) for eqn, values, results in equations]


def array(draw: Draw, shape: Sequence[int], dtype: str = "float32", *, low: int = -4, high: int = 5) -> Any:
    """A random operand."""
    return draw_array(tuple(shape), dtype, draw.rng, low=low, high=high)


def shape(draw: Draw, rank: int | None = None, *, sizes: Sequence[int] = SIZES, largest: int = 600) -> tuple[int, ...]:
    """A shape of small dims that 2 and 3 often divide (less often in an odd draw)."""
    rank = draw.choose((1, 2, 2, 3)) if rank is None else rank
    dims: list[int] = []
    for _ in range(rank):
        fits = [n for n in sizes if int(np.prod(dims)) * n <= largest]
        dims.append(draw.choose(fits or [1]))
    return tuple(extent(draw, n) for n in dims)


def extent(draw: Draw, size: int) -> int:
    """The extent of a dim: ``size``, or in an odd draw one that divides evenly less often."""
    return ODD.get(size, size) if draw.odd else size


def some(draw: Draw, options: Sequence[T], *, least: int = 0) -> tuple[T, ...]:
    """A random subset of at least ``least`` options, in order."""
    while True:
        chosen = tuple(o for o in options if draw.choose((True, False)))
        if len(chosen) >= least:
            return chosen


def shuffled(draw: Draw, items: Sequence[T]) -> tuple[T, ...]:
    """The items in a random order."""
    remaining, out = list(items), []
    while remaining:
        out.append(remaining.pop(draw.choose(range(len(remaining)))))
    return tuple(out)


def _call(primitive: str, operands: Sequence[Any], results: Sequence[Any], params: Any) -> Call:
    def types(values: Sequence[Any]) -> tuple[str, ...]:
        return tuple(str(jnp.asarray(v).dtype if not hasattr(v, "dtype") else v.dtype) for v in values)

    def shapes(values: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(np.shape(v)) if not hasattr(v, "shape") else tuple(v.shape) for v in values)

    return Call(primitive, shapes(operands), shapes(results), params, types(operands), types(results))


def _walk(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Any]) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Evaluates equation by equation, calls seen through; yields each with its operand and result values."""
    known: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *operands], strict=True))
    for eqn in jaxpr.eqns:
        values = [v.val if isinstance(v, _jax.Literal) else known[v] for v in eqn.invars]
        inner = _jax.called(eqn)
        if inner is not None:
            yield from _walk(*_jax.jaxpr_and_consts(inner), values)
        out = _jax.bind(eqn.primitive.name, values, eqn.params)
        results = list(out) if eqn.primitive.multiple_results else [out]
        if inner is None:
            yield eqn, values, results
        known.update(zip(eqn.outvars, results, strict=True))
