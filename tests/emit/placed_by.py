"""Trains three steps by a plan with groups of devices, on the devices of several processes.

``python -m tests.emit.placed_by PROCESS COUNT PORT CASE`` prints, as JSON, the losses, those of the step on one device, the
processes of each group, and the leaves of the last state that are not those of one device, by the law of `shardplan verify`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardplan.verify.on_host import as_numbers
from shardplan.verify.perturb import neighbours


def case(name: str) -> tuple[Any, Any, dict[str, Any]]:
    """The step, its arguments, and the options of its plan."""
    from models import gpt, mlp, two_tower
    from tests.placed import Halves

    match name:
        case "tiny":
            return descent, ((jnp.eye(4), 0), jnp.ones((2, 4))), {"placement": Halves()}
        case "mlp":
            return *mlp.train_step(layers=4, concrete=True), {"axes": {"stage": 2}, "microbatches": 4}
        case "gpt":
            sizes = {"layers": 2, "width": 32, "heads": 4, "sequence": 16, "batch": 16, "vocabulary": 64, "dropout": 0.1}
            axes = {"stage": 2, "data": 2, "tensor": 2}
            return *gpt.train_step(concrete=True, **sizes), {"axes": axes, "microbatches": 4}
        case "scan":
            sizes = {"layers": 4, "width": 32, "heads": 4, "sequence": 16, "batch": 16, "vocabulary": 64}
            axes = {"stage": 2, "data": 2, "tensor": 2}
            return *gpt.train_step(concrete=True, scan=True, **sizes), {"axes": axes, "microbatches": 4}
        case "towers":
            return *two_tower.train_step(concrete=True), {"placement": Halves()}
        case "shared":
            return *two_tower.train_step(concrete=True), {"placement": Halves(shared=1)}
    raise ValueError(name)


def descent(state: tuple[jax.Array, Any], x: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
    """One step of gradient descent, counted by a weakly typed number."""
    w, count = state
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 0.5) ** 2))(w)
    return (w - 0.1 * gradient, count + 1), loss


def main() -> None:
    """Joins the processes, plans, trains, compares."""
    process, count, port = map(int, sys.argv[1:4])
    devices = 2 if sys.argv[4] == "tiny" else 8
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process)

    import shardplan
    from shardplan.verify.judge import Sensitivity, judge
    from tests.machines import machine

    step, (state, batch), options = case(sys.argv[4])
    cluster = machine("2x4:eager") if devices == 8 else "2"
    plan: Any = shardplan.agree(step, state, batch, cluster=cluster, donate_argnums=0, **options)
    wanted, single = trained(jax.jit(step), state, batch)
    draw = np.random.default_rng(0)
    runs = [trained(jax.jit(step), jax.tree.map(lambda x: moved(x, draw), state), batch)[1] for _ in range(8)]

    run, placed = plan.jit(step), plan.init(lambda: state) if sys.argv[4] == "mlp" else plan.put((state, batch))[0]
    shardings = [x.sharding for x in jax.tree.leaves(placed)]
    losses: list[float] = []
    for _ in range(3):
        given = [x for x in jax.tree.leaves(placed) if x.addressable_shards]
        placed, loss = run(placed, batch)  # each process has the whole batch
        losses.append(float(plan.fetch(loss)))
        assert not given or any(x.is_deleted() for x in given)  # donated
    assert [x.sharding for x in jax.tree.leaves(placed)] == shardings
    weak = [x.weak_type for x in plan.traced.in_shapes[: len(shardings)]]
    assert [getattr(x, "weak_type", False) for x in jax.tree.leaves(placed)] == weak
    assert loss.sharding.device_set in [set(m.devices.flat) for m in plan.meshes()]
    found = [as_numbers(x) for x in jax.tree.leaves(plan.fetch(placed))]
    changes = [Sensitivity()] * len(single)
    for nudged in runs:
        changes = [change.with_run(a, b) for change, a, b in zip(changes, single, nudged, strict=True)]
    judged = judge(list(map(str, range(len(single)))), [single], [found], [changes])
    processes = [sorted({d.process_index for d in mesh.devices.flat}) for mesh in plan.meshes()]
    said = {"losses": losses, "alone": wanted, "processes": processes, "unequal": judged.unequal, "error": judged.largest.error}
    sys.stdout.write(json.dumps(said) + "\n")


def trained(step: Any, state: Any, batch: Any) -> tuple[list[float], list[Any]]:
    """The losses of three steps, and the leaves of the last state."""
    losses: list[float] = []
    for _ in range(3):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, [as_numbers(x) for x in jax.tree.leaves(state)]


def moved(x: Any, draw: np.random.Generator) -> Any:
    """An array of floats with each moved to one of its neighbours; other values as they are."""
    return jnp.asarray(neighbours(np.asarray(x), draw)) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


if __name__ == "__main__":
    main()
