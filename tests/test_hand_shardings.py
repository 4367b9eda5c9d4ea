"""The programs by hand of `benchmarks/by_hand.py`: what they cut is what people cut."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.hand_rows import BLOCKS, ROWS, Row
from benchmarks.hand_shardings import HANDS, path_text
from models import moe

TENSOR = HANDS["FSDP x tensor 2"]
SIZES = {"data": 4, "tensor": 2}
MOMENTS = ("mu", "nu")


def leaves(row: Row) -> dict[str, tuple[int, ...]]:
    """The shape of each leaf of a row's state, by its path."""
    _, (state, _) = row.step()
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return {path_text(path): tuple(x.shape) for path, x in flat}


def cut(path: str, shape: tuple[int, ...]) -> list[Any]:
    """What each dim is cut over."""
    return [*TENSOR.weight(path, shape, SIZES), *(None,) * len(shape)][: len(shape)]


@pytest.mark.parametrize("name", ["gpt-labels", "gpt-125m", "gpt-350m-scan", "llama-8b", "moe", "t5"])
def test_megatron_cuts_heads_inner_dims_and_the_vocabulary(name: str) -> None:
    row = ROWS[name]
    assert row.name in BLOCKS
    kernels = {path: shape for path, shape in leaves(row).items() if not set(path.split("/")) & {*MOMENTS, "opt_state"}}
    attended = [path for path in kernels if "/attention/" in path and "kernel" in path]
    assert attended
    for path, shape in kernels.items():
        at = [d for d, axis in enumerate(cut(path, shape)) if axis == "tensor"]
        words = path.removesuffix("/value").split("/")
        if path in attended and "out" in words:
            heads = len(shape) - (4 if name in ("llama-8b", "moe") else 3)  # groups of heads share keys in these
            assert at == [heads], path
        elif path in attended:
            assert len(at) == 1, path
            assert shape[at[0]] < 64, f"{path}: heads are fewer than features"
        elif words[-1] == "kernel" and words[-2] in ("up", "gate", "head"):
            assert at == [len(shape) - 1], path
        elif words[-1] == "kernel" and words[-2] == "down":
            assert at == [len(shape) - 2], path
        elif "norm" in path.lower():
            assert at == [], path


@pytest.mark.parametrize("name", ["gpt-labels", "gpt-350m-scan", "llama-8b"])
def test_each_moment_lies_as_its_weight(name: str) -> None:
    shapes = leaves(ROWS[name])
    moments = 0
    for path, shape in shapes.items():
        words = path.split("/")
        moment = next((word for word in MOMENTS if word in words), None)
        if moment is None:
            continue
        tail = words[words.index(moment) + 1 :]
        weights = [p for p in shapes if p.split("/")[-len(tail) :] == tail and not set(p.split("/")) & {*MOMENTS, "opt_state"}]
        weight = min(weights, key=len)  # the path that ends so and has the least before it
        assert cut(path, shape) == cut(weight, shapes[weight]), path
        moments += 1
    assert moments > 4


def test_experts_by_hand_exchange_tokens(devices: list[Any]) -> None:
    """Tokens go to their experts by all-to-alls."""
    hand, mesh = HANDS["experts"], jax.make_mesh((2, 4), ("data", "expert"), devices=devices, axis_types=(AxisType.Auto,) * 2)
    step, (state, batch) = moe.train_step(layers=1, boundary=hand.boundary, dispatched=hand.dispatched)

    def of_weight(path: Any, x: Any) -> Any:
        return NamedSharding(mesh, PartitionSpec(*hand.weight(path_text(path), tuple(x.shape), dict(mesh.shape))))

    shardings = jax.tree_util.tree_map_with_path(of_weight, state), NamedSharding(mesh, PartitionSpec(*hand.batch))
    with jax.set_mesh(mesh):
        text = jax.jit(step, in_shardings=shardings).lower(state, batch).compile().as_text()
    assert text is not None
    assert " all-to-all(" in text
