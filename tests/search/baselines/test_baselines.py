"""Baselines are what people mean by their names: they move the bytes of the closed forms."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from models import gpt, mlp, wresnet
from shardplan.cost.overlap import step_s
from shardplan.mesh import Cluster
from shardplan.report.plan_text import baselines_text
from shardplan.search.baselines.batch_dims import follow
from shardplan.search.baselines.megatron import sides
from shardplan.search.baselines.recipes import Restriction, baselines, written
from shardplan.search.baselines.rivals import alone
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.shell.plan_of_step import Plan
from tests.search import steps

# (layers, width, sequence, batch, heads, vocabulary): large enough that bandwidth decides and not latency
SIZES = {"8": (4, 1024, 512, 64, 16, 4096), "8x8": (2, 8192, 512, 64, 64, 32768)}


@cache
def transformer(cluster: str) -> Plan:
    layers, width, sequence, batch, heads, vocabulary = SIZES[cluster]
    step, args = gpt.train_step(layers=layers, width=width, sequence=sequence, batch=batch, heads=heads, vocabulary=vocabulary)
    return shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, memory_limit="10TiB", factors={})


def moved(plan: Plan, name: str) -> float:
    return next(b.communication_bytes for b in plan.baselines if b.name == name)


def parameter_bytes(plan: Plan) -> int:
    args: Any = jax.tree.unflatten(plan.traced.in_tree, plan.traced.in_shapes)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0][0]))


@pytest.mark.parametrize("cluster", [pytest.param("8", marks=pytest.mark.slow), "8x8"])
def test_data_parallel_all_reduces_every_gradient_once(cluster: str) -> None:
    plan = transformer(cluster)
    n = plan.cluster.size
    assert moved(plan, "data parallel") == pytest.approx(2 * (n - 1) / n * parameter_bytes(plan), rel=1e-2)
    assert moved(plan, "ZeRO-1") == pytest.approx(2 * (n - 1) / n * parameter_bytes(plan), rel=1e-2)


@pytest.mark.parametrize("cluster", SIZES)
def test_fsdp_gathers_weights_twice_and_scatters_gradients_once(cluster: str) -> None:
    """3 (n-1)/n P, less one gather of the two tables that are looked up: no backward op reads them."""
    plan = transformer(cluster)
    n = plan.cluster.size
    _, width, sequence, _, _, vocabulary = SIZES[cluster]
    tables = (vocabulary + sequence) * width * 4
    expected = (n - 1) / n * (3 * parameter_bytes(plan) - tables)
    assert moved(plan, "FSDP") == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("data parallel", {"data": (0, 1)}),
        ("ZeRO-1", {"data": (0, 1), "zero": (0, 1)}),
        ("FSDP", {"data": (0, 1), "shard": (0, 1)}),
        ("data x FSDP", {"data": (0, 1), "shard": (1,)}),
        ("FSDP x tensor parallel + sequence", {"data": (0,), "shard": (0,), "tensor": (1,), "sequence": True}),
    ],
)
def test_a_sharding_written_by_hand_costs_what_the_baseline_of_its_roles_does(name: str, roles: Any) -> None:
    plan = transformer("8x8")
    problem = plan.session.problem
    restriction = written(problem, name, **roles)
    assert isinstance(restriction, Restriction)
    solution = alone(Solver(problem, memory.liveness(problem, frozenset())), restriction)
    same = next(s for s in plan.session.rivals.solutions if s.name == name)
    assert solution is not None
    assert (solution.name, solution.states, solution.seconds) == (name, same.states, same.seconds)


def test_optimizer_state_can_be_split_beside_tensor_parallelism() -> None:
    """No baseline by name: data parallelism over the slow level with its optimizer state split, tensor parallelism below."""
    problem = transformer("8x8").session.problem
    solver = Solver(problem, memory.liveness(problem, frozenset()))
    restrictions: list[Any] = [written(problem, "one", data=(0,), tensor=(1,), zero=zero) for zero in ((), (0,))]
    whole, split = (alone(solver, r) for r in restrictions)
    assert whole is not None
    assert split is not None
    assert split.peak_bytes < 0.7 * whole.peak_bytes


@pytest.mark.parametrize("cluster", SIZES)
def test_tensor_parallel_all_reduces_four_activations_a_layer(cluster: str) -> None:
    """With A the bytes of one activation [batch, sequence, width], n devices:

    - a layer: after attention and after the MLP, forward and backward: 4 all-reduces, 8 (n-1)/n A (as a reduce-scatter and an
      all-gather each);
    - the head: its input gathered, the gradient of that scattered: 2 (n-1)/n A. The embedding, split along its width, makes what
      the first block reads without exchange;
    - rows whose width or classes are split: each of the 2 * layers + 1 norms sums twice forward and twice backward, the loss
      three times, [batch, sequence] float32 each.
    """
    plan = transformer(cluster)
    n = plan.cluster.size
    layers, width, sequence, batch, _, _ = SIZES[cluster]
    row = batch * sequence * 4
    activation = row * width
    expected = (n - 1) / n * ((8 * layers + 2) * activation + 2 * row * (4 * (2 * layers + 1) + 3))
    assert moved(plan, "tensor parallel") == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("cluster", SIZES)
def test_replication_moves_nothing(cluster: str) -> None:
    assert moved(transformer(cluster), "replicated") == 0


def test_products_of_baselines_move_the_sum_of_their_parts() -> None:
    """Data over 8 nodes, tensor over 8 GPUs: a node's part of the activations, and gradients split 8 ways over the nodes."""
    plan = transformer("8x8")
    layers, width, sequence, batch, _, _ = SIZES["8x8"]
    activation = batch // 8 * sequence * width * 4
    gradients = 2 * 7 / 8 * parameter_bytes(plan) / 8
    tensor = 7 / 8 * (8 * layers + 2) * activation
    assert moved(plan, "data x tensor parallel") == pytest.approx(gradients + tensor, rel=2e-2)
    fsdp = 7 / 8 * (3 * parameter_bytes(plan) - (SIZES["8x8"][5] + sequence) * width * 4) / 8
    assert moved(plan, "FSDP x tensor parallel") == pytest.approx(fsdp + tensor, rel=2e-2)


