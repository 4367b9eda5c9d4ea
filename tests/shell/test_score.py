"""`shardplan.score` and `shardplan score`: a sharding that the user wrote, priced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp
from shardplan.errors import ClusterError, PinError, ShardplanError
from shardplan.shell.cli import main

WIDE = {"width": 1024, "batch": 2048, "inputs": 1024}
BOTH = ("node", "gpu")


def fsdp(tree: Any, axes: Any = BOTH, ways: int = 8) -> Any:
    """FSDP by hand: each array split along its first dim that divides, the batch along its leading one."""

    def spec(x: Any) -> P:
        d = next((i for i, n in enumerate(x.shape) if n % ways == 0), None)
        return P() if d is None else P(*[None] * d, axes)

    return jax.tree.map(spec, tree)


@pytest.fixture(scope="module")
def wide() -> tuple[Any, Any, shardplan.Score]:
    """(step, args, score) of an MLP by FSDP."""
    step, args = mlp.train_step(**WIDE)
    return step, args, shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args))


def test_fsdp_of_an_mlp_is_priced_beside_the_plan(wide: Any) -> None:
    step, args, found = wide
    plan = shardplan.plan(step, *args, cluster="2x4")
    baseline = next(b for b in plan.baselines if b.name == "FSDP")
    assert found.plan_s == plan.step_time_s
    assert plan.step_time_s <= found.step_time_s <= baseline.step_time_s * 1.001  # the best with these arguments
    assert found.fits
    assert found.peak_bytes < plan.peak_bytes
    assert found.replicated == ()
    assert found.in_specs["batch/inputs"] == "P(('node', 'gpu'))"
    assert all(a.seconds >= b.seconds > 0 for a, b in zip(found.losses, found.losses[1:], strict=False))
    assert all("mlp.py" in row.source or "losses.py" in row.source or "optax" in row.source for row in found.unasked)


def test_an_array_that_is_pinned_badly_is_named_first_with_its_line(wide: Any) -> None:
    """The first kernel's output dim over both levels: its activations would have to move, or the kernel be gathered."""
    step, args, before = wide
    bad = fsdp(args)
    bad[0]["params"]["layer_1"]["kernel"] = P("gpu", "node")
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=bad)
    first = found.losses[0]
    assert first.path == "state/params/layer_1/kernel"
    assert first.given == "P('gpu', 'node')"
    assert first.instead != first.given
    assert "mlp.py" in first.source
    assert first.bytes > 0
    assert found.step_time_s > before.step_time_s


@pytest.mark.slow
def test_a_gain_is_that_of_the_freed_argument_alone(wide: Any) -> None:
    """Pinning the argument where its loss says makes the step faster by what it says, in the search's prices."""
    step, args, _ = wide
    bad = fsdp(args)
    bad[0]["params"]["layer_1"]["kernel"] = P("gpu", "node")
    before = shardplan.score(step, *args, cluster="2x4", in_shardings=bad)
    loss = before.losses[0]
    bad[0]["params"]["layer_1"]["kernel"] = eval(loss.instead, {"P": P})
    after = shardplan.score(step, *args, cluster="2x4", in_shardings=bad)
    assert after.communication_bytes == pytest.approx(before.communication_bytes - loss.bytes)
    assert not [row for row in after.losses if row.path == loss.path]


def test_fsdp_of_a_gpt_names_what_the_plan_does_not_send() -> None:
    step, args = gpt.train_step()
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args))
    assert found.plan_s < found.step_time_s
    gathered = [row for row in found.unasked if row.kind == "all-gather"]
    assert gathered
    assert all(row.bytes > 0 for row in found.unasked)
    assert sum(row.bytes for row in found.unasked) <= found.communication_bytes
    assert any("gpt.py" in row.source for row in gathered)


