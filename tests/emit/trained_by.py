"""Trains a small GPT for three steps by one plan, on eight devices of one process or of two.

``python -m tests.emit.trained_by PROCESS COUNT PORT`` prints the losses; each process has 8 / COUNT devices.
"""

from __future__ import annotations

import sys

import jax


def main() -> None:
    """Plans the step, trains, prints the losses."""
    process, count, port = map(int, sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // count)
    if count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", count, process)

    import shardplan
    from models import gpt
    from tests.machines import machine

    step, (state, batch) = gpt.train_step(
        layers=2, width=32, heads=4, sequence=16, batch=16, vocabulary=64, dropout=0.1, scan=True, concrete=True
    )
    plan = shardplan.plan(step, state, batch, cluster=machine("2x4:slow"), donate_argnums=0)
    assert plan.sends
    run = plan.jit(step)
    losses: list[float] = []
    for _ in range(3):
        state, loss = run(state, batch)
        losses.append(float(loss))
    sys.stdout.write(f"{losses}\n")


if __name__ == "__main__":
    main()
