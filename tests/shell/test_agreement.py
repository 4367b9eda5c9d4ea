"""Processes share one plan, or all raise the same error."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import shardplan
from shardplan.shell.agreement import Exchange, ProcessGroup
from tests.processes import ROOT, outcome


class Texts:
    """The store of a coordinator, for threads of one process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, text: str) -> None:
        with self._changed:
            assert self._texts.setdefault(key, text) == text, key
            self._changed.notify_all()

    def get(self, key: str, limit_s: float | None) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._texts, limit_s)
            return self._texts.get(key)


def settled(answers: dict[int, str], members: tuple[int, ...]) -> list[Any]:
    """What each process that answers ends with, where ``members`` should."""
    store: Any = Texts()
    talks = {own: Exchange(ProcessGroup(members, own, 0.5), store, "test") for own in answers}
    with ThreadPoolExecutor(len(talks)) as threads:
        said = [threads.submit(outcome, lambda own=own: talks[own].settle("terms", answers[own])) for own in answers]
        return [each.result() for each in said]


def test_all_agree() -> None:
    assert settled({0: "", 1: "", 2: ""}, (0, 1, 2)) == [None, None, None]


def test_all_name_those_that_differ_and_the_first_difference() -> None:
    errors = settled({0: "", 1: "", 2: "JAX's version is 1 instead of 2", 3: "another"}, (0, 1, 2, 3))
    (text,) = {str(error) for error in errors}
    assert "process 2 differs from process 0, and process 3 too: JAX's version is 1 instead of 2; start the same" in text
    assert all(e.processes == (2, 3) and e.difference == "JAX's version is 1 instead of 2" for e in errors)


def test_all_name_those_that_do_not_answer() -> None:
    errors = settled({3: "", 5: ""}, (3, 4, 5, 8))
    assert {str(error).partition(":")[0] for error in errors} == {"processes 4, 8 did not ask for this plan within 0.5 s"}
    assert all(isinstance(e, shardplan.AgreementError) and e.processes == (4, 8) for e in errors)


def test_one_process_agrees_with_itself() -> None:
    plan = shardplan.agree(lambda x: x * 2.0, 1.0, cluster="2x4")
    assert plan.axes == {"node": 2, "gpu": 4}


def test_a_limit_of_no_seconds_is_refused() -> None:
    with pytest.raises(shardplan.ShardplanError, match="timeout_s=0: give the seconds"):
        shardplan.agree(lambda x: x * 2.0, 1.0, cluster="2x4", timeout_s=0)


def test_a_file_is_for_this_cluster_and_these_donations(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shardplan.plan(lambda x: x * 2.0, 1.0, cluster="2x4").save(file)
    assert shardplan.agree(lambda x: x * 2.0, 1.0, cluster="2x4", file=file).axes == {"node": 2, "gpu": 4}
    with pytest.raises(shardplan.PlanFileError, match="the plan is for the cluster 2x4, not for 2x2"):
        shardplan.agree(lambda x: x * 2.0, 1.0, cluster="2x2", file=file)
    with pytest.raises(shardplan.PlanFileError, match=r"the plan is for donate_argnums=\(\), not for \(0,\)"):
        shardplan.agree(lambda x: x * 2.0, 1.0, cluster="2x4", donate_argnums=0, file=file)
    with pytest.raises(shardplan.ShardplanError, match="remat beside file="):
        shardplan.agree(lambda x: x * 2.0, 1.0, cluster="2x4", remat="auto", file=file)


@pytest.fixture(scope="module")
def said() -> tuple[dict[str, Any], dict[str, Any]]:
    """What came of each case of `tests.shell.agreed_by` in each of two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.shell.agreed_by"]
    started = [
        subprocess.Popen([*command, str(n), "2", str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        for n in range(2)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert all(process.returncode == 0 for process in started), ended
    first, second = (dict(json.loads(line) for line in out.splitlines() if line.startswith('["')) for out, _ in ended)
    return first, second


@pytest.mark.slow
def test_two_processes_run_the_plan_of_one(said: Any) -> None:
    first, second = said
    assert first["same"] == second["same"]
    assert first["decorated"] == second["decorated"]
    assert first["loaded"] == second["loaded"] == [[0, 1], [2, 3]]


DIFFERENCES = {
    "program": "tests/shell/agreed_by.py",
    "number": "mul at ",
    "argument": "x was float32[64, 32] and is float32[128, 32]",
    "cluster": "cluster is 2 (",
    "version": "shardplan's version is 0.0.7 instead of 0.1.0",
    "option": "memory_limit is 1.00 GiB instead of 2.00 GiB",
    "placement": "placement is one with the hash ",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DIFFERENCES)
def test_a_difference_is_the_same_error_in_both(said: Any, case: str) -> None:
    first, second = (each[case] for each in said)
    assert first == second
    assert first.startswith("AgreementError: process 1 differs from process 0: ")
    assert DIFFERENCES[case] in first


@pytest.mark.slow
def test_no_plan_is_an_error_in_both(said: Any) -> None:
    first, second = (each["unplanned"] for each in said)
    reason = first.removeprefix("MemoryLimitError: ")
    assert reason != first
    assert second == f"AgreementError: process 0 has no plan: {reason}"


@pytest.mark.slow
def test_a_process_that_does_not_ask_is_named(said: Any) -> None:
    first, second = (each["late"] for each in said)
    assert first == second
    assert first.startswith("AgreementError: process 1 did not ask for this plan within 1 s: see the output there")
