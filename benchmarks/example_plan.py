"""The report of a plan that docs/reading_a_plan.md explains, without the seconds that planning took.

python benchmarks/example_plan.py
"""

from __future__ import annotations

import contextlib
import io
import sys

from shardplan.shell.cli import main as shardplan

COMMAND = """plan models.mlp:train_step --cluster 2x4 --donate 0
    --set layers=3 --set width=2048 --set inputs=2048 --set batch=4096""".split()


def main() -> int:
    """Prints the report."""
    report = io.StringIO()
    with contextlib.redirect_stdout(report):
        code = shardplan(COMMAND)
    print("\n".join(line for line in report.getvalue().splitlines() if not line.startswith("planned in")))
    return code


if __name__ == "__main__":
    sys.exit(main())
