"""Optimizer state in host memory: which arguments may lie there, in which order they are updated, what they hold and cost."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardplan.errors import OffloadError
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.ir import Program
from shardplan.mesh import Cluster, factors
from shardplan.offload import matching, offloaded, on_device
from shardplan.search.coarsening import coarsen
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.search.problem.extract import Extractor
from shardplan.search.problem.problem import Problem
from tests.search import steps

N, W, LAYERS = 8, 16, 3
MATRIX = 4 * W * W


def step(state: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Adam's shape: all first moments, all second ones, then all weights."""

    def loss(ws: list[jax.Array]) -> jax.Array:
        y = x
        for w in ws:
            y = jnp.tanh(y @ w)
        return jnp.sum(y)

    value, grads = jax.value_and_grad(loss)(state["w"])
    mu = [0.9 * m + 0.1 * g for m, g in zip(state["mu"], grads, strict=True)]
    nu = [0.9 * n + 0.1 * g * g for n, g in zip(state["nu"], grads, strict=True)]
    ws = [w - m / (jnp.sqrt(n) + 1e-3) for w, m, n in zip(state["w"], mu, nu, strict=True)]
    return {"w": ws, "mu": mu, "nu": nu, "count": state["count"] + 1, "last": value}, value


def traced(function: Any = step) -> Program:
    matrices = [steps.array(W, W)] * LAYERS
    state = {"w": matrices, "mu": matrices, "nu": matrices, "count": jax.ShapeDtypeStruct((), jnp.int32), "last": steps.array()}
    return trace(function, state, steps.array(N, W)).program


MOMENTS = ("*/mu/*", "*/nu/*")


def hosted(*globs: str) -> Program:
    program = traced()
    return offloaded(program, matching(program, globs))


def problem(program: Program, cluster: str = "4") -> Problem:
    graph = flatten(program)
    on = Cluster.load(cluster)
    return Problem(graph, coarsen(graph, "none"), on, factors(on))


@pytest.mark.quick
def test_what_the_forward_or_backward_pass_reads_stays_on_the_device() -> None:
    program = traced()
    kept = {program.input_paths[i]: why for i, why in on_device(program).items()}
    assert {path for path in program.input_paths if path not in kept} == {
        f"state/{moment}/{n}" for moment in ("mu", "nu") for n in range(LAYERS)
    }
    assert "forward or the backward pass" in kept["state/w/0"]
    assert "given back" in kept["x"]
    assert "no dims" in kept["state/count"]


def test_a_step_without_a_backward_pass_keeps_its_state_on_the_device() -> None:
    def serve(cache: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cache + x, x @ cache

    program = trace(serve, steps.array(W, W), steps.array(W, W)).program
    assert "no backward pass" in on_device(program)[0]


@pytest.mark.parametrize(
    ("glob", "path", "reason"),
    [
        ("*/momentum/*", "'*/momentum/*'", "matches no argument"),
        ("*/count", "'*/count'", "matches no argument that has dims"),
        ("*/w/1", "state/w/1", "is read by the forward or the backward pass"),
        ("x", "x", "is not given back"),
    ],
)
def test_what_cannot_lie_in_host_memory_is_named(glob: str, path: str, reason: str) -> None:
    with pytest.raises(OffloadError, match=reason) as caught:
        matching(traced(), [glob])
    assert caught.value.path == path


def test_nothing_in_host_memory_leaves_the_program_alone() -> None:
    program = traced()
    assert offloaded(program, frozenset()) is program


@pytest.mark.quick
def test_the_update_takes_one_array_after_the_other() -> None:
    before, after = traced(), hosted(*MOMENTS)
    assert sorted(op.id for op in before.ops) == sorted(op.id for op in after.ops)
    made = set(after.inputs) | {t for t, _ in after.constants}
    for op in after.ops:
        assert made.issuperset(op.tensors), "an op waits for what it reads"
        made.update(op.outputs)
    reader = {i: min(n for n, op in enumerate(after.ops) if after.inputs[i] in op.tensors) for i in after.offloaded}
    order = [after.input_paths[i] for i in sorted(reader, key=lambda i: reader[i])]
    assert [path[-1] for path in order] == ["0", "0", "1", "1", "2", "2"]
    last_backward = max(n for n, op in enumerate(after.ops) if op.backward)
    assert last_backward < min(reader.values())


def whole(of: Problem) -> tuple[int, ...]:
    """Every value whole on every device."""
    return tuple(of.resharder.space(v.shape).number((((),) * (len(v.shape) + 1), ())) for v in of.coarse.variables)


@pytest.mark.quick
def test_a_device_holds_the_moments_of_few_arrays_at_once() -> None:
    profiles = []
    for program in (traced(), hosted(*MOMENTS)):
        of = problem(program)
        live = memory.liveness(of, frozenset(range(3 * LAYERS + 1)))
        profiles.append(memory.profile(of, live, whole(of), frozenset()))
    first, last = (p[0] for p in profiles), (p[-1] for p in profiles)
    for with_all, without in (tuple(first), tuple(last)):
        assert with_all - without == 2 * LAYERS * MATRIX
    assert profiles[0].max() - profiles[1].max() >= (2 * LAYERS - 4) * MATRIX, "two moments, old and new"


@pytest.mark.quick
def test_copies_cost_the_bytes_of_both_ways_over_the_link_of_the_host() -> None:
    of = problem(hosted(*MOMENTS))
    device = of.cluster.device
    solver = Solver(of, memory.liveness(of))
    states = whole(of)
    found = Extractor.of(of).decide(solver.rate("whole", states, {}, False, None))
    copies = 2 * 2 * LAYERS
    assert device.host_bytes_per_s is not None
    assert found.host_s == pytest.approx(copies * (MATRIX / device.host_bytes_per_s + device.launch_s))
    plain = problem(traced())
    same = Extractor.of(plain).decide(Solver(plain, memory.liveness(plain)).rate("whole", whole(plain), {}, False, None))
    assert found.step_time_s - same.step_time_s == pytest.approx(found.host_s), "nothing hides them"
