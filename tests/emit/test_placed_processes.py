"""Plans with groups of devices over several processes, as on several hosts."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.processes import ROOT


def trained(count: int, case: str) -> list[dict[str, Any]]:
    """What each of ``count`` processes says of a case of `tests.emit.placed_by`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command, pipe = [sys.executable, "-m", "tests.emit.placed_by"], subprocess.PIPE
    more = [str(count), str(port), case]
    started = [subprocess.Popen([*command, str(n), *more], stdout=pipe, stderr=pipe, text=True, cwd=ROOT) for n in range(count)]
    said = [process.communicate(timeout=900) for process in started]
    assert all(process.returncode == 0 for process in started), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def check(said: list[dict[str, Any]], groups: list[list[int]]) -> None:
    first = said[0]
    assert all(each["losses"] == first["losses"] for each in said)
    np.testing.assert_allclose(first["losses"], first["alone"], rtol=1e-5)
    assert first["losses"][-1] < first["losses"][0]
    assert first["processes"] == groups
    assert [each["unequal"] for each in said] == [[]] * len(said)


def test_two_processes_pass_values_on() -> None:
    check(trained(2, "tiny"), [[0], [1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "case", "groups"),
    [
        (2, "mlp", [[0], [1]]),
        (2, "towers", [[0], [1]]),
        (4, "gpt", [[0, 1], [2, 3]]),
        (4, "scan", [[0, 1], [2, 3]]),
        (4, "shared", [[0, 1, 2], [1, 2, 3]]),
    ],
    ids=str,
)
def test_groups_of_several_processes_train_as_one_device(count: int, case: str, groups: list[list[int]]) -> None:
    check(trained(count, case), groups)
