"""Whatever a user gets wrong is a `ShardplanError` that says what to do, and on the command line one line and exit code 2."""

from __future__ import annotations

import contextlib
import gc
import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.__main__ import main as entry
from shardplan.mesh import Cluster
from shardplan.shell import interrupts
from shardplan.shell.cli import main
from shardplan.shell.target import load_target
from shardplan.user_code import shown_path

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def step(w: Any) -> Any:
    return w * 2


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"cluster": None}, "cluster=None is not a cluster: give a preset"),
    ({"cluster": 8}, "cluster=8 is not a cluster"),
    ({"cluster": ("2", "4")}, "is not a cluster: give a preset"),
    ({"cluster": "1000000x4"}, "4000000 devices are more than"),
    ({"cluster": "99999999999x4"}, "devices are more than"),
    ({"memory_limit": float("inf")}, "is not a size"),
    ({"memory_limit": [1]}, "is not a size"),
    ({"pins": 3}, "give a dict from globs"),
    ({"pins": [("w", P())]}, "give a dict from globs"),
    ({"pins": {3: P()}}, "the pin 3 is not a glob"),
    ({"pins": {"w": None}}, "give a jax.sharding.PartitionSpec"),
    ({"pins": {"w": P(P.UNCONSTRAINED)}}, "UNCONSTRAINED"),
    ({"pins": {"w": P(("gpu", 3))}}, "has the entry .'gpu', 3.: each entry is None, an axis"),
    ({"pins": {"w": P(("gpu", None))}}, "each entry is None, an axis"),
    ({"pins": {"w": P("gpu", unreduced=frozenset({"node"}))}}, "has reduced or unreduced axes"),
    ({"time_budget_s": True}, "time_budget_s=True"),
    ({"time_budget_s": "3"}, "time_budget_s='3'"),
    ({"time_budget_s": float("inf")}, "time_budget_s=inf: give a positive number of seconds, or None"),
    ({"donate_argnums": "0"}, "give whole numbers"),
    ({"donate_argnums": None}, "donate_argnums=None: give whole numbers"),
    ({"donate_argnums": 1.5}, "donate_argnums=1.5: give whole numbers"),
    ({"observer": 3}, "observer=3 is not callable"),
    ({"replicate": None}, "replicate=None: give names of primitives"),
    ({"replicate": [3]}, "replicate=.3.: give names of primitives"),
    ({"cluster": "\uff12x4"}, "no cluster"),
    ({"donate_argnums": 5}, "donate_argnums=5 names no argument"),
    ({"replicate": "nosuch"}, "'nosuch', which is not a primitive"),
    ({"replicate": ("mull",)}, "nearest: mul"),
]


@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=[repr(options) for options, _ in OPTIONS])
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.plan(step, W, **{"cluster": "2x4", **options})


@pytest.mark.parametrize("given", ["a decorated step", "a plan", "a file"])
def test_a_step_that_lacks_an_argument_is_said_where_it_is_called(given: str, tmp_path: Path) -> None:
    def pair(w: Any, x: Any) -> Any:
        return w + x

    file = tmp_path / "plan.json"
    shardplan.plan(step, W, cluster="2").save(file)
    calls: dict[str, Callable[[], Any]] = {
        "a decorated step": lambda: shardplan.parallelize("2")(pair)(jnp.ones(8)),
        "a plan": lambda: shardplan.plan(pair, W, cluster="2"),
        "a file": lambda: shardplan.load(file, pair, W),
    }
    with pytest.raises(
        shardplan.TraceError, match=rf"missing 1 .*: 'x', at {re.escape(shown_path(__file__))}:\d+ \(<lambda>\); jax.eval_shape"
    ):
        calls[given]()


def test_a_step_that_is_no_function_is_said() -> None:
    with pytest.raises(shardplan.TraceError, match="the step is None, a value of type NoneType: give the function"):
        shardplan.plan(None, W, cluster="2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "says"),
    [("pinz", r"no option 'pinz' \(nearest: pins"), ("zz", r"no option 'zz' \(known: axes, backend, batch_argnums, cache_dir,")],
)
def test_an_option_of_the_decorator_that_does_not_exist_is_refused_at_once(option: str, says: str) -> None:
    given: dict[str, Any] = {option: {}}
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.parallelize("2", **given)


