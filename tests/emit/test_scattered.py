"""Any layouts that the search could choose run right, not only those that it does choose."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

import shardplan
from shardplan.tdl.proof import CASES, Drawn
from shardplan.verify.verify import verify
from tests import machines
from tests.emit.proof.runs import gradient
from tests.emit.proof.sweep import primitives
from tests.scattered import scattered
from tests.tdl.programs import PROGRAMS, Program

FEW = [p for p in PROGRAMS if p.__name__ in ("experts_by_one_hot", "fft_convolution", "graph_network")]


def check(program: Callable[[], Program], machine: str, seed: int) -> None:
    step, args = program()
    plan = shardplan.plan(step, *args, cluster=machines.machine(machine), backend="specs")
    made = scattered(plan, seed)
    assert made is not None
    assert made.communication_bytes > 0
    found = verify(made, step, args, backend="specs", steps=1, devices=jax.devices()[: int(np.prod(list(plan.axes.values())))])
    assert found.equal, found


@pytest.mark.slow
@pytest.mark.parametrize("program", FEW, ids=lambda program: program.__name__)
def test_layouts_drawn_at_random_run_as_one_device_does(program: Callable[[], Program]) -> None:
    check(program, "2x4:eager", 0)


PRODUCTS = (
    "conv_general_dilated",
    "cumprod",
    "dynamic_slice",
    "gather",
    "reduce_window_max",
    "scatter-add",
    "select_and_gather_add",
)


def check_product(primitive: str, machine: str, seed: int) -> None:
    """A primitive's vector-Jacobian product as a step, under layouts drawn at random."""
    made = next((g for n in range(seed, seed + 8) if (g := gradient(CASES[primitive](Drawn(n)))) is not None), None)
    assert made is not None, f"{primitive} has no gradient in eight draws"
    step, *args = made
    plan = shardplan.plan(step, *args, cluster=machines.machine(machine), backend="specs")
    drawn = scattered(plan, seed)
    assert drawn is not None
    found = verify(drawn, step, args, backend="specs", steps=1, devices=jax.devices()[: int(np.prod(list(plan.axes.values())))])
    assert found.equal, found


@pytest.mark.parametrize("primitive", PRODUCTS)
def test_a_gradient_runs_right_under_layouts_drawn_at_random(primitive: str) -> None:
    check_product(primitive, "2x2:eager", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "primitive"), [*enumerate(primitives())])
def test_every_gradient_runs_right_under_layouts_drawn_at_random(primitive: str, number: int) -> None:
    seed = number % 4
    if gradient(CASES[primitive](Drawn(seed))) is not None:
        check_product(primitive, ("2x2:eager", "2x4:eager", "3x2:eager", "2x2x2:eager")[seed], seed)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "machine"), [*enumerate(["2x4:eager", "2x2x2:eager", "8:eager", "3x2:eager"])])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_layouts_of_every_program_drawn_at_random(program: Callable[[], Program], machine: str, seed: int) -> None:
    check(program, machine, seed)
