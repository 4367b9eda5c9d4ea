"""The processes of a run end soon after one of them was killed."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.processes import ROOT

FIRST = """
from shardplan.shell import watching
watching.END_S = 0.5
print(watching.serve(0), flush=True)
exec(input())
"""
OTHER = """
import sys
from shardplan.shell import watching
watching.END_S = 0.5
watching.join(int(sys.argv[1]), 0, "localhost", sys.argv[2])
print("joined", flush=True)
exec(input())
"""


@contextmanager
def run_of(count: int) -> Iterator[list[subprocess.Popen[str]]]:
    """So many watched processes, each of which runs a line that it is given and ends."""

    def started(*command: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", *command], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)

    first = started(FIRST)
    assert first.stdout is not None
    told = first.stdout.readline().strip()
    processes = [first, *(started(OTHER, str(n), told) for n in range(1, count))]
    for process in processes[1:]:
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n"
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def said(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The code and the errors of a process that ends."""
    assert process.stderr is not None
    text = process.stderr.read()
    return process.wait(), text


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_ends_all_others_with_its_name(victim: int) -> None:
    with run_of(4) as processes:
        processes[victim].kill()
        for n, process in enumerate(processes):
            if n != victim:
                code, text = said(process)
                assert (code, text.count("\n")) == (1, 1)
                assert f"process {victim} was killed or has crashed: see its output" in text
                assert f"process {n} ends in 0.5 s" in text


def test_a_process_that_ends_by_itself_ends_no_other() -> None:
    with run_of(3) as processes:
        assert processes[1].communicate("pass\n")[1] == ""
        assert processes[2].communicate("import time; time.sleep(1)\n")[1] == ""
        assert processes[0].communicate("pass\n")[1] == ""
        assert [process.returncode for process in processes] == [0, 0, 0]


def test_the_first_process_may_end_before_others() -> None:
    with run_of(2) as (first, other):
        assert first.communicate("pass\n")[1] == ""
        assert other.communicate("import time; time.sleep(1)\n")[1] == ""
        assert other.returncode == 0


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_process_is_told_in_all(failing: int) -> None:
    with run_of(3) as processes:
        processes[failing].communicate("raise KeyError('no such file')\n")
        for n in {0, 1, 2} - {failing}:
            text = processes[n].communicate("import time; time.sleep(1)\n")[1]
            assert text.startswith(f"shardplan: process {failing} ended with KeyError: see its output; process {n} may wait")
            assert (processes[n].returncode, text.count("\n")) == (0, 1)


def test_a_stranger_is_not_heard() -> None:
    with run_of(2) as (first, other):
        stranger = [sys.executable, "-c", OTHER, "7", f"{_port(other)} wrong-token"]
        subprocess.run(stranger, input="import os; os._exit(7)\n", text=True, cwd=ROOT, timeout=60, check=False)
        assert other.communicate("import time; time.sleep(1)\n")[1] == ""
        assert first.communicate("pass\n")[1] == ""


def _port(process: subprocess.Popen[str]) -> int:
    """The port that a process was told to connect to."""
    return int(str(process.args[-1]).split()[0])  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "victim", "when"), [(3, 1, "training"), (2, 0, "training"), (2, 0, "planning"), (2, 1, "placed")]
)
def test_a_killed_process_ends_those_that_train_with_it(count: int, victim: int, when: str) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command, more, pipe = (
        [sys.executable, "-m", "tests.shell.killed_by"],
        [str(count), str(port), str(victim), when],
        subprocess.PIPE,
    )
    started = [subprocess.Popen([*command, str(n), *more], stdout=pipe, stderr=pipe, text=True, cwd=ROOT) for n in range(count)]
    ended = [process.communicate(timeout=300)[1] for process in started]
    for n in set(range(count)) - {victim}:
        assert started[n].returncode != 0
        assert f"shardplan: process {victim} was killed or has crashed" in ended[n]
        assert "stopped sending heartbeats" not in ended[n]  # JAX's own words, much later
