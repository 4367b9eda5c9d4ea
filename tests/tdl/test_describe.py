"""How a call is described: by its rule, read once for each pattern of an elementwise op's dims."""

from __future__ import annotations

import importlib
from functools import wraps
from typing import Any

import pytest

from shardplan.tdl import Call, describe
from shardplan.tdl.describe import rule_of
from shardplan.tdl.description import read
from shardplan.tdl.index import Affine, FloorDiv, Mod


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

    module = importlib.import_module("shardplan.tdl.describe")  # the front has a function of that name
    monkeypatch.setitem(module.__dict__["_RULES"], primitive, wraps(function)(counted))
    monkeypatch.setattr(module, "_PATTERNS", {})
    for operands, times in ((one, 1), (other, 1), (one, 1), (((1, 1),) * len(one), 2), (((0, 2),) * len(one), 3)):
        result = tuple(max(ns, key=lambda n: (n != 1, n)) for ns in zip(*[s for s in operands if s], strict=True))
        call = Call(primitive, operands, (result,), params, ("float32",) * len(operands), ("float32",))
        found = describe(call)
        assert len(runs) == times
        assert found == read(call, function)


def test_a_reshape_splits_and_merges_dims() -> None:
    found = describe(Call("reshape", ((8, 3),), ((24,),), {}))
    assert found is not None
    assert found.accesses[0][1] == (FloorDiv(Affine(((0, 1),)), 3), Mod(Affine(((0, 1),)), 3))


@pytest.mark.parametrize(("start", "stop", "whole"), [(0, 4, True), (0, 2, False), (0, 1, False), (2, 4, False)])
def test_only_a_slice_of_everything_reads_at_its_own_index(start: int, stop: int, whole: bool) -> None:
    params = {"start_indices": (start,), "limit_indices": (stop,), "strides": None}
    found = describe(Call("slice", ((4,),), ((stop - start,),), params))
    assert found is not None
    assert found.elementwise == whole
