"""Trains a small GPT for three steps by one plan, on eight devices of one process or of two.

``python -m tests.emit.trained_by PROCESS COUNT PORT`` prints the losses; each process has 8 / COUNT devices. The processes agree
on a plan, each makes its part of the state, and each gives its part of the batch.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

OPTIONS = {
    "layers": 2, "width": 32, "heads": 4, "sequence": 16, "batch": 16, "vocabulary": 64, "dropout": 0.1, "scan": True,
}  # fmt: skip


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

    step, args = gpt.train_step(**OPTIONS)
    pins = {"batch/*": P(("node", "gpu"))}
    plan = shardplan.agree(step, *args, cluster=machine("2x4:slow"), donate_argnums=0, pins=pins)
    assert plan.sends
    run = plan.jit(step)
    state = plan.init(lambda: gpt.train_step(**OPTIONS, concrete=True)[1][0])
    assert all(len(x.sharding.device_set) == 8 for x in jax.tree.leaves(state))
    whole = jax.device_get(gpt.train_step(**OPTIONS, concrete=True)[1][1])
    batch = placed(plan, whole, process, count)
    losses: list[float] = []
    for _ in range(3):
        state, loss = run(state, batch)
        losses.append(float(loss))
    sys.stdout.write(f"{losses}\n")


def placed(plan: Any, whole: Any, process: int, count: int) -> Any:
    """The global batch, of which this process gives its rows; each device has the rows that are its own."""
    from shardplan.errors import ArgumentError

    rows = OPTIONS["batch"] // count
    batch = plan.put_local(jax.tree.map(lambda x: x[process * rows : (process + 1) * rows], whole))
    for name, x in batch.items():
        assert x.shape == whole[name].shape
        assert len(x.addressable_shards) == 8 // count
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[name][shard.index])
    if count > 1:
        try:
            plan.put_local(whole)
        except ArgumentError as error:
            assert f"process {process} of {count} gives the part" in str(error)  # noqa: PT017 - no test, a program of one
        else:
            raise AssertionError("the whole batch was taken for a part")
    return batch


if __name__ == "__main__":
    main()
