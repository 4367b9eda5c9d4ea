"""Trains in one of several processes until one of them kills itself.

``python -m tests.shell.killed_by PROCESS COUNT PORT VICTIM WHEN``: the victim dies while it is ``planning`` or
``training``, also on groups of devices (``placed``), or raises an error there (``failing``).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import jax


def main() -> None:
    """Joins the processes, plans and trains."""
    process, count, port, victim = map(int, sys.argv[1:5])
    when = sys.argv[5] if process == victim else ""
    placed = sys.argv[5] == "placed"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process)

    import shardplan
    from tests.placed import Halves
    from tests.shell.agreed_by import gradient_step

    def observer(what: str, part: float) -> None:
        """Dies while the search runs."""
        if when == "planning":
            os.kill(os.getpid(), signal.SIGKILL)

    options: Any = {"placement": Halves()} if placed else {"pins": {"x": jax.sharding.PartitionSpec(("node", "gpu"))}}
    step = shardplan.parallelize("2x2", observer=observer, **options)(gradient_step())
    w, x = jax.numpy.eye(32), jax.numpy.ones((64, 32))
    for n in range(1_000_000):
        w = step(w, x)
        w.block_until_ready()
        if n == 20 and when in ("training", "placed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if n == 20 and when == "failing":
            raise RuntimeError("no more data")


if __name__ == "__main__":
    main()