def test_a_prefix_stands_for_all_below_it() -> None:
    step, args = mlp.train_step()
    state, batch = args
    whole = jax.tree.map(lambda x: P(), state), {"inputs": P("node"), "labels": P("node")}
    assert jax.tree.structure(whole[1]) == jax.tree.structure(batch)
    one = shardplan.score(step, *args, cluster="2x4", in_shardings=(P(), P("node")))
    every = shardplan.score(step, *args, cluster="2x4", in_shardings=whole)
    assert one == every
    nothing = shardplan.score(step, *args, cluster="2x4", in_shardings=(None, P("node")))
    assert nothing.step_time_s == one.step_time_s
    assert len(nothing.replicated) == len(jax.tree.leaves(state))
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=None).communication_bytes == 0


def test_the_first_rule_that_matches_holds() -> None:
    step, args = mlp.train_step()
    found = shardplan.score(
        step, *args, cluster="2x4", rules={"batch/*": P("node"), "*layer_1/kernel": P("gpu"), "*kernel": P(None, "gpu")}
    )
    assert found.in_specs["state/params/layer_1/kernel"] == "P('gpu')"
    assert found.in_specs["state/params/layer_2/kernel"] == "P(None, 'gpu')"
    assert found.in_specs["state/params/layer_2/bias"] == "P()"
    assert "state/params/layer_2/bias" in found.replicated


MISTAKES = [
    ({"rules": {"*kernl": P("gpu")}}, "the rule '*kernl' = PartitionSpec('gpu',) matches no argument"),
    ({"rules": {"batch/inputs": P("gpux")}}, "unknown axis 'gpux'; the mesh has node=2, gpu=4 (nearest: gpu)"),
    ({"rules": {"batch/inputs": P("data")}}, "other axes need mesh="),
    ({"rules": {"batch/labels": P("gpu", None)}}, "has 2 entries, but batch/labels has rank 1"),
    ({"rules": {"state/params/layer_3/bias": P(("node", "gpu"))}}, "which does not divide 10"),
    ({"rules": {"batch/inputs": "gpu"}}, "no argument carries axis names"),
    ({"rules": {"batch/inputs": 3}}, "give a PartitionSpec for a glob"),
    ({"rules": 7}, "rules=7"),
    ({"rules": {}}, "nothing shards the step"),
    ({}, "nothing shards the step"),
    ({"in_shardings": (P(),)}, "has 1 entries, and the step takes 2"),
    ({"in_shardings": {"inputs": P()}}, "in_shardings is a dict"),
    ({"in_shardings": (P(), {"inputs": P("node")})}, "nothing for batch/labels"),
    ({"in_shardings": (P(), {"inputs": P(), "labels": P(), "label": P()})}, "batch/label, which is no argument"),
    ({"in_shardings": (P(), "node")}, "is a str: give a PartitionSpec"),
    ({"in_shardings": P(), "rules": {"*": P()}}, "cannot be given together"),
    ({"in_shardings": P(), "mesh": {"data": 3}}, "has 3 devices, and '2x4' has 8"),
    ({"in_shardings": P(), "mesh": {}}, "give sizes by axis name"),
    ({"in_shardings": P(), "pins": {"*": P()}}, "score has no option 'pins'"),
]


@pytest.mark.parametrize(("given", "part"), MISTAKES, ids=[part for _, part in MISTAKES])
def test_a_mistake_says_what_to_do(given: dict[str, Any], part: str) -> None:
    step, args = mlp.train_step(classes=10)
    with pytest.raises((PinError, ClusterError, ShardplanError)) as raised:
        shardplan.score(step, *args, cluster="2x4", **given)
    assert part.replace("PartitionSpec('gpu',)", str(P("gpu"))) in str(raised.value)


class Linen(nn.Module):
    """Two layers whose kernels name mesh axes, or logical ones."""

    logical: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        wrap = nn.with_logical_partitioning if self.logical else nn.with_partitioning
        names = ("embed", "mlp") if self.logical else (None, "gpu")
        init = nn.initializers.lecun_normal()
        x = nn.Dense(64, kernel_init=wrap(init, names))(x)
        return nn.Dense(32, kernel_init=wrap(init, names[::-1]))(nn.relu(x))


