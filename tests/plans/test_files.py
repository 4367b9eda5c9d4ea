"""Plan files: read back whole, and refused by name for whatever they lack."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from models import mlp
from shardplan.plans.files import FORMAT, read, write_whole
from shardplan.report.json import plan_json
from shardplan.report.plan_text import plan_text
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem import Problem
from shardplan.shell.cli import main

Planned = tuple[shardplan.Plan, Any, Any]


def solver(plan: shardplan.Plan) -> Solver:
    problem = plan.session.problem
    return Solver(problem, memory.liveness(problem, frozenset(plan.donated_leaves)))


def layout(dims: list[list[int]], reducer: str = "sum") -> dict[str, Any]:
    """A layout in a plan's file."""
    return {"dims": dims, "partial": [], "reducer": reducer}


def body(content: dict[str, Any]) -> dict[str, Any]:
    """The choices of the step's own body in a plan's file."""
    return content["choices"]["bodies"][0][1]


def copy(content: dict[str, Any]) -> dict[str, Any]:
    """The first copy in a plan's file."""
    return content["choices"]["copies"][0]


@pytest.fixture(scope="module")
def planned() -> Planned:
    step, args = mlp.train_step(batch=64, width=64)
    pins = {"batch/*": P(("node", "gpu")), "state/params/layer_1/kernel": P(None, "gpu")}
    return shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, pins=pins), step, args


@pytest.fixture(scope="module")
def saved(planned: Planned) -> dict[str, Any]:
    return planned[0].to_json()


def test_a_saved_plan_is_read_back_whole(planned: Planned, tmp_path: Path) -> None:
    plan, step, args = planned
    file = tmp_path / "plan.json"
    plan.save(file)
    again = shardplan.load(file, step, *args)
    assert again.to_json() == plan.to_json()
    assert again.specs_by_path == plan.specs_by_path
    assert again.baselines == plan.baselines
    assert again.pins == plan.pins
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"], "nothing is left beside the file"


def test_a_plan_with_replicated_primitives_is_read_back(tmp_path: Path) -> None:
    unheard_of = Primitive("unheard_of")
    unheard_of.def_abstract_eval(lambda x: x)

    def step(x: jax.Array) -> jax.Array:
        return jnp.sum(unheard_of.bind(x) @ x)

    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    plan = shardplan.plan(step, x, cluster="2", replicate=("unheard_of",))
    plan.save(tmp_path / "plan.json")
    assert shardplan.load(tmp_path / "plan.json", step, x).replicate == ("unheard_of",)


def test_a_plan_on_ones_own_mesh_takes_it_again(tmp_path: Path, devices: list[Any]) -> None:
    def step(x: jax.Array) -> jax.Array:
        return x @ x

    x, mesh = jax.ShapeDtypeStruct((8, 8), jnp.float32), Mesh(np.array(devices[::-1]).reshape(2, 4), ("rows", "columns"))
    shardplan.plan(step, x, cluster=mesh).save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, x, mesh=mesh)
    assert again.mesh().devices.tolist() == mesh.devices.tolist()
    for other in (Mesh(mesh.devices, ("rows", "other")), Mesh(mesh.devices.reshape(4, 2), ("rows", "columns"))):
        with pytest.raises(shardplan.DeviceError, match=r"the plan is for the mesh axes {'rows': 2, 'columns': 4}"):
            shardplan.load(tmp_path / "plan.json", step, x, mesh=other)


@pytest.fixture(scope="module")
def three() -> Planned:
    step, args = mlp.train_step(batch=64, width=64)
    return shardplan.plan(step, *args, cluster="2x2x2", donate_argnums=0), step, args


@pytest.mark.slow
def test_a_saved_baseline_is_priced_and_cut_as_before(three: Planned, tmp_path: Path) -> None:
    plan, step, args = three
    dearer = list[str]()
    for name, one in itertools.islice(plan.baseline_plans().items(), 0, None, 4):
        one.save(tmp_path / "plan.json")
        again = shardplan.load(tmp_path / "plan.json", step, *args)
        assert (again.step_time_s, again.peak_bytes) == (one.step_time_s, one.peak_bytes), name
        assert (again.data.choices, again.collectives) == (one.data.choices, one.collectives), name
        assert again.session.solution.seconds == one.session.solution.seconds, name
        assert again.session.decisions.step_time_s == pytest.approx(one.searched_s, rel=1e-12), name
        assert again.session.decisions.uses == one.session.decisions.uses, name
        freely = solver(plan).unlimited(one.session.solution).seconds
        dearer += [name] if freely < one.session.solution.seconds * (1 - 1e-6) else []
    assert len(dearer) > 1, "limits say how these are cut: without them they would be faster"


