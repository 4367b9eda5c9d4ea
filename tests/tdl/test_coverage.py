"""Every primitive of the installed JAX is sorted, and every description has its proof."""

from __future__ import annotations

import sys
from types import ModuleType

import jax
import pytest
from jax import lax
from jax.extend.core import Primitive

import shardplan
from shardplan import _jax
from shardplan.tdl.coverage import (
    OPAQUE,
    UNCUT,
    WHOLE_DIMS,
    coverage,
    prove_one,
    sort_primitives,
)
from shardplan.tdl.describe import described
from shardplan.tdl.proof import CASES
from shardplan.tdl.releases import REFUSED, SAMPLES, differences, installed

pytestmark = pytest.mark.quick


def test_no_primitive_is_unsorted() -> None:
    assert [e.name for e in sort_primitives() if e.kind == "undescribed"] == [], "describe it, or say in coverage.py why not"


def test_the_primitives_of_a_module_that_is_loaded_later_are_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pallas, for example, is loaded by the first program that imports it."""
    assert "later" not in _jax.primitives()
    module = ModuleType("jax.later")
    vars(module)["later_p"] = Primitive("later")
    monkeypatch.setitem(sys.modules, "jax.later", module)
    assert _jax.primitives()["later"][0] == "jax.later"


def test_at_least_150_primitives_are_described_and_all_have_cases() -> None:
    found = coverage()
    assert found["described"] >= 150
    assert found["undescribed"] == []
    assert set(CASES) >= {e.name for e in sort_primitives() if e.kind in ("described", "opaque")}
    assert found["verified"] == found["opaque_verified"] == found["cuts"] == 0  # nothing was run


def test_a_description_is_verified_once_a_cut_was_run() -> None:
    found = prove_one("rev", 1)  # its first case has no dim that divides
    assert (found.fault, found.cuts > 0) == (None, True)
    assert all(prove_one(name, 1).cuts == 0 for name in UNCUT)


@pytest.mark.slow
def test_every_description_is_verified() -> None:
    found = coverage(examples=1)
    assert found["verified"] == found["described"]
    assert found["opaque_verified"] == found["opaque"]
    assert found["unverified"] == []
    assert found["faults"] == {}


def test_what_is_not_described_has_a_reason() -> None:
    assert [e.name for e in sort_primitives() if e.kind != "described" and not e.reason] == []


def test_reasons_are_given_for_primitives_that_have_a_rule() -> None:
    assert set(OPAQUE) | set(WHOLE_DIMS) <= set(described())


@pytest.mark.parametrize("sample", range(len(SAMPLES)))
def test_what_is_seen_through_is_traced_and_planned(sample: int) -> None:
    x = jax.ShapeDtypeStruct((2, 2), "float32")
    assert shardplan.plan(SAMPLES[sample], x, cluster="2").step_time_s > 0


def test_a_jax_that_refuses_cases_is_reported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ``lax.tan`` were gone and ``lax.top_k`` bound another primitive."""
    monkeypatch.delattr(lax, "tan")
    monkeypatch.setattr(lax, "top_k", lambda x, k, axis: (x * 2.0, x))
    assert "refuses the case: AttributeError" in (prove_one("tan", 1).fault or "")
    assert "refuses the case: UnboundCaseError: top_k does not occur" in (prove_one("top_k", 1).fault or "")
    installed.cache_clear()
    try:
        changed = differences().changed
    finally:
        monkeypatch.undo()
        installed.cache_clear()
    assert changed["tan"][0] == changed["top_k"][0] == f"+{REFUSED}"