def linen_step(*, logical: bool) -> tuple[Callable[..., Any], tuple[Any, Any]]:
    model, x = Linen(logical), jax.ShapeDtypeStruct((16, 32), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)

    def step(params: Any, x: Any) -> Any:
        run: Any = model.apply
        grads = jax.grad(lambda p: jnp.square(run(p, x)).mean())(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step, (params, x)


def test_axes_that_linen_metadata_names_are_read_from_the_model() -> None:
    step, args = linen_step(logical=False)
    found = shardplan.score(step, *args, cluster="2x4", rules={"x": P("node")})
    assert found.in_specs["params/params/Dense_0/kernel"] == "P(None, 'gpu')"
    assert found.in_specs["params/params/Dense_1/kernel"] == "P('gpu', None)"
    assert found.in_specs["x"] == "P('node')"
    assert found.replicated == ("params/params/Dense_0/bias", "params/params/Dense_1/bias")


def test_logical_axes_go_through_flaxs_rules() -> None:
    step, args = linen_step(logical=True)
    found = shardplan.score(
        step, *args, cluster="2x4", rules=[("mlp", "gpu"), ("embed", "node"), ("heads", "gpu"), ("x", P("node"))]
    )
    assert found.in_specs["params/params/Dense_0/kernel"] == "P('node', 'gpu')"
    with pytest.raises(PinError, match="unknown axis 'embed'"):
        shardplan.score(step, *args, cluster="2x4")


class Nnx(nnx.Module):
    """One layer whose kernel names a mesh axis."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "gpu"))
        self.layer = nnx.Linear(8, 64, rngs=rngs, kernel_init=init)


def test_nnx_objects_may_be_arguments() -> None:
    with nnx.use_eager_sharding(False):
        model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda m: (m.layer(x) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    args = model, optimizer, jax.ShapeDtypeStruct((16, 8), jnp.float32)
    carried = shardplan.score(step, *args, cluster="2x4", rules={"x": P("node")})
    assert carried.in_specs["model/layer/kernel"] == "P(None, 'gpu')"
    assert carried.in_specs["optimizer/opt_state/0/mu/layer/kernel"] == "P(None, 'gpu')"
    specs = nnx.get_partition_spec(nnx.state(model)), nnx.get_partition_spec(nnx.state(optimizer)), P("node")
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=specs).step_time_s == carried.step_time_s
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=(P(), None, P())).communication_bytes == 0


def test_named_shardings_over_the_users_own_mesh(devices: list[Any]) -> None:
    """The mesh's axes lie on the levels; specs and losses name them."""
    step, args = mlp.train_step()
    mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mine = NamedSharding(mesh, P("model")), NamedSharding(mesh, P(("data", "model")))
    state = jax.tree.map(lambda x: mine[0] if x.ndim == 2 else None, args[0])
    found = shardplan.score(step, *args, cluster="8", in_shardings=(state, mine[1]))
    assert found.axes == {"data": 4, "model": 2}
    assert any("'model'" in loss.given for loss in found.losses)
    over = shardplan.score(step, *args, cluster=mesh, in_shardings=(state, mine[1]), mesh=mesh)
    assert over.in_specs == found.in_specs
    other = Mesh(np.array(devices), ("all",), axis_types=(AxisType.Auto,))
    with pytest.raises(ClusterError, match="several meshes"):
        shardplan.score(step, *args, cluster="8", in_shardings=(state, NamedSharding(other, P("all"))))


def test_an_axis_may_go_over_several_levels() -> None:
    step, args = mlp.train_step()
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=(fsdp(args[0], "all"), P("all")), mesh={"all": 8})
    same = shardplan.score(step, *args, cluster="2x4", in_shardings=(fsdp(args[0]), P(BOTH)))
    assert found.step_time_s == same.step_time_s
    assert found.losses[0].given == "P(('all[0]', 'all[1]'))"


