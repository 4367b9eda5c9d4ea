"""Exported plans: each form says what the plan says, read back as its users read it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardplan
from models import mlp
from shardplan.mesh import Cluster
from shardplan.report.rules_file import folded
from shardplan.shell.cli import main
from shardplan.shell.sharding_files import read_sharding
from tests.machines import launchless

STEP = """
import jax, jax.numpy as jnp

def train_step(width=64, concrete=False):
    def loss_of(params, batch):
        x = batch["it's \\"x\\" [0]"]
        for layer in params["layers"]:
            x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
        return jnp.mean(x ** 2)

    def step(state, rate, batch):
        loss, gradients = jax.value_and_grad(loss_of)(state, batch)
        return jax.tree.map(lambda p, g: p - rate * g, state, gradients), {"loss": loss}

    def array(*shape):
        return jax.random.normal(jax.random.key(len(shape)), shape) / 8

    state = {"layers": [{"kernel": array(width, width), "bias": array(width)} for _ in range(3)]}
    args = state, jnp.float32(0.1), {"it's \\"x\\" [0]": array(32, width)}
    return step, args if concrete else jax.eval_shape(lambda: args)
"""

PINS = {"state/layers/*/kernel": P(None, "gpu"), "batch/*": P("node", "gpu")}

ALONE = """
import sys
sys.modules["shardplan"] = None  # it cannot be imported
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
import numpy as np
import small, specs

step, args = small.train_step(concrete=True)
expected = jax.jit(step)(*args)
on = specs.mesh()
wanted = specs.shardings(specs.in_specs(args), on), specs.shardings(specs.out_specs(jax.eval_shape(step, *args)), on)
found = jax.jit(step, in_shardings=wanted[0], out_shardings=wanted[1])(*jax.device_put(args, wanted[0]))
for a, b, s in zip(jax.tree.leaves(found), jax.tree.leaves(expected), jax.tree.leaves(wanted[1]), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert a.sharding.is_equivalent_to(s, a.ndim)
print("split", sum(not s.is_fully_replicated for s in jax.tree.leaves(wanted)))
"""


@pytest.fixture
def folder(folder_with: Callable[[str], Path]) -> Path:
    """A directory of its own with ``small.py`` in it, as the current one."""
    return folder_with(STEP)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``run("export", "plan.json", ...)`` -> (exit code, stdout, stderr)."""

    def call(*argv: str) -> tuple[int, str, str]:
        code = main(argv)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[shardplan.Plan, Any, str]:
    """The plan of small.py's step, its arguments, and the text of its file."""
    space: dict[str, Any] = {}
    exec(STEP, space)
    step, args = space["train_step"](concrete=True)
    plan = shardplan.plan(step, *args, cluster="2x4", pins=PINS)
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    plan.save(file)
    return plan, args, file.read_text()


@pytest.fixture
def planned(folder: Path, made: tuple[shardplan.Plan, Any, str]) -> shardplan.Plan:
    """The plan of small.py's step, which is plan.json too."""
    (folder / "plan.json").write_text(made[2])
    return made[0]


def test_specs_run_the_step_in_a_process_without_shardplan(
    folder: Path, planned: shardplan.Plan, run: Callable[..., tuple[int, str, str]]
) -> None:
    assert run("export", "plan.json", "-o", "specs.py") == (0, "exported to specs.py\n", "")
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[1]) >= 4
    written = Path("specs.py").read_text()
    planned.export("specs.py")
    assert Path("specs.py").read_text() == written
    imported = set(re.findall(r"^(?:import|from) ([\w.]+)", written, re.MULTILINE))
    assert imported == {"jax", "jax.sharding"}


