"""Axes that a user fixes: each factor cuts what its purpose says, the matrix is the best of all legal ones, and it runs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import shardplan
from models import gpt, moe
from shardplan.constants import CONSTANTS
from shardplan.mesh import Cluster, matrices
from shardplan.planning import candidate_problem
from shardplan.planning.purpose_matrices import laid
from shardplan.report.parallelism import purposes_text
from shardplan.search.strategy.purposes import ContractionLoops
from shardplan.shell.factor_options import checked_axes, checked_factors, read_axes, read_factors
from shardplan.tdl.index import loops_of
from shardplan.verify.verify import verify
from tests.machines import machine

SMALL = {"layers": 2, "width": 64, "heads": 4, "batch": 16, "sequence": 32, "vocabulary": 256}
KIND = {"data": "batch", "fsdp": "batch", "tensor": "tensor", "sequence": "sequence", "expert": "expert"}


def planned(axes: Any, on: str = "2x4:slow", *, model: Any = gpt, options: Any = SMALL, **more: Any) -> tuple[Any, Any, Any]:
    step, args = model.train_step(**options, **({"concrete": True} if more.pop("concrete", False) else {}))
    return shardplan.plan(step, *args, cluster=machine(on), donate_argnums=0, axes=axes, time_model="sum", **more), step, args


@pytest.mark.parametrize(
    "axes",
    [{"data": 8}, {"data": 2, "tensor": 4}, {"fsdp": 4, "sequence": 2}, {"fsdp": 2, "tensor": 4}],
    ids=str,
)
def test_each_factor_cuts_the_loops_of_its_purpose(axes: dict[str, int]) -> None:
    plan, _, _ = planned(axes)
    matrix = plan.matrix
    assert dict(zip(matrix["axes"], map(math.prod, matrix["factors"]), strict=True)) == axes
    assert [math.prod(column) for column in zip(*matrix["factors"], strict=True)] == [2, 4]
    of = [shares[0][0] for shares in plan.data.purposes]
    problem, decisions = plan.session.problem, plan.session.decisions
    loops = ContractionLoops(problem)
    cut = 0
    for node in loops.contractions:
        kinds = loops.kinds(node)
        for purpose, loop in zip(of, decisions.uses[node.id].loops, strict=True):
            if loop >= 0:
                assert kinds[loop] == KIND[purpose]
                cut += 1
    assert cut > len(loops.contractions) / 2
    weights = [t for t in problem.graph.inputs if t in problem.coarse.parameters & loops.root.keys()]
    for t in weights:
        layout = decisions.layouts[t]
        used = {of[f] for dim in layout.dims for f in dim} if layout is not None else set()
        assert "data" not in used
    if "fsdp" in axes:
        split = [t for t in weights if any(of[f] == "fsdp" for d in decisions.layouts[t].dims for f in d)]
        assert len(split) > len(weights) / 2


def test_the_matrix_is_the_fastest_of_all_legal_ones() -> None:
    plan, _, _ = planned({"data": 4, "tensor": 4}, "2x8:slow")
    every = {tuple(map(tuple, m.rows)) for m in matrices((2, 8), (4, 4))}
    tried = plan.provenance["factorings"]
    assert len(tried) == len(every) == 2
    assert plan.searched_s == pytest.approx(min(row["seconds"] for row in tried), rel=1e-7)
    assert plan.matrix["factors"] == [[2, 2], [1, 4]], "activations are sent more often than gradients, so they stay in a node"


@pytest.mark.parametrize(
    ("axes", "model", "options"),
    [
        pytest.param({"data": 2, "tensor": 4}, gpt, SMALL, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4, "sequence": 2}, gpt, {**SMALL, "scan": True}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 4}, moe, {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_with_given_axes_runs_as_planned_and_is_read_again(axes: Any, model: Any, options: Any, tmp_path: Any) -> None:
    plan, step, args = planned(axes, model=model, options=options, concrete=True)
    found = verify(plan, step, args, steps=2, backend="explicit", devices=jax.devices()[:8])
    assert found.equal
    assert not found.unmatched
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", step, *args)
    assert (again.matrix, again.step_time_s, again.collectives) == (plan.matrix, plan.step_time_s, plan.collectives)
    assert again.session.solution.seconds == pytest.approx(plan.searched_s, rel=1e-7)
    assert again.provenance == plan.provenance


@pytest.mark.slow
def test_experts_are_told_from_heads_and_features() -> None:
    step, args = moe.train_step()
    plan = shardplan.plan(step, *args, cluster=machine("8:slow"), factors={"gpu": (2, 2, 2)})
    problem = plan.session.problem
    loops = ContractionLoops(problem)
    seen = {kind for node in loops.contractions for kind in loops.kinds(node).values()}
    assert seen == {"batch", "sequence", "expert", "tensor"}
    dense = gpt.train_step(**SMALL)
    other = ContractionLoops(shardplan.plan(dense[0], *dense[1], cluster="8", factors={}).session.problem)
    assert "expert" not in {kind for node in other.contractions for kind in other.kinds(node).values()}


def experts(weights: tuple[Any, Any], x: Any, y: Any) -> Any:
    def loss(w: tuple[Any, Any]) -> Any:
        h = jax.nn.relu(jnp.einsum("ecd,edh->ech", x, w[0]))
        return ((jnp.einsum("ech,ehd->ecd", h, w[1]) - y) ** 2).mean()

    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, jax.grad(loss)(weights))


def test_the_gradients_of_experts_are_cut_by_experts_too() -> None:
    w1, w2, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 12, 24), (8, 24, 12), (8, 8, 12)))
    plan = partial(shardplan.plan, experts, (w1, w2), x, x, cluster=machine("2x4:slow"), donate_argnums=0)
    free, fixed = plan(), plan(axes={"expert": 8})
    assert free.data.purposes == fixed.data.purposes == ((("expert", 1.0),),) * 2
    assert fixed.searched_s <= free.searched_s * 1.001
    problem = free.session.problem
    loops = ContractionLoops(problem)
    assert len(loops.contractions) >= 5
    assert all("expert" in loops.kinds(node).values() for node in loops.contractions)


def test_expert_dims_are_known_where_activations_differ_in_dims_of_one() -> None:
    def step(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            over_experts = jnp.einsum("ek,tek->te", w, y)
            features = jnp.einsum("otk,ek->ote", x, w)
            return (over_experts**2).mean() + ((features.sum(0) @ w) ** 2).mean()

        return w - 0.01 * jax.grad(loss)(w)

    w, x, y = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 16), (1, 32, 16), (4, 8, 16)))
    loops = ContractionLoops(shardplan.plan(step, w, x, y, cluster="8", factors={}, donate_argnums=0).session.problem)
    batched = next(node for node in loops.contractions if node.signature.call.params["dimension_numbers"][1] != ((), ()))
    (expert,) = batched.signature.call.params["dimension_numbers"][1][0]
    description = batched.signature.description
    assert description is not None
    of_dim = next(indices for operand, indices in description.accesses if operand == 0)[expert]
    assert {v for v, kind in loops.kinds(batched).items() if kind == "expert"} == loops_of(of_dim)


def test_the_factors_of_an_axis_meet_in_a_product() -> None:
    """Four sequences cannot be split by eight, in whatever parts."""
    step, args = gpt.train_step(**{**SMALL, "batch": 4})
    for on in ("8:slow", "2x4:slow"):
        with pytest.raises(shardplan.ClusterError, match="nothing is cut by 8 for 'data'"):
            shardplan.plan(step, *args, cluster=machine(on), donate_argnums=0, axes={"data": 8})


def test_the_filter_of_a_convolution_is_its_weight() -> None:
    def step(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    x, k = jax.ShapeDtypeStruct((8, 32, 32, 64), "float32"), jax.ShapeDtypeStruct((3, 3, 64, 64), "float32")
    plan = shardplan.plan(step, x, k, cluster="8", axes={"data": 8})
    assert plan.specs_by_path == {"x": PartitionSpec("gpu"), "k": PartitionSpec()}


def test_a_mesh_in_words() -> None:
    plan, _, _ = planned({"data": 4, "tensor": 4}, "2x8:slow")
    assert purposes_text(plan.data) == "data 4 = 2 nodes x 2 GPUs, tensor 4 = 4 GPUs"


def test_every_matrix_becomes_factors_with_purposes() -> None:
    for over, of in laid(Cluster.load("4x8"), {"data": 8, "tensor": 4}):
        sizes = {p: math.prod(f.size for f, own in zip(over, of, strict=True) if own == p) for p in of}
        assert sizes == {"data": 8, "tensor": 4}


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ({"data": 4}, "make 4 devices"),
        ({}, "give the size of each purpose"),
        ({"data": True, "tensor": 8}, "give the size of each purpose"),
        ({"dta": 8}, "nearest: data"),
        ({"data": 0, "tensor": 8}, "give the size"),
        ({"expert": 8}, "no product of this step has a loop for 'expert'"),
    ],
)
def test_axes_that_cannot_be(axes: Any, said: str) -> None:
    with pytest.raises(shardplan.ClusterError, match=said):
        planned(axes)


def forward(weights: list[Any], x: Any) -> Any:
    for w in weights:
        x = jax.nn.relu(x @ w)
    return x


def descent(weights: list[Any], x: Any) -> list[Any]:
    gradients = jax.grad(lambda ws: (forward(ws, x) ** 2).mean())(weights)
    return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)]


def on_eight(step: Any, width: int, batch: int, **more: Any) -> Any:
    weights = [jax.ShapeDtypeStruct((width, width), "float32")] * 2
    return shardplan.plan(step, weights, jax.ShapeDtypeStruct((batch, width), "float32"), cluster="8", time_model="sum", **more)


@pytest.mark.parametrize(
    ("purpose", "weight", "data"),
    [
        ("data", PartitionSpec(), PartitionSpec("gpu")),
        ("fsdp", PartitionSpec(None, "gpu"), PartitionSpec("gpu")),
        ("tensor", PartitionSpec(None, "gpu"), PartitionSpec()),
    ],
)
def test_a_forward_pass_has_purposes_too(purpose: str, weight: PartitionSpec, data: PartitionSpec) -> None:
    plan = on_eight(forward, 2048, 64, axes={purpose: 8})
    assert plan.specs_by_path == {"weights/0": weight, "weights/1": weight, "x": data}
    assert plan.matrix["axes"] == [purpose]


@pytest.mark.parametrize(("purpose", "weight"), [("data", PartitionSpec()), ("fsdp", PartitionSpec("gpu"))])
def test_of_two_inputs_that_a_forward_pass_multiplies_the_earlier_is_the_weight(purpose: str, weight: PartitionSpec) -> None:
    w, x = jax.ShapeDtypeStruct((2048, 2048), "float32"), jax.ShapeDtypeStruct((64, 2048), "float32")

    def apart(a: Any, b: Any, x: Any) -> Any:
        return forward([a, b], x)

    plan = shardplan.plan(apart, w, w, x, cluster="8", axes={purpose: 8})
    assert plan.specs_by_path == {"a": weight, "b": weight, "x": PartitionSpec("gpu")}


def test_weights_that_a_forward_pass_has_split_by_rows_are_tensor_parallel() -> None:
    plan = on_eight(forward, 2048, 8, pins={"weights/*": PartitionSpec("gpu")})
    assert plan.matrix["axes"] == ["tensor"]


@pytest.mark.parametrize(
    ("width", "batch", "axes", "said"),
    [
        (2048, 4, {"data": 8}, "nothing is cut by 8 for 'data'; the loops that 'data' cuts have the extents 4"),
        (2048, 6, {"data": 8}, "the extents 6"),
        (2048, 2, {"data": 4, "tensor": 2}, "nothing is cut by 4 for 'data'; the loops that 'data' cuts have the extents 2:"),
        (2047, 8, {"fsdp": 8}, "no weight that it reads is stored split by 8"),
    ],
)
def test_axes_that_divide_nothing_are_refused(width: int, batch: int, axes: dict[str, int], said: str) -> None:
    with pytest.raises(shardplan.ClusterError, match=said):
        on_eight(descent, width, batch, axes=axes)


def test_on_a_ring_the_parts_of_a_level_have_every_order() -> None:
    ring = machine("8:slow")
    ring = replace(ring, levels=tuple(replace(level, kind="ring") for level in ring.levels))
    choices = list(laid(ring, {"data": 2, "tensor": 4}))
    assert [of for _, of in choices] == [("data", "tensor"), ("tensor", "data")]
    assert len(list(laid(machine("8:slow"), {"data": 2, "tensor": 4}))) == 1
    step, args = gpt.train_step(**SMALL)
    plan = shardplan.plan(step, *args, cluster=ring, donate_argnums=0, axes={"data": 2, "tensor": 4}, time_model="sum")
    seconds = [row["seconds"] for row in plan.provenance["factorings"]]
    assert plan.searched_s == pytest.approx(min(seconds), rel=1e-7)
    assert min(seconds) < 0.99 * max(seconds)


@pytest.mark.slow
def test_a_memory_limit_is_kept_within_the_axes() -> None:
    axes = {"data": 2, "tensor": 4}
    free, _, _ = planned(axes)
    limit = int(0.85 * free.peak_bytes)
    plan, _, _ = planned(axes, memory_limit=limit)
    assert plan.peak_bytes <= limit < free.peak_bytes
    assert dict(zip(plan.matrix["axes"], map(math.prod, plan.matrix["factors"]), strict=True)) == axes
    assert plan.lower_bound_s > 0
    assert plan.data.bound_s <= plan.searched_s


def test_an_interrupt_between_matrices_gives_the_best_so_far() -> None:
    """Four devices as data 2 and tensor 2 over two levels: two matrices."""

    def interrupt(what: str, part: float) -> None:
        if what == "axes" and part > 0.4:
            raise KeyboardInterrupt

    whole, _, _ = planned({"data": 2, "tensor": 2}, "2x2:slow")
    plan, _, _ = planned({"data": 2, "tensor": 2}, "2x2:slow", observer=interrupt)
    assert plan.stopped == "interrupted"
    assert len(plan.provenance["factorings"]) < len(whole.provenance["factorings"])
    assert dict(zip(plan.matrix["axes"], map(math.prod, plan.matrix["factors"]), strict=True)) == {"data": 2, "tensor": 2}


def test_a_deadline_ends_the_search_over_matrices() -> None:
    plan, _, _ = planned({"data": 2, "tensor": 2}, "2x2:slow", time_budget_s=1e-6)
    assert plan.stopped == "time budget"
    assert dict(zip(plan.matrix["axes"], map(math.prod, plan.matrix["factors"]), strict=True)) == {"data": 2, "tensor": 2}


def test_a_matrix_with_too_many_layouts_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data 2 and tensor 8 on 2x8: one matrix has three factors, the other two."""
    monkeypatch.setattr(candidate_problem, "CONSTANTS", replace(CONSTANTS, most_layouts=100))
    plan, _, _ = planned({"data": 2, "tensor": 8}, "2x8:slow")
    rows = plan.provenance["factorings"]
    assert [row["seconds"] is None for row in rows].count(True) == 1
    assert "at most 100 can be searched" in next(row["why"] for row in rows if row["seconds"] is None)
    monkeypatch.setattr(candidate_problem, "CONSTANTS", replace(CONSTANTS, most_layouts=5))
    with pytest.raises(shardplan.ClusterError, match="give fewer axes"):
        planned({"data": 4, "tensor": 4}, "2x8:slow")


