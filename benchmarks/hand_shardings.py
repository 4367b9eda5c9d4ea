"""Train steps sharded by hand, with no code of shardplan.

A program is the step under `jax.jit`, with a `NamedSharding` for each argument and, where people write it,
`with_sharding_constraint` between blocks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.hand_rows import BLOCKS, Row

SMALLEST = 1024
"""FSDP leaves arrays of fewer elements whole: our choice (gathers of biases cost a launch each and save nothing)."""


Spec = tuple[Any, ...]
"""The entries of a `PartitionSpec`: for each dim a mesh axis, a tuple of axes or None."""


@dataclass(frozen=True, slots=True)
class Hand:
    """A sharding as people write it: the sizes of its mesh axes, the spec of a weight by its path and shape, that of a batch, and
    where activations lie between blocks. ``needs`` says for which rows it makes sense, ``dispatched`` how the tokens of
    experts are sharded (`models.moe`).
    """

    axes: Callable[[int, int], Mapping[str, int]]
    weight: Callable[[str, tuple[int, ...], Mapping[str, int]], Spec]
    batch: Spec
    boundary: Spec
    needs: Callable[[Row], bool] = lambda row: True
    dispatched: Spec | None = None


def _whole(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    return ()


def _largest(axes: tuple[str, ...]) -> Callable[[str, tuple[int, ...], Mapping[str, int]], Spec]:
    """FSDP: the largest dim that divides, over these axes."""

    def spec(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
        ways = math.prod(sizes[axis] for axis in axes)
        legal = [d for d, n in enumerate(shape) if n % ways == 0]
        if math.prod(shape) < SMALLEST or not legal:
            return ()
        return (*(None,) * _largest_of(legal, shape), axes[0] if len(axes) == 1 else axes)

    return spec


def _largest_of(dims: Sequence[int], shape: tuple[int, ...]) -> int:
    """The dim with the most elements; the first of several."""
    return max(dims, key=lambda d: (shape[d], -d))


_CUT = re.compile(r"(qkv|query|key|value|out|up|gate|down|embedding|head)$")


def _megatron(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """Megatron's cut of a weight over "tensor": heads of attention, the inner dim of MLPs, the vocabulary."""
    words = path.removesuffix("/value").split("/")  # an nnx variable's leaf
    ways = sizes["tensor"]
    stacked = int("blocks" in words and not words[words.index("blocks") + 1].isdigit())
    name = next((word for word in reversed(words) if _CUT.search(word)), "")
    is_bias, rank = words[-1] == "bias", len(shape) - stacked
    if (name, words[-1]) in (("up", "a"), ("down", "b")):  # an adapter's side without the inner dim
        return ()
    at = None
    if name.endswith("qkv"):
        at = rank - 2  # [width, 3, heads, head] and [3, heads, head]
    elif name in ("query", "key", "value"):
        at = 0 if is_bias else 1 if rank > 1 else None
    elif name in ("out", "down"):
        at = None if is_bias else rank - 2 if name == "down" else 0
    elif name in ("up", "gate"):
        at = rank - 1
    elif "embedding" in name:
        at = 0
    elif name == "head":
        at = rank - 1
    if at is None or at < 0 or shape[at + stacked] % ways:
        return ()
    return (*(None,) * (at + stacked), "tensor")


def _both(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """Megatron's cut, and FSDP of the largest other dim over "data"."""
    cut = [*_megatron(path, shape, sizes), *(None,) * len(shape)][: len(shape)]
    free = [d for d, n in enumerate(shape) if cut[d] is None and n % sizes["data"] == 0]
    if free and math.prod(shape) >= SMALLEST:
        cut[_largest_of(free, shape)] = "data"
    return tuple(cut)


def _experts(path: str, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Spec:
    """Experts over "expert", all other weights FSDP over all axes."""
    if "moe" in path.split("/") and len(shape) == 3 and shape[0] % sizes["expert"] == 0:
        return ("expert", *(None,) * (len(shape) - 2), "data" if shape[-1] % sizes["data"] == 0 else None)
    return _largest(("data", "expert"))(path, shape, sizes)


def _flat(nodes: int, gpus: int) -> Mapping[str, int]:
    return {"data": nodes * gpus}


def _levels(nodes: int, gpus: int) -> Mapping[str, int]:
    return {"node": nodes, "gpu": gpus}


def _tensor(ways: int) -> Callable[[int, int], Mapping[str, int]]:
    return lambda nodes, gpus: {"data": nodes * gpus // ways, "tensor": ways}


def _transformer(row: Row) -> bool:
    return row.name in BLOCKS


def _several_nodes(row: Row) -> bool:
    return row.sizes[0] > 1


def _transformer_on_nodes(row: Row) -> bool:
    return _transformer(row) and _several_nodes(row)


HANDS = {
    "data parallel": Hand(_flat, _whole, ("data",), ("data",)),
    "FSDP": Hand(_flat, _largest(("data",)), ("data",), ("data",)),
    "hybrid FSDP": Hand(_levels, _largest(("gpu",)), (("node", "gpu"),), (("node", "gpu"),), _several_nodes),
    "FSDP x tensor 2": Hand(_tensor(2), _both, ("data",), ("data",), _transformer),
    "FSDP x tensor 8": Hand(_tensor(8), _both, ("data",), ("data",), _transformer_on_nodes),
    "FSDP x tensor 8, sequence": Hand(_tensor(8), _both, ("data",), ("data", "tensor"), _transformer_on_nodes),
    "experts": Hand(
        lambda nodes, gpus: {"data": nodes, "expert": gpus},
        _experts,
        (("data", "expert"),),
        (("data", "expert"),),
        lambda row: row.name == "moe",
        ("expert", "data"),
    ),
}
"""The shardings that people write: FSDP is MaxText's default, "tensor" Megatron's inside a node."""


def by_hand(row: Row, hand: Hand, machine: Any) -> Any:
    """The step of a row under a sharding by hand, lowered for a machine (a `topologies` description). The state is donated."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    nodes, gpus = row.sizes
    sizes = {name: n for name, n in hand.axes(nodes, gpus).items() if n > 1 or name == "data"}
    mesh = Mesh(np.array(machine.devices).reshape(tuple(sizes.values())), tuple(sizes))
    options = {"boundary": _boundary(row, hand.boundary)} if row.name in BLOCKS else {}
    step, (state, batch) = row.step(**options, **({"dispatched": hand.dispatched} if hand.dispatched else {}))

    def sharding(spec: Spec) -> Any:
        return NamedSharding(mesh, PartitionSpec(*spec))

    def of_weight(path: Any, x: Any) -> Any:
        return sharding(hand.weight(path_text(path), tuple(x.shape), {**dict.fromkeys(hand.axes(nodes, gpus), 1), **sizes}))

    states = jax.tree_util.tree_map_with_path(of_weight, state)
    batches = jax.tree.map(lambda x: sharding(hand.batch), batch)
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, in_shardings=(states, batches), out_shardings=(states, sharding(())), donate_argnums=0)
        return jitted.lower(state, batch)


def path_text(path: Sequence[Any]) -> str:
    """The path of a leaf as `Hand.weight` reads it: keys, attributes and numbers joined by slashes."""
    import jax

    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in path)


def _boundary(row: Row, spec: Spec) -> Any:
    """A boundary in the type that the step takes: a `PartitionSpec` for steps of `hand_steps`, a tuple for `models`."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*spec) if row.source == "hand" else tuple(spec)