def test_a_mesh_that_does_not_lie_on_the_levels_is_refused() -> None:
    step, args = mlp.train_step()
    with pytest.raises(ClusterError, match="does not lay its axes on the levels"):
        shardplan.score(step, *args, cluster="3x2", in_shardings=P(), mesh={"a": 2, "b": 3})


@pytest.mark.slow
def test_what_does_not_fit_is_priced_all_the_same() -> None:
    step, args = mlp.train_step(**WIDE)
    plan = shardplan.plan(step, *args, cluster="2x4", memory_limit="16MiB")
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=None, memory_limit="16MiB")
    assert not found.fits
    assert found.peak_bytes > found.memory_limit == plan.memory_limit
    assert found.plan_s == plan.step_time_s


def test_odd_sizes_are_priced_whole() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    args = jnp.ones((7, 5)), jnp.ones((9, 7))
    assert shardplan.score(step, *args, cluster="2x4", in_shardings=P()).in_specs == {"w": "P()", "x": "P()"}
    with pytest.raises(PinError, match=r"in_shardings: w: .* does not divide 7; 8 would"):
        shardplan.score(step, *args, cluster="2x4", in_shardings=(P("node"), P()))


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_the_score_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "rules.json").write_text(json.dumps({"batch/*": "P(('node', 'gpu'))", "*kernel": ["gpu", None]}))
    argv = ["score", "models.mlp:train_step", "--cluster", "2x4", "--rules", "rules.json", "--measure", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {"step_time_s", "plan_s", "communication_bytes", "peak_bytes", "fits", "losses", "unasked"}
    assert all(row.keys() >= {"path", "source", "seconds", "bytes", "instead"} for row in found["losses"])
    assert all(row.keys() >= {"kind", "bytes", "source"} for row in found["unasked"])
    measured = found["measured"]
    assert measured["communication_bytes"] > 0
    assert measured["communication_bytes"] == pytest.approx(sum(row["measured"] for row in measured["collectives"].values()))
    assert found["communication_bytes"] == pytest.approx(sum(row["predicted"] for row in measured["collectives"].values()))


def test_what_plan_prints_is_a_file_of_specs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["models.mlp:train_step", "--cluster", "2x4", "--set", "width=512", "--set", "batch=512"]
    assert main(["plan", *target, "--factors", "gpu=2x2", "--json"]) == 0
    printed = capsys.readouterr().out
    (files / "plan.json").write_text(printed)
    assert main(["score", *target, "--specs", "plan.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best_s"] == pytest.approx(json.loads(printed)["step_time_s"])
    assert found["step_time_s"] == pytest.approx(found["best_s"], rel=0.05)
    assert found["axes"] == {"node": 2, "gpu0": 2, "gpu1": 2}


def test_the_score_is_saved_as_a_page(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "rules.json").write_text(json.dumps({"*kernel": "P('gpu')"}))
    argv = ["score", "models.mlp:train_step", "--cluster", "2x2", "--set", "width=512", "--rules", "rules.json", "--html"]
    assert main([*argv, "plan.html"]) == 0
    assert capsys.readouterr().out.endswith("page in plan.html\n")
    page = (files / "plan.html").read_text()
    own = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])["own"]
    assert own["specs"]
    assert set(own["specs"].values()) <= {"P('gpu')", "P()"}
    assert main([*argv, "rules.json"]) == 2
    assert "which --rules reads" in capsys.readouterr().err


