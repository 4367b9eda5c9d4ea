"""What a plan runs is what was planned: each strategy of each primitive, emitted and run, gives what the primitive gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jaxlib
import pytest

from shardplan.emit import blocks
from shardplan.emit.backends import BACKENDS
from shardplan.graph import nodes as graph
from shardplan.tdl import Call, strategies
from shardplan.tdl.localize import Local, counted_in
from shardplan.tdl.proof import CASES
from shardplan.tdl.xla_quirks import UNCOMPILED
from shardplan.versions import TESTED
from tests.emit.proof.cuts import MESHES
from tests.emit.proof.runs import Draw, Task, cases_of, run
from tests.emit.proof.sweep import FENCED, primitives, sweep, tasks, whole

REMEMBERED = [Draw("conv_general_dilated", 7, "2x2x2", False, gradient) for gradient in (False, True)]
"""Draws that the partitioner got wrong."""
EXPLICIT = [Draw("conv_general_dilated", 3, "2x2x2", True, True), Draw("scatter", 11, "2x2x2", False, True)]
"""A draw that the schedule refused: a kernel cut unevenly along windows on an image of one element. One in which terms of a sum
changed places with those of another.
"""
INDEXING = ("gather", "scatter", "scatter-add", "scatter-max")
MODES = ("FILL_OR_DROP", "CLIP", "PROMISE_IN_BOUNDS")
EVERY_MODE = 12, 3
"""The first seed, and how many, that draw every mode of a lookup."""
GROUPS = 24


def sample(group: int) -> Iterator[Task]:
    """A part of a sample: what is `FENCED`, half of that under both backends, and of all others every twelfth under one."""
    others = [name for name in primitives() if name not in FENCED][::12]
    yield from {0: [Task(tuple(REMEMBERED), 12)], 1: [Task(tuple(EXPLICIT), 12, backend="explicit")]}.get(group, [])
    yield from list(tasks(FENCED, 2, 1))[group::GROUPS]
    yield from list(tasks(FENCED[1::2], 1, 1, "explicit"))[group::GROUPS]
    yield from list(tasks(["gather"], 8, 1))[group::GROUPS]
    yield from list(tasks(others[::2], 1, 1))[group::GROUPS]
    yield from list(tasks(others[1::2], 1, 1, "explicit"))[group::GROUPS]


@pytest.mark.parametrize("group", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, GROUPS))])
def test_a_sample_of_all_strategies(group: int) -> None:
    found = sweep(sample(group), jobs=1, budget_s=3600.0)
    assert not found.faults, "\n".join(found.faults)
    assert not found.skipped
    assert found.cases
    if group == 0:  # other groups may hold one primitive
        assert found.cases > 50
        assert min(found.cuts, found.pairs, found.idle, found.partial, found.uneven) > 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_strategies_of_a_third_of_all_primitives(backend: str) -> None:
    third, every_mode = primitives()[BACKENDS.index(backend) :: 3], tasks(INDEXING, *EVERY_MODE, backend)
    found = sweep([*whole(third, 0, 1, backend), *every_mode], jobs=2, budget_s=3600.0)
    assert not found.faults, "\n".join(found.faults)
    assert not found.skipped
    assert set(found.primitives) >= set(third)
    assert {f"{name} {mode}" for name in INDEXING for mode in MODES} <= set(found.classes)


@pytest.mark.slow
def test_every_mode_of_a_lookup_is_drawn() -> None:
    calls = [case.call for task in tasks(INDEXING, *EVERY_MODE) for draw in task.draws for case in cases_of(draw)]
    drawn = {(call.primitive, str(call.params["mode"]).rpartition(".")[2]) for call in calls if "mode" in call.params}
    assert drawn >= {(name, mode) for name in INDEXING for mode in MODES}


def test_every_primitive_is_proven_or_refused() -> None:
    assert set(primitives()) | set(UNCOMPILED) <= set(CASES)
    assert set(primitives()).isdisjoint(UNCOMPILED)


def test_the_proof_is_of_the_installed_jaxlib() -> None:
    """With another one what is fenced is to be proven anew: ``python -m tests.emit.proof --rounds 6``, then `TESTED`."""
    assert jaxlib.version.__version__ in TESTED


def unshifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device looks up, and writes, as if it were the first."""
    monkeypatch.setattr(blocks, "counted_in", lambda share, true: replace(share := counted_in(share, true), run=_first(share)))


def _first(local: Local) -> Any:
    return lambda bind, operands, worker: local.run(bind, operands, 0 * worker)


def unfenced(primitives: frozenset[str]) -> Callable[[pytest.MonkeyPatch], None]:
    """What is fenced goes back to the partitioner, and is padded again."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("shared_loops", "fenced_loops"):
            real = getattr(graph, name)

            def changed(call: Call, known: Any, *, real: Any = real, **how: Any) -> frozenset[int]:
                return frozenset() if call.primitive in primitives else real(call, known, **how)

            monkeypatch.setattr(graph, name, changed)
        monkeypatch.setattr(strategies, "_maskable", lambda *_: True)

    return mutate


MUTATIONS = {
    "indices that are not shifted": (unshifted, "gather"),
    "updates that are not shifted": (unshifted, "scatter-add"),
    "convolutions cut by the partitioner": (unfenced(frozenset({"conv_general_dilated"})), "conv_general_dilated"),
    "scatters that are padded": (unfenced(frozenset({"scatter-add"})), "scatter-add"),
}
SHIFTS = ("indices that are not shifted", "updates that are not shifted")


@pytest.mark.parametrize(
    "name", [*SHIFTS, *(pytest.param(name, marks=pytest.mark.slow) for name in MUTATIONS if name not in SHIFTS)]
)
def test_the_sample_finds_a_wrong_emitter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, primitive = MUTATIONS[name]
    mutate(monkeypatch)
    mine = (task for group in range(GROUPS) for task in sample(group) if task.draws[0].primitive == primitive)
    assert any(run(task, lambda _: None).faults for task in mine)


@pytest.mark.parametrize("mesh", MESHES)
def test_equal_seeds_give_equal_strategies(mesh: str) -> None:
    task = Task((Draw("gather", 3, mesh),), 4)
    told: list[str] = []
    first, second = (run(task, lambda e: told.append(e.name)) for _ in range(2))
    assert first == second
    assert first.cases
