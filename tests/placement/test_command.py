"""`shardplan place` and `shardplan.place`: what they answer, what they write, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive

import shardplan
from shardplan.mesh.singles import SingleDevice
from shardplan.shell.cli import main
from shardplan.shell.target import load_target

QUICK = ["place", "models.mlp:train_step", "--cluster", "2x2", "--chains", "1", "--proposals", "30"]


def _run(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    code = main([*QUICK, *options])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_answer_has_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--json")
    answer = json.loads(out)
    promised = {"step_time_s", "data_parallel_s", "expert_s", "plan_s", "assignment", "proposals", "simulations_per_s"}
    assert code == 0
    assert promised <= set(answer)
    assert answer["step_time_s"] <= min(answer["data_parallel_s"], answer["expert_s"], answer["plan_s"])
    assert set(answer["assignment"]) == {f"layer_{n}/kernel" for n in range(4)}
    assert all(set(devices) <= {0, 1, 2, 3} for devices in answer["assignment"].values())


def test_the_report_says_where_operators_run_and_what_else_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--start", "dp,expert")
    assert code == 0
    for words in ("a step (", "data parallel", "Where operators run", "layer_3/kernel", "mlp.py"):
        assert words in out


def test_a_saved_strategy_is_a_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {"-o": tmp_path / "s.json", "--timeline": tmp_path / "t.json"}
    code, out, _ = _run(capsys, "--start", "dp,random", "--json", *(str(x) for pair in files.items() for x in pair))
    assert code == 0
    first = json.loads(out)
    events = json.loads(files["--timeline"].read_text())["traceEvents"]
    last = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X")
    assert last == pytest.approx(first["step_time_s"] * 1e6, abs=2e-3)
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {f"device {d}" for d in range(4)}
    bare = files["-o"].rename(tmp_path / "strategy")
    code, out, _ = _run(capsys, "--start", f" {bare}, dp", "--json")
    assert code == 0
    assert json.loads(out)["step_time_s"] <= first["step_time_s"]
    held = bare.read_bytes()
    for option in ("-o", "--timeline"):
        code, _, err = _run(capsys, "--start", f"dp,{bare}", option, str(bare))
        assert (code, err) == (2, f"shardplan: {option} names {str(bare)!r}, which --start reads: give it another name\n")
    assert bare.read_bytes() == held


def test_a_gantt_chart_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, _, _ = _run(capsys, "--start", "dp", "--png", str(tmp_path / "t.png"))
    assert code == 0
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "0"], "budget_s is 0.0: give a finite number of seconds above 0 for the search"),
        (["--seed", "-1"], "seed is -1: give a whole number of at least 0"),
        (["--cluster", "1024x8"], "1024x8 has 8,192 devices, too many to place operators on: take at most 4,096"),
        (["--start", "best"], "no start 'best': use some of dp, expert, random, plan"),
        (["--method", "luck"], "the method 'luck' does not exist: use mcmc, regions, fd-dps or heft"),
        (["--start", "nowhere.json"], "cannot read the strategy nowhere.json: No such file or directory"),
        (["--png", "t.txt"], "'t.txt': a drawing is written as .png, .svg, .pdf; end the file's name with one of these"),
        (["-o", "/nowhere/s.json"], "cannot write /nowhere/s.json: there is no folder /nowhere"),
    ],
)
def test_what_cannot_be_searched_is_one_line(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    code, out, err = _run(capsys, *options)
    assert (code, out, err) == (2, "", f"shardplan: {message}\n")


def test_two_outputs_need_two_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = str(tmp_path / "x.json")
    code, _, err = _run(capsys, "-o", file, "--timeline", file)
    assert code == 2
    assert "-o and --timeline both name" in err
    assert not list(tmp_path.iterdir())


def test_the_function_answers_like_the_command() -> None:
    step, args = load_target("models.mlp:train_step", {"layers": 3})
    told: list[str] = []
    made = shardplan.place(step, *args, cluster="2x2", start=("dp",), proposals=20, observer=lambda what, done: told.append(what))
    assert made.step_time_s <= made.data_parallel_s
    assert made.plan_s is None
    assert set(made.assignment) == {"layer_0/kernel", "layer_1/kernel", "layer_2/kernel"}
    assert made.timeline.step_time_s == made.step_time_s
    assert "tracing" in told
    assert "Placement of 3 operators" in repr(made)
    assert all(gain is None or gain + made.step_time_s >= 0 for gain in made.gains)


def test_no_device_holds_more_than_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    step, args = load_target("models.mlp:train_step", {})
    with pytest.raises(shardplan.PlacementMemoryError) as raised:
        shardplan.place(step, *args, cluster="2x2", start="dp", memory_limit=1)
    _, held, has = raised.value.needs["dp"]
    assert has == 1
    assert _run(capsys, "--start", "dp", "--memory", str(held))[0] == 0
    code, _, err = _run(capsys, "--start", "dp", "--memory", str(held - 1))
    assert code == 2
    assert "no strategy to begin from fits in memory (dp holds" in err
    assert _run(capsys, "--start", "dp", "--memory", "auto")[0] == 0


def test_a_device_with_less_memory_keeps_its_own_limit() -> None:
    cluster = shardplan.Cluster.load("2x2")
    small = replace(cluster, single_devices=(SingleDevice(1, memory_bytes=2**30),))
    step, args = load_target("models.mlp:train_step", {})
    made = shardplan.place(step, *args, cluster=small, start="dp", proposals=1, memory_limit="40GiB")
    assert made.problem.machine.memory_bytes.tolist() == [40 * 2**30, 2**30, 40 * 2**30, 40 * 2**30]


@pytest.mark.slow
def test_what_a_step_allows_holds_for_its_placement_and_the_plan_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A primitive without a description, and an argument whose buffers are reused."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - unheard_of.bind(jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w))

    unheard_of = Primitive("unheard_of")
    unheard_of.def_abstract_eval(lambda x: x)
    args = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((128, 64), "float32")
    given: dict[str, Any] = {"replicate": ("unheard_of",), "donate_argnums": 0}
    with pytest.raises(shardplan.UndescribedPrimitiveError, match="unheard_of"):
        shardplan.place(step, *args, cluster="2", proposals=1)
    made = shardplan.place(step, *args, cluster="2", proposals=1, **given)
    assert made.plan_s is not None
    assert shardplan.plan(step, *args, cluster="2", placement=made, **given).step_time_s > 0
    assert _run(capsys, "--start", "dp,plan", "--donate", "0", "--replicate", "sort")[0] == 0


def test_an_interrupt_while_the_start_is_planned_ends_the_search() -> None:
    step, args = load_target("models.mlp:train_step", {"layers": 3})
    told: list[str] = []

    def observer(what: str, done: float) -> None:
        told.append(what)
        if done > 0.9 and "tracing" in told:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardplan.place(step, *args, cluster="2x2", start=("plan",), proposals=20, observer=observer)
    assert not any(what.startswith("searching by ") for what in told)


def test_loops_without_a_trip_count_are_told_without_a_plan_too(caplog: pytest.LogCaptureFixture) -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda y: y.sum() < 1.0, lambda y: y @ y, x)

    shardplan.place(step, jax.ShapeDtypeStruct((8, 8), "float32"), cluster="2", start="dp", proposals=1)
    assert [m.partition(" at ")[0] for m in caplog.messages] == ["the while loop"]


def test_the_seconds_of_a_schedule_stand_beside_a_faster_start(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--start", "dp", "--method", "heft", "--set", "batch=65536", "--json")
    answer = json.loads(out)
    assert code == 0
    assert answer["origin"] == "dp"
    assert answer["step_time_s"] < answer["schedule_s"]
    code, out, _ = _run(capsys, "--start", "dp", "--method", "heft", "--set", "batch=65536")
    assert code == 0
    assert "scheduled whole operators" in out


def test_the_planners_price_stands_beside_the_simulated_plan(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--start", "plan", "--json")
    assert code == 0
    step, args = load_target("models.mlp:train_step", {})
    planned = shardplan.plan(step, *args, cluster="2x2")
    assert json.loads(out)["plan_priced_s"] == planned.step_time_s
    assert json.loads(out)["schedule_s"] is None


@pytest.mark.slow
def test_a_plan_that_cuts_nothing_is_simulated_on_one_device() -> None:
    step, args = load_target("models.mlp:train_step", {})
    planned = shardplan.plan(step, *args, cluster="2x2")
    assert planned.communication_bytes == 0
    made = shardplan.place(step, *args, cluster="2x2", start=("dp", "plan"), proposals=1)
    assert made.plan_s == pytest.approx(planned.step_time_s, rel=0.1)
    assert made.plan_s is not None
    assert made.plan_s < made.data_parallel_s


def test_a_start_that_is_neither_a_name_nor_names_is_refused() -> None:
    three: Any = 3
    with pytest.raises(shardplan.ShardplanError, match="start=3 is no start: use some of dp"):
        shardplan.place(jax.numpy.sum, jax.ShapeDtypeStruct((8, 8), "float32"), cluster="2", start=three, proposals=1)


def test_regions_are_in_the_report_and_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--start", "dp", "--method", "regions", "--json")
    answer = json.loads(out)
    assert code == 0
    assert sorted(n for r in answer["regions"] for n in r["operators"]) == sorted(answer["assignment"])
    assert all(set(answer["assignment"][n]) <= set(r["devices"]) for r in answer["regions"] for n in r["operators"])
    assert all(r["seconds"] > 0 for r in answer["regions"])
    assert answer["step_time_s"] <= min(answer["data_parallel_s"], answer["expert_s"])
    code, out, _ = _run(capsys, "--start", "dp", "--method", "regions")
    assert code == 0
    assert "Regions\n\ndevices" in out