def test_a_donation_of_an_argument_that_the_step_does_not_take_is_refused(three: Planned, tmp_path: Path) -> None:
    plan, step, args = three
    content = json.loads(json.dumps(plan.to_json()))
    content["donate_argnums"] = [7]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match=r"plan\.json: donate_argnums=7 names no argument: the step takes \d"):
        shardplan.load(file, step, *args)


def test_a_saved_plan_for_bytes_is_cut_as_before(tmp_path: Path) -> None:
    step, args = mlp.train_step(batch=64, width=64)
    plan = shardplan.plan(step, *args, cluster="2x2", objective="bytes")
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert (again.step_time_s, again.collectives) == (plan.step_time_s, plan.collectives)
    assert solver(plan).unlimited(plan.session.solution).seconds < plan.session.solution.seconds, (
        "the premise costs time: the test would see it lost"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c["choices"]["bodies"].pop(), "the plan has 0 bodies, the step 1"),
        (lambda c: body(c)["layouts"].pop(), r"\d+ layouts for \d+ values"),
        (
            lambda c: body(c)["layouts"].__setitem__(0, 999),
            r"layouts\[0\]=999 is no Layout: the file has",
        ),
        (lambda c: body(c)["layouts"].reverse(), "a layout of rank . for a value of shape"),
        (lambda c: body(c)["uses"].append([99999, 0]), "the plan cuts op 99999, which is not in this step"),
        (lambda c: body(c)["uses"].append([0, 999]), r"not a plan: .*uses\[\d+\]\[1\]=999 is no Use: the file has"),
        (lambda c: body(c)["reads"].append([[99999, 0], 0]), "op 99999 reads operand 0, which is not in this step"),
        (lambda c: body(c)["reads"][0].__setitem__(1, 999), "not a plan: no copy 999: the file has"),
        (lambda c: body(c)["reads"].append(body(c)["reads"][0]), r"not a plan: choices\.bodies\[0\]\[1\]\.reads has a key twice"),
        (lambda c: c["uses"][0]["loops"].pop(), "cuts loops for 2 factors, the plan has 3"),
        (lambda c: c["uses"][0].__setitem__("loops", [99, 99, 99]), "cannot be cut as the plan says"),
        (lambda c: c["uses"][0]["needs"].pop(), "cannot be cut as the plan says"),
        (lambda c: [use.__setitem__("loops", [0, 0, 0]) for use in c["uses"]], "cannot be cut as the plan says"),
        (
            lambda c: [use.__setitem__("stored", use["needs"][:1] * len(use["stored"])) for use in c["uses"]],
            "two layouts|as the plan says",
        ),
        (lambda c: c["uses"][0]["needs"].__setitem__(0, None), "operand 0 of op . .* has no layout|as the plan says"),
        (lambda c: copy(c).__setitem__("backward", "yes"), r"choices\.copies\[0\]\.backward='yes' is not true or false"),
        (lambda c: copy(c).__setitem__("source", 77), "not a plan: no copy 77: the file has"),
        (lambda c: c["choices"].pop("copies"), "incomplete plan: 'choices.copies' is missing"),
    ],
)
def test_choices_that_do_not_fit_are_refused(three: Planned, tmp_path: Path, change: Any, says: str) -> None:
    plan, step, args = three
    content = json.loads(json.dumps(plan.to_json()))
    change(content)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match=rf"plan\.json: .*{says}"):
        shardplan.load(file, step, *args)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.__setitem__("step_time_s", math.nan), "step_time_s is nan, not a finite number"),
        (
            lambda c: c["baselines"][0].__setitem__("step_time_s", math.inf),
            r"baselines\[0\]\.step_time_s is inf, not a finite number",
        ),
        (lambda c: c.__setitem__("compute_s", -1e-3), r"compute_s=-0\.001 is below 0"),
        (lambda c: c.__setitem__("peak_bytes", -1), "peak_bytes=-1 is below 0"),
        (lambda c: c.__setitem__("memory_limit", 1.5), r"memory_limit=1\.5 is not a whole number"),
        (lambda c: c.__setitem__("step_time_s", 1e-12), "step_time_s=1e-12 does not fit: compute_s, host_s and collectives take"),
        (lambda c: c.__setitem__("compute_s", 0.0), r"step_time_s=.* does not fit: compute_s, host_s and collectives take"),
    ],
    ids=["not a number", "infinite", "negative", "negative bytes", "half a byte", "too short", "too long"],
)
def test_seconds_that_cannot_be_are_refused(three: Planned, tmp_path: Path, change: Any, says: str) -> None:
    plan, step, args = three
    content = json.loads(json.dumps(plan.to_json()))
    change(content)
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match=rf"plan\.json: not a plan: {says}"):
        shardplan.load(file, step, *args)


