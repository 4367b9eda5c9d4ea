"""Grouped paths: nothing is lost, nothing unlike is merged."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from shardplan.report.paths import grouped

PATHS = st.lists(
    st.sampled_from(["a", "b", "c", "0", "1", "2", "3", "10", "a1", "a2", "b_0", "a10", "a00"]), min_size=1, max_size=4
).map("/".join)


@given(st.dictionaries(PATHS, st.sampled_from(["P()", "P('gpu')"]), max_size=24))
def test_every_path_is_in_one_group_of_its_like(attributes: dict[str, str]) -> None:
    groups = grouped(attributes)
    assert sorted(p for g in groups for p in g.paths) == sorted(attributes)
    assert all(len({attributes[p] for p in g.paths}) == 1 for g in groups)


@given(st.dictionaries(PATHS, st.sampled_from(["P()", "P('gpu')"]), max_size=24))
def test_a_pattern_says_exactly_its_paths(attributes: dict[str, str]) -> None:
    for group in grouped(attributes):
        assert set(group.paths) == set(_expanded(group.pattern))


def _expanded(pattern: str) -> list[str]:
    """What a pattern stands for, by an independent reading of it."""
    open_ = pattern.find("{")
    if open_ < 0:
        return [pattern]
    close = pattern.index("}", open_)
    found: list[str] = []
    for item in pattern[open_ + 1 : close].split(","):
        low, dots, high = item.partition("..")
        values = [str(n) for n in range(int(low), int(high) + 1)] if dots else [item]
        found += [p for v in values for p in _expanded(pattern[:open_] + v + pattern[close + 1 :])]
    return found


def test_layers_become_a_range() -> None:
    same = {f"blocks/{i}/mlp/kernel": "P()" for i in range(12)}
    assert [g.pattern for g in grouped(same)] == ["blocks/{0..11}/mlp/kernel"]
    assert [g.pattern for g in grouped(same | {"blocks/5/mlp/kernel": "P('gpu')"})] == [
        "blocks/{0..4,6..11}/mlp/kernel",
        "blocks/5/mlp/kernel",
    ]
