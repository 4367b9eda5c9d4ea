"""What XLA's partitioner makes of a sharding that the user wrote: foreseen, and compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from models import gpt, mlp
from shardplan.errors import DeviceError, PinError, ShardplanError
from shardplan.hlo.meter import HloCollective, measure
from shardplan.hlo.reshards import Sent
from shardplan.ir import Collective
from shardplan.report.score_text import score_text
from shardplan.shell.score_of_xla import replicated
from shardplan.verify.compiler_log import LastResort
from shardplan.verify.given import Compiled
from tests.shell.test_score import BOTH, fsdp


@pytest.mark.parametrize("model", [mlp, pytest.param(gpt, marks=pytest.mark.slow)], ids=["mlp", "gpt"])
def test_predicted_bytes_are_those_that_xla_compiles(model: Any) -> None:
    step, args = model.train_step()
    told: list[tuple[str, float]] = []
    options = {"measure": True, "donate_argnums": 0, "observer": lambda what, share: told.append((what, share))}
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args), **options)
    assert told[-1][0] == "compiling your sharding"
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert found.inferred
    assert found.measured is not None
    assert found.measured.communication_bytes == pytest.approx(found.communication_bytes, rel=0.02)
    for row in found.measured.collectives.values():
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.02, abs=64)
    assert sum(row.bytes for row in found.measured.added) <= 0.02 * found.communication_bytes


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_what_xla_makes_of_a_loop_over_layers_is_foreseen(remat: bool) -> None:
    """Under FSDP without constraints inside, XLA splits gradients by features and gathers them whole, in every layer."""
    step, args = gpt.train_step(scan=True, remat=remat, layers=4, width=256, heads=8, sequence=128, batch=64)
    found = shardplan.score(step, *args, cluster="2x4", in_shardings=fsdp(args), measure=True, donate_argnums=0)
    assert found.measured is not None
    assert found.communication_bytes > 5 * found.best_communication_bytes
    assert found.measured.communication_bytes == pytest.approx(found.communication_bytes, rel=0.02)
    assert found.measured.collectives["all-gather"]["measured"] == pytest.approx(
        found.measured.collectives["all-gather"]["predicted"], rel=0.02
    )
    assert any(row.kind == "all-gather" and "mlp (backward)" in row.tensor and "gpt.py" in row.source for row in found.unasked)


def placing(*spec: Any, names: tuple[str, str] = ("node", "gpu")) -> Callable[..., Any]:
    """A step whose hidden values lie by ``spec`` over a mesh of 2x4 devices."""
    mesh = AbstractMesh((2, 4), names, axis_types=(AxisType.Auto,) * 2)

    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(mesh, P(*spec)))
            return jnp.mean(y**2)

        return w - 0.1 * jax.grad(loss)(w)

    return step


def test_what_xla_does_not_compile_is_an_error_of_our_own() -> None:
    """XLA's partitioner makes slices of nothing of a transposed convolution whose window is split."""

    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * jax.grad(lambda w: jnp.mean(jax.lax.conv_transpose(x, w, (2, 2), "SAME") ** 2))(w)

    kernel, images = jax.ShapeDtypeStruct((4, 4, 8, 16), "float32"), jax.ShapeDtypeStruct((8, 8, 8, 8), "float32")
    shardings = P(None, "gpu"), P()
    assert shardplan.score(step, kernel, images, cluster="2x4", in_shardings=shardings).step_time_s > 0
    with pytest.raises(
        DeviceError, match=r"with this sharding, for the op at .*test_score_of_xla.py:\d+ \(.*: .*or leave out measure"
    ):
        shardplan.score(step, kernel, images, cluster="2x4", in_shardings=shardings, measure=True)


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


def test_what_xla_adds_has_the_users_lines_without_constraints_too() -> None:
    """Then the ops of the step run one by one, by code of shardplan."""
    shardings = P("gpu"), P(None, BOTH)
    kept, freed = (
        shardplan.score(placing(None, "gpu"), *PLACED, cluster="2x4", in_shardings=shardings, measure=True, constraints=how)
        for how in ("keep", "ignore")
    )
    for found in (kept, freed):
        assert found.measured is not None
        assert found.measured.added
        assert all("jnp.tanh(x @ w)" in line(row.source) for row in found.measured.added)


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
    assert Path(__file__).name in row.source
    assert row.bytes == pytest.approx(64**3 * 4 * 7 / 8)
    assert "rematerialization" not in capfd.readouterr().err
    assert any(one.kind == "all-gather" and one.source == row.source for one in found.measured.added)
    text = score_text(found, title="a step")
    assert "Values that XLA gathers whole on every device, and then cuts in another way" in text
    assert row.source in text


def test_each_last_resort_of_xla_is_a_row_with_its_bytes() -> None:
    """Also two at one line, and one for which no collective is known."""
    resorts = [
        LastResort("f32", (8, 64, 64), 8, "P('all', None, None)", "P(None, 'all', None)", "jit(run)/mul", 1),
        LastResort("f32", (8, 64, 64), 8, "P('all', None, None)", "P(None, None, 'all')", "jit(run)/mul", 1),
        LastResort("bf16", (4, 8), 4, "P('gpu', None)", "P(None, 'gpu')", "jit(run)/add", 2),
    ]
    text = """HloModule m, num_partitions=8
ENTRY %main (p: f32[1024]) -> f32[1024] {
  ROOT %p = f32[1024]{0} parameter(0)
}
"""
    lines = ["a.py:1 (f)", "a.py:1 (f)", "a.py:2 (f)"]
    rows = replicated(Compiled(measure(text), (), 0, tuple(zip(resorts, lines, strict=True))), [])
    part = 8 * 64 * 64 * 4
    assert [(row.source, row.after, row.bytes) for row in rows] == [
        ("a.py:1 (f)", "P(None, 'all', None)", 7 * part),
        ("a.py:1 (f)", "P(None, None, 'all')", 7 * part),
        ("a.py:2 (f)", "P(None, 'gpu')", 3 * 64),
    ]
    gather = HloCollective(Collective.ALL_GATHER, 64, 8, ((0, 1, 2, 3, 4, 5, 6, 7),), 1, "all-gather.1", "", "f32", 3)
    gathered = Sent(gather, -1, "jit(run)/sub", "a.py:3 (f)", cut_again=True)
    first, second = replicated(Compiled(measure(text), (gathered,), 0, tuple(zip(resorts[2:], lines[2:], strict=True))), [])
    assert (first.involuntary, first.source) == (True, "a.py:2 (f)")
    assert (second.involuntary, second.bytes) == (False, gathered.collective.wire_bytes)


def test_a_score_initialises_no_device() -> None:
    """A process that only scores keeps no GPU from others, and may still join `jax.distributed`."""
    code = """
import jax, shardplan
from jax._src import xla_bridge
from jax.sharding import PartitionSpec as P
x = jax.ShapeDtypeStruct((64, 64), "float32")
found = shardplan.score(lambda w, x: w + x @ w, x, x, cluster="2x4", in_shardings=P("gpu"))
assert found.inferred
assert not xla_bridge._backends, list(xla_bridge._backends)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
