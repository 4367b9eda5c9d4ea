"""Drawings: what is drawn is what the plan decided, repeats are folded and none is lost, and files are whole or not there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardplan
from models import gpt, llama, mlp
from shardplan.errors import ShardplanError
from shardplan.mesh import Cluster
from shardplan.report.draw import FORMATS, picture
from shardplan.report.drawing import Column, Drawing, RepeatedColumns, drawing, folded
from shardplan.shell.plan_of_step import Plan
from tests.machines import launchless

MAGIC = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    step, args = gpt.train_step(layers=3, width=256, sequence=64, batch=32, vocabulary=512)
    return shardplan.plan(step, *args, cluster=launchless(Cluster.load("2x2x2")), donate_argnums=0)


@pytest.fixture(scope="module")
def drawn(plan: Plan) -> Drawing:
    return drawing(plan.planned)


def unfolded(runs: Sequence[RepeatedColumns]) -> list[Column]:
    return [c for run in runs for _ in range(run.times) for c in run.columns]


def test_a_weight_is_drawn_as_its_argument_lies(plan: Plan, drawn: Drawing) -> None:
    specs = plan.specs_by_path
    column = next(c for c in unfolded(drawn.runs) if (c.block, c.label) == ("mlp", "up"))
    (path,) = [p for p in specs if "blocks/0/mlp/up/kernel" in p and "opt" not in p.lower() and p.startswith("state/0")]
    kept = tuple(
        tuple(list(plan.axes).index(a) for a in ((e,) if isinstance(e, str) else e or ())) for e in (*specs[path], None, None)
    )
    weight, activation = column.tiles
    assert (weight.kind, activation.kind) == ("weight", "activation")
    assert weight.shape == (256, 1024)
    assert weight.kept == kept[:2]


def test_every_layer_is_drawn_once_and_equal_layers_are_folded(drawn: Drawing) -> None:
    layer = ["qkv", "QK", "AV", "out", "up", "down"]
    assert [c.label for c in unfolded(drawn.runs)] == ["embedding", *layer * 3, "head"]
    assert max(run.times for run in drawn.runs) == 3


def test_what_brings_a_tensor_to_its_op_is_what_lies_between_its_layouts(drawn: Drawing) -> None:
    tiles = [t for run in drawn.runs for c in run.columns for t in c.tiles]
    assert any(t.moves for t in tiles)
    for tile in tiles:
        assert not tile.moves or tile.kept != tile.read
        if "all-gather" in tile.moves:
            assert sum(map(len, tile.read)) < sum(map(len, tile.kept))


def test_every_cut_dim_is_shown_up_to_two(drawn: Drawing) -> None:
    for tile in [t for run in drawn.runs for c in run.columns for t in c.tiles]:
        cut = {d for d, (a, b) in enumerate(zip(tile.kept, tile.read, strict=True)) if a or b}
        assert len(tile.shown) == min(2, len(tile.shape))
        assert cut <= set(tile.shown) or set(tile.shown) <= cut


def test_a_loops_body_is_drawn_once_with_its_trips() -> None:
    step, args = llama.train_step(layers=6, scan=True, remat=True)
    drawn = drawing(shardplan.plan(step, *args, cluster="2x4").planned)
    body = next(run for run in drawn.runs if "gate" in [c.label for c in run.columns])
    assert body.times == 6
    assert [c.label for c in body.columns].count("value") == 1


def test_a_step_that_feeds_no_state_back_has_its_weights_drawn_too() -> None:
    def predict(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    shapes = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((128, 64), "float32")
    (run,) = drawing(shardplan.plan(predict, *shapes, cluster="4").planned).runs
    (column,) = run.columns
    assert [(t.kind, t.shape) for t in column.tiles] == [("weight", (64, 32)), ("activation", (128, 64))]


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_folding_loses_nothing(letters: list[str]) -> None:
    columns = [Column("", name, (), (), ()) for name in letters]
    runs = folded(columns)
    assert [c.label for c in unfolded(runs)] == letters
    assert sum(len(run.columns) for run in runs) <= len(letters)


def test_a_repeat_begins_where_a_block_does() -> None:
    """Of a stage whose first block differs, the later blocks are folded, each whole."""
    blocks = [["first", "b", "c"], ["a", "b", "c"], ["a", "b", "c"]]
    columns = [Column("block", name, (i,), (), ()) for i, block in enumerate(blocks) for name in block]
    assert [([c.label for c in run.columns], run.times) for run in folded(columns)] == [
        (["first", "b", "c"], 1),
        (["a", "b", "c"], 2),
    ]


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_picture_is_a_file_of_its_format_and_the_same_again(drawn: Drawing, suffix: str) -> None:
    once = picture(drawn, title="a title", suffix=suffix)
    assert once.startswith(MAGIC[suffix])
    assert once == picture(drawn, title="a title", suffix=suffix)


def test_a_picture_is_written_whole_beside_nothing(plan: Plan, tmp_path: Path) -> None:
    plan.draw(tmp_path / "plan.SVG", title="gpt")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.SVG"]
    assert "gpt on 2x2x2" in (tmp_path / "plan.SVG").read_text()
    with pytest.raises(ShardplanError, match="cannot write"):
        plan.draw(tmp_path / "nowhere" / "plan.svg")


def test_an_unknown_format_names_those_that_there_are(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ShardplanError, match=r"plan\.bmp.*\.png, \.svg, \.pdf"):
        plan.draw(tmp_path / "plan.bmp")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ShardplanError, match=r"pip install 'shardplan\[draw\]'"):
        plan.draw(tmp_path / "plan.png")


@pytest.mark.slow
def test_a_plan_on_one_device_and_one_of_many_parts_are_drawn() -> None:
    step, args = mlp.train_step(width=256, batch=4096)
    for cluster in ("1", "64x8"):
        assert picture(drawing(shardplan.plan(step, *args, cluster=cluster).planned), title="", suffix="svg")
