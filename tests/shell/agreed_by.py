"""Asks for plans in one of several processes, and prints what came of each as a line of JSON.

``python -m tests.shell.agreed_by PROCESS COUNT PORT``: each process has two devices. Process 1 differs where a case says so.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from tests.placed import Halves
from tests.shell import agreed_by


def main() -> None:
    """Joins the processes and runs every case in turn."""
    process, count, port = map(int, sys.argv[1:])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", count, process)

    import shardplan

    for name in CASES:
        run: Callable[[bool], Any] = getattr(agreed_by, name)
        try:
            said = run(process == 1)
        except shardplan.ShardplanError as error:
            said = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps([name, said]) + "\n")
        sys.stdout.flush()


CASES = "same decorated program number argument cluster version option placement unplanned loaded late".split()


def gradient_step(rate: float = 0.1, act: Callable[[Any], Any] = jax.numpy.tanh) -> Callable[..., Any]:
    def step(w: Any, x: Any) -> Any:
        """One step of gradient descent."""
        return w - rate * jax.grad(lambda w: jax.numpy.mean(act(x @ w) ** 2))(w)

    return step


def _agreed(step: Callable[..., Any], batch: int = 64, cluster: str = "2x2", **options: Any) -> Any:
    import shardplan

    shapes = jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((batch, 32), "float32")
    return shardplan.agree(step, *shapes, cluster=cluster, **options)


def same(differs: bool) -> Any:
    """The plan and the program that runs it are the same in all processes, although only one has planned."""
    step = gradient_step()
    plan = _agreed(step, donate_argnums=0)
    lowered = plan.jit(step).lower(*plan.traced.in_shapes).as_text()
    w = plan.put((jax.numpy.eye(32), jax.numpy.ones((64, 32))))
    result = jax.jit(lambda w: w.sum(), out_shardings=None)(plan.jit(step)(*w))
    return hashlib.blake2b(lowered.encode()).hexdigest(), plan.step_time_s, float(result)


def decorated(differs: bool) -> Any:
    """The decorator agrees by itself, and does so once for each plan."""
    import shardplan

    step = shardplan.parallelize("2x2")(gradient_step())
    w, x = jax.numpy.eye(32), jax.numpy.ones((64, 32))
    for _ in range(2):
        w = step(w, x)
    return float(jax.jit(lambda w: w.sum())(w))


def program(differs: bool) -> Any:
    """Process 1 has another op."""
    return str(_agreed(gradient_step(act=jax.numpy.sin if differs else jax.numpy.tanh)))


def number(differs: bool) -> Any:
    """Process 1 has another learning rate, which changes no plan."""
    return str(_agreed(gradient_step(0.2 if differs else 0.1)))


def argument(differs: bool) -> Any:
    """Process 1 has another batch."""
    return str(_agreed(gradient_step(), batch=128 if differs else 64))


def cluster(differs: bool) -> Any:
    """Process 1 plans for a cluster of half as many devices, all of which are those of process 0."""
    return str(_agreed(gradient_step(), cluster="2" if differs else "2x2"))


def version(differs: bool) -> Any:
    """Process 1 has another shardplan."""
    import shardplan

    own = shardplan.__version__
    shardplan.__version__ = "0.0.7" if differs else own
    try:
        return str(_agreed(gradient_step()))
    finally:
        shardplan.__version__ = own


def option(differs: bool) -> Any:
    """Process 1 has another memory limit."""
    return str(_agreed(gradient_step(), memory_limit="1GiB" if differs else "2GiB"))


def placement(differs: bool) -> Any:
    """Process 1 has other groups of devices."""
    return str(_agreed(gradient_step(), placement=Halves(shared=1 if differs else 0)))


def unplanned(differs: bool) -> Any:
    """Nothing fits: process 0 finds no plan."""
    return str(_agreed(gradient_step(), memory_limit="1KiB"))


def loaded(differs: bool) -> Any:
    """Process 0 loads a plan from a file that no other process has."""
    import shardplan

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plan.json"
        if not differs:
            shapes = jax.ShapeDtypeStruct((32, 32), "float32"), jax.ShapeDtypeStruct((64, 32), "float32")
            shardplan.plan(gradient_step(), *shapes, cluster="2x2", placement=Halves()).save(file)
        return _agreed(gradient_step(), file=file).devices


def late(differs: bool) -> Any:
    """Process 1 asks after process 0 has given it up."""
    time.sleep(3 if differs else 0)
    return str(_agreed(gradient_step(), timeout_s=1))


if __name__ == "__main__":
    main()
