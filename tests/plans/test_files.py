"""Plan files: read back whole, and refused by name for whatever they lack."""

from __future__ import annotations

import json
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
from shardplan.plans.files import read_plan_file
from shardplan.plans.plan import FORMAT
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory

Planned = tuple[shardplan.Plan, Any, Any]


def solver(plan: shardplan.Plan) -> Solver:
    problem = plan.extractor.problem
    return Solver(problem, memory.liveness(problem, frozenset(plan.donated_leaves)))


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


def test_a_saved_baseline_is_priced_and_cut_as_before(three: Planned, tmp_path: Path) -> None:
    plan, step, args = three
    dearer = list[str]()
    for name, one in plan.baseline_plans().items():
        one.save(tmp_path / "plan.json")
        again = shardplan.load(tmp_path / "plan.json", step, *args)
        assert (again.step_time_s, again.peak_bytes) == (one.step_time_s, one.peak_bytes), name
        assert (again.decisions.uses, again.collectives) == (one.decisions.uses, one.collectives), name
        assert again.solution.limits == one.solution.limits, name
        freely = solver(plan).unlimited(one.solution).seconds
        dearer += [name] if freely < one.step_time_s * (1 - 1e-6) else []
    assert len(dearer) > 2, "limits say how these are cut: without them they would be faster"


def test_a_saved_plan_for_bytes_is_cut_as_before(tmp_path: Path) -> None:
    step, args = mlp.train_step(batch=64, width=64)
    plan = shardplan.plan(step, *args, cluster="2x2", objective="bytes")
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert (again.step_time_s, again.collectives) == (plan.step_time_s, plan.collectives)
    assert solver(plan).unlimited(plan.solution).seconds < plan.step_time_s, "the premise costs time: the test would see it lost"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"groups": [[0, 3]]}, r"the groups \[\[0, 3\]\] of limits do not part the 3 factors"),
        ({"groups": [[0], [0, 1]]}, "do not part the 3 factors"),
        ({"groups": [[], [0, 1, 2]]}, "do not part the 3 factors"),
        ({"cuts": [{"loops": [[-1]] * 3, "nodes": [99999]}]}, "limits name op 99999, which has no cut of its own"),
        ({"cuts": [{"loops": [[-1]] * 2, "nodes": ["op"]}]}, "loops for 2 factors, the plan has 3"),
        ({"cuts": [{"loops": [[-1], [77], []], "nodes": ["op"]}]}, r"cut loop \[77\], of loops \[-1, 0"),
        ({"cuts": [{"loops": [[-1]] * 3, "nodes": ["op", "op"]}]}, "limits say twice how op"),
        ({"cuts": None}, "not a plan: TypeError"),
    ],
    ids=["range", "twice", "empty", "node", "factors", "loop", "repeated", "none"],
)
def test_limits_that_do_not_fit_are_refused(three: Planned, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    plan, step, args = three
    joins = plan.extractor.problem.coarse.joins
    made = {"groups": [[0], [1, 2]], "cuts": [], **change}
    for row in made["cuts"] or ():
        row["nodes"] = [joins[0] if n == "op" else n for n in row["nodes"]]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**plan.to_json(), "limits": made}))
    with pytest.raises(shardplan.PlanFileError, match=rf"plan\.json: .*{says}"):
        shardplan.load(file, step, *args)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": 3}, r"state/optimizer/0/mu/layer_2/bias was float32\[\d+\] and is float32\[\d+\]"),
        ({"batch": 32}, r"batch/inputs was float32\[64, 64\] and is float32\[32, 64\]"),
        ({"dtype": "bfloat16"}, r"the arguments agree, the program does not \(\d+ operators then, \d+ now\)"),
        ({"optimizer": "sgd"}, r"state/optimizer/0/count, int32\[\], is not there"),
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not a plan file"),
        ("{", "not a plan file"),
        ("[]", "plan format 'list'"),
        ('{"format": 999}', "plan format 999"),
        (f'{{"format": {FORMAT}}}', "not a whole plan: 'cluster' is missing"),
    ],
)
def test_a_file_that_is_no_plan_says_so(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(text)
    with pytest.raises(shardplan.PlanFileError, match=rf"bad\.json: {says}"):
        read_plan_file(file)


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(shardplan.PlanFileError, match="No such file"):
        read_plan_file(tmp_path / "nowhere.json")


READ = (
    "fingerprint arguments operators cluster factors variables keep regather limits memory_limit objective donate_argnums"
    " replicate pins baselines lower_bound_s unlimited_s exact trace_s search_s explain stopped one_choice"
).split()


@pytest.mark.parametrize("name", READ)
def test_a_file_that_lacks_a_field_names_it(saved: dict[str, Any], tmp_path: Path, name: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({k: v for k, v in saved.items() if k != name}))
    with pytest.raises(shardplan.PlanFileError, match=f"not a whole plan: '{name}' is missing"):
        read_plan_file(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"variables": []}, "0 layouts for"),
        ({"factors": [["node", 3, 0, 1]]}, "the factors node=3 make 3 devices"),
        ({"factors": [["node", 2]]}, "not a plan: ValueError"),
        ({"cluster": "name = 3"}, "cluster"),
        ({"keep": 3}, "not a plan: TypeError"),
        ({"keep": [99999]}, "keep names variable 99999, which is no copy for the backward pass"),
        ({"stopped": "tired"}, "not a plan: ValueError: stopped='tired'"),
        ({"one_choice": "all"}, "not a plan: ValueError: one_choice='all'"),
        ({"baselines": [{"name": "FSDP"}]}, "not a plan: TypeError"),
        ({"lower_bound_s": "soon"}, "not a plan: ValueError"),
        ({"explain": []}, "not a plan: AttributeError"),
        ({"objective": "x"}, "not a plan: ValueError: objective='x'"),
        ({"donate_argnums": [-1]}, r"not a plan: ValueError: donate_argnums=\[-1\]"),
        ({"replicate": "sort"}, "not a plan: ValueError: replicate='sort'"),
        ({"regather": None}, "not a plan: ValueError: regather=None"),
        ({"exact": "x"}, "not a plan: ValueError: exact='x'"),
        ({"cluster_fingerprint": "x"}, "not that of the cluster in it"),
    ],
)
def test_a_tampered_plan_is_refused(planned: Planned, saved: dict[str, Any], tmp_path: Path, change: Any, says: str) -> None:
    _, step, args = planned
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({**saved, **change}))
    with pytest.raises(shardplan.ShardplanError, match=says):
        shardplan.load(file, step, *args)


def test_a_layout_that_does_not_divide_or_cannot_be_names_its_argument(tmp_path: Path) -> None:
    def step(w: jax.Array, x: jax.Array) -> Any:
        return w - 0.1, (x @ w).sum()

    args = jax.ShapeDtypeStruct((9, 6), jnp.float32), jax.ShapeDtypeStruct((8, 9), jnp.float32)
    plan = shardplan.plan(step, *args, cluster="4")
    content = plan.to_json()
    v = plan.extractor.problem.coarse.of[plan.extractor.problem.graph.inputs[0]]
    for layout, says in (([[[0], []], []], "does not divide it"), ([[[0], [0]], []], "is not possible")):
        content["variables"][v] = layout
        (tmp_path / "plan.json").write_text(json.dumps(content))
        with pytest.raises(shardplan.PlanFileError, match=rf"the layout P\('gpu'.*\) of w of shape \(9, 6\) {says}"):
            shardplan.load(tmp_path / "plan.json", step, *args)
