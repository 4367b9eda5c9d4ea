"""A process that the compiler would end is named by an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan.frontend.trace import trace
from shardplan.tdl.xla_quirks import may_die
from shardplan.verify.child import compile_in_child_first
from shardplan.verify.verify import verify
from shardplan.versions import TESTED, jax_version


def reading_nothing(mesh: Mesh) -> Any:
    """A step whose `jax.shard_map` has an operand without elements."""

    def step(w: Any, empty: Any) -> Any:
        return jax.shard_map(lambda w, e: w * 2 + e.sum(), mesh=mesh, in_specs=(P("gpu"), P()), out_specs=P("gpu"))(w, empty)

    return step


@pytest.fixture
def mesh(devices: list[Any]) -> Mesh:
    return jax.make_mesh((2,), ("gpu",), devices=devices[:2], axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("release", TESTED)
@pytest.mark.parametrize("backend", ["explicit", "specs"])
def test_what_may_die_is_known_by_release_and_backend(release: str, backend: str) -> None:
    assert may_die([("shard_map", (8, 0)), ("add", (4,))], backend, (), "0.99.0") == "this release is untested"
    assert may_die([("shard_map", (8, 4)), ("reduce_sum", (0,))], backend, (2, 4), release) is None
    named = may_die([("shard_map", (8, 0))], backend, (2, 4), release)
    assert (named is not None) == (release == "0.11.2" and backend == "specs")
    named = may_die([("add", (4,))], backend, (3, 2), release)
    assert (named is not None) == (release != "0.10.2" and backend == "specs")


def test_operands_without_elements_run_under_both_backends(devices: list[Any]) -> None:
    def step(w: Any, empty: Any) -> Any:
        return jnp.concatenate([w, empty @ w.T @ w]) * 2 + empty.sum()

    args = (jnp.ones((8, 4)), jnp.ones((0, 4)))
    plan = shardplan.plan(step, *args, cluster="2", pins={"w": P("gpu")})
    for backend in ("explicit", "specs"):
        assert verify(plan, step, args, steps=1, backend=backend, devices=devices[:2]).passed


def test_a_users_shard_map_on_nothing_is_verified_or_named(mesh: Mesh, devices: list[Any]) -> None:
    step, args = reading_nothing(mesh), (jnp.ones((8, 4)), jnp.zeros(0))
    plan = shardplan.plan(step, *args, cluster=mesh)
    if may_die([("shard_map", (8, 0))], "specs") is None:
        assert verify(plan, step, args, steps=1, backend="specs", devices=devices[:2]).passed
    else:
        died = r"SIGSEGV.*a jax\.shard_map of the step has an operand without elements"
        with pytest.raises(shardplan.CompilerDiedError, match=died):
            verify(plan, step, args, steps=1, devices=devices[:2])
    assert float(plan.jit(step)(*args)[0, 0]) == 2.0


def test_a_death_is_an_error_that_names_the_signal(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child here ends itself, as a compiler would."""
    shapes = (jax.ShapeDtypeStruct((8, 4), "float32"), jax.ShapeDtypeStruct((0,), "float32"))
    program = trace(reading_nothing(mesh), *shapes).program
    monkeypatch.setattr("shardplan.verify.child.may_die", lambda *_: "it was to be feared")
    devices = mesh.devices.flatten().tolist()
    lowered = jax.jit(lambda w: w * 2, in_shardings=NamedSharding(mesh, P("gpu"))).lower(shapes[0])
    compile_in_child_first(program, lambda: lowered, devices, "specs")
    monkeypatch.setattr("shardplan.verify.child._CHILD", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    died = rf"JAX {jax_version()} dies of this program \(SIGSEGV\): it was to be feared"
    with pytest.raises(shardplan.CompilerDiedError, match=died):
        compile_in_child_first(program, lambda: lowered, devices, "specs")
    monkeypatch.setattr("shardplan.verify.child._CHILD", "raise AttributeError('the compiler has moved')")
    with pytest.warns(UserWarning, match="a child process could not try to compile it: AttributeError: the compiler has moved"):
        compile_in_child_first(program, lambda: lowered, devices, "specs")
    monkeypatch.setattr("shardplan.verify.child._CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr("shardplan.verify.child.LIMIT_S", 0.5)
    with pytest.raises(shardplan.CompilerDiedError, match="no answer in 0 s"):
        compile_in_child_first(program, lambda: lowered, devices, "specs")