@pytest.mark.parametrize("what", ["arguments", "results"])
def test_a_file_with_another_number_of_ends_is_refused(three: Planned, tmp_path: Path, what: str) -> None:
    plan, step, args = three
    content = json.loads(json.dumps(plan.to_json()))
    key = "arguments" if what == "arguments" else "result_layouts"
    content[key].pop()
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match=rf"plan\.json: .*\d+ {what}"):
        shardplan.load(file, step, *args)


def test_a_sum_does_not_take_a_number_as_a_term(tmp_path: Path) -> None:
    """``x @ w + 1.0 + y @ w``: were the partial sum handed through ``+ 1.0``, each device would add one."""

    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ w + 1.0 + y @ w

    args = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 8), (8, 8), (8, 8))]
    plan = shardplan.plan(step, *args, cluster="4", factors={})
    content = json.loads(json.dumps(plan.to_json()))
    node = next(n for n in plan.graph.nodes if n.op.primitive == "add" and any(t < 0 for t in n.inputs))
    layouts = content["layouts"]
    layouts.append({"dims": [[], []], "partial": [0], "reducer": "sum"})
    at = len(layouts) - 1
    content["uses"].append({"loops": [-2], "needs": [at, None], "gives": [at], "stored": [at], "compute_s": 0.0})
    uses = body(content)["uses"]
    uses[:] = [u for u in uses if u[0] != node.op.id] + [[node.op.id, len(content["uses"]) - 1]]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match="cannot be cut as the plan says"):
        shardplan.load(file, step, *args)