@pytest.mark.parametrize("cluster", SIZES)
def test_the_plan_is_never_slower_than_a_baseline(cluster: str) -> None:
    plan = transformer(cluster)
    assert len(plan.baselines) >= 5
    assert all(plan.step_time_s <= b.step_time_s for b in plan.baselines)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["8", "8x8"])
def test_a_baseline_as_a_plan_issues_what_it_was_scored_with(cluster: str) -> None:
    plan = transformer(cluster)
    for b in plan.baselines:
        one = plan.as_baseline(b.name)
        assert one.communication_bytes == pytest.approx(b.communication_bytes)
        assert one.step_time_s == pytest.approx(b.step_time_s, rel=1e-6)
        hideable_s = one.communication_s - one.exposed_s
        assert step_s(one.compute_s, one.exposed_s, hideable_s, 1.3) == pytest.approx(b.step_time_s, rel=1e-6)


def test_the_batch_dim_is_followed_through_the_step() -> None:
    step, args = gpt.train_step(layers=1, batch=16, sequence=32, heads=8, width=64)
    problem = steps.problem(step, *args, on=Cluster.load("2x4"))
    graph = problem.graph
    state = {i for i in graph.feedback if i is not None}
    found = follow(graph, [t for i, t in enumerate(graph.inputs) if i not in state])
    scores = [t.id for t in graph.tensors if t.shape == (16, 8, 32, 32) and t.id not in problem.coarse.free]
    assert len(scores) > 4
    for t in scores:
        if found.data[t]:  # a mask does not depend on the data
            assert found.batch[t] == 0
            assert found.data[t] <= {0, 2, 3}, "heads do not come with the data"
    for i, t in enumerate(graph.inputs):
        if i in state:
            assert found.batch[t] is None
    for o, i in zip(graph.outputs, graph.feedback, strict=True):
        if i is not None and o >= 0:
            assert found.batch[o] is None, graph.input_paths[i]