def test_a_limit_may_be_a_float_and_a_primitive_a_word() -> None:
    assert shardplan.plan(step, W, cluster="4", memory_limit=1.5e9, replicate="mul").memory_limit == 1_500_000_000


@pytest.mark.parametrize("value", ["s", object(), len])
def test_an_argument_that_is_no_array_is_named(value: Any) -> None:
    with pytest.raises(shardplan.TraceError, match=r"tree\['a'\] is a .*, not an array: bind it with functools.partial"):
        shardplan.plan(lambda tree: tree, {"a": value}, cluster="4")


@pytest.mark.parametrize(
    "value",
    [np.array(["a", "b"]), np.array(b"x"), np.array([1, None]), np.array(["2020-01-01"], "M8[D]"), np.zeros(3, [("a", "f4")])],
    ids=lambda value: str(value.dtype),
)
def test_an_array_of_what_jax_has_no_arrays_of_is_named(value: Any) -> None:
    with pytest.raises(
        shardplan.TraceError, match=r"tree\['a'\] is a ndarray of dtype .*, which JAX has no arrays of: convert it"
    ):
        shardplan.plan(lambda tree: tree, {"a": value}, cluster="4")
    plan = shardplan.plan(lambda tree: tree, {"a": np.ones(2)}, cluster="4")
    run = plan.jit(lambda tree: tree, devices=jax.devices()[:4])
    with pytest.raises(shardplan.ArgumentError, match=r"tree/a is ndarray, but the plan was made for float32\[2\]"):
        run({"a": value})


@pytest.mark.parametrize("dtype", ["bfloat16", "int4", "float8_e4m3fn", "bool", "float64", "complex64", "key<fry>"])
def test_an_array_of_any_dtype_of_jax_is_taken(dtype: str) -> None:
    value = jax.random.key(0) if dtype.startswith("key") else np.zeros(4, jnp.dtype(dtype))
    assert shardplan.plan(lambda x: x, value, cluster="4").specs_by_path["x"] is not None


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(shardplan.ShardplanError, match="cache_dir="):
        shardplan.parallelize("4", cache_dir=tmp_path / "file")(step).prepare(W)


# -- the user's code ---------------------------------------------------------------------------------------------------

CODE = """
import shardplan, jax
class Own(Exception):
    pass
class Deep(BaseException):
    pass
shape = (jax.ShapeDtypeStruct((8, 8), "float32"),)
def own(): raise Own("of my own")
def stops(): raise StopIteration
def memory(): raise MemoryError
def recursion(): return recursion()
def leaves(): raise SystemExit(0)
def unknown_name():
    def step(w): return nothing_of_that_name + w
    return step, shape
def own_in_step():
    def step(w): raise Own("in the step")
    return step, shape
def stops_in_step():
    def step(w): next(iter(()))
    return step, shape
def as_list():
    return [lambda w: w, shape]
def decorated():
    return shardplan.parallelize("2x4")(lambda w: w * 2), shape
def odd(n=1):
    def inner(): pass
    return inner + n
def lacks():
    return (lambda a, b: a * b), shape
def fine():
    return (lambda w: w * 2), shape
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "theirs.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "theirs.py"


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("own", "Own: of my own"),
        ("stops", "StopIteration"),
        ("memory", "MemoryError"),
        ("recursion", "RecursionError"),
        ("leaves", "SystemExit"),
        ("unknown_name", "NameError: name 'nothing_of_that_name' is not defined"),
        ("own_in_step", "Own: in the step"),
        ("stops_in_step", "StopIteration"),
        ("as_list", "return the tuple (step, args) in place of the list"),
        ("decorated", "give the bare step"),
    ],
)
def test_a_target_that_fails_is_said_in_one_line(
    factory: str, says: str, code: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", f"{code}:{factory}", "--cluster", "4"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    monkeypatch.setenv("SHARDPLAN_TRACEBACK", "1")
    assert main(["plan", f"{code}:{factory}", "--cluster", "4"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_place_is_left_out_where_no_line_of_the_users_leads_there(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a thread of its own the command line is called by libraries alone, as it is by its script."""
    thread = threading.Thread(target=main, args=(["plan", f"{code}:lacks", "--cluster", "4"],))
    thread.start()
    thread.join()
    assert "missing 1 required positional argument: 'b'; jax.eval_shape(step" in capsys.readouterr().err


