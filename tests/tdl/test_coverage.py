"""Every primitive of the installed JAX is sorted, and every description has its proof."""

from __future__ import annotations

from shardplan.tdl.coverage import OPAQUE, WHOLE_DIMS, coverage, sort_primitives
from shardplan.tdl.describe import described


def test_no_primitive_is_unsorted() -> None:
    assert [e.name for e in sort_primitives() if e.kind == "undescribed"] == [], "describe it, or say in coverage.py why not"


def test_at_least_150_primitives_are_described_and_all_have_cases() -> None:
    found = coverage()
    assert found["described"] >= 150
    assert found["verified"] == found["described"]
    assert found["opaque_verified"] == found["opaque"]
    assert found["unverified"] == found["undescribed"] == []


def test_a_case_is_run_where_examples_are_asked_for() -> None:
    from shardplan.tdl.coverage import prove_one

    assert prove_one("transpose", 1) is None


def test_what_is_not_described_has_a_reason() -> None:
    assert [e.name for e in sort_primitives() if e.kind != "described" and not e.reason] == []


def test_reasons_are_given_for_primitives_that_have_a_rule() -> None:
    assert set(OPAQUE) | set(WHOLE_DIMS) <= set(described())
