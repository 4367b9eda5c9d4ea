"""Rematerialisation: what is computed again is in the program, fewer bytes live between the passes, and the numbers stay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import shardplan
from models import gpt, llama, mlp
from shardplan.cost import compute
from shardplan.errors import MemoryLimitError, PlanFileError, ShardplanError
from shardplan.frontend.nnx_state import trace_step
from shardplan.graph.flattening import flatten
from shardplan.ir import Program
from shardplan.plans.fingerprint import fingerprint
from shardplan.remat import RecomputedPart, find, rematerialised

DEEP: dict[str, Any] = {"layers": 3, "width": 32, "sequence": 16, "batch": 16, "vocabulary": 64, "heads": 4}


def found(program: Program, policy: Any = "all") -> tuple[RecomputedPart, ...]:
    heavy = {
        (n.where, n.op.id)
        for n in flatten(program).nodes
        if n.signature.description is not None and compute.is_contraction(n.signature.description)
    }
    return find(program, lambda where, op_id: (where, op_id) in heavy, policy)


def program_of(step: Any, args: Any) -> Program:
    return trace_step(step, args, (0,)).program


def contractions(program: Program) -> float:
    nodes = flatten(program).nodes
    return sum(
        n.weight * compute.flops(n.signature.description)
        for n in nodes
        if n.signature.description is not None and compute.is_contraction(n.signature.description)
    )


def everything(program: Program) -> Iterator[Program]:
    yield program
    for op in program.ops:
        for body in op.bodies:
            yield from everything(body)


def is_well_formed(program: Program) -> bool:
    """Every operand is made before it is read, every id is of one op."""
    for p in everything(program):
        there = {*p.inputs, *(t for t, _ in p.constants)}
        assert len({op.id for op in p.ops}) == len(p.ops)
        for op in p.ops:
            assert set(op.tensors) <= there, op
            there.update(op.outputs)
            for body in op.bodies:
                assert op.primitive in ("while", "cond") or len(body.inputs) == len(op.inputs)
        assert {o for o in p.outputs if isinstance(o, int)} <= there
        assert [t.id for t in p.tensors] == list(range(len(p.tensors)))
    return True


@pytest.mark.parametrize("policy", ["all", pytest.param("light", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scan", [False, True])
def test_the_program_computes_again_and_hands_over_less(scan: bool, policy: Any) -> None:
    before = program_of(*gpt.train_step(**DEEP, scan=scan, dropout=0.1))
    parts = found(before, policy)
    after = rematerialised(before, parts)
    assert is_well_formed(after)
    assert (after.inputs, after.outputs, after.feedback) == (before.inputs, before.outputs, before.feedback)
    assert sum(p.loop is not None for p in parts) == scan
    again = [n for n in flatten(after).nodes if n.op.recomputed]
    assert len(again) == sum(len(p.ops) for p in parts) > 0
    assert all(n.backward for n in again)
    if policy == "light":  # contractions run once
        assert contractions(after) == contractions(before)
    else:
        assert contractions(before) < contractions(after) <= 4 / 3 * contractions(before)


def test_a_scan_hands_over_its_carry_in_place_of_all_else() -> None:
    before = program_of(*llama.train_step(layers=3, scan=True))
    (part, *_) = found(before)
    assert part.loop is not None
    forward = part.loop[0]
    after = rematerialised(before, [part])

    def stacks(program: Program) -> int:
        op = next(op for op in program.ops if op.id == forward)
        return sum(program.tensors[t].nbytes for t in op.outputs[op.params["num_carry"] :])

    carry = next(op for op in before.ops if op.id == forward).outputs[0]
    assert stacks(before) - stacks(after) == part.saved_bytes
    assert stacks(after) == 3 * before.tensors[carry].nbytes


def test_the_forward_pass_is_cut_between_layers() -> None:
    """Equal layers of an unrolled model fall into blocks of equal ops."""
    program = program_of(*gpt.train_step(**{**DEEP, "layers": 8}))
    kinds = {op.id: op.primitive for op in program.ops}
    blocks = [[kinds[i] for i in part.ops] for part in found(program)]
    assert len(blocks) >= 4
    assert blocks[1:3] == blocks[3:5] or blocks[1] == blocks[2] == blocks[3]


@pytest.mark.parametrize("options", [{}, {"scan": True}])
def test_what_is_under_checkpoint_stays_as_it_is(options: dict[str, Any]) -> None:
    program = program_of(*gpt.train_step(**DEEP, **options, remat=True))
    bodies = {id(b) for op in program.ops for b in op.bodies if "differentiated" in op.params}
    after = rematerialised(program, found(program))
    assert bodies <= {id(b) for op in after.ops for b in op.bodies}
    if options:
        assert all(part.loop is None for part in found(program))


def test_a_step_without_a_backward_pass_has_nothing_to_compute_again() -> None:
    assert found(program_of(lambda w, x: jnp.tanh(x @ w).sum(), (jnp.ones((8, 8)), jnp.ones((8, 8))))) == ()


def test_what_a_callback_says_is_not_asked_twice() -> None:
    """An op with an effect runs once: its result is kept."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ w)
            noise = io_callback(np.ones_like, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
            x = jnp.sin(x * noise)
        return x.sum()

    before = program_of(jax.grad(loss), (jnp.ones((8, 8)), jnp.ones((64, 8))))
    after = rematerialised(before, found(before))
    calls = [sum(op.primitive == "io_callback" for p in everything(q) for op in p.ops) for q in (before, after)]
    assert calls == [4, 4]
    assert any(op.primitive == "remat2" for op in after.ops)


# -- plans -------------------------------------------------------------------------------------------------------------


@cache
def model(scan: bool) -> tuple[Any, Any, int]:
    """(step, args, the fewest bytes of a device that it fits in with nothing computed again)."""
    step, args = gpt.train_step(**DEEP, scan=scan)
    with pytest.raises(MemoryLimitError) as caught:
        shardplan.plan(step, *args, cluster="8", donate_argnums=0, memory_limit=1)
    return step, args, caught.value.smallest_bytes


@cache
def tight(scan: bool) -> shardplan.Plan:
    """The plan for less than that."""
    step, args, needed = model(scan)
    return shardplan.plan(step, *args, cluster="8", donate_argnums=0, memory_limit=int(0.8 * needed), remat="auto")


@pytest.mark.slow
@pytest.mark.parametrize("scan", [False, True])
def test_what_does_not_fit_fits_with_activations_computed_again(scan: bool, tmp_path: Path) -> None:
    step, args, needed = model(scan)
    plan = tight(scan)
    assert plan.peak_bytes <= plan.memory_limit
    assert (plan.remat.loops > 0) == scan
    assert plan.remat.without is not None
    assert (plan.remat.without.fits, plan.remat.without.peak_bytes) == (False, needed)
    free = shardplan.plan(step, *args, cluster="8", donate_argnums=0)
    assert plan.operators == free.operators
    # a file keeps it, and is still for the user's step
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert (again.remat, again.step_time_s, again.peak_bytes) == (plan.remat, plan.step_time_s, plan.peak_bytes)
    assert fingerprint(again.traced) == fingerprint(free.traced)


def test_where_the_limit_costs_nothing_nothing_is_computed_again() -> None:
    step, args = mlp.train_step()
    plain = shardplan.plan(step, *args, cluster="2x4")
    auto = shardplan.plan(step, *args, cluster="2x4", remat="auto")
    assert auto.remat.parts == ()
    assert "costs nothing" in auto.remat.note
    assert auto.searched_s == plain.searched_s


@pytest.mark.slow
def test_a_plan_with_it_is_never_slower_than_one_without() -> None:
    """Between what the fastest plan holds and the least that fits without."""
    step, args, least = model(True)
    most = shardplan.plan(step, *args, cluster="8", donate_argnums=0).peak_bytes
    limit = (least + most) // 2
    plain, auto = (
        shardplan.plan(step, *args, cluster="8", donate_argnums=0, memory_limit=limit, remat=r) for r in ("none", "auto")
    )
    assert auto.searched_s <= plain.searched_s
    assert auto.remat.without is not None
    assert auto.remat.without.step_time_s <= plain.searched_s, "the fastest as scheduled may cost more in the search"


@pytest.mark.slow
def test_the_error_counts_it_in() -> None:
    step, args, least = model(True)
    with pytest.raises(MemoryLimitError, match="recomputed where that helps") as caught:
        shardplan.plan(step, *args, cluster="8", donate_argnums=0, memory_limit=1, remat="auto")
    assert "set remat" not in str(caught.value)
    assert caught.value.smallest_bytes < least


def test_an_option_that_is_not_there() -> None:
    with pytest.raises(ShardplanError, match="unsupported remat 'some'"):
        shardplan.plan(*mlp.train_step()[:1], *mlp.train_step()[1], cluster="8", remat="some")


@pytest.mark.slow
def test_a_file_with_parts_of_another_step_is_refused(tmp_path: Path) -> None:
    (step, args, _), plan = model(True), tight(True)
    odd = replace(plan.remat.parts[0], loop=(10**6, 10**6))
    content = plan.to_json()
    content["remat"]["parts"] = [asdict(odd)]
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(PlanFileError, match="recomputes are not in this step"):
        shardplan.load(tmp_path / "plan.json", step, *args)


@pytest.mark.slow
def test_a_step_that_returns_a_number_of_numpy() -> None:
    """A constant result need not be hashable."""

    def net(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - jax.grad(net)(w, x), np.float32(3)

    args = jnp.ones((64, 64)), jnp.ones((64, 64))
    limit = int(shardplan.plan(step, *args, cluster="2x4").peak_bytes * 0.7)
    plan = shardplan.plan(step, *args, cluster="2x4", memory_limit=limit, remat="auto")
    assert float(plan.jit(step)(*plan.put(args))[1]) == 3.0