def test_the_report_names_the_losses(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "rules.toml").write_text('"batch/*" = "P(\'data\')"\n"*kernel" = "P(None, \'tensor\')"\n')
    argv = ["score", "models.mlp:train_step", "--cluster", "2x4", "--rules", "rules.toml", "--mesh", "data=2,tensor=4"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "over data=2, tensor=4" in out
    assert "times as long as under the plan" in out
    assert "What a step gains if only this argument is sharded differently" in out
    assert "Collectives that the plan does not have" in out
    assert "without a spec lie whole on every device: state/optimizer/0/count" in out


FILES = [
    ("s.json", "{", "s.json: is not JSON"),
    ("s.json", "[1]", "s.json: this is no object of specs"),
    ("s.json", "{}", "s.json: it has no specs"),
    ("s.json", '{"batch/inputs": 3}', "s.json: batch/inputs: 3 is no spec"),
    ("s.json", '{"batch/inputs": "P(3)"}', "s.json: batch/inputs: 'P(3)' is not a PartitionSpec"),
    ("s.json", '{"batch/inputs": "P(\'gpux\')"}', "s.json: the rule 'batch/inputs' = P('gpux') names an unknown axis 'gpux'"),
    (
        "s.json",
        '{"batch/input": "P()"}',
        "s.json: the rule 'batch/input' = PartitionSpec() matches no argument (nearest: batch/inputs",
    ),
    ("s.json", '{"batch/inputs": "P()", "batch/inputs": "P()"}', "s.json: batch/inputs: has two specs"),
    ("s.json", '{"in_specs": {"batch/inputs": "P()"}, "axes": 3}', "s.json: axes: 3"),
    ("s.toml", "a = ", "s.toml: is not TOML"),
    ("none.json", None, "none.json: cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "part"), FILES, ids=[part for _, _, part in FILES])
def test_a_malformed_file_is_one_line_and_exit_two(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, part: str
) -> None:
    if text is not None:
        (files / name).write_text(text)
    assert main(["score", "models.mlp:train_step", "--cluster", "2x4", "--specs", name]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert part.replace("PartitionSpec()", str(P())) in err[0]


def test_arguments_by_name_are_scored() -> None:
    def step(w: jax.Array, *, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

    w, x = jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32")
    found = shardplan.score(step, w, kwargs={"x": x}, cluster="2x4", rules={"x": P(BOTH)}, donate_argnums=-1)
    assert found.in_specs["x"] == "P(('node', 'gpu'))"
    alone = shardplan.score(lambda w, x: step(w, x=x), w, x, cluster="2x4", rules={"x": P(BOTH)}, donate_argnums=0)
    assert (found.step_time_s, found.peak_bytes) == (alone.step_time_s, alone.peak_bytes)


# -- what XLA makes of it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [mlp, pytest.param(gpt, marks=pytest.mark.slow)], ids=["mlp", "gpt"])
def test_predicted_bytes_are_those_that_xla_compiles(model: Any) -> None:
    step, args = model.train_step()
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args), measure=True, donate_argnums=0)
    assert found.inferred
    assert found.measured is not None
    assert found.measured.communication_bytes == pytest.approx(found.communication_bytes, rel=0.02)
    for row in found.measured.collectives.values():
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.02, abs=64)
    assert sum(row.bytes for row in found.measured.added) <= 0.02 * found.communication_bytes


@pytest.mark.slow
def test_what_xla_makes_of_a_loop_over_layers_is_foreseen() -> None:
    """Under FSDP without constraints inside, XLA splits the activations of a scan by features, and adds up every layer's."""
    step, args = gpt.train_step(scan=True, layers=4, width=256, heads=8, sequence=128, batch=64)
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args), measure=True, donate_argnums=0)
    assert found.measured is not None
    assert found.communication_bytes > 5 * found.best_communication_bytes
    assert found.measured.communication_bytes == pytest.approx(found.communication_bytes, rel=0.3)
    assert any(row.kind == "all-reduce" and "attention" in row.tensor and "gpt.py" in row.source for row in found.unasked)


def placing(*spec: Any, names: tuple[str, str] = ("node", "gpu")) -> Callable[..., Any]:
    """A step whose hidden values lie by ``spec`` over a mesh of 2x4 devices."""
    mesh = AbstractMesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P(*spec)))
            return jnp.mean(y**2)

        return w - 0.1 * jax.grad(loss)(w)

    return step


def line(source: str) -> str:
    """The text of a source line."""
    file, number, *_ = source.replace(" ", ":").split(":")
    return Path(file).read_text().splitlines()[int(number) - 1]


