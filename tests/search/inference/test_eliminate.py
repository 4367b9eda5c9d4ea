"""Eliminations are kept while they are small, and done again where they were forgotten."""

from __future__ import annotations

from typing import Any

import pytest

import shardplan
from models import mlp
from shardplan.search.inference.eliminate import Eliminator
from shardplan.search.problem.cost_tables import TableStore
from shardplan.search.problem.pricing import Pricer


def test_memory_that_is_freed_changes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a limit, where solutions are repaired between eliminations."""
    step, args = mlp.train_step(layers=2, width=256)
    options: dict[str, Any] = {"cluster": "2x2x2", "memory_limit": "300KiB"}
    kept = shardplan.plan(step, *args, **options)
    freed = {"tables": 0, "eliminations": 0, "prices": 0}

    def tidy_store(store: TableStore, _: int, original: Any = TableStore.tidy) -> None:
        freed["tables"] += len(store._passing)
        original(store, -1)

    def tidy_eliminator(eliminator: Eliminator, original: Any = Eliminator.tidy) -> None:
        freed["eliminations"] += len(eliminator._memo) * (eliminator._forgotten != eliminator.store.forgotten)
        original(eliminator)

    def tidy_pricer(pricer: Pricer, _: int, original: Any = Pricer.tidy) -> None:
        freed["prices"] += len(pricer._costs)
        original(pricer, -1)

    monkeypatch.setattr(TableStore, "tidy", tidy_store)
    monkeypatch.setattr(Eliminator, "tidy", tidy_eliminator)
    monkeypatch.setattr(Pricer, "tidy", tidy_pricer)
    again = shardplan.plan(step, *args, **options)
    assert min(freed.values()) > 100, freed
    assert again.specs_by_path == kept.specs_by_path
    assert (again.step_time_s, again.peak_bytes) == (kept.step_time_s, kept.peak_bytes)
