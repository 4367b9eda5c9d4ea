"""A plan over two processes, as on two hosts: each has half of the devices."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.processes import ROOT


def losses(count: int) -> list[list[float]]:
    """The losses that each of ``count`` processes sees."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.emit.trained_by"]
    started = [
        subprocess.Popen(
            [*command, str(n), str(count), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        for n in range(count)
    ]
    said = [process.communicate(timeout=300) for process in started]
    assert all(process.returncode == 0 for process in started), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
def test_two_processes_train_as_one_does() -> None:
    (alone,), both = losses(1), losses(2)
    assert both[0] == both[1]
    assert alone[-1] < alone[0]
    np.testing.assert_allclose(both[0], alone, rtol=1e-5)
