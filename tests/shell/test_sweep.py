"""`shardplan sweep`: a plan for each combination of settings, with prices, the Pareto front, and rows for what has no plan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from models import mlp
from shardplan.errors import ShardplanError
from shardplan.report.sweep import Point, Sweep
from shardplan.report.sweep_text import sweep_text
from shardplan.shell import sweep as swept
from shardplan.shell.cli import main

MLP = ["sweep", "models.mlp:train_step", "--set", "layers=2", "--workers", "1"]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line: (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture
def prices(tmp_path: Path) -> str:
    file = tmp_path / "prices.toml"
    file.write_text('"H100-SXM5-80GB" = 3.6\n2x4 = 7.2\n')
    return str(file)


def _factory(batch: int = 64, width: int = 64) -> Any:
    if width == 13:
        raise ValueError("width=13 is unlucky")

    def step(weight: Any, x: Any) -> Any:
        return weight - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weight)

    floats = jax.ShapeDtypeStruct
    return step, (floats((width, width), "float32"), floats((batch, width), "float32"))


def test_each_combination_has_a_row_with_its_figures(run: Run, tmp_path: Path, prices: str) -> None:
    out = tmp_path / "sweep.json"
    words = ["--vary", "batch=64,128", "--vary", "cluster=2x4,1x4", "--price", prices]
    code, text, _ = run(*MLP, *words, "--json", "-o", str(out))
    assert code == 0
    found = json.loads(text)
    assert found == json.loads(out.read_text())
    assert [p["settings"] for p in found["points"]] == [{"batch": b, "cluster": c} for b in (64, 128) for c in ("2x4", "1x4")]
    for p in found["points"]:
        assert p["fits"]
        assert p["samples_per_s"] == p["settings"]["batch"] / p["step_time_s"]
        dollars = 7.2 if p["devices"] == 8 else 3.6
        assert p["cost"] == pytest.approx(dollars * p["devices"] / 3600 / p["samples_per_s"] * 1e6)
    assert found["best"] == min(found["points"], key=lambda p: (p["step_time_s"] / p["samples"], p["cost"]))
    assert found["cheapest"] == min(found["points"], key=lambda p: p["cost"])
    assert found["best"] == found["pareto"][0]
    assert found["cheapest"] == found["pareto"][-1]
    assert found["cost_unit"] == "dollars per million samples"


def test_a_row_has_the_figures_of_the_plan() -> None:
    made = shardplan.sweep(_factory, vary={"cluster": ["2x2"], "batch": [32]})
    step, args = _factory(batch=32)
    alone = shardplan.plan(step, *args, cluster="2x2")
    (point,) = made.points
    assert (point.step_time_s, point.peak_bytes, point.samples) == (alone.step_time_s, alone.peak_bytes, 32)
    assert made.best == point
    assert made.cheapest is None


def test_points_of_one_step_share_a_trace_and_a_plan_that_fits_a_smaller_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, plans = list[Any](), list[Any]()
    traced, plan = swept.trace_step, swept.plan
    monkeypatch.setattr(swept, "trace_step", lambda *a: traces.append(a) or traced(*a))
    monkeypatch.setattr(swept, "plan", lambda *a, **k: plans.append(k) or plan(*a, **k))
    made = shardplan.sweep(_factory, vary={"memory": ["1GiB", "2GiB"], "cluster": ["2x2", "2x4"]})
    assert (len(traces), len(plans)) == (1, 2)
    assert [p.limit_bytes for p in made.points] == [2**30, 2**30, 2**31, 2**31]
    assert [p.step_time_s for p in made.points[:2]] == [p.step_time_s for p in made.points[2:]]


def test_points_under_which_nothing_fits_share_a_search_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, plan = list[tuple[Any, Any]](), swept.plan
    monkeypatch.setattr(swept, "plan", lambda *a, **k: plans.append((k["memory_limit"], k.get("remat"))) or plan(*a, **k))
    made = shardplan.sweep(_factory, vary={"memory": ["4KiB", "1GiB", "5KiB", "6KiB"]}, cluster="2x2", options={"width": 32})
    assert plans == [("1GiB", None), ("6KiB", None), ("4KiB", "auto")]
    assert [p.fits for p in made.points] == [False, True, False, False]
    small, _, middle, large = made.points
    assert {small.peak_bytes, middle.peak_bytes} == {large.peak_bytes}
    assert all("with remat=auto it needs" in str(p.remedy) for p in (small, middle, large))


def test_what_fits_with_recomputation_under_the_smallest_limit_fits_under_the_others() -> None:
    def factory() -> Any:
        def step(weights: Any, x: Any) -> Any:
            def loss(weights: Any) -> Any:
                y = x
                for weight in weights:
                    y = jnp.tanh(y @ weight)
                return jnp.mean(y)

            return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss)(weights))

        floats = jax.ShapeDtypeStruct
        return step, ([floats((64, 64), "float32")] * 12, floats((4096, 64), "float32"))

    alone = shardplan.plan(factory()[0], *factory()[1], cluster="1x2")
    less = [int(alone.peak_bytes * part) for part in (0.7, 0.6)]
    made = shardplan.sweep(factory, vary={"memory": less}, cluster="1x2")
    more, few = (str(p.remedy) for p in made.points)
    assert "with remat=auto it fits (step " in few
    assert few.partition("fits (step ")[2] == more.partition("fits (step at most ")[2]


def test_a_point_that_does_not_fit_says_what_would(run: Run) -> None:
    words = ["--cluster", "1x2", "--vary", "memory=4KiB,1GiB"]
    code, text, _ = run(*MLP, *words, "--json")
    found = json.loads(text)
    assert code == 0
    small, large = found["points"]
    assert (small["fits"], large["fits"]) == (False, True)
    assert small["peak_bytes"] > small["memory_limit"] == 4 * 1024
    assert small["error"] is None
    assert "which the device has, or more devices" in small["remedy"]
    assert "remat=auto" in small["remedy"]
    assert "in this sweep it fits with memory=1GiB" in small["remedy"]


@pytest.mark.slow
def test_what_stays_in_host_memory_varies(run: Run) -> None:
    words = ["--cluster", "dgx-h100:1", "--vary", "offload=none,auto,*/mu/*,[*/mu/*,*/nu/*]", "--vary", "memory=40GiB,6MiB"]
    code, text, _ = run("sweep", "models.mlp:train_step", "--set", "layers=5", "--set", "width=1024", *words, "--json")
    assert code == 0
    point = {(str(p["settings"]["offload"]), p["settings"]["memory"]): p for p in json.loads(text)["points"]}
    assert point["auto", "40GiB"]["step_time_s"] == point["none", "40GiB"]["step_time_s"], "what fits stays on the devices"
    assert not point["none", "6MiB"]["fits"]
    assert "offload=auto" in point["none", "6MiB"]["remedy"]
    assert point["auto", "6MiB"]["fits"]
    assert point["auto", "6MiB"]["step_time_s"] > point["none", "40GiB"]["step_time_s"]
    one, both = point["['*/mu/*']", "40GiB"], point["['*/mu/*', '*/nu/*']", "40GiB"]
    assert both["peak_bytes"] < one["peak_bytes"] < point["none", "40GiB"]["peak_bytes"]


def test_a_cluster_that_cannot_offload_is_a_row() -> None:
    cluster = shardplan.Cluster.load("2x2")
    without = replace(cluster, device=replace(cluster.device, host_bytes_per_s=None))
    made = shardplan.sweep(mlp.train_step, vary={"cluster": [without, "dgx-h100:1"], "offload": ["none", ["*/mu/*"]]})
    errors = [p.error for p in made.points]
    assert [bool(e) for e in errors] == [False, True, False, False]
    assert "host_bytes_per_s" in str(errors[1])
    with pytest.raises(ShardplanError, match="unsupported offload='all'"):
        shardplan.sweep(mlp.train_step, vary={"offload": ["none", "all"]}, cluster="2x2")


def test_the_text_lists_what_has_no_plan() -> None:
    fits = Point({"memory": "1GiB"}, 2, step_time_s=1e-3, samples=32, peak_bytes=9000, limit_bytes=2**30)
    small = Point({"memory": "4KiB"}, 2, peak_bytes=9000, limit_bytes=4096, remedy="needs a memory limit of 9KiB")
    text = sweep_text(Sweep("it", ("memory",), (small, fits), 2, "batch/x"))
    assert "1    4KiB        2        -" in text
    assert "no plan:\n  1  memory=4KiB: needs a memory limit of 9KiB" in text


def test_settings_that_are_refused_are_rows_and_others_go_on() -> None:
    made = shardplan.sweep(_factory, vary={"width": [13, 64], "microbatches": [1, 5]}, cluster="2x2")
    unlucky, other, good, uneven = made.points
    assert unlucky.error == other.error
    assert "failed with width=13: ValueError: width=13 is unlucky" in str(unlucky.error)
    assert good.fits
    assert uneven.error
    assert "64" in uneven.error
    assert made.pareto == (good,)
    assert "width=13 microbatches=1: " in sweep_text(made)


def test_a_cluster_that_is_wrong_is_a_row_and_others_go_on(run: Run) -> None:
    code, out, _ = run(*MLP, "--vary", "cluster=dgx-h10,2x2", "--vary", "batch=32,64", "--json")
    points = json.loads(out)["points"]
    assert code == 0
    assert [p["fits"] for p in points] == [False, False, True, True]
    assert [p["devices"] for p in points] == [0, 0, 4, 4]
    assert all("dgx-h10" in p["error"] for p in points[:2])


def test_several_processes_have_nothing_to_do_where_each_cluster_is_wrong() -> None:
    made = shardplan.sweep(_factory, vary={"cluster": ["dgx-h10"]}, workers=2)
    assert "dgx-h10" in str(made.points[0].error)


@pytest.mark.parametrize("vary", [("--cluster", "2x2", "--vary", "width=0"), ("--vary", "cluster=dgx-h10,dgx-h11")])
def test_nothing_but_refusals_exits_with_one(run: Run, vary: tuple[str, ...]) -> None:
    code, text, _ = run(*MLP, *vary)
    assert code == 1
    assert "0 with a plan" in text


def test_the_front_has_what_nothing_beats() -> None:
    times = [(4.0, 1), (2.0, 2), (3.0, 2), (1.0, 8), (1.0, 8), (1.0, 16)]
    points = [Point({"n": n}, devices, step_time_s=t, samples=1, peak_bytes=1) for n, (t, devices) in enumerate(times)]
    sweep = Sweep("it", ("n",), (*points, Point({"n": 6}, 1, error="no")), 7, "x")
    assert [p.settings["n"] for p in sweep.pareto] == [3, 4, 1, 0]
    assert sweep.best is points[3]


def test_plans_for_other_sequence_lengths_are_compared_by_tokens() -> None:
    short, long = (
        Point({"sequence": n}, 2, step_time_s=t, samples=8, tokens=8 * n, peak_bytes=1, price=3.6)
        for n, t in ((16, 1.0), (64, 3.0))
    )
    sweep = Sweep("it", ("sequence",), (short, long), 2, "batch/tokens")
    assert sweep.best is sweep.cheapest is long
    assert sweep.cost(long) == pytest.approx(3.6 * 2 / 3600 * 3.0 / (8 * 64) * 1e6)
    assert sweep.json["cost_unit"] == "dollars per million tokens"
    assert "$/1e6 tokens" in sweep_text(sweep)
    without = Sweep("it", ("sequence",), (short, replace(long, tokens=None)), 2, "batch/tokens")
    assert without.best is short
    assert without.json["cost_unit"] == "dollars per million samples"


@pytest.mark.parametrize("times", [(0.0, 0.0), (0.0, 1.0)])
def test_plans_without_a_second_of_work_have_no_rates(times: tuple[float, float], tmp_path: Path) -> None:
    points = [Point({"n": n}, 8, step_time_s=t, samples=4, tokens=8, peak_bytes=1, price=1.0) for n, t in enumerate(times)]
    sweep = Sweep("it", ("n",), (*points, Point({"n": 2}, 8, error="no")), 3, "x")
    assert sweep.best is points[0]
    assert [row["samples_per_s"] for row in sweep.json["points"]] == [None, 4.0 if times[1] else None, None]
    assert "tokens/s" in sweep_text(sweep)
    sweep.draw(tmp_path / "sweep.svg")
    assert "1 point has no plan" in (tmp_path / "sweep.svg").read_text()


def test_an_interrupt_keeps_the_points_so_far(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, count = swept.plan, list[int]()

    def interrupted(*args: Any, **options: Any) -> Any:
        count.append(1)
        if len(count) > 2:
            raise KeyboardInterrupt
        return plan(*args, **options)

    monkeypatch.setattr(swept, "plan", interrupted)
    code, text, err = run(*MLP, "--cluster", "2x2", "--vary", "batch=16,32,64,128")
    assert code == 0
    assert "2 of 4 points, 2 with a plan" in text
    assert err == "shardplan: interrupted: 2 of 4 points are done\n"
    code, text, err = run(*MLP, "--cluster", "2x2", "--vary", "batch=16,32")
    assert (code, text, err) == (130, "", "shardplan: interrupted before the first point was planned\n")


def test_several_processes_find_what_one_finds(run: Run) -> None:
    words = ["--vary", "batch=16,32,48", "--vary", "cluster=2x2,4", "--vary", "memory=auto,50KiB", "--json"]
    one, several = (json.loads(run(*MLP[:-1], workers, *words)[1]) for workers in ("1", "2"))
    assert one == several
    assert len(one["points"]) == 12


def test_what_other_processes_cannot_have_is_refused() -> None:
    with pytest.raises(ShardplanError, match=r"workers=2: the factory or a setting cannot be sent .*, or workers=1"):
        shardplan.sweep(lambda batch: _factory(batch), vary={"batch": [32, 64]}, cluster="2x2", workers=2)
    wrong: Any
    for wrong in (0, True, 1.5):
        with pytest.raises(ShardplanError, match=f"workers={wrong!r} is not a positive whole number"):
            shardplan.sweep(_factory, vary={"batch": [32]}, cluster="2x2", workers=wrong)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_sweep_is_drawn(run: Run, tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"sweep.{suffix}"
    code, text, _ = run(*MLP, "--cluster", "2x2", "--vary", "batch=16,32", "--png", str(file))
    assert code == 0
    assert f"drawn in {file}" in text
    assert len(file.read_bytes()) > 1000
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vary", "batch=1,2"], "no cluster is given"),
        (["--cluster", "2x4", "--vary", "batch"], "--vary batch: write it as NAME=VALUE,VALUE"),
        (["--cluster", "2x4", "--vary", "batch=1,,2"], "--vary batch=1,,2: write it as NAME=VALUE,VALUE"),
        (["--cluster", "2x4", "--vary", "batch="], "--vary batch=: write it as NAME=VALUE,VALUE"),
        (["--cluster", "2x4", "--vary", "batch=1", "--vary", "batch=2"], "--vary gives 'batch' twice"),
        (["--cluster", "2x4", "--vary", "batch=8,8"], "batch has the value 8 twice"),
        (["--cluster", "2x4", "--vary", "layers=3"], "'layers' varies and is fixed too"),
        (["--cluster", "2x4", "--vary", "cluster=2x2"], "'cluster' varies and is fixed too"),
        (["--cluster", "2x4", "--memory", "1GiB", "--vary", "memory=2GiB"], "'memory' varies and is fixed too"),
        (["--cluster", "2x4", "--vary", "bacth=1"], "'bacth' cannot vary: models.mlp:train_step has no such parameter"),
        (["--cluster", "dgx-h10", "--vary", "batch=8,16"], "dgx-h10"),
        (["--cluster", "2x4", "--vary", "memory=many"], "memory limit 'many' is not a size"),
        (["--cluster", "2x4", "--vary", "remat=some"], "unsupported remat 'some': use 'none', or 'auto'"),
        (["--vary", "cluster=2x4,dgx-h200", "--price", "PRICES"], "no price for 'dgx-h200' or 'H200-SXM-141GB'"),
        (["--cluster", "2x4", "--vary", "batch=8", "-o", "PRICES", "--price", "PRICES"], "which --price reads"),
        (["--cluster", "2x4", "--vary", "batch=8", "--price", "nowhere.toml"], "--price nowhere.toml: No such file"),
        (["--cluster", "2x4", "--vary", "batch=8", "-o", "a.png", "--png", "a.png"], "-o and --draw both name 'a.png'"),
    ],
)
def test_mistakes_are_one_line_before_anything_is_planned(run: Run, prices: str, words: list[str], message: str) -> None:
    code, out, err = run(*MLP, *[prices if word == "PRICES" else word for word in words])
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("H100 = 0", "H100 = 0: give dollars for an hour of one device"),
        ("p5.48xlarge = 3", "p5 is a table: put names with dots or colons in quotes"),
        ("H100", "not TOML"),
        ('H100 = "3"', "H100 = '3': give dollars"),
    ],
)
def test_a_price_file_is_checked(run: Run, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prices.toml"
    file.write_text(text)
    code, _, err = run(*MLP, "--cluster", "2x4", "--vary", "batch=8", "--price", str(file))
    assert code == 2
    assert message in err


def test_a_trace_of_other_arguments_is_refused() -> None:
    step, args = _factory()
    made = shardplan.plan(step, *args, cluster="2x2")
    again = shardplan.plan(step, *args, cluster="2x4", traced=made.traced)
    assert again.traced is made.traced
    assert again.specs_by_path == shardplan.plan(step, *args, cluster="2x4").specs_by_path
    with pytest.raises(shardplan.TraceError, match="traced= is of other arguments"):
        shardplan.plan(step, *_factory(batch=32)[1], cluster="2x2", traced=made.traced)


class _UnsayableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _failing(how: str = "") -> Any:
    """A factory that fails in many ways."""
    match how:
        case "exit":
            raise SystemExit(3)
        case "lines":
            raise ValueError("one\ntwo")
        case "unsayable":
            raise _UnsayableError
        case "nothing":
            return None
        case _:
            step, args = _factory()
            return (step, args) if not how else (lambda *_: {}[how], args)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("exit", "failed with how='exit': SystemExit: 3"),
        ("lines", "failed with how='lines': ValueError: one two"),
        ("unsayable", "failed with how='unsayable': _UnsayableError: (its text raises RuntimeError)"),
        ("nothing", "returned a value of type NoneType"),
        ("trace", "could not be traced on these shapes: KeyError: 'trace'"),
    ],
)
def test_a_point_that_fails_is_one_line_beside_the_others(how: str, says: str) -> None:
    made = shardplan.sweep(_failing, vary={"how": ["", how]}, cluster="2")
    good, bad = made.points
    assert good.fits
    assert bad.settings == {"how": how}
    assert says in str(bad.error)
    assert "\n" not in str(bad.error)
    assert f"  2  how={how}: {bad.error}" in sweep_text(made)


def test_a_sweep_without_a_plan_says_nothing_of_batches() -> None:
    made = shardplan.sweep(_failing, vary={"how": ["exit", "lines"]}, cluster="2")
    assert "batch" not in sweep_text(made)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"vary": ["batch"]}, r"vary=\['batch'\]: give at least one setting"),
        ({"vary": {}}, "vary={}: give at least one setting"),
        ({"vary": {"batch": 3}}, "batch=3: give a list of at least one value"),
        ({"vary": {"batch": iter(())}}, "batch=.*: give a list of at least one value"),
        ({"vary": {"batch": iter([3, 3])}}, "batch has the value 3 twice"),
        ({"options": {"widht": 3}}, "options: it has no parameter 'widht' .nearest: width.; it has batch, width"),
        ({"memori": 3}, "sweep has no option 'memori' .nearest: memory_limit.*; it takes cluster, memory_limit"),
        ({"traced": 3}, "sweep has no option 'traced'"),
    ],
)
def test_mistakes_in_the_call_are_errors_of_their_own(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ShardplanError, match=says):
        shardplan.sweep(_factory, **{"vary": {"batch": [16]}, "cluster": "2", "name": "it", **given})


def test_what_is_no_factory_is_refused() -> None:
    with pytest.raises(ShardplanError, match="3 is no factory: give a function"):
        shardplan.sweep(3, vary={"batch": [1]}, cluster="2")  # pyright: ignore[reportArgumentType]


def test_a_factory_that_takes_any_names_is_not_asked_for_them() -> None:
    made = shardplan.sweep(lambda **given: _factory(**given), vary={"batch": iter([16, 32])}, cluster="2")
    assert [p.samples for p in made.points] == [16, 32]


def test_values_that_look_alike_are_points_of_their_own() -> None:
    """The text of large arrays leaves their middle out."""
    sizes = [np.zeros(2000, int), np.zeros(2000, int)]
    sizes[1][1000] = 32
    made = shardplan.sweep(lambda sizes: _factory(batch=32 + int(sizes.sum())), vary={"sizes": sizes}, cluster="2")
    assert [p.samples for p in made.points] == [32, 64]


def test_what_fits_instead_is_found_among_settings_with_arrays() -> None:
    sizes, pair = [np.array([32, 32]), np.array([64, 64])], (np.zeros(2), np.ones(2))
    vary = {"sizes": sizes, "pair": [pair, {"x": pair[0]}], "memory": ["4KiB", "1GiB"]}
    made = shardplan.sweep(lambda sizes, pair: _factory(batch=int(sizes[0])), vary=vary, cluster="2x2")
    assert [p.fits for p in made.points] == [False, True] * 4
    assert all(str(p.remedy).endswith("; in this sweep it fits with memory=1GiB") for p in made.points[::2])


def test_purposes_and_placements_vary(run: Run) -> None:
    words = ["--cluster", "2x4", "--vary", "axes=data=8,[data=4,tensor=2],data=3", "--json"]
    code, text, _ = run(*MLP, *words)
    points = json.loads(text)["points"]
    assert code == 0
    assert [p["settings"]["axes"] for p in points] == [{"data": 8}, {"data": 4, "tensor": 2}, {"data": 3}]
    assert [p["fits"] for p in points] == [True, True, False]
    assert "data=3 make 3 devices" in points[2]["error"]
    _, text, _ = run(*MLP, *words[:-1])
    assert "[data=4,tensor=2]" in text
    made = shardplan.sweep(_factory, vary={"placement": ["one", "auto"]}, cluster="2")
    assert [p.fits for p in made.points] == [True, True]