PLACED = jax.ShapeDtypeStruct((512, 512), "float32"), jax.ShapeDtypeStruct((4096, 512), "float32")


def test_constraints_inside_are_kept_or_ignored() -> None:
    step = placing(None, "gpu")
    kept, freed = (
        shardplan.score(step, *PLACED, cluster="2x4", in_shardings=(P(), P(BOTH)), measure=True, constraints=how)
        for how in ("keep", "ignore")
    )
    assert freed.step_time_s < kept.step_time_s
    assert freed.plan_s <= kept.plan_s
    for found in (kept, freed):
        assert found.measured is not None
        assert found.measured.communication_bytes == pytest.approx(found.communication_bytes, rel=0.02)
    assert {row.kind for row in freed.unasked} == {"all-reduce"}
    assert any(row.kind == "all-gather" and "with_sharding_constraint" in line(row.source) for row in kept.unasked)
    with pytest.raises(ShardplanError, match="unsupported constraints='drop'"):
        shardplan.score(step, *PLACED, cluster="2x4", in_shardings=P(), constraints="drop")


def test_constraints_name_the_axes_of_the_given_mesh() -> None:
    own = shardplan.score(
        placing(None, "model", names=("data", "model")), *PLACED, cluster="2x4", in_shardings=P(), mesh={"data": 2, "model": 4}
    )
    levels = shardplan.score(placing(None, "gpu"), *PLACED, cluster="2x4", in_shardings=P())
    assert own.step_time_s == levels.step_time_s
    with pytest.raises(PinError, match="the axis 'model' of size 4"):
        shardplan.score(placing(None, "model", names=("data", "model")), *PLACED, cluster="2x4", in_shardings=P())


def test_a_value_that_xla_replicates_to_cut_it_again_is_told_with_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    """XLA's own warning on stderr, "involuntary full rematerialization", is caught and not printed."""
    mesh = AbstractMesh((2, 4), BOTH, axis_types=(AxisType.Auto,) * 2)

    def step(w: Any, x: Any) -> Any:
        y = jax.lax.with_sharding_constraint(jnp.tanh(x), NamedSharding(mesh, P(BOTH)))
        z = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, "gpu", "node")))
        return jnp.sum(z * w)

    cube = jax.ShapeDtypeStruct((64, 64, 64), "float32")
    found = shardplan.score(step, cube, cube, cluster="2x4", in_shardings=(P(None, "gpu", "node"), P(BOTH)), measure=True)
    assert found.measured is not None
    (row,) = found.measured.replicated
    assert row.involuntary
    assert (row.before, row.after) == ("P(('node', 'gpu'), None, None)", "P(None, 'gpu', 'node')")
    assert "test_score.py" in row.source
    assert row.bytes == pytest.approx(64**3 * 4 * 7 / 8)
    assert "rematerialization" not in capfd.readouterr().err
    assert any(one.kind == "all-gather" and one.source == row.source for one in found.measured.added)
    from shardplan.report.score_text import score_text

    text = score_text(found, title="a step")
    assert "Values that XLA gathers whole on every device, and then cuts in another way" in text
    assert row.source in text


# -- files of rules ----------------------------------------------------------------------------------------------------


