"""The command `shardplan diff`: what changed from one saved plan to another."""

from __future__ import annotations

import argparse
from typing import Any

from shardplan.report.report import Report
from shardplan.shell.arguments import add_command


def add_diff_command(commands: Any) -> None:
    """Adds `diff`."""
    one = add_command(commands, "diff", _diff, "say what changed from one saved plan to another")
    one.add_argument("before", metavar="a.json")
    one.add_argument("after", metavar="b.json")


def _diff(options: argparse.Namespace) -> Report:
    from shardplan.plans.files import read_any
    from shardplan.report.diff_text import diff_text
    from shardplan.report.plan_diff import plan_diff

    found = plan_diff(read_any(options.before), read_any(options.after))
    return Report(diff_text(found, (options.before, options.after)), found.json, passed=found.alike)
