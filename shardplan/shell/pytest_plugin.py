"""A pytest plugin for projects that use plans: simulated devices, and fixtures that verify a plan, or compare it with a file.

pytest loads it wherever shardplan is installed; without an install, use ``pytest -p shardplan.shell.pytest_plugin``:

    pytest --shardplan-devices 8

    def test_my_step(verify_plan):
        step, args = train_step(concrete=True)
        verify_plan(step, *args, cluster="2x4")

    def test_its_plan_stays(assert_plan_unchanged):
        assert_plan_unchanged(shardplan.plan(step, *args, cluster="2x4"))
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from shardplan.errors import ShardplanError


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--shardplan-devices`` and ``--update-plans``."""
    parser.addoption("--shardplan-devices", type=int, default=None, metavar="N", help="run on N simulated CPU devices")
    parser.addoption("--update-plans", action="store_true", help="save the plans that assert_plan_unchanged compares")


def pytest_configure(config: pytest.Config) -> None:
    """Simulates the devices before any test starts JAX."""
    count = config.getoption("--shardplan-devices")
    if count is not None:
        from shardplan.shell.target import simulate

        simulate(count)


@pytest.fixture
def verify_plan() -> Callable[..., Any]:
    """``verify_plan(step, *args, cluster=..., **options)`` plans a step, verifies the plan, and returns the `Verified`.

    The test fails if a check fails. A warning says if the plan cuts no array. ``options`` are those of `shardplan.plan`.
    """

    def check(step: Callable[..., Any], *args: Any, cluster: Any, **options: Any) -> Any:
        """Plans and verifies."""
        import shardplan
        from shardplan.report.verified_text import uncut_text, verified_text
        from shardplan.verify.verify import verify

        verified = verify(shardplan.plan(step, *args, cluster=cluster, **options), step, args)
        if not verified.passed:
            pytest.fail(verified_text(verified.json), pytrace=False)
        if verified.uncut:
            warnings.warn(uncut_text(verified.devices), stacklevel=2)
        return verified

    return check


@pytest.fixture
def assert_plan_unchanged(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``assert_plan_unchanged(plan, name=None)`` fails where a plan differs from the one saved in ``plans/`` beside the test.

    The file is named after the test's file, class and function, and after ``name`` where a test compares several plans.
    ``pytest --update-plans`` saves them.
    """
    taken: set[str] = set()

    def check(plan: Any, name: str | None = None) -> None:
        """Compares a plan with its file, or saves it."""
        from shardplan.shell.plan_asserts import assert_plan_unchanged

        __tracebackhide__ = True
        words = [request.path.stem, *request.node.nodeid.split("::")[1:], *([name] if name else [])]
        file = re.sub(r"[^\w.-]+", "_", "-".join(words)).strip("_") + ".json"
        if file in taken:
            raise ShardplanError(f"this test compares two plans with {file}: give each a name, assert_plan_unchanged(plan, name)")
        taken.add(file)
        assert_plan_unchanged(plan, request.path.parent / "plans" / file, update=bool(request.config.getoption("--update-plans")))

    return check
