"""The command line: every command in text and JSON, exit codes, and every mistake of a user in one readable line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardplan.report.tables import seconds
from shardplan.shell.cli import main
from shardplan.shell.target import read_options

ROOT = Path(__file__).parents[2]

STEP = '''
import jax, jax.numpy as jnp
from jax.extend.core import Primitive

def train_step(width=64, batch=64, dtype="float32", concrete=False):
    """A regression by two layers, with momentum."""
    if width == 13:
        raise ValueError("width=13 is unlucky")
    print("a factory may print")

    def loss_of(params, batch):
        hidden = jnp.tanh(batch["x"].astype(dtype) @ params["up"].astype(dtype))
        return jnp.mean((hidden @ params["down"].astype(dtype) - batch["y"]) ** 2)

    def step(state, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    def array(*shape):
        return jax.random.normal(jax.random.key(len(shape)), shape) if concrete else jax.ShapeDtypeStruct(shape, "float32")

    params = {"up": array(32, width), "down": array(width, 16)}
    return step, ({"params": params, "momentum": params}, {"x": array(batch, 32), "y": array(batch, 16)})

def sorts(concrete=False):
    unheard_of = Primitive("unheard_of")
    unheard_of.def_abstract_eval(lambda x: x)
    def step(x):
        return unheard_of.bind(x)
    return step, (jax.ShapeDtypeStruct((8,), "float32"),)

def bits(concrete=False):
    """The bits of a sum depend on the order in which it is taken."""
    def step(x):
        return jax.lax.bitcast_convert_type(x.sum(0), "int32")
    return step, (jax.random.normal(jax.random.key(0), (64, 32)),)

def wrong():
    return 1, 2, 3

def no_function():
    return "step", ()

def untraceable():
    return (lambda x: x + jnp.zeros(3)), (jax.ShapeDtypeStruct((4,), "float32"),)

def leaves():
    raise SystemExit(0)

number = 7
'''

PLAN_FIELDS = (
    "step_time_s compute_s communication_s communication_bytes peak_bytes lower_bound_s trace_s search_s operators"
    " baselines in_specs axes matrix"
).split()
VERIFY_FIELDS = (
    "equal max_error steps predicted_bytes measured_bytes raw_measured_bytes predicted_peak_bytes measured_peak_bytes collectives"
).split()


@pytest.fixture
def target(folder_with: Callable[[str], Path]) -> str:
    """A directory of its own with ``small.py`` in it, and that file's step as TARGET."""
    folder_with(STEP)
    return "small.py:train_step"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """``run("mesh", "list")`` -> (exit code, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as left:  # argparse leaves so
            code = int(left.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def test_plan_prints_what_a_person_wants_to_know(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("plan", target, "--cluster", "2x4")
    assert code == 0
    for part in ("mesh", "node=2 x gpu=4", "step time", "memory", "state/{momentum,params}/", "data parallel", "this plan"):
        assert part in out


def test_plan_as_json_is_one_object_and_nothing_else(run: Callable[..., Any], target: str) -> None:
    code, out, err = run("plan", target, "--cluster", "2x4", "--json")
    made = json.loads(out)
    assert code == 0
    assert "a factory may print" in err
    assert set(PLAN_FIELDS) <= set(made)
    assert made["axes"] == {"node": 2, "gpu": 4}
    assert made["matrix"] == {"axes": ["replica"], "levels": ["node", "gpu"], "factors": [[2, 4]]}
    assert set(made["in_specs"]) >= {"state/params/up", "state/momentum/down", "batch/x"}
    assert all({"name", "step_time_s", "communication_bytes", "peak_bytes", "fits"} <= set(b) for b in made["baselines"])
    assert made["step_time_s"] <= min(b["step_time_s"] for b in made["baselines"] if b["fits"])


def test_a_module_is_a_target_too(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    code, out, _ = run(
        "plan", "models.mlp:train_step", "--cluster", "2x4", "--set", "width=32", "--set", "optimizer=sgd", "--json"
    )
    assert code == 0
    assert "state/params/layer_1/kernel" in json.loads(out)["in_specs"]


def test_a_target_file_may_be_called_as_a_module_is(run: Callable[..., Any], target: str) -> None:
    """``json.py`` takes nobody's place."""
    Path("small.py").rename("json.py")
    code, out, _ = run("plan", "json.py:train_step", "--cluster", "2", "--json")
    assert code == 0
    assert sys.modules["json"] is json
    assert json.loads(out)["axes"] == {"gpu": 2}


