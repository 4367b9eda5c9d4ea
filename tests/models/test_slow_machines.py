"""Every model on a machine where even small steps are cut runs as on one device, by the partitioner (test_explicit has ours)."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import pytest

import shardplan
from shardplan.verify.verify import verify
from tests.machines import machine
from tests.models.test_factories import TINY, factory, tiny_on

MACHINES = ("2x4:slow", "2x2x2:slow", "3x2:slow")
DEVICES = {"2x4:slow": 8, "2x2x2:slow": 8, "3x2:slow": 6}


def check(name: str, on: str, options: dict[str, Any], steps: int) -> None:
    step, args = factory(name)(**options, concrete=True)
    plan = shardplan.plan(step, *args, cluster=machine(on), donate_argnums=0, backend="specs")
    assert plan.communication_bytes > 0, "nothing is cut that has to be reduced"
    found = verify(plan, step, args, backend="specs", steps=steps, devices=jax.devices()[: DEVICES[on]])
    assert found.passed, found


LONG = ("gpt", "llama", "moe", "rnn", "lenet", "two_tower")
"""The partitioner takes longest to compile these; the explicit backend runs all but the experts among the quick tests."""


@pytest.mark.parametrize(
    ("name", "on"),
    [pytest.param(*p.values, marks=[*p.marks, *[pytest.mark.slow] * (p.values[0] in LONG)]) for p in tiny_on(MACHINES)],
)
def test_a_tiny_model_is_right_where_it_is_cut(name: str, on: str) -> None:
    check(name, on, TINY[name], 2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("llama", {"remat": "products", "accumulate": 2}, marks=pytest.mark.slow),
        pytest.param("gpt", {"remat": "products", "scan": True}, marks=pytest.mark.slow),
        pytest.param("vit", {"remat": "products", "accumulate": 2, "inner": 24}, marks=pytest.mark.slow),
        pytest.param("wresnet", {"middle": 2, "activation": "silu"}, marks=pytest.mark.slow),
    ],
)
def test_products_kept_and_microbatches_are_right_where_they_are_cut(name: str, options: dict[str, Any]) -> None:
    check(name, "2x4:slow", {**TINY[name], **options}, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "on"), [*zip(TINY, itertools.cycle(MACHINES[::-1]), strict=False)])
def test_a_model_is_right_where_it_is_cut(name: str, on: str) -> None:
    check(name, on, {}, 3)