def test_an_interrupt_is_no_failure_of_the_users_code(code: str) -> None:
    Path(code).write_text("def f(): raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        load_target(f"{code}:f", {})


def test_no_address_comes_into_a_message(code: str) -> None:
    with pytest.raises(shardplan.TargetError) as caught:
        load_target(f"{code}:odd", {"n": "abc"})
    assert " at 0x" not in str(caught.value)


# -- interrupts --------------------------------------------------------------------------------------------------------

INTERRUPTED = """
import jax
shape = (jax.ShapeDtypeStruct((64, 64), "float32"),)
def stop(*_): raise KeyboardInterrupt
def in_step(): return stop, shape
"""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["plan", "theirs.py:stop"], "before a plan that fits was found: wait longer, or give a --time-budget"),
        (["plan", "theirs.py:in_step"], "before a plan that fits was found: wait longer, or give a --time-budget"),
        (["verify", "theirs.py:in_step"], "before a plan that fits was found: wait longer"),
    ],
)
def test_an_interrupt_is_said_in_one_line(words: list[str], says: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(code).write_text(INTERRUPTED)
    assert main([*words, "--cluster", "4"]) == 130
    assert capsys.readouterr().err.startswith(f"shardplan: interrupted {says}")


@pytest.mark.slow
def test_an_interrupt_that_python_drops_is_heard_again(capsys: pytest.CaptureFixture[str]) -> None:
    """As in a callback of the garbage collector, out of which no exception comes."""

    def stop(_phase: str, _info: Any) -> None:
        gc.callbacks.remove(stop)
        raise KeyboardInterrupt

    def work() -> None:
        gc.callbacks.append(stop)
        gc.collect()
        for _ in range(1000):
            time.sleep(0.01)

    with interrupts.heard(), pytest.raises(KeyboardInterrupt):
        work()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_interrupt_that_a_module_made_an_import_error_of_is_one(interrupted: bool) -> None:
    def work() -> None:
        try:
            if interrupted:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise ImportError

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt if interrupted else ImportError), interrupts.heard():
        work()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_that_other_code_cleared_is_raised_by_the_check() -> None:
    with interrupts.heard() as check:
        check()
        with contextlib.suppress(KeyboardInterrupt):  # as C code does
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            check()


def test_an_interrupt_while_loading_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "shardplan.shell.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "shardplan.shell.cli")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert entry() == 130
    said = capsys.readouterr().err
    assert said == "shardplan: interrupted while loading: nothing was done\n"


# -- options of the command line ---------------------------------------------------------------------------------------

LINES: list[tuple[list[str], str]] = [
    (["plan", "--donate", "5"], "donate_argnums=5 names no argument"),
    (["plan", "--replicate", "nosuch"], "'nosuch', which is not a primitive"),
    (["plan", "--pin", "w="], "--pin w=: write it as 'GLOB=SPEC'"),
    (["plan", "--pin", "w=gpu", "--pin", "w=node"], "--pin gives w twice: P('gpu') and P('node')"),
    (["plan", "-o", ""], "-o is empty: give the name of a file"),
    (["plan", "-o", "gone/p.json"], "cannot write gone/p.json: there is no folder"),
    (["plan", "--draw", "gone/p.png"], "cannot write gone/p.png: there is no folder"),
    (["simulate", "-o", "gone/t.json"], "cannot write gone/t.json: there is no folder"),
    (["simulate", "-o", "."], "cannot write .: it is a folder"),
    (["simulate", "--contention", "1e308"], "contention of compute is 1e+308: give a factor from 1 (none) to 1000"),
    (["simulate", "--contention", "2", "--no-overlap"], "--contention has no effect with --no-overlap"),
    (["simulate", "--plan", "p.json", "-o", "./p.json"], "-o names './p.json', which --plan reads: give it another name"),
    (["compare", "--repeats", "2"], "--repeats 2 is for --measure"),
    (["verify", "--plan", "p.json", "--memory", "1KiB"], "--memory is for a new plan"),
    (["verify", "--plan", "p.json", "--pin", "w=gpu"], "--pin is for a new plan"),
    (["verify", "--plan", "p.json", "--objective", "bytes"], "--objective is for a new plan"),
]


