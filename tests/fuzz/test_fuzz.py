"""Random programs compute under a plan what they compute under plain `jax.jit`; and the fuzzer itself keeps its word.

More by hand: ``python -m tests.fuzz FIRST COUNT``.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing

import jax
import pytest

from shardplan.emit.backends import BACKENDS
from tests.fuzz.check import Finding, examine
from tests.fuzz.generate import LEAST, MOST, program
from tests.fuzz.pool import Worker
from tests.fuzz.program import Argument, Instruction, Program, Value, make, source
from tests.fuzz.report import as_test, line
from tests.fuzz.run import Failure, examined, reduced
from tests.fuzz.shrink import pruned, shrunk
from tests.fuzz.templates import TEMPLATES

JOBS = 2
SHRUNK = 2
"""Failures that a test makes small; the others are a line each."""


def assert_equal(seeds: Iterable[int]) -> None:
    """Fails with the failures of the programs of these seeds, under one backend after another, the first of them as tests."""
    programs = {seed: program(seed, BACKENDS[seed % len(BACKENDS)]) for seed in seeds}
    found = examined(programs, JOBS)
    failures = [Failure(seed, finding, programs[seed]) for seed, finding in sorted(found.items()) if finding.failed]
    if failures:
        small = reduced(failures[:SHRUNK], JOBS)
        tests = [as_test(x.program, f"seed_{x.seed}") for x in small]
        pytest.fail("\n\n".join(["\n".join(line(f.seed, f.finding) for f in failures), *tests]), pytrace=False)
    compared = [f for f in found.values() if f.status == "equal" and not f.silent]
    assert len(compared) >= 0.85 * len(found), "too many are refused, or have no finite number"
    assert sum(f.communicates for f in compared) >= 0.8 * len(compared)


def test_random_programs_compute_under_a_plan_what_they_compute_under_plain_jit() -> None:
    assert_equal(range(2))


@pytest.mark.slow
def test_a_program_in_bfloat16_compiled_for_one_device_is_the_program_op_by_op() -> None:
    made = program(1004)
    assert made.reference == "always"
    assert any(value.dtype == "bfloat16" for value in made.values.values())
    assert_equal([1004])


@pytest.mark.slow
def test_a_program_whose_barriers_delay_values_that_others_read() -> None:
    assert_equal([3032])


@pytest.mark.slow
def test_hundreds_of_random_programs_compute_what_they_compute_under_plain_jit() -> None:
    assert_equal(range(1000, 1300))


def test_a_seed_always_gives_the_same_program() -> None:
    assert [program(seed) for seed in range(5)] == [program(seed) for seed in range(5)]


@pytest.mark.slow
def test_every_template_occurs_and_programs_have_the_sizes_that_they_should() -> None:
    drawn = [program(seed) for seed in range(120)]
    assert {x.template for p in drawn for x in p.instructions} == set(TEMPLATES)
    assert all(LEAST <= len(p.instructions) <= MOST for p in drawn)
    trained = sum(p.form != "plain" for p in drawn)
    assert 0.35 * len(drawn) <= trained <= 0.65 * len(drawn)


@pytest.mark.parametrize("seed", [0, 3, 4])
def test_a_program_computes_the_types_that_it_says_and_as_a_noisy_one_those_too(seed: int) -> None:
    made = program(seed)
    step, args = make(made)
    outs = jax.eval_shape(step, *args)
    assert jax.eval_shape(make(made, 1)[0], *args) == outs
    for name, value in made.values.items():
        if made.form == "plain" and name in made.returned and isinstance(outs, dict):
            assert (outs["out"][name].shape, str(outs["out"][name].dtype)) == value.like


def _chain(count: int) -> Program:
    """A sum at the end of many lines, most of which do nothing for it."""
    lines = [Instruction("x0", "unary", "jnp.sin({0})", ("a0",), Value((8, 6), "float32", False))]
    for i in range(1, count):
        text = "jnp.cumsum({0}, 1)" if i == count // 2 else "{0} * 0.5 + {1}"
        operands = (f"x{i - 1}",) if i == count // 2 else (f"x{i - 1}", "a1")
        lines.append(
            Instruction(f"x{i}", "running" if i == count // 2 else "binary", text, operands, Value((8, 6), "float32", False))
        )
    arguments = tuple(Argument(f"a{i}", "normal", i, Value((8, 6), "float32", False)) for i in range(2))
    return Program(arguments, tuple(lines), (f"x{count - 1}", "x1"), pins=(("a0", ("gpu",)),))


def test_a_planted_fault_shrinks_to_the_line_that_has_it() -> None:
    asked: list[Program] = []

    def fails(candidate: Program) -> bool:
        asked.append(candidate)
        return any(x.template == "running" for x in candidate.instructions)

    small = shrunk(_chain(20), fails)
    assert [x.template for x in small.instructions] == ["running"]
    assert not small.pins
    assert small.instructions[0].value.shape == (1, 1)
    assert len(asked) <= 120
    step, args = make(small)
    assert jax.eval_shape(step, *args)


def test_the_fault_of_a_large_program_shrinks_to_few_lines_that_run() -> None:
    whole = next(p for p in map(program, range(100)) if len(p.instructions) > 25 and p.form != "plain")
    template = whole.instructions[len(whole.instructions) // 2].template
    small = shrunk(whole, lambda p: any(x.template == template for x in pruned(p).instructions))
    assert len(small.instructions) <= 3
    step, args = make(small)
    jax.block_until_ready(jax.jit(step)(*args))


def test_what_is_printed_is_a_test_of_the_program() -> None:
    made = _chain(4)
    text = as_test(made, "chain")
    assert all(f"    {row}" in text.splitlines() for row in source(made))
    space: dict[str, object] = {}
    exec(compile(text, "<test>", "exec"), space)
    assert callable(space["test_chain"])
    space["test_chain"]()


@pytest.mark.slow
def test_a_process_that_dies_is_a_finding_and_the_next_program_has_a_new_one() -> None:
    value = Value((8,), "float32", False)
    dies = Instruction("x0", "dies", "[__import__('os').abort(), {0}][1]", ("a0",), value)
    lives = Instruction("x0", "unary", "jnp.sin({0})", ("a0",), value)
    arguments = (Argument("a0", "normal", 0, value),)
    with closing(Worker()) as worker:
        assert worker.judge(Program(arguments, (dies,), ("x0",))).status == "aborted"
        assert worker.judge(Program(arguments, (lives,), ("x0",))) == Finding("equal", communicates=False)


@pytest.mark.slow
def test_a_step_that_cannot_run_at_all_is_told_from_a_fault_of_the_planner() -> None:
    value = Value((8,), "float32", False)
    odd = Instruction("x0", "odd", "{0} @ jnp.ones((3, 3))", ("a0",), value)
    with closing(Worker()) as worker:
        assert worker.judge(Program((Argument("a0", "normal", 0, value),), (odd,), ("x0",))).status == "invalid"


def test_a_pin_that_does_not_divide_is_refused() -> None:
    step, args = make(_chain(3))
    assert examine(step, args, cluster="8:eager", pins={"a0": (None, "gpu")}).status == "refused"


def test_a_plan_that_leaves_out_an_exchange_is_found_wrong_and_not_taken_for_rounding() -> None:
    value = Value((16, 16), "float32", False)
    arguments = tuple(Argument(f"a{i}", "normal", i, value, trained=i == 0) for i in range(2))
    product = Instruction("x0", "dense", "jnp.tanh({0} @ {1})", ("a0", "a1"), value)
    made = Program(arguments, (product,), ("x0",), "sgd", cluster="2x4:eager", pins=(("a0", ("gpu",)), ("a1", ("node",))))
    step, args = make(made)
    assert examine(step, args, **made.options).status == "equal"
    found = examine(step, args, **made.options, drop=0, noisy=lambda seed: make(made, seed)[0])
    assert found.status == "wrong"
    assert "off by" in found.detail