def test_a_pin_holds(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run(
        "plan", target, "--cluster", "2x4", "--pin", "state/params/up=P(None, 'gpu')", "--pin", "batch/*=node", "--json"
    )
    specs = json.loads(out)["in_specs"]
    assert code == 0
    assert specs["state/params/up"] == "P(None, 'gpu')"
    assert specs["batch/x"] == "P('node')"


def test_a_saved_plan_is_explained_and_verified(run: Callable[..., Any], target: str) -> None:
    assert run("plan", target, "--cluster", "2x2", "-o", "plan.json", "--pin", "batch/*=P(('node', 'gpu'))")[0] == 0
    code, out, _ = run("explain", "plan.json")
    assert (code, "a step on node=2 x gpu=2" in out) == (0, True)
    code, out, _ = run("explain", "plan.json", "state/params/up")
    assert (code, out.startswith("state/params/up  float32[32, 64]")) == (0, True)
    code, out, _ = run("explain", "plan.json", "*/down", "--json")
    assert set(json.loads(out)["explain"]) == {"state/params/down", "state/momentum/down"}
    code, out, _ = run("verify", target, "--plan", "plan.json", "--json")
    found = json.loads(out)
    assert (code, found["equal"], found["passed"]) == (0, True, True)
    assert set(VERIFY_FIELDS) <= set(found)
    assert found["predicted_bytes"] > 0
    assert all(set(kind) >= {"predicted", "measured"} for kind in found["collectives"].values())
    code, _, err = run("verify", target, "--plan", "plan.json", "--cluster", "2x4")
    assert (code, "made for the cluster 2x2, not for 2x4" in err) == (2, True)


def test_a_plan_of_one_device_is_verified_too(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("verify", target, "--cluster", "1", "--json")
    found = json.loads(out)
    assert (code, found["equal"], found["predicted_bytes"], found["measured_bytes"]) == (0, True, 0, 0)


def test_a_plan_is_drawn(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("plan", target, "--cluster", "2x2", "--draw", "plan.svg")
    assert (code, out.endswith("drawn in plan.svg\n")) == (0, True)
    assert "cut over node (2)" in Path("plan.svg").read_text()


def test_a_plan_is_saved_as_a_page(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("plan", target, "--cluster", "2x2", "--html", "plan.html")
    assert (code, out.endswith("page in plan.html\n")) == (0, True)
    page = Path("plan.html").read_text()
    assert "<title>small.py:train_step on 2x2: shardplan</title>" in page
    assert out.partition("planned in")[0].splitlines()[3].strip() in page  # the step time, as text for readers without JavaScript


def test_a_step_without_products_is_drawn_as_one(run: Callable[..., Any], target: str) -> None:
    Path("plain.py").write_text("import jax.numpy as jnp\ndef train_step():\n    return (lambda x: x + 1), (jnp.ones((8, 8)),)\n")
    code, _, _ = run("plan", "plain.py:train_step", "--cluster", "2x2", "--draw", "plan.svg")
    assert code == 0
    assert "no product" in Path("plan.svg").read_text()


def test_an_equal_step_is_said_to_be_equal(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("verify", target, "--cluster", "2x2", "--pin", "batch/*=P(('node', 'gpu'))")
    assert code == 0
    assert out.startswith("equal to the single-device step after each of 3 steps")
    assert "on the wire" in out


def test_a_step_without_a_result_is_a_mistake(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nothing.py").write_text("import jax\n\ndef made(): return lambda x: None, (jax.ShapeDtypeStruct((8,), 'float32'),)\n")
    code, out, err = run("verify", "nothing.py:made", "--cluster", "2")
    assert (code, out) == (2, "")
    assert "the step returns no array, so there is nothing to compare" in err


def test_a_failed_check_exits_with_one(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("verify", "small.py:bits", "--cluster", "2x2", "--pin", "x=P(('node', 'gpu'))")
    assert code == 1
    assert out.startswith("NOT EQUAL")


def test_compare_lists_the_plan_and_every_baseline(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("compare", target, "--cluster", "2x4", "--json")
    rows = json.loads(out)["plans"]
    assert code == 0
    assert rows[0]["name"] == "this plan"
    assert {"data parallel", "FSDP", "tensor parallel"} <= {r["name"] for r in rows}
    assert seconds(rows[0]["step_time_s"]) in run("compare", target, "--cluster", "2x4")[1]


@pytest.mark.slow
def test_compare_measures_compiled_programs(run: Callable[..., Any], target: str) -> None:
    code, out, _ = run("compare", target, "--cluster", "2x2", "--measure", "--json")
    rows = json.loads(out)["plans"]
    assert code == 0
    assert all(r["measured_peak_bytes"] > 0 for r in rows)
    by_name = {r["name"]: r for r in rows}
    assert by_name["data parallel"]["measured_bytes"] == pytest.approx(by_name["data parallel"]["communication_bytes"], rel=0.15)


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["mesh", "list"], "dgx-h100"),
        (["mesh", "show", "2x4"], "8 devices"),
        (["mesh", "matrices", "--cluster", "2x4", "--axes", "2 4"], "axis 0"),
        (["mesh", "matrices", "--cluster", "2x4", "--axes", "2 4", "--over", "0", "--bytes", "1000000"], "all-reduce"),
        (["mesh", "matrices", "--cluster", "2x4", "--axes", "2 4", "--over", "0", "--bytes", "2GiB"], "2.00 GiB a device"),
        (
            ["reduce", "--cluster", "2x4", "--axes", "2 4", "--over", "0", "--matrix", "2 1 / 1 4", "--bytes", "1e9"],
            "954 MiB a device",
        ),
        (["tdl", "dot_general"], "Sum(k0"),
        (["tdl", "pure_callback"], "effect"),
        (["tdl", "pallas_call"], "@shardplan.register('pallas_call:NAME', run="),
        (["tdl", "ffi_call"], "@shardplan.register('ffi_call:TARGET')"),
        (["tdl"], "primitives in the installed JAX"),
    ],
)
def test_other_commands_in_text_and_json(run: Callable[..., Any], argv: list[str], part: str) -> None:
    code, out, _ = run(*argv)
    assert code == 0
    assert part in out
    code, out, _ = run(*argv, "--json")
    assert code == 0
    assert isinstance(json.loads(out), dict)


def test_the_machine_is_detected_and_written(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    code, out, _ = run("mesh", "detect", "-o", str(file))
    assert code == 0
    assert out
    assert run("mesh", "show", str(file))[0] == 0


MISTAKES = [
    (["plan", "small.py", "--cluster", "2x4"], "write it as package.module:factory"),
    (["plan", "nowhere.at.all:step", "--cluster", "2x4"], "No module named 'nowhere'"),
    (["plan", "none.py:step", "--cluster", "2x4"], "no file none.py"),
    (["plan", "small.py:train_stp", "--cluster", "2x4"], "nearest: train_step"),
    (["plan", "small.py:number", "--cluster", "2x4"], "a value of type int"),
    (["plan", "small.py:wrong", "--cluster", "2x4"], "a factory returns (step, args)"),
    (["plan", "small.py:no_function", "--cluster", "2x4"], "a factory returns (step, args)"),
    (["plan", "small.py:leaves", "--cluster", "2x4"], "SystemExit"),
    (["plan", "small.py:untraceable", "--cluster", "2x4"], "could not be traced"),
    (["plan", "small.py:sorts", "--cluster", "2x4"], "no description of the primitive 'unheard_of'"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--set", "hight=3"], "hight"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--set", "width=13"], "ValueError: width=13 is unlucky"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--set", "width"], "write it as NAME=VALUE"),
    (["plan", "broken.py:train_step", "--cluster", "2x4"], "SyntaxError"),
    (["plan", "needs.py:train_step", "--cluster", "2x4"], "No module named 'not_installed'"),
    (["plan", "small.py:train_step"], "--cluster is missing"),
    (["plan", "small.py:train_step", "--cluster", "dgx-h1000"], "dgx-h100"),
    (["plan", "small.py:train_step", "--cluster", "broken.toml"], "broken.toml"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--memory", "20 parsecs"], "is not a size"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--memory", "4KiB"], "no plan fits"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--pin", "state/params/uo=P('gpu')"], "matches no argument"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--pin", "ZZZ=P('gpu')"], "the arguments are state/"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--pin", "state/params/up=P(3)"], "is not a PartitionSpec"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--pin", "state/params/up"], "write it as 'GLOB=SPEC'"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--objective", "speed"], "invalid choice"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "-o", "no/such/place.json"], "cannot write"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--draw", "plan.jpeg"], "'plan.jpeg': a drawing is written as .png"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--draw", "no/such/plan.png"], "cannot write"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "-o", "plan.png", "--draw", "./plan.png"], "both name"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--html", "no/such/plan.html"], "cannot write"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--draw", "plan.svg", "--html", "./plan.svg"], "both name"),
    (["plan", "small.py:train_step", "--cluster", "2x4", "--html", ""], "--html is empty"),
    (["verify", "small.py:train_step", "--cluster", "8x8"], "64"),
    (["verify", "small.py:train_step", "--cluster", "2x4", "--steps", "0"], "--steps: 0 is less than 1"),
    (["verify", "small.py:train_step", "--cluster", "2x4", "--backend", "magic"], "invalid choice"),
    (["verify", "small.py:train_step", "--plan", "none.json"], "none.json"),
    (["verify", "small.py:train_step", "--plan", "broken.toml"], "not a plan file"),
    (["explain", "none.json"], "none.json"),
    (["explain", "broken.toml"], "not a plan file"),
    (["mesh", "show", "nothing"], "nothing"),
    (["mesh", "matrices", "--cluster", "2x4", "--axes", "3 3"], "3"),
    (["mesh", "matrices", "--cluster", "2x4", "--axes", "two"], "whole numbers"),
    (["mesh", "matrices", "--cluster", "2x4", "--axes", "2 4", "--bytes", "10"], "--bytes: without --over there is no reduction"),
    (["mesh", "matrices", "--cluster", "2x4", "--axes", "2 4", "--over", "7"], "no axis 7 to reduce over"),
    (["mesh", "matrices", "--cluster", "2x4", "--axes", "2 4", "--over", "0", "--bytes", "two"], "--bytes 'two' is not a size"),
    (["reduce", "--cluster", "2x4", "--axes", "2 4", "--over", "7", "--matrix", "2 1 / 1 4", "--bytes", "10"], "7"),
    (["tdl", "dot_genral"], "nearest: dot_general"),
    (["score", "small.py:train_step", "--cluster", "2x4", "--specs", "s.json"], "s.json: cannot be read"),
    (["score", "small.py:train_step", "--cluster", "2x4"], "--specs FILE, or --rules FILE"),
    (["score", "small.py:train_step", "--specs", "s.json"], "--cluster is missing"),
    (["score", "small.py:train_step", "--cluster", "2x4", "--specs", "s.json", "--pin", "*=P()"], "--pin is not for score"),
    (["score", "small.py:train_step", "--cluster", "2x4", "--specs", "s.json", "--remat", "auto"], "--remat is not for score"),
    (
        ["score", "small.py:train_step", "--cluster", "2x4", "--specs", "s.json", "--mesh", "data"],
        "--mesh 'data': write it like data=16,tensor=4",
    ),
    (["fly"], "invalid choice"),
    ([], "COMMAND"),
]


@pytest.mark.parametrize(("argv", "part"), MISTAKES, ids=[" ".join(argv) or "nothing" for argv, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_two(run: Callable[..., Any], target: str, argv: list[str], part: str) -> None:
    Path("broken.py").write_text("def train_step(:")
    Path("needs.py").write_text("import not_installed")
    Path("broken.toml").write_text("[device\nname = 3")
    code, out, err = run(*argv)
    last = err.strip().splitlines()
    said = [line for line in last if line != "a factory may print"]
    assert (code, out) == (2, "")
    assert len(said) == (5 if "no description" in part else 1)  # the lines to write
    assert part in said[0]
    assert "Traceback" not in err


def test_a_plan_for_another_model_is_refused(run: Callable[..., Any], target: str) -> None:
    assert run("plan", target, "--cluster", "2x2", "-o", "plan.json")[0] == 0
    code, _, err = run("verify", target, "--plan", "plan.json", "--set", "width=32")
    assert (code, "another model or other shapes" in err) == (2, True)
    code, _, err = run("explain", "plan.json", "state/params/upp")
    assert (code, "nearest: state/params/up" in err) == (2, True)


@pytest.mark.slow
def test_a_fresh_process_simulates_its_own_devices(target: str, environment: dict[str, str]) -> None:
    """No device is there before; the command makes as many as the cluster has."""
    command = [sys.executable, "-m", "shardplan.shell.cli", "verify", target, "--cluster", "2x4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["equal"]


def test_values_of_options_are_literals_or_words() -> None:
    words = ["scan=true", "tied=false", "remat=True", "layers=24", "dtype=bfloat16", "name='true'", "sizes=(2, 4)"]
    assert read_options(words) == {
        "scan": True, "tied": False, "remat": True, "layers": 24, "dtype": "bfloat16", "name": "true", "sizes": (2, 4),
    }  # fmt: skip
