"""Dims that the mesh does not divide are named, with the next size that it would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import shardplan
from shardplan.report import explain


@pytest.mark.parametrize(("size", "padded"), [(9, 16), (2049, 2176)])
def test_what_does_not_divide_is_told_with_the_size_that_would(size: int, padded: int) -> None:
    plan = shardplan.plan(lambda w: w - 0.1, jax.ShapeDtypeStruct((size, 64), jnp.float32), cluster="8")
    told = f"{size} does not divide by gpu=8; padded to {padded} it would"
    assert told in plan.explain("w")
    assert told in explain.explain_all(plan.completed(), plan.session)["w"]


def test_what_divides_is_not() -> None:
    plan = shardplan.plan(lambda w: w - 0.1, jax.ShapeDtypeStruct((16, 64), jnp.float32), cluster="8")
    assert "does not divide" not in plan.explain("w")
