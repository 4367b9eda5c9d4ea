"""Real programs of many kinds meet no op that is not described, plan, and run cut as they run whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest

import shardplan
from shardplan.tdl import Call, describe
from shardplan.tdl.coverage import sort_primitives
from shardplan.tdl.cut_proof import draw, verify
from shardplan.verify.verify import verify as verify_plan
from tests.tdl.programs import PROGRAMS, Program

STRUCTURAL = {entry.name for entry in sort_primitives() if entry.kind == "structural"}


def calls(jaxpr: Any) -> Iterator[Call]:
    """All applications of primitives, bodies included."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in STRUCTURAL:
            for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                body = getattr(value, "jaxpr", value)
                if hasattr(body, "eqns"):
                    yield from calls(body)
            continue
        ins, outs = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        yield Call(
            eqn.primitive.name,
            tuple(tuple(v.shape) for v in ins),
            tuple(tuple(v.shape) for v in outs),
            eqn.params,
            tuple(str(v.dtype) for v in ins),
            tuple(str(v.dtype) for v in outs),
        )


def traced(program: Callable[[], Program]) -> Any:
    step, args = program()
    return jax.make_jaxpr(step)(*args).jaxpr


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_meets_no_undescribed_op(program: Callable[[], Program]) -> None:
    found = list(calls(traced(program)))
    assert found
    assert sorted({call.primitive for call in found if describe(call) is None}) == []


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_each_op_of_a_program_is_proven_on_its_shapes(program: Callable[[], Program]) -> None:
    seen: dict[Any, Call] = {}
    for call in calls(traced(program)):
        params = str({k: v for k, v in call.params.items() if "jaxpr" not in k})
        seen.setdefault((call.primitive, call.operands, call.results, call.dtypes, params), call)
    rng = np.random.default_rng(0)
    faults = [f for call in seen.values() for f in verify(call, draw(call, rng, low=0, high=2), nested=1).faults]
    assert not faults, "\n".join(map(str, faults))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_cut_wherever_it_can_be_runs_as_it_does_whole(program: Callable[[], Program], eager: Any) -> None:
    step, args = program()
    plan = shardplan.plan(step, *args, cluster=eager)
    uses = plan.session.decisions.uses.values()
    assert sum(any(loop >= 0 for loop in use.loops) for use in uses) > 0.8 * len(uses), "too little is cut to prove anything"
    found = verify_plan(plan, step, args, reference="unequal")
    assert found.passed, found


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_program_planned_for_gpus_runs_as_it_does_whole(program: Callable[[], Program]) -> None:
    step, args = program()
    plan = shardplan.plan(step, *args, cluster="2x4")
    found = verify_plan(plan, step, args, reference="unequal")
    assert found.passed, found
