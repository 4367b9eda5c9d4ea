"""The garbage collector is kept out of the search, and only there."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.search.inference.garbage import uncollected

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    gc.unfreeze()  # what Python 3.12 froze itself in an earlier collection
    yield
    gc.enable()


@pytest.mark.parametrize("before", [True, False])
def test_the_search_collects_nothing_and_leaves_the_collector_as_it_was(before: bool) -> None:
    (gc.enable if before else gc.disable)()
    seen: dict[str, bool] = {}
    shardplan.plan(lambda w: w * 2, W, cluster="2", observer=lambda what, _: seen.update({what: gc.isenabled()}))
    assert seen["tracing"] == before == gc.isenabled()
    assert not seen["tables"]


def test_what_the_search_keeps_is_old_and_what_was_frozen_stays_frozen() -> None:
    with uncollected():
        kept = [[n] for n in range(1000)]
    young = {id(found) for found in (*gc.get_objects(0), *gc.get_objects(1))}
    assert not any(id(made) in young for made in kept)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with uncollected():
            pass
        assert gc.get_freeze_count() == frozen
    finally:
        gc.unfreeze()


def test_an_error_leaves_the_collector_as_it_was() -> None:
    with pytest.raises(shardplan.MemoryLimitError):
        shardplan.plan(lambda w: w * 2, W, cluster="2", memory_limit=10)
    assert gc.isenabled()


def test_an_interrupt_as_it_is_switched_off_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    with pytest.raises(KeyboardInterrupt), uncollected():
        pass
    assert gc.isenabled()


@pytest.mark.parametrize("at", ["freeze", "unfreeze"])
def test_an_interrupt_at_its_end_leaves_the_collector_as_it_was_and_nothing_frozen(
    monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    asked = getattr(gc, at)

    def interrupted() -> None:
        asked()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, at, interrupted)
    with pytest.raises(KeyboardInterrupt), uncollected():
        pass
    assert gc.isenabled()
    assert not gc.get_freeze_count()
