"""Any layouts that the search could choose run right, not only those that it does choose."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

import shardplan
from shardplan.emit.verify import verify
from tests import machines
from tests.scattered import scattered
from tests.tdl.programs import PROGRAMS, Program

FEW = [p for p in PROGRAMS if p.__name__ in ("experts_by_one_hot", "fft_convolution", "graph_network")]


def check(program: Callable[[], Program], machine: str, seed: int) -> None:
    step, args = program()
    plan = shardplan.plan(step, *args, cluster=machines.machine(machine))
    made = scattered(plan, seed)
    assert made is not None
    assert made.communication_bytes > 0
    found = verify(made, step, args, steps=1, devices=jax.devices()[: int(np.prod(list(plan.axes.values())))])
    assert found.equal, found


@pytest.mark.parametrize("program", FEW, ids=lambda p: p.__name__)
def test_layouts_drawn_at_random_run_as_one_device_does(program: Callable[[], Program]) -> None:
    check(program, "2x4:eager", 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("machine", ["2x4:eager", "2x2x2:eager", "8:eager", "3x2:eager"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_layouts_of_every_program_drawn_at_random(program: Callable[[], Program], machine: str, seed: int) -> None:
    check(program, machine, seed)