def specs_module(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {}
    exec(text, space)
    return space


def test_specs_have_the_mesh_of_the_plan_and_of_the_user(tmp_path: Path, devices: list[Any]) -> None:
    """Devices in the order of a cluster with interleaved factors, and in the user's own; a mesh of one device has no axes."""
    step, args = lambda x: {"y": x * 2}, (jnp.ones((16, 4)),)
    mine = Mesh(np.array(devices[::-1]).reshape(4, 2), ("rows", "columns"))
    for cluster in (mine, "2x4", "1"):
        plan = shardplan.plan(step, *args, cluster=cluster)
        plan.export(tmp_path / "specs.py")
        module = specs_module((tmp_path / "specs.py").read_text())
        mesh = module["mesh"]()
        assert mesh.axis_names == plan.mesh().axis_names
        assert mesh.devices.tolist() == plan.mesh().devices.tolist()
        assert mesh.axis_types == plan.mesh().axis_types
        assert module["in_specs"](args) == plan.in_specs
        assert module["out_specs"](step(*args)) == plan.out_specs
    with pytest.raises(ValueError, match="the mesh has 8 devices, here are 3"):
        specs_module_of(shardplan.plan(step, *args, cluster="2x4"), tmp_path)["mesh"](devices[:3])


def specs_module_of(plan: shardplan.Plan, folder: Path) -> dict[str, Any]:
    plan.export(folder / "my-specs.py")
    return specs_module((folder / "my-specs.py").read_text())


def test_two_leaves_of_one_path_have_their_own_specs_and_no_rule(tmp_path: Path, devices: list[Any]) -> None:
    def step(tree: Any) -> Any:
        return jax.tree.map(lambda x: x + 1, tree)

    args = ({"a": {"b": jnp.ones((8, 8))}, "a/b": jnp.ones((4, 4)), "a#c": jnp.ones(3)},)
    plan = shardplan.plan(step, *args, cluster="2", pins={"tree/a/b": P("gpu")})
    module = specs_module_of(plan, tmp_path)
    assert module["in_specs"](args) == plan.in_specs
    assert set(module["IN_SPECS"]) == {"tree/a/b", "tree/a/b#2", "tree/a#c"}
    with pytest.raises(KeyError, match="'tree/z' is not a path of the planned step"):
        module["in_specs"](({"z": args[0]["a/b"]},))


def read_rules(text: str) -> list[tuple[str, tuple[Any, ...]]]:
    """The rules of a file, each a line of JSON after a dash."""
    rows = [json.loads(line[2:]) for line in text.partition("rules:\n")[2].splitlines() if line.startswith("- ")]
    return [(pattern, tuple(tuple(e) if isinstance(e, list) else e for e in spec)) for pattern, spec in rows]


def test_the_first_rule_that_matches_gives_each_leaf_its_spec(
    planned: shardplan.Plan, run: Callable[..., tuple[int, str, str]]
) -> None:
    assert run("export", "plan.json", "-o", "rules.yml", "--json")[:2] == (0, '{"file": "rules.yml", "form": "rules.yml"}\n')
    text = Path("rules.yml").read_text()
    rules = read_rules(text)
    for path, spec in planned.specs_by_path.items():
        assert next(P(*own) for pattern, own in rules if re.search(pattern, path)) == spec
    assert [pattern for pattern, _ in rules] == [
        r"^state/layers/\d+/bias$", r"^state/layers/\d+/kernel$", "^rate$", r"""^batch/it's "x" \[0\]$""",
    ]  # fmt: skip
    assert "not said" not in text


def test_rules_fold_only_what_is_exact() -> None:
    assert folded({f"h_{i}/w": ("gpu",) if i % 2 else () for i in range(4)}) == [("^h_(0|2)/w$", ()), ("^h_(1|3)/w$", ("gpu",))]
    mixed = {"a/0/b/0": (), "a/1/b/1": (), "a/0/b/1": ("gpu",)}
    assert folded(mixed) == [("^a/0/b/0$", ()), ("^a/1/b/1$", ()), ("^a/0/b/1$", ("gpu",))]
    for specs in (mixed, {"x": ("a",), "x1": ("b",), "x.1": ("c",), "x/١": ("d",)}):
        rules = folded(specs)
        assert {p: next(s for pattern, s in rules if re.search(pattern, p)) for p in specs} == specs


def test_what_no_rule_can_say_is_named(tmp_path: Path, devices: list[Any]) -> None:
    args = ({"a": {"b": jnp.ones((8, 8))}, "a/b": jnp.ones((8, 4)), "c\n": jnp.ones(4)},)
    plan = shardplan.plan(lambda tree: jax.tree.map(jnp.sin, tree), *args, cluster="2", pins={"tree/a/b": P("gpu")})
    plan.export(tmp_path / "rules.yml")
    text = (tmp_path / "rules.yml").read_text()
    specs = dict.fromkeys(plan.flat_in_specs[:2])
    assert ('# not said: "tree/a/b"' in text) == (len(specs) > 1)
    assert all(re.match(r"(- |# |mesh: |rules:)", line) for line in text.splitlines())


@pytest.mark.parametrize("name", ["specs.py", "rules.yml"])
def test_arguments_with_one_path_keep_their_specs_in_a_file(tmp_path: Path, name: str) -> None:
    def step(state: Any, x: jax.Array) -> jax.Array:
        return x @ state["a/b"] @ state["a"]["b"]

    square = jax.ShapeDtypeStruct((64, 64), "float32")
    args = {"a/b": square, "a": {"b": square}}, square
    plan = shardplan.plan(step, *args, cluster="2x4", pins={"state/*": P("gpu"), "x": P("node")})
    plan.export(tmp_path / name)
    read: Any = read_sharding(tmp_path / name, plan.cluster, None, paths=name == "specs.py")
    score = shardplan.score(step, *args, cluster="2x4", rules=read.rules, mesh=read.mesh)
    assert score.in_specs == {"state/a/b": "P('gpu')", "state/a/b#2": "P('gpu')", "x": "P('node')"}


def test_maxtext_gets_the_sizes_of_its_axes(tmp_path: Path) -> None:
    step, args = mlp.train_step(layers=2, width=1024, batch=1024)
    cluster = launchless(Cluster.load("2x4"))
    plan = shardplan.plan(step, *args, cluster=cluster, axes={"data": 2, "tensor": 4})
    plan.export(tmp_path / "maxtext.yml")
    text = (tmp_path / "maxtext.yml").read_text()
    rows = dict(line.split(": ") for line in text.splitlines() if re.match(r"\w+: ", line))
    assert json.loads(rows.pop("mesh_axes")) == ["data", "tensor"]
    sizes = {name: int(n) for name, n in rows.items()}
    matrix = dict(zip(plan.matrix["axes"], plan.matrix["factors"], strict=True))
    for axis in ("data", "fsdp", "sequence", "tensor", "expert"):
        dcn, ici = matrix.get(axis, [1, 1])
        assert (sizes.pop(f"dcn_{axis}_parallelism"), sizes.pop(f"ici_{axis}_parallelism")) == (dcn, ici)
    assert not sizes
    assert '- ["activation_batch", ["data"]]' in text
    assert "# not said: which dims of which arrays the plan splits" in text


def test_what_maxtext_has_no_axis_for_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step, args = mlp.train_step(batch=64, width=64)
    plan = shardplan.plan(step, *args, cluster="2x4")
    plan.export(tmp_path / "maxtext.yml")
    said = "8 devices do the same work (purpose replica)"
    assert said in (tmp_path / "maxtext.yml").read_text().splitlines()[1]
    plan.save(tmp_path / "plan.json")
    assert main(["export", str(tmp_path / "plan.json"), "-o", str(tmp_path / "maxtext.yml")]) == 0
    assert said in capsys.readouterr().err


def test_stablehlo_is_the_planned_step(
    planned: shardplan.Plan, made: tuple[shardplan.Plan, Any, str], run: Callable[..., tuple[int, str, str]]
) -> None:
    pytest.importorskip("flatbuffers")
    assert run("export", "plan.json", "-o", "step.stablehlo")[2] == (
        "shardplan: step.stablehlo needs the step: shardplan export plan.json TARGET -o step.stablehlo\n"
    )
    planned.export("step.stablehlo")
    exported = jax.export.deserialize(bytearray(Path("step.stablehlo").read_bytes()))
    assert (exported.nr_devices, exported.platforms) == (8, ("cpu",))
    _, args, _ = made
    found = jax.jit(exported.call)(*jax.tree.leaves(planned.put(args)))
    expected = planned.jit(planned.step)(*args)
    for a, b in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    code, out, _ = run("export", "plan.json", "small.py:train_step", "-o", "gpu-step.stablehlo")
    assert (code, out) == (0, "exported to gpu-step.stablehlo\n")
    assert jax.export.deserialize(bytearray(Path("gpu-step.stablehlo").read_bytes())).platforms == ("cuda",)
    assert (
        "made for another model"
        in run("export", "plan.json", "small.py:train_step", "--set", "width=32", "-o", "step.stablehlo")[2]
    )


def test_without_flatbuffers_the_extra_is_named(planned: shardplan.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    monkeypatch.delitem(sys.modules, "jax._src.export.serialization", raising=False)
    with pytest.raises(shardplan.ShardplanError, match=r"pip install 'shardplan\[export\]'"):
        planned.export("step.stablehlo")


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (
            "specs.json",
            "'specs.json' names no form of export: end the name in specs.py, rules.yml, maxtext.yml or step.stablehlo",
        ),
        ("nowhere/specs.py", "cannot write nowhere/specs.py: there is no folder"),
        ("folder-specs.py", "cannot write folder-specs.py: it is a folder"),
        ("", "-o is empty: give the name of a file"),
    ],
)
def test_a_file_that_cannot_be_written_is_one_line(
    planned: shardplan.Plan, run: Callable[..., tuple[int, str, str]], file: str, message: str
) -> None:
    Path("folder-specs.py").mkdir()
    code, out, err = run("export", "plan.json", "-o", file)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    if file:
        with pytest.raises(shardplan.ShardplanError):
            planned.export(file)


def test_an_existing_file_is_replaced_as_a_whole(planned: shardplan.Plan) -> None:
    Path("rules.yml").write_text("old" * 100_000)
    planned.export("rules.yml")
    assert Path("rules.yml").read_text().startswith("# Rules for the 8 argument arrays")
    assert sorted(p.name for p in Path().glob("*rules*")) == ["rules.yml"]


def test_an_option_of_a_factory_without_a_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "plan.json", "--set", "layers=2", "-o", str(tmp_path / "rules.yml")]) == 2
    assert "--set layers=2 is an option of a TARGET, and none is given" in capsys.readouterr().err
