"""The example of a project that tests its plan, as its users run it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardplan.plans.files import read

PROJECT = Path(__file__).parent.parent / "examples" / "project"
MADE_WITH = "0.12.0.1"
"""The release of JAX that traced the project's saved plan."""


def test_the_saved_plan_is_one_of_this_version() -> None:
    [saved] = (PROJECT / "tests" / "plans").iterdir()
    assert not read(saved).changed_constants, "run pytest --update-plans in examples/project"


@pytest.mark.slow
def test_the_project_passes_its_tests_until_its_model_changes(tmp_path: Path, environment: dict[str, str]) -> None:
    def run(*options: str) -> str:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "shardplan.shell.pytest_plugin", *options]
        done = subprocess.run(command, cwd=tmp_path / "project", capture_output=True, text=True, check=False, env=environment)
        return done.stdout

    shutil.copytree(PROJECT, tmp_path / "project")
    if jax.__version__ == MADE_WITH:
        assert "3 passed" in run(), "as its users find it"
    assert "3 passed" in run("--update-plans")
    assert "3 passed" in run()
    model = tmp_path / "project" / "train.py"
    model.write_text("# one line more\n" + model.read_text())
    assert "3 passed" in run(), "source lines are no part of a plan"
    model.write_text(model.read_text().replace("range(2)", "range(1)"))
    said = run("-k", "reviewed")
    assert "1 failed" in said
    assert "They are plans of different programs" in said