@pytest.mark.parametrize(("words", "says"), LINES, ids=[" ".join(words) for words, _ in LINES])
def test_no_option_is_ignored(words: list[str], says: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    shardplan.plan(lambda w: w * 2, jax.ShapeDtypeStruct((8, 8), jnp.float32), cluster="2x4").save("p.json")
    assert json.loads(Path("p.json").read_text())
    assert main([words[0], f"{code}:fine", "--cluster", "2x4", *words[1:]]) == 2
    assert says in capsys.readouterr().err


def test_what_a_command_reads_is_not_overwritten(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = code.removesuffix(".py")
    cluster = Cluster.load("2x4")
    Path("c.toml").write_text(cluster.to_toml())
    source = Path(f"{module}.py")
    before = {file: file.read_text() for file in (source, Path("c.toml"))}
    for words, says in (
        (["plan", f"{module}:fine", "--cluster", "2x4", "-o", f"{module}.py"], "which TARGET reads"),
        (["plan", f"{module}.py:fine", "--cluster", "2x4", "--draw", f"./{module}.py"], "which TARGET reads"),
        (["plan", f"{module}.py:fine", "--cluster", "2x4", "--html", f"./{module}.py"], "which TARGET reads"),
        (["plan", f"{module}:fine", "--cluster", "c.toml 2x4", "-o", "c.toml"], "which --cluster reads"),
        (["simulate", f"{module}:fine", "--cluster", "2x4@c.toml", "-o", str(Path("c.toml").resolve())], "which --cluster reads"),
    ):
        assert main(words) == 2
        assert says in capsys.readouterr().err
    assert before == {file: file.read_text() for file in before}


def test_a_donation_is_heeded(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Counted from the end, as in Python."""
    run: Callable[..., int] = main
    assert run(["plan", f"{code}:fine", "--cluster", "2x4", "--donate", "-1", "-o", "p.json"]) == 0
    capsys.readouterr()
    assert json.loads(Path("p.json").read_text())["donate_argnums"] == [0]


def test_the_axes_of_one_dim_go_slowest_first() -> None:
    with pytest.raises(shardplan.PinError, match=r"slowest first, \('node', 'gpu'\)"):
        shardplan.plan(step, W, cluster="2x4", pins={"w": P(("gpu", "node"))})


def test_a_small_limit_is_said_in_small_units() -> None:
    with pytest.raises(shardplan.MemoryLimitError, match=r"no plan fits in 1\.00 KiB"):
        shardplan.plan(step, W, cluster="2x4", memory_limit="1KiB")


def test_a_plan_without_explanations_says_so(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    shardplan.plan(step, W, cluster="4").save("p.json")
    Path("p.json").write_text(json.dumps({**json.loads(Path("p.json").read_text()), "explanations": {}}))
    assert main(["explain", "p.json", "w"]) == 2
    assert "holds no explanations" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["8", "2x4"])
def test_a_cluster_in_the_wrong_units_is_said_and_no_plan_of_infinite_seconds_is_made(shape: str) -> None:
    cluster = Cluster.load(shape)
    figures = {k: v / 1e12 for k, v in cluster.device.flops_per_s.items()}  # teraflops in place of flops
    slow = replace(cluster, device=replace(cluster.device, flops_per_s=figures, memory_bytes_per_s=1e-6))
    with pytest.raises(shardplan.ShardplanError, match=r"takes 1,000 s or more in every layout.*units of"):
        shardplan.plan(lambda w, x: x @ w, W, W, cluster=slow)


def test_what_xla_compiles_for_one_device_alone_is_refused_on_several() -> None:
    """A product's high words: planned for one device, refused by name and line on more."""

    def step(x: jax.Array) -> jax.Array:
        return jax.lax.mulhi(x, x)

    x = jnp.arange(8, dtype=jnp.uint32)
    assert shardplan.plan(step, x, cluster="1").communication_bytes == 0
    with pytest.raises(
        shardplan.UncompiledPrimitiveError, match=r"'mulhi', used at .*test_mistakes.py.*multiply in a wider type"
    ):
        shardplan.plan(step, x, cluster="2x4")
