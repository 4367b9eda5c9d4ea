"""Measured seconds of whole steps: several plans of one step on real devices, run in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.calibrate.timing import Timed, timed_of
from shardplan.frontend.nnx_state import apart
from shardplan.plans.runner import Leaves, Runner
from shardplan.verify.on_host import drawn


class RunnablePlan(Protocol):
    """The part of a plan that measuring uses."""

    def mesh(self, devices: Sequence[Any] | None = None) -> Any:
        """The mesh on these devices."""
        ...

    def leaves(self, mesh: Any) -> Leaves:
        """The planned types and shardings of the arguments' leaves."""
        ...

    def jit(self, step: Callable[..., Any], devices: Sequence[Any] | None = None, backend: str = "auto") -> Runner:
        """The step to run."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready:
    """A compiled plan that can be run again and again."""

    run: Runner
    leaves: Leaves

    def seconds(self, host: Sequence[Any], tree: Any) -> float:
        """The seconds of one step; placing its arguments, which it may donate, does not count."""
        placed = jax.block_until_ready(self.leaves.placed([_array(x) for x in host]))
        began = time.perf_counter()
        result, _ = self.run.run(placed, tree)
        jax.block_until_ready(jax.tree.leaves(result))
        return time.perf_counter() - began


def step_seconds(
    plans: Mapping[str, RunnablePlan],
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    devices: Sequence[Any],
    backend: str = "auto",
    rounds: int = 5,
    observer: Callable[[str, float], None] | None = None,
) -> dict[str, Timed]:
    """Measured seconds of one step under each plan, by name: the median of ``rounds``, in each of which every plan runs once.

    Two steps of each plan warm up. Arguments that are only shapes are drawn as `shardplan.verify.on_host.drawn` says.
    """
    tell = observer or (lambda what, part: None)
    leaves, tree = jax.tree.flatten(apart(tuple(args)))
    for plan in plans.values():
        plan.leaves(plan.mesh(devices)).fit(leaves)
    host = [_host(x) for x in drawn(leaves)]
    ready: dict[str, _Ready] = {}
    for number, (name, plan) in enumerate(plans.items()):
        tell(f"compiling {name}", 0.5 * number / len(plans))
        ready[name] = _Ready(plan.jit(step, devices, backend), plan.leaves(plan.mesh(devices)))
        for _ in range(2):
            ready[name].seconds(host, tree)
    runs: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(rounds):
        tell("running the plans in turn", 0.5 + 0.5 * number / rounds)
        for name, one in ready.items():
            runs[name].append(one.seconds(host, tree))
    return {name: timed_of(seconds) for name, seconds in runs.items()}


@dataclass(frozen=True, slots=True)
class _Key:
    """A random key on the host."""

    data: np.ndarray[Any, Any]
    implementation: Any


def _host(x: Any) -> Any:
    """A copy on the host, which donation cannot delete."""
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return _Key(np.array(jax.random.key_data(x)), jax.random.key_impl(x))
    return np.array(x) if hasattr(x, "dtype") else x


def _array(x: Any) -> Any:
    return jax.random.wrap_key_data(jnp.asarray(x.data), impl=x.implementation) if isinstance(x, _Key) else x
