"""Arrays cross between any groups of devices as `jax.device_put` moves them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.collectives.pieces import in_rounds, pieces, shape_of
from shardplan.emit.crossings import Crossing, Places


def on(devices: list[int], shape: dict[str, int], *spec: Any) -> NamedSharding:
    every = np.array(jax.devices(), dtype=object)
    return NamedSharding(Mesh(every[devices].reshape(tuple(shape.values())), tuple(shape)), PartitionSpec(*spec))


CASES = {
    "to others": (on([0, 1], {"a": 2}, "a"), on([2, 3], {"a": 2}, "a")),
    "to another dim": (on([0, 1, 2, 3], {"a": 4}, "a"), on([4, 5, 6, 7], {"a": 4}, None, "a")),
    "to more, of which some have it": (on([2, 3], {"a": 2}, None, "a"), on([0, 1, 2, 3], {"a": 2, "b": 2}, "b", "a")),
    "to fewer": (on([0, 1, 2, 3], {"a": 2, "b": 2}, ("b", "a")), on([5], {"a": 1})),
    "three to two": (on([0, 1, 2], {"a": 3}, "a"), on([2, 5], {"a": 2}, "a")),
    "copies": (on([0, 1, 2, 3], {"a": 2, "b": 2}, None, "b"), on([4, 5, 6, 7], {"a": 4})),
}


@pytest.mark.parametrize("name", CASES)
def test_an_array_crosses_between_groups(name: str) -> None:
    source, target = CASES[name]
    x = jnp.arange(12 * 12, dtype=jnp.float32).reshape(12, 12)
    moved = Crossing(jax.ShapeDtypeStruct(x.shape, x.dtype), source, target).moved(jax.device_put(x, source))
    wanted = jax.device_put(x, target)
    assert moved.sharding == target
    for a, b in zip(moved.addressable_shards, wanted.addressable_shards, strict=True):
        assert (a.device, a.index) == (b.device, b.index)
        np.testing.assert_array_equal(a.data, b.data)


VALUES = {
    "a flag": jnp.asarray(True),
    "a weak number": jnp.sin(1.0),
    "keys": jax.random.split(jax.random.key(3), 4),
    "one key": jax.random.key(3, impl="rbg"),
    "bytes": jnp.arange(16, dtype=jnp.uint8),
    "halves": jnp.arange(16, dtype=jnp.bfloat16),
    "nothing": jnp.zeros((0, 4)),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_any_type_cross(name: str) -> None:
    x = VALUES[name]
    spec = ["a"] if x.ndim == 1 else []
    source, target = on([0, 1], {"a": 2}, *spec), on([1, 2, 3, 4], {"a": 2, "b": 2}, *spec)
    crossing = Crossing(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False)), source, target)
    crossing.connect()
    moved = crossing.moved(jax.device_put(x, source))
    assert moved.sharding == target
    assert (moved.dtype, moved.shape, moved.aval.weak_type) == (x.dtype, x.shape, x.aval.weak_type)
    a, b = (jax.random.key_data(y) if jnp.issubdtype(x.dtype, jax.dtypes.extended) else y for y in (moved, x))
    np.testing.assert_array_equal(a, b)


def test_what_every_process_has_is_put_and_fetched() -> None:
    sharding = on([4, 5], {"a": 2}, None, "a")
    places = Places([sharding.mesh])  # type: ignore[list-item]
    placed = places.put(np.ones((2, 4)), sharding)
    assert (placed.sharding, placed.dtype) == (sharding, jnp.float32)
    np.testing.assert_array_equal(places.fetch(placed), np.ones((2, 4)))
    assert places.fetch(3) == 3


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_device_sends_or_receives_twice_in_a_round(data: st.DataObject) -> None:
    extents = data.draw(st.lists(st.sampled_from([6, 12]), min_size=1, max_size=2))

    def blocks(first: int) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        ways = [data.draw(st.sampled_from([1, 2, 3, 6])) for _ in extents]
        grid = [[(i * n // k, (i + 1) * n // k) for i in range(k)] for n, k in zip(extents, ways, strict=True)]
        boxes = np.ndindex(*ways)
        return [(first + n, tuple(grid[d][i] for d, i in enumerate(at))) for n, at in enumerate(boxes)]

    held, wanted = blocks(0), blocks(data.draw(st.integers(0, 40)))
    parts = [p for own in pieces(held, wanted, ()) for p in own]
    rounds = in_rounds(parts)
    assert {p for turn in rounds for p in turn} == set(parts)
    assert sum(map(len, rounds)) == len(parts)
    for turn in rounds:
        assert len({p.source for p in turn}) == len({p.target for p in turn}) == len(turn)
        assert len({shape_of(p.box) for p in turn}) == 1