def test_exported_files_score_like_the_plan(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["models.mlp:train_step", "--cluster", "2x4", "--set", "width=1024", "--set", "batch=2048"]
    assert main(["plan", *target, "-o", "plan.json"]) == 0
    for name in ("specs.py", "rules.yml"):
        assert main(["export", "plan.json", "-o", name]) == 0
    found: list[Any] = []
    for option, name in (("--specs", "specs.py"), ("--rules", "rules.yml")):
        capsys.readouterr()
        assert main(["score", *target, option, name, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["in_specs"] == found[1]["in_specs"]
    assert found[0]["step_time_s"] == found[1]["step_time_s"]
    assert found[0]["best_s"] == pytest.approx(found[0]["plan_s"], rel=1e-3)  # the plan has the best layouts inside
    assert main(["score", *target, "--specs", "rules.yml"]) == 2
    assert "give it with --rules, not --specs" in capsys.readouterr().err
    assert main(["score", *target, "--rules", "specs.py"]) == 2
    assert "give it with --specs, not --rules" in capsys.readouterr().err


MAXTEXT = """
mesh_axes: ['data', 'stage', 'fsdp', 'fsdp_transpose', 'sequence', 'tensor']
logical_axis_rules: [['mlp', ['fsdp_transpose', 'tensor']], ['embed', ['fsdp', 'sequence']], ['norm', 'tensor'], ['kv', []]]
data_sharding: [['data', 'stage', 'fsdp']]
dcn_data_parallelism: -1
ici_fsdp_parallelism: 2
ici_tensor_parallelism: 2
"""
LINEN = """
from tests.shell.test_score import linen_step

def train_step():
    return linen_step(logical=True)
"""


def test_the_rules_of_maxtext_are_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Axes of size one cut nothing; an axis has its part between nodes before that inside a node."""
    (files / "base.yml").write_text(MAXTEXT)
    (files / "own.py").write_text(LINEN)
    target = ["score", "own.py:train_step", "--cluster", "2x4", "--rules"]
    assert main([*target, "base.yml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: n for name, n in found["axes"].items() if n > 1} == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found["in_specs"]["params/params/Dense_0/kernel"] == "P(('fsdp', 'sequence'), ('fsdp_transpose', 'tensor'))"
    assert main([*target, "base.yml", "--mesh", "fsdp=2,tensor=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes"]["data"] == 1
    (files / "base.yml").write_text(MAXTEXT.replace("ici_tensor_parallelism: 2", "ici_tensor_parallelism: 3"))
    assert main([*target, "base.yml"]) == 2
    assert "ici_fsdp_parallelism=2, ici_tensor_parallelism=3 do not multiply to 4" in capsys.readouterr().err


YAML = [
    ("a: [", "is not YAML"),
    ("a: 1", "has neither rules:"),
    ("rules: 3\nmesh: {gpu: 8}", "rules is no list of rules"),
    ("rules: [['(', ['gpu']]]\nmesh: {gpu: 8}", "'(' is no regular expression"),
    ("rules: [['w', ['gpu']]]", "mesh: None has no sizes by name"),
    ("rules: [['^w$', ['gpu']]]\nmesh: {gpu: 8}", "the rule '^w$' = P('gpu',) matches no argument"),
    ("logical_axis_rules: [['embed', 3]]", "embed: 3 is no mesh axis"),
    ("logical_axis_rules: [['embed', fsdp]]\nmesh_axes: [fsdp]\nici_fsdp_parallelism: 0", "ici_fsdp_parallelism is no number"),
]


@pytest.mark.parametrize(("text", "part"), YAML, ids=[part for _, part in YAML])
def test_a_mistake_in_yaml_is_one_line_and_exit_two(
    files: Path, capsys: pytest.CaptureFixture[str], text: str, part: str
) -> None:
    (files / "rules.yml").write_text(text)
    assert main(["score", "models.mlp:train_step", "--cluster", "8", "--rules", "rules.yml"]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert err[0].startswith("shardplan: rules.yml: ")
    assert part.replace("P('gpu',)", str(P("gpu"))) in err[0] or part in err[0]


def test_few_rows_make_up_the_losses(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left of them is one row."""
    (files / "rules.json").write_text(json.dumps({"*kernel": "P(('node', 'gpu'))", "batch/*": "P(('node', 'gpu'))"}))
    argv = ["score", "models.mlp:train_step", "--cluster", "2x4", "--set", "layers=12", "--rules", "rules.json"]
    assert main([*argv, "--json"]) == 0
    every = json.loads(capsys.readouterr().out)["losses"]
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert len(every) > 12
    assert "others, together" in shown or shown.count("\n") < 40
