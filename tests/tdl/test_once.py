"""An analysis that was made once for symbols gives on numbers what these numbers give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan import tdl
from shardplan.errors import DescriptionError
from shardplan.frontend.trace import trace
from shardplan.graph.flattening import flatten
from shardplan.tdl import once
from shardplan.tdl.coverage import sort_primitives
from shardplan.tdl.describe import (
    _RULES,
    describe,
    forget,
    forget_analyses,
    rule,
    rule_of,
)
from shardplan.tdl.description import Call, Description, read
from shardplan.tdl.index import Affine, FloorDiv, Mod
from shardplan.tdl.once import Leaf, Tree
from shardplan.tdl.proof import CASES, Drawn
from shardplan.tdl.symbols import Extent, Trail

NAMES = [entry.name for entry in sort_primitives() if entry.name in CASES]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On symbols from the first time on."""
    monkeypatch.setattr(once, "FEW", 0)


# Code that decides by numbers in all the ways that rules do.
DECIDING: list[Callable[[Any, Any, Any], Any]] = [
    lambda a, b, c: (a + b - c, a * b, -a, abs(b - c), a // b, a % b, divmod(a * c, b)),
    lambda a, b, c: "less" if a < b else "more" if a > c else "between",
    lambda a, b, c: (a * b - c) // (a + 1) if a * b >= c else c,
    lambda a, b, c: [10, 20, 30, 40][a % 4] + (c if b == c else b),
    lambda a, b, c: len({a, b, c, 5}) + (a in (3, 5)),
    lambda a, b, c: tuple(range(a % 5)) + (b,) * (c % 3),
    lambda a, b, c: (c - a) * (b - a),
    lambda a, b, c: a * b if (a - b) * (c - b) > 0 else a - b,
    lambda a, b, c: max(a, b) - min(b, c) + max(0, a - c - 2),
    lambda a, b, c: (a - 3) * 2 if a - 3 <= 1 else a,
    lambda a, b, c: (a // b == 0, a // b >= 1, a // b, bool(a % b), (a // b) // c),
    lambda a, b, c: (int(a), f"{b:03d}", str(c), a / b, a**2, 1.5 * c, isinstance(a, int)),
    lambda a, b, c: (a**0.5, 2.0**b, 2**c, a / 2.0, 3.0 / b, c * 0.5 < a, b < 1.5, a // 2.0, 7.5 % c, a << 1, 5 & b, True + c),
    lambda a, b, c: (a * np.int64(3) + b, np.float32(2) * c, np.asarray((a, b)).sum() > c, math.isqrt(a * b), math.gcd(a, c)),
    lambda a, b, c: a // (b - c) if b != c else 0,
    lambda a, b, c: a % (b - c),
    lambda a, b, c: (a <= 2, a >= 3, b > 2, c < 3, a != b, not a - b, 7 - a, 7 // b, 7 % c),
    lambda a, b, c: np.prod([a, b, c]) + math.prod((a, b)) + sum((a, c)),
    lambda a, b, c: sorted([a, b, c])[1],
    lambda a, b, c: "small" if (a - 9) * (b - 9) < 9 else "large",
    lambda a, b, c: (a * a - b * b) // c if (a - b) // c < -1 else (b - a) % c,
]  # fmt: skip


@pytest.mark.parametrize("function", DECIDING)
@pytest.mark.parametrize("different", [True, False])
def test_code_that_decides_by_numbers_is_replayed_only_where_it_decides_alike(function: Any, different: bool) -> None:
    tree, runs = Tree(), Tree.runs
    numbers = [n for n in itertools.product(range(2, 8), repeat=3) if not different or len(set(n)) == 3]
    for given in numbers:
        tape = list(given)
        leaf = tree.find(tape)
        want = outcome(lambda given=given: function(*given))
        if leaf is None:
            trail = Trail([], {}, {})
            symbols = [trail.symbol(n, own=different) for n in given]
            leaf = outcome(lambda symbols=symbols, trail=trail: tree.grow(trail, lambda: function(*symbols)))
            tape = [n.value for n in trail.tape]
        made = leaf.filled(tape) if isinstance(leaf, Leaf) else leaf
        assert made == want, given
        assert not extents(made)
    assert 0 < Tree.runs - runs <= len(numbers)


def outcome(run: Callable[[], Any]) -> Any:
    """What is returned, or the kind of error that is raised: shapes are drawn that no primitive would make."""
    try:
        return run()
    except (DescriptionError, ArithmeticError, LookupError, RuntimeError, ValueError, TypeError) as error:
        return type(error)


def extents(made: Any) -> bool:
    """Whether a symbol was left behind."""
    if is_dataclass(made) and not isinstance(made, type):
        return any(extents(getattr(made, f.name)) for f in fields(made) if f.name not in ("origin", "call"))
    return any(map(extents, made)) if isinstance(made, tuple | frozenset) else type(made) is Extent


def renumbered(value: Any, other: dict[int, int]) -> Any:
    """A shape, or a parameter of plain tuples, with other numbers."""
    if type(value) is tuple:
        return tuple(renumbered(part, other) for part in value)
    return other.get(value, value) if type(value) is int else value


def calls(name: str, draws: int) -> Iterator[Call]:
    """Drawn calls, and each with other numbers: as many different ones, and any, equal ones and empty dims among them."""
    for seed in range(draws):
        call = CASES[name](Drawn(seed)).call
        yield call
        rng = np.random.default_rng(seed)
        for variant in range(9):
            different, any_ = rng.permutation(np.arange(2, 50)), rng.choice([0, 1, 2, 3, 4, 5, 6, 8, 9, 12, 24], 48)
            if variant % 3 == 1:  # even ones, which are cut
                different = 2 * different
            other = {n: int(n_) for n, n_ in zip(range(2, 50), any_ if variant % 3 == 2 else different, strict=True)}
            params = call.params if variant < 3 else {k: renumbered(v, other) for k, v in call.params.items()}
            operands = renumbered(call.operands, other) if variant < 6 else call.operands
            results = renumbered(call.results, other) if variant < 6 else call.results
            yield replace(call, operands=operands, results=results, params=params)


def check(name: str, draws: int) -> None:
    function = rule_of(name)
    assert function is not None
    for call in calls(name, draws):
        want, got = outcome(lambda call=call: read(call, function)), outcome(lambda call=call: describe(call))
        assert got == want
        if not isinstance(want, Description):
            continue
        assert not extents(got)
        assert tdl.linear_sets(got) == tdl.linear_sets(want)
        for loop in range(len(want.loops)):
            for ways in (1, 2, 3, 4, 6):
                for pad in (False, True):
                    made = tdl.cut(got, loop, ways, pad=pad)
                    assert made == tdl.cut(want, loop, ways, pad=pad), (call, loop, ways, pad)
                    assert not extents(made)


@pytest.mark.parametrize("name", NAMES)
def test_an_instance_is_what_its_numbers_give(name: str) -> None:
    check(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_instance_is_what_its_numbers_give_often(name: str) -> None:
    check(name, 60)


def test_cuts_are_shared_only_by_what_reads_alike() -> None:
    """The last loop of the second has another extent, though nothing is read and all else is the same."""
    for shape, ways in (((4, 6, 4), (2, 2)), ((4, 6, 6), (2, 3)), ((6, 4, 6), (2, 3)), ((6, 4, 4), (2, 2))):
        made = describe(Call("broadcast_in_dim", ((),), (shape,), {"broadcast_dimensions": ()}))
        assert made is not None
        assert [k for k in (2, 3) if tdl.cut(made, 2, k)] == [k for k in (2, 3) if k in ways]


def test_each_analysis_is_made_once() -> None:
    """Other shapes, offsets and numbers of ways ask nothing new; a structure that is another one does."""

    def product(rows: int, columns: int, ways: int) -> None:
        call = Call("dot_general", ((rows, 96), (96, columns)), ((rows, columns),), {"dimension_numbers": PRODUCT})
        made = describe(call)
        assert made is not None
        assert len(tdl.cuts(made, ways)) == 3

    product(32, 64, 2)
    before = Tree.runs
    product(64, 32, 4)
    product(1024, 512, 8)
    assert Tree.runs == before
    product(96, 32, 2)  # as many rows as terms: the same symbol
    assert Tree.runs > before

    def part(start: int) -> Any:
        params = {"start_indices": (start, 0), "limit_indices": (start + 4, 8), "strides": None}
        return describe(Call("slice", ((64, 8),), ((4, 8),), params))

    assert part(5).accesses[0][1][0] == Affine(((0, 1),), 5)
    before = Tree.runs
    assert part(7).accesses[0][1][0] == Affine(((0, 1),), 7)
    assert Tree.runs == before


@pytest.mark.parametrize(
    ("primitive", "one", "other", "params"),
    [
        ("add", ((4, 6), (4, 6)), ((9, 2), (9, 2)), {}),
        ("mul", ((4, 1), (4, 6)), ((5, 1), (5, 5)), {}),
        ("mul", ((), (4, 6)), ((), (3, 3)), {}),
        ("select_n", ((4, 6),) * 3, ((8, 2),) * 3, {}),
        ("convert_element_type", ((4, 6),), ((8, 8),), {"new_dtype": "float32"}),
        ("integer_pow", ((4, 6),), ((8, 8),), {"y": 2}),
    ],
)
def test_elementwise_calls_of_one_pattern_are_read_once(
    primitive: str,
    one: tuple[tuple[int, ...], ...],
    other: tuple[tuple[int, ...], ...],
    params: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function = rule_of(primitive)
    assert function is not None
    runs: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        runs.append(primitive)
        return function(*args, **kwargs)

    monkeypatch.setitem(_RULES, primitive, wraps(function)(counted))
    monkeypatch.setattr(once, "FEW", 9)  # on numbers
    forget_analyses()
    for operands, times in ((one, 1), (other, 1), (one, 1), (((1, 1),) * len(one), 2), (((0, 2),) * len(one), 3)):
        result = tuple(max(ns, key=lambda n: (n != 1, n)) for ns in zip(*[s for s in operands if s], strict=True))
        call = Call(primitive, operands, (result,), params, ("float32",) * len(operands), ("float32",))
        found = describe(call)
        assert len(runs) == times
        assert found == read(call, function)
    forget_analyses()


PRODUCT = (((1,), (0,)), ((), ()))


def test_what_is_asked_for_often_is_analysed_on_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(rows: int, ways: int) -> tdl.Strategy | None:
        made = describe(Call("cumsum", ((rows, 7, rows),), ((rows, 7, rows),), {"axis": 1, "reverse": False}))
        assert made is not None
        return tdl.cut(made, 2, ways)

    asked = [(8, 2), (12, 4), (16, 8), (24, 8), (40, 4), (48, 8)]
    found: dict[int, list[tdl.Strategy | None]] = {}
    more: dict[int, list[int]] = {}
    for few in (0, 1, 2):
        monkeypatch.setattr(once, "FEW", few)
        forget_analyses()
        found[few], more[few] = [], []
        for rows, ways in asked:
            before = Tree.runs
            found[few].append(cut(rows, ways))
            more[few].append(Tree.runs - before)
    # what was read on numbers is cut on numbers; then it is read on symbols, and its cuts are counted from there
    assert more == {0: [2, 0, 0, 0, 0, 0], 1: [0, 1, 1, 0, 0, 0], 2: [0, 0, 1, 0, 1, 0]}
    assert found[0] == found[1] == found[2]
    assert None not in found[0]


def test_how_a_reshape_merges_its_dims_is_its_structure() -> None:
    def reshape(old: tuple[int, ...], new: tuple[int, ...]) -> Any:
        return describe(Call("reshape", (old,), (new,), {}))

    reshape((4, 6), (24,))
    before = Tree.runs
    assert reshape((8, 3), (24,)).accesses[0][1] == (FloorDiv(Affine(((0, 1),)), 3), Mod(Affine(((0, 1),)), 3))
    assert Tree.runs == before
    reshape((4, 6), (2, 12))
    assert Tree.runs == before + 1


def test_a_steps_ops_share_analyses() -> None:
    def step(x: Any, w: Any) -> Any:
        for n in range(24):
            x = jnp.tanh(x @ w)[: x.shape[0] - 2 * (n % 3)]
        return x

    program = trace(step, jax.ShapeDtypeStruct((240, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)).program
    before = Tree.runs
    graph = flatten(program)
    signatures = {node.signature.id for node in graph.nodes}
    assert len(signatures) == 48
    assert Tree.runs - before <= 6


def test_a_description_that_decides_by_something_else_is_refused() -> None:
    """Its cuts would be those of another time."""
    asked = iter([lambda n: n > 20, lambda n: n % 5 == 1, lambda n: n > 20])

    @rule("whim")
    def describe_whim(call: Call, x: tdl.TensorRef) -> Any:
        return (lambda i: x[i]) if next(asked)(x.shape[0]) else (lambda i: tdl.apply("whim", x[i]))

    try:
        describe(Call("whim", ((12,),), ((12,),), {}))
        with pytest.raises(DescriptionError, match="decides by something else than its call"):
            describe(Call("whim", ((24,),), ((24,),), {}))
    finally:
        forget("whim")
