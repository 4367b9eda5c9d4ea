"""The plan of the train step: it fits, it sends what it should, it stays, and it computes what one device computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from train import train_step

import shardplan
from shardplan.testing import assert_communication_at_most, assert_fits, assert_no_collective

CLUSTER = "2x4"


@pytest.fixture(scope="module")
def plan() -> Any:
    """The plan for the cluster on which the project trains."""
    step, args = train_step()
    return shardplan.plan(step, *args, cluster=CLUSTER, donate_argnums=0)


def test_it_fits_and_sends_little(plan: Any) -> None:
    assert_fits(plan, "1GiB")
    assert_communication_at_most(plan, "64MiB")
    assert_no_collective(plan, "*attention*", kind="all-to-all")


def test_it_is_the_plan_that_was_reviewed(plan: Any, assert_plan_unchanged: Callable[..., None]) -> None:
    assert_plan_unchanged(plan)


def test_it_computes_what_one_device_computes(verify_plan: Callable[..., Any]) -> None:
    step, args = train_step()
    verify_plan(step, *args, cluster=CLUSTER, donate_argnums=0)