def test_purposes_are_those_of_the_plan_even_where_axes_and_pins_differ() -> None:
    """One of two weights is stored split by a pin: over half of the seconds, "data" is FSDP."""
    split = PartitionSpec(None, "gpu")
    plan = on_eight(descent, 2048, 4096, axes={"data": 8}, pins={"weights/1": split})
    assert plan.matrix["axes"] == ["data"]
    (shares,) = plan.data.purposes
    assert [purpose for purpose, _ in shares] == ["data", "fsdp"]
    assert 0.2 < dict(shares)["fsdp"] < 0.8
    assert sum(part for _, part in shares) == pytest.approx(1.0)
    with pytest.raises(shardplan.ClusterError, match=r"or leave out the pins on 'weights/\*'"):
        on_eight(descent, 2048, 4096, axes={"data": 8}, pins={"weights/*": split})


def test_axes_and_the_premise_of_bytes_exclude_each_other() -> None:
    with pytest.raises(shardplan.ShardplanError, match="cannot be given together"):
        planned({"data": 8}, objective="bytes")


def test_sizes_may_be_integers_of_numpy() -> None:
    two: Any = np.int64(2)
    sizes = checked_axes({"data": two, "tensor": 4}, Cluster.load("8"))
    assert sizes is not None
    assert [(purpose, size, type(size)) for purpose, size in sizes.items()] == [("data", 2, int), ("tensor", 4, int)]
    assert checked_factors({"gpu": (two, 4)}, Cluster.load("8")) == checked_factors({"gpu": (2, 4)}, Cluster.load("8"))


def test_axes_and_factors_exclude_each_other() -> None:
    with pytest.raises(shardplan.ClusterError, match="cannot be given together"):
        planned({"data": 8}, factors={"gpu": 4})


@pytest.mark.parametrize("text", ["data", "data=x", "data=0", "=4", "data=2,data=4"])
def test_axes_as_text_that_is_malformed(text: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match="--axes"):
        read_axes([text])


@pytest.mark.parametrize("text", ["gpu", "gpu=2y4", "gpu=0x8", "gpu=", "gpu=8,gpu=2x4"])
def test_factors_as_text_that_are_malformed(text: str) -> None:
    with pytest.raises(shardplan.ShardplanError, match="--factors"):
        read_factors([text])
