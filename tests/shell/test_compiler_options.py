"""The plan's XLA flags are applied, unless the user says otherwise, in the call or in the environment."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import shardplan
from shardplan.errors import ShardplanError
from shardplan.shell.compiler_options import compiler_options

PLANNED = {"xla_gpu_a": 1, "xla_gpu_b": 2}


def test_the_flags_of_the_plan_are_the_default() -> None:
    assert compiler_options(PLANNED, None, "gpu", {}) == compiler_options(PLANNED, True, "cpu", {"XLA_FLAGS": ""}) == PLANNED
    assert compiler_options(PLANNED, False, "gpu", {}) == {}
    assert compiler_options(PLANNED, None, "tpu", {}) == {}, "its compiler does not know them"
    assert compiler_options(PLANNED, {"xla_c": 3}, "tpu", {"XLA_FLAGS": "--xla_d=4"}) == {"xla_c": 3}


@pytest.mark.parametrize("text", ["--xla_gpu_a=7 --other", "--other='b --xla_gpu_b=1' --xla_gpu_a=7", "  --xla_gpu_a=7"])
def test_what_xla_flags_sets_wins_and_is_said(text: str, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    file = tmp_path / "flags"
    file.write_text(text)
    for value in (text, str(file)):
        caplog.clear()
        assert compiler_options(PLANNED, None, "gpu", {"XLA_FLAGS": value}) == {"xla_gpu_b": 2}
        assert [r.getMessage() for r in caplog.records] == ["XLA_FLAGS has --xla_gpu_a=7, which wins: the plan counts on 1"]
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        assert compiler_options(PLANNED, None, "gpu", {"XLA_FLAGS": "--xla_gpu_a=1"}) == {"xla_gpu_b": 2}
        assert compiler_options({"xla_gpu_a": True}, None, "gpu", {"XLA_FLAGS": "--xla_gpu_a"}) == {}
        assert not caplog.records, "the same value needs no word"
        assert compiler_options(PLANNED, {"xla_gpu_a": 3}, "gpu", {"XLA_FLAGS": "--xla_gpu_a=4"}) == {}
        assert [r.getMessage() for r in caplog.records] == ["XLA_FLAGS has --xla_gpu_a=4, which wins: xla_flags gives 3"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [(3, "xla_flags=3"), ("none", "xla_flags='none'"), ({"--xla_a": 1}, "without dashes"), ({"xla_a": None}, "give a number")],
)
def test_what_are_no_flags_is_refused(asked: Any, says: str) -> None:
    with pytest.raises(ShardplanError, match=says):
        compiler_options(PLANNED, asked, "gpu", {})


def test_flags_with_an_open_quote_are_refused() -> None:
    with pytest.raises(ShardplanError, match="cannot be read"):
        compiler_options(PLANNED, None, "gpu", {"XLA_FLAGS": "--xla_gpu_a='7"})


def test_a_file_of_flags_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardplanError, match="cannot be read"):
        compiler_options(PLANNED, None, "gpu", {"XLA_FLAGS": str(tmp_path / "none")})


@pytest.mark.parametrize("way", ["jit", "parallelize"])
def test_they_reach_the_compiler(way: str, devices: list[Any]) -> None:
    """XLA's compiler refuses a flag that it does not know, so a flag of the user's own shows that they arrive."""

    def step(x: Any) -> Any:
        return x @ x

    x, unknown = jnp.ones((64, 64)), {"xla_no_such_flag": 1}
    if way == "jit":
        run = shardplan.plan(step, x, cluster="2x2").jit(step, devices[:4], xla_flags=unknown)
    else:
        run = shardplan.parallelize("2x2", devices=devices[:4], xla_flags=unknown)(step)
    with pytest.raises(ShardplanError, match=r"xla_no_such_flag.*change xla_flags"):
        run(x)
    with pytest.raises(ShardplanError, match=r"xla_no_such_flag.*change xla_flags"):
        run.lower(x).compile()
