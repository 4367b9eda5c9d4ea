"""Eliminations are kept while they are small, and done again where they were forgotten."""

from __future__ import annotations

from typing import Any

import pytest

import shardplan
from models import gpt
from shardplan.search.problem.cost_tables import Store


def test_memory_that_is_freed_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    step, args = gpt.train_step(layers=2)
    options: dict[str, Any] = {"cluster": "2x2x2", "memory_limit": "1.6MiB"}
    kept = shardplan.plan(step, *args, **options)
    freed = 0

    def tidy(store: Store) -> None:
        nonlocal freed
        freed += len(store._passing)
        original(store)

    original = Store.tidy
    monkeypatch.setattr("shardplan.search.problem.cost_tables.MOST_BYTES", -1)
    monkeypatch.setattr("shardplan.search.problem.pricing.MOST_BYTES", -1)
    monkeypatch.setattr(Store, "tidy", tidy)
    again = shardplan.plan(step, *args, **options)
    assert freed > 100
    assert again.specs_by_path == kept.specs_by_path
    assert (again.step_time_s, again.peak_bytes) == (kept.step_time_s, kept.peak_bytes)
