"""A training run that loses a node: planned again, its state moved, its losses beside those of one device.

GPT on 2x4 simulated devices, with so little memory each that weights must be cut. After half of the steps
the first node is lost, and the run goes on with the other one. What moves is read from devices of that node where they hold it.

python benchmarks/replan.py [--steps 20] [--memory 2MiB] [--after 1GiB]
"""

from __future__ import annotations

import argparse
import time

import jax

import shardplan
from models import gpt
from shardplan.errors import size_text


def main() -> None:
    """Both runs, step by step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--memory", default="2MiB", help="the memory limit before the node is lost")
    parser.add_argument("--after", default="1GiB", help="the memory limit after it")
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    step, (state, batch) = gpt.train_step(layers=1, width=128, batch=16, concrete=True)
    plan = shardplan.plan(step, state, batch, cluster="2x4", memory_limit=given.memory)
    run, alone = plan.jit(step), jax.jit(step)
    _show("before", plan)
    one, (state, _) = state, plan.put((state, batch))
    worst = 0.0
    for number in range(1, given.steps + 1):
        if number == given.steps // 2 + 1:
            plan, run, state = _without_a_node(plan, step, state, given.after)
        one, expected = alone(one, batch)
        state, loss = run(state, batch)
        worst = max(worst, abs(float(loss) - float(expected)))
        print(f"step {number:2d}   loss {float(loss):.6f}   one device {float(expected):.6f}")
    print(f"largest difference {worst:.2e}")


def _without_a_node(plan, step, state, memory):
    """The plan, the jitted step and the state on the second node."""
    left = jax.devices()[4:]
    began = time.perf_counter()
    new = shardplan.replan(plan, "4", memory_limit=memory)
    planned = time.perf_counter()
    moved = shardplan.reshard(state, plan, new, devices=left)
    ended = time.perf_counter()
    _show("after", new)
    sent = shardplan.resharding(plan, new, argument=0, devices=range(4, 8))
    seconds = "?" if sent.seconds is None else f"{1e3 * sent.seconds:.3f} ms"
    print(
        f"replanned in {planned - began:.1f} s; moved in {ended - planned:.1f} s: at most {size_text(sent.bytes_per_device)} "
        f"from a device, {size_text(sent.total_bytes)} in all, {seconds} on the old cluster"
    )
    return new, new.jit(step, left), moved


def _show(when, plan):
    sizes = " x ".join(f"{name} {size}" for name, size in plan.axes.items())
    print(
        f"{when}: {sizes}, {1e3 * plan.step_time_s:.3f} ms a step, {size_text(plan.peak_bytes)} a device, {plan.matrix['axes']}"
    )


if __name__ == "__main__":
    main()