def test_a_plan_is_loaded_without_planning(three: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file holds all that a plan says, and all that is needed to run it; only what asks for runner-ups searches again."""
    plan, step, args = three
    plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(Problem, "__init__", lambda *_, **__: pytest.fail("a problem was made"))
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert plan_text(again.completed()) == plan_text(plan.completed())
    assert plan_json(again.completed()) == plan_json(plan.completed())
    again.jit(step).lower(*args)
    with pytest.raises(pytest.fail.Exception, match="a problem was made"):
        again.explain()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 3}, r"state/optimizer/0/mu/layer_2/bias was float32\[\d+\] and is float32\[\d+\]"),
        ({"batch": 32}, r"batch/inputs was float32\[64, 64\] and is float32\[32, 64\]"),
        (
            {"dtype": "bfloat16"},
            r"the arguments agree, the program does not \(\d+ operators then, \d+ now, .* at .*mlp.py:\d+ .*\)",
        ),
        ({"optimizer": "sgd"}, r"state/optimizer/0/count, int32\[\], is missing"),
    ],
    ids=["layers", "batch", "dtype", "optimizer"],
)
def test_a_plan_of_another_model_is_refused_where_they_differ(
    saved: dict[str, Any], tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    other, args = mlp.train_step(**{"batch": 64, "width": 64, **options})
    with pytest.raises(shardplan.PlanFileError, match=f"another model or other shapes: ({says})"):
        shardplan.load(file, other, *args)


def test_a_plan_is_loaded_for_another_learning_rate_and_runs_with_it(tmp_path: Path) -> None:
    def trained(rate: float) -> Any:
        return lambda w, x: w - rate * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    args = jnp.ones((8, 8)), jnp.ones((16, 8))
    shardplan.plan(trained(1e-3), *args, cluster="2x2").save(tmp_path / "plan.json")
    step = trained(0.5)
    loaded = shardplan.load(tmp_path / "plan.json", step, *args)
    assert jnp.allclose(loaded.jit(step)(*loaded.put(args)), step(*args))


@pytest.mark.parametrize("options", [{"batch": 128}, {"batch": 128, "width": 96}], ids=str)
def test_a_plan_for_other_shapes_begins_with_the_saved_one(saved: dict[str, Any], tmp_path: Path, options: Any) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    step, args = mlp.train_step(**{"batch": 64, "width": 64, **options})
    with pytest.raises(shardplan.PlanFileError, match="other shapes"):
        shardplan.load(file, step, *args)
    warm = shardplan.load(file, step, *args, warm_start=True)
    fresh = shardplan.plan(step, *args, cluster="2x4", donate_argnums=0, pins=warm.pins)
    assert warm.pins
    assert {a.path: a.shape for a in warm.data.arguments} == {a.path: a.shape for a in fresh.data.arguments}
    assert warm.data.memory_limit == fresh.data.memory_limit
    assert fresh.step_time_s <= warm.step_time_s * (1 + 1e-9)
    assert warm.step_time_s <= fresh.step_time_s * 1.02
    warm.check_step(step)


def test_a_pin_that_no_longer_divides_is_dropped_with_a_warning(
    saved: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    step, args = mlp.train_step(batch=63, width=64)
    warm = shardplan.load(file, step, *args, warm_start=True)
    assert list(warm.pins) == ["state/params/layer_1/kernel"]
    assert "a pin of the old plan is dropped" in caplog.text


def test_a_plan_of_other_ops_is_no_start(saved: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(saved))
    for options, says in (({"layers": 3}, r"op \d+ was"), ({"dtype": "bfloat16", "batch": 128}, r"op \d+ was \w+ and is \w+")):
        step, args = mlp.train_step(**{"batch": 64, "width": 64, **options})
        with pytest.raises(shardplan.PlanFileError, match=f"another model: for a warm start only shapes may differ, and {says}"):
            shardplan.load(file, step, *args, warm_start=True)


def test_a_warm_start_keeps_the_objective_of_bytes(tmp_path: Path) -> None:
    step = lambda w, x: w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)  # noqa: E731
    shardplan.plan(step, jnp.ones((64, 64)), jnp.ones((64, 64)), cluster="2x4", objective="bytes").save(tmp_path / "plan.json")
    wide = jnp.ones((64, 64)), jnp.ones((128, 64))
    warm = shardplan.load(tmp_path / "plan.json", step, *wide, warm_start=True)
    assert warm.objective == "bytes"
    assert warm.communication_bytes == shardplan.plan(step, *wide, cluster="2x4", objective="bytes").communication_bytes > 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a plan file"),
        ("{", "not a plan file"),
        ("[]", "not a plan file"),
        ("[" * 100_000, "not a plan file"),
        ('{"cluster": 1}', "not a plan file: it has no key 'format'"),
        ('{"format": 999}', "plan format 999"),
        (f'{{"format": {FORMAT}}}', "incomplete plan: 'layouts' is missing"),
    ],
)
def test_a_file_that_is_no_plan_says_so(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(shardplan.PlanFileError, match=rf"bad\.json: {says}"):
        read(file)


def test_a_link_is_followed_and_nothing_else_is_replaced(tmp_path: Path) -> None:
    """A pipe or a device is not turned into a file."""
    real, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    real.write_text("old")
    link.symlink_to(real)
    write_whole(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    os.mkfifo(pipe)
    with pytest.raises(shardplan.PlanFileError, match="it is a device or a pipe"):
        write_whole(pipe, "new")
    assert pipe.is_fifo()
    with pytest.raises(shardplan.PlanFileError, match="it is a folder"):
        write_whole(tmp_path, "new")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_remains_of_a_write_that_fails(tmp_path: Path, error: BaseException) -> None:
    file = tmp_path / "plan.json"
    file.write_text("old")

    def parts() -> Iterator[bytes]:
        yield b"new"
        raise error

    with pytest.raises((shardplan.PlanFileError, KeyboardInterrupt)):
        write_whole(file, parts())
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]
    assert file.read_text() == "old"


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(shardplan.PlanFileError, match="No such file"):
        read(tmp_path / "nowhere.json")


READ = (
    "name fingerprint arguments operators cluster factors choices layouts collectives result_layouts regather limited"
    " step_time_s compute_s peak_bytes memory_limit objective donate_argnums replicate pins baselines left_out bound_s"
    " constants unlimited_s exact trace_s search_s explanations stopped one_choice idle_axes unknown_trips whole_ops"
    " time_budget_s remat"
).split()


@pytest.mark.parametrize("name", READ)
def test_a_file_that_lacks_a_field_names_it(saved: dict[str, Any], tmp_path: Path, name: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({k: v for k, v in saved.items() if k != name}))
    with pytest.raises(shardplan.PlanFileError, match=f"incomplete plan: '{name}' is missing"):
        read(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layouts": []}, r"not a plan: uses\[0\]\.needs\[0\]=1 is no Layout: the file has 0"),
        ({"layouts": [layout([[7]])] * 99}, r"not a plan: a layout uses the factors \[7\]: each must be below 2"),
        ({"layouts": [layout([[0], [0]])] * 99}, r"a layout uses the factors \[0, 0\]: each must be below 2"),
        ({"layouts": [layout([[0]], "mean")]}, r"not a plan: unsupported layouts\[0\].reducer='mean'"),
        (
            {"factors": [{"name": "node", "size": 3, "level": 0, "stride": 1}]},
            r"plan\.json: .*factors: the factors node=3 make 3",
        ),
        ({"factors": [{"name": "node", "size": 2}]}, r"incomplete plan: 'factors\[0\].level' is missing"),
        ({"cluster": "name = 3"}, "cluster"),
        ({"collectives": 3}, "not a plan: collectives=3 is not a list"),
        ({"stopped": "tired"}, "not a plan: unsupported stopped='tired'"),
        ({"one_choice": "all"}, "not a plan: unsupported one_choice='all'"),
        ({"baselines": [{"name": "FSDP"}]}, r"incomplete plan: 'baselines\[0\]\.step_time_s' is missing"),
        (
            {
                "baselines": [
                    {"name": "FSDP", "step_time_s": 1, "compute_s": 1, "communication_bytes": 0, "peak_bytes": -1, "fits": True}
                ]
            },
            r"not a plan: baselines\[0\]\.peak_bytes=-1 is below 0",
        ),
        (
            {"arguments": [{"path": "x", "shape": [8, -1], "dtype": "float32", "nbytes": 4, "layout": None, "memory": "device"}]},
            r"not a plan: arguments\[0\]\.shape\[1\]=-1 is below 0",
        ),
        ({"host_s": -1}, "not a plan: host_s=-1 is below 0"),
        ({"weights": {"compute": 1, "hideable": 1, "other": 1}}, "not a plan: weights.other is not a field of this version"),
        ({"bound_s": "soon"}, "not a plan: bound_s='soon' is not a number"),
        ({"bound_s": None}, "incomplete plan: 'bound_s' is missing"),
        ({"company": {"early": 1.0}}, "company={'early': 1.0} is not of the pools early, late"),
        ({"purposes": []}, "says nothing of some of the 2 factors"),
        ({"fixed_axes": {"cook": 2}}, "unsupported fixed_axes='cook'"),
        ({"explanations": []}, r"not a plan: explanations=\[\] is not an object"),
        ({"objective": "x"}, "not a plan: unsupported objective='x'"),
        ({"donate_argnums": [-1]}, r"not a plan: donate_argnums\[0\]=-1 is below 0"),
        ({"replicate": "sort"}, "not a plan: replicate='sort'"),
        ({"regather": None}, "not a plan: regather=None"),
        ({"exact": "x"}, "not a plan: exact='x'"),
        ({"cluster_fingerprint": "x"}, "does not match the cluster in the file"),
    ],
)
def test_a_tampered_plan_is_refused(planned: Planned, saved: dict[str, Any], tmp_path: Path, change: Any, says: str) -> None:
    _, step, args = planned
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**saved, **change}))
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.load(file, step, *args)


def test_a_plan_with_other_constants_is_loaded_and_says_so(
    planned: Planned, saved: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, step, args = planned
    says = "planned with other constants, so prices made again differ: saved_overlap 0.4 (now 0.5)"
    file = tmp_path / "plan.json"
    assert saved["constants"]["saved_overlap"] == "0.5"
    file.write_text(json.dumps({**saved, "constants": {**saved["constants"], "saved_overlap": "0.4"}}))
    again = shardplan.load(file, step, *args)
    for text in (plan_text(again.completed()), again.explain(), again.explain("batch/*")):
        assert text.lower().count(says) == 1
    assert "constants" not in plan_text(planned[0].completed())
    assert main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.lower().strip().endswith(f"{says}.")


def test_a_layout_that_does_not_divide_names_its_argument(tmp_path: Path) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1, (x @ w).sum()

    args = jax.ShapeDtypeStruct((9, 6), jnp.float32), jax.ShapeDtypeStruct((8, 9), jnp.float32)
    plan = shardplan.plan(step, *args, cluster="4")
    content = plan.to_json()
    content["layouts"] = [layout([[0], []])] + [layout([[], []])] * 99
    body(content)["layouts"][0] = 0
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(shardplan.PlanFileError, match=r"the layout P\('gpu'.*\) of w of shape \(9, 6\) does not divide it"):
        shardplan.load(tmp_path / "plan.json", step, *args)
