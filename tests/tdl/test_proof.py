"""Every description is proven: each legal cut, run by the real primitive, gives what the whole gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardplan.tdl.coverage import sort_primitives
from shardplan.tdl.proof import CASES, prove

PROVEN = [entry.name for entry in sort_primitives() if entry.kind in ("described", "opaque")]


class Hypothesis:
    """Choices that hypothesis makes, and shrinks."""

    def __init__(self, data: st.DataObject, seed: int) -> None:
        self.data = data
        self.generator = np.random.default_rng(seed)

    @property
    def rng(self) -> np.random.Generator:
        return self.generator

    @property
    def odd(self) -> bool:
        return False

    def choose(self, options: Sequence[Any]) -> Any:
        return options[0] if len(options) == 1 else self.data.draw(st.sampled_from(options))


def check(primitive: str, data: st.DataObject, seed: int) -> None:
    found = prove(primitive, Hypothesis(data, seed))
    assert not found.faults, "\n".join(map(str, found.faults))


COMMON = {"suppress_health_check": list(HealthCheck), "report_multiple_bugs": False}


@pytest.mark.parametrize("primitive", PROVEN)
def test_every_cut_gives_what_the_whole_gives(primitive: str) -> None:
    @settings(max_examples=3, **COMMON)
    @given(st.data(), st.integers(0, 2**16))
    def some(data: st.DataObject, seed: int) -> None:
        check(primitive, data, seed)

    some()


@pytest.mark.slow
@pytest.mark.parametrize("primitive", PROVEN)
def test_every_cut_of_fifty_examples(primitive: str) -> None:
    @settings(max_examples=50, **COMMON)
    @given(st.data(), st.integers(0, 2**16))
    def many(data: st.DataObject, seed: int) -> None:
        check(primitive, data, seed)

    many()


def test_every_description_has_a_case() -> None:
    assert sorted(PROVEN) == sorted(set(PROVEN) & set(CASES))
