"""A pytest plugin for projects that use plans: simulated devices, and a fixture that verifies the plan of a step.

pytest loads it wherever shardplan is installed; without an install, use ``pytest -p shardplan.shell.pytest_plugin``:

    pytest --shardplan-devices 8

    def test_my_step(verify_plan):
        step, args = train_step(concrete=True)
        verify_plan(step, *args, cluster="2x4")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--shardplan-devices``."""
    parser.addoption("--shardplan-devices", type=int, default=None, metavar="N", help="run on N simulated CPU devices")


def pytest_configure(config: pytest.Config) -> None:
    """Simulates the devices before any test starts JAX."""
    count = config.getoption("--shardplan-devices")
    if count is not None:
        from shardplan.shell.target import simulate

        simulate(count)


@pytest.fixture
def verify_plan() -> Callable[..., Any]:
    """``verify_plan(step, *args, cluster=..., **options)`` plans a step, verifies the plan, and returns the `Verified`.

    The test fails if a check fails. ``options`` are those of `shardplan.plan`.
    """

    def check(step: Callable[..., Any], *args: Any, cluster: Any, **options: Any) -> Any:
        """Plans and verifies a step; fails the test with the report if a check fails."""
        import shardplan
        from shardplan.report.plan_text import verified_text
        from shardplan.verify.verify import verify

        verified = verify(shardplan.plan(step, *args, cluster=cluster, **options), step, args)
        if not verified.passed:
            pytest.fail(verified_text(verified.json), pytrace=False)
        return verified

    return check
