"""What a plan runs is what was planned: each strategy of each primitive, emitted and run, gives what the primitive gives."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shardplan.tdl.proof import CASES, Drawn
from shardplan.tdl.xla_quirks import UNCOMPILED
from tests.emit.proof.cuts import MESHES, Cuts
from tests.emit.proof.runs import Draw, Task, mesh_of, run
from tests.emit.proof.sweep import primitives, sweep, tasks

FENCED = (
    "conv_general_dilated dot_general gather pad reduce_and reduce_or reduce_sum reshape scatter scatter-add scatter-max slice"
).split()
"""What was found wrong once, or is in every step, is in every sample."""
REMEMBERED = [Draw("conv_general_dilated", 7, "2x2x2", False, gradient) for gradient in (False, True)]
"""Draws that the partitioner got wrong."""
GROUPS = 4


def sample(group: int) -> Iterator[Task]:
    """A quarter of a sample: what is `FENCED`, and of all others every fourth primitive once."""
    others = [name for name in primitives() if name not in FENCED][::4]
    yield from ([Task(tuple(REMEMBERED), 12)] if group == 0 else [])
    yield from list(tasks(FENCED, 1, 2))[group::GROUPS]
    yield from list(tasks(others, 1, 1))[group::GROUPS]


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_sample_of_all_strategies(group: int) -> None:
    found = sweep(sample(group), jobs=1, budget_s=600.0)
    assert not found.faults, "\n".join(found.faults)
    assert found.cases > 100
    assert min(found.cuts, found.pairs, found.idle, found.partial, found.uneven) > 5


@pytest.mark.slow
def test_strategies_of_every_primitive() -> None:
    found = sweep(tasks(primitives(), 0, 6), jobs=2, budget_s=3600.0)
    assert not found.faults, "\n".join(found.faults)
    assert set(found.primitives) >= set(primitives())


def test_every_primitive_is_proven_or_refused() -> None:
    assert set(primitives()) | set(UNCOMPILED) <= set(CASES)
    assert set(primitives()).isdisjoint(UNCOMPILED)


def test_a_wrong_result_is_found() -> None:
    """A gather whose result is not added up."""
    cuts = Cuts(CASES["reduce_sum"](Drawn(0)), "2x2")
    rows = cuts.options
    rng = np.random.default_rng(0)
    made = [cuts.emitted(rows, row, mesh_of("2x2"), rng) for row in range(len(rows.loops))]
    right = [e.expected.whole for e in made]
    assert not any(e.faults([*whole]) for e, whole in zip(made, right, strict=True) if not any(e.kept))
    assert all(e.faults([x + 1 for x in whole]) for e, whole in zip(made, right, strict=True) if not any(e.kept))


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_seeds_give_equal_strategies(mesh: str) -> None:
    task = Task((Draw("gather", 3, mesh),), 4)
    told: list[str] = []
    first, second = (run(task, lambda e: told.append(e.name)) for _ in range(2))
    assert first == second
    assert first.cases
