"""Assertions about plans, for the tests of projects that use them.

    from shardplan.testing import assert_communication_at_most, assert_fits, assert_no_collective

    def test_my_step():
        plan = shardplan.plan(step, *args, cluster="dgx-h100:4")
        assert_fits(plan, "60GiB")
        assert_communication_at_most(plan, "2GiB")
        assert_no_collective(plan, "*attention*")

A failing assertion names the arrays that cause it. `assert_plan_unchanged` compares a plan with a saved one; as a pytest
fixture (`shardplan.shell.pytest_plugin`) it finds the file by the test's name, and ``--update-plans`` rewrites it.
"""

from __future__ import annotations

from shardplan.shell.plan_asserts import assert_communication_at_most, assert_fits, assert_no_collective, assert_plan_unchanged

__all__ = ["assert_communication_at_most", "assert_fits", "assert_no_collective", "assert_plan_unchanged"]