@pytest.mark.parametrize("scan", [False, True])
def test_megatron_cuts_columns_then_rows(scan: bool) -> None:
    step, args = gpt.train_step(layers=2, scan=scan)
    problem = steps.problem(step, *args, on=Cluster.load("4"))
    graph, found = problem.graph, sides(problem.graph, problem.coarse)
    cut = {p: sorted(found[t]) for p, t in zip(graph.input_paths, graph.inputs, strict=True) if t in found}
    extra = 1 if scan else 0  # the stack of layers
    named = {p: [d - extra for d in dims] for p, dims in cut.items() if "/blocks/" in p and p.startswith("state/0")}
    kinds = {tuple(p.split("/")[-3:]): dims for p, dims in named.items()}
    assert kinds == {
        ("attention", "qkv", "kernel"): [1, 2, 3],
        ("attention", "out", "kernel"): [0, 1],
        ("mlp", "up", "kernel"): [1],
        ("mlp", "down", "kernel"): [0],
    }


def test_a_baseline_that_cannot_be_is_left_out() -> None:
    step, args = mlp.train_step(batch=6, width=32, classes=16)
    names = [r.name for r in baselines(steps.problem(step, *args, on=Cluster.load("4")))]
    assert names == ["replicated", "tensor parallel", "tensor parallel + sequence"], "6 examples do not divide over 4 devices"


@pytest.mark.parametrize("factory", [wresnet.train_step, mlp.train_step], ids=["wresnet", "mlp"])
def test_every_op_of_data_parallel_keeps_to_its_examples(factory: Any) -> None:
    """No activation moves: only gradients are reduced."""
    step, args = factory()
    plan = shardplan.plan(step, *args, cluster="4", donate_argnums=0)
    problem = plan.session.problem
    parameters = {problem.graph.tensors[t].size for i, t in enumerate(problem.graph.inputs) if i in problem.graph.feedback}
    for issued in plan.as_baseline("data parallel").session.decisions.issued:
        tensor = problem.graph.tensors[issued.tensor]
        assert tensor.size in parameters or len(tensor.shape) < 2, tensor


def test_only_the_leading_loop_of_a_merged_dim_runs_over_the_batch() -> None:
    """[batch * sequence] taken apart: the batch is cut along its own loop, the sequence comes with the data all the same."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return x.reshape(16, 32, 8) @ w

    problem = steps.problem(step, steps.array(512, 8), steps.array(8, 8), on=Cluster.load("4"))
    found = follow(problem.graph, [problem.graph.inputs[0]])
    reshape = next(n for n in problem.graph.nodes if n.signature.call.primitive == "reshape")
    batch, data = found.loops(reshape)
    assert reshape.signature.description is not None
    rows, columns, _ = reshape.signature.description.results[0]
    assert batch == {rows}
    assert data == {rows, columns}
    assert found.batch[problem.graph.outputs[0]] == 0
    assert found.data[problem.graph.outputs[0]] == {0, 1}


def test_a_baseline_that_is_left_out_says_why() -> None:
    step, args = mlp.train_step(batch=6, width=32, classes=16)
    plan = shardplan.plan(step, *args, cluster="4")
    reasons = {r.name: r.reason for r in plan.session.rivals.left_out}
    assert reasons["data parallel"] == reasons["FSDP"] == "no leading dim of the data divides by 4"
    assert "not possible: data parallel, ZeRO-1, FSDP (no leading dim" in baselines_text(plan.completed())
    step, args = mlp.train_step(batch=8, width=30, inputs=30, classes=10)
    reasons = {r.name: r.reason for r in shardplan.plan(step, *args, cluster="8").session.rivals.left_out}
    assert "kernel (30, 30) divides by 8 along no dim" in reasons["tensor parallel"]


@pytest.mark.parametrize("cluster", ["2x4", "8"])
def test_data_that_lies_like_state_leaves_no_baseline_without_layouts(cluster: str) -> None:
    """A mask of the parameter's shape shares its layout, which ZeRO-1 splits and the data alone would not."""

    def step(w: jax.Array, mask: jax.Array, x: jax.Array) -> Any:
        loss = lambda w: jnp.mean(jnp.where(mask > 0, w, 0.1 * w) ** 2) + jnp.mean((x * 2) ** 2)  # noqa: E731
        return w - 0.1 * jax.grad(loss)(w), loss(w)

    problem = steps.problem(step, steps.array(1, 8), steps.array(1, 8), steps.array(8, 1), on=Cluster.load(cluster))
    for restriction in baselines(problem):
        assert all(restriction.domains), restriction.name
