"""The error of a step that does not fit: its sizes, what takes the memory, and the remedies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.errors import sufficient_limit
from shardplan.sizes import parse_bytes
from tests.search import steps


def test_the_error_says_all_sizes_in_units_that_fit_them() -> None:
    step = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    with pytest.raises(shardplan.MemoryLimitError) as caught:
        shardplan.plan(step, steps.array(64, 64), steps.array(16, 64), cluster="2", memory_limit="2KiB", pins={"w": P()})
    said = str(caught.value)
    assert "arguments take 18.00 KiB, the largest are w 16.00 KiB, x 2.00 KiB" in said
    needed = caught.value.smallest_bytes
    assert f"raise the memory limit to {sufficient_limit(needed)}," in said
    large = str(shardplan.MemoryLimitError(2**30, 7168 * 2**30))
    near = str(shardplan.MemoryLimitError(2**30, 2**30 + 1))
    assert "fits in 1,073,741,824 bytes per device: the smallest found needs 1,073,741,825 bytes" in near
    assert "fits in 1.00 GiB per device: the smallest found needs 7.00 TiB;" in large
    assert "raise the memory limit to 7TiB," in large
    for nbytes in (1, 1000, 1024, 1025, 27_343_210, 2**30 + 1, 3 * 2**38, 7 * 2**40 - 1):
        assert nbytes <= parse_bytes(sufficient_limit(nbytes)) <= 1.01 * nbytes


def test_the_error_names_the_largest_values_between_ops_where_they_hold_more_than_the_arguments() -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(jnp.tanh(x @ w) @ w) @ w)))(w)

    args = steps.array(64, 64), steps.array(4096, 64)
    with pytest.raises(shardplan.MemoryLimitError) as caught:
        shardplan.plan(step, *args, cluster="2", memory_limit="64KiB")
    said = str(caught.value)
    assert "values between ops take" in said.split("the largest are x", 1)[1]
    assert "the largest are dot_general " in said or "the largest are tanh " in said, said
    assert "set microbatches=" in said
    with pytest.raises(shardplan.MemoryLimitError) as caught:
        shardplan.plan(step, *args, cluster="2", memory_limit="64KiB", microbatches=2)
    assert "set microbatches=" not in str(caught.value)
    assert caught.value.microbatched
