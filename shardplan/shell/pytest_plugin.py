"""A pytest plugin for projects that train by plans: simulated devices, and a fixture that proves a step's plan.

It is there wherever shardplan is installed (without an install: ``pytest -p shardplan.shell.pytest_plugin``):

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
    """Makes the devices, before any test has started JAX."""
    count = config.getoption("--shardplan-devices")
    if count is not None:
        from shardplan.shell.target import simulate

        simulate(count)


@pytest.fixture
def verify_plan() -> Callable[..., Any]:
    """``verify_plan(step, *args, cluster=..., **options)``: plans, verifies, fails where a check does; returns the `Verified`.

    ``options`` are those of `shardplan.plan`.
    """

    def check(step: Callable[..., Any], *args: Any, cluster: Any, **options: Any) -> Any:
        """Plans and verifies a step, or fails the test with what differs."""
        import shardplan
        from shardplan.emit.verify import verify
        from shardplan.report.text import verified_text

        found = verify(shardplan.plan(step, *args, cluster=cluster, **options), step, args)
        if not found.passed:
            pytest.fail(verified_text(found.json), pytrace=False)
        return found

    return check
