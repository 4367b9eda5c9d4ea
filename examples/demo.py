"""The whole way once: plan a GPT on 2x4 devices, read the plan, prove it, and train by it beside the step on one device, under
both backends.

    python examples/demo.py

Nothing is downloaded and no accelerator is needed: the eight devices are simulated on the CPU, and the text is the source of
Python's own standard library. The model is large enough that dividing the work pays on the machine that is planned for (eight
H100 in two nodes), so the plan really communicates; a smaller one would be kept whole on every device, and rightly so. Exits with
1 if anything does not agree.
"""

from __future__ import annotations

import os
import sys
import time
from itertools import islice
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's remarks on its own partitioning
import jax

sys.path.insert(0, str(Path(__file__).parent.parent))  # `models` lies beside the package, and is no part of it

CLUSTER, DEVICES = "2x4", 8
OPTIONS = {"layers": 1, "width": 256, "sequence": 128, "batch": 64, "vocabulary": 128}
STEPS = 20
AGREE = 1e-3
"""Relative: what rounding in another order may do to a loss in this many steps."""


def main() -> int:
    """Plans, verifies, trains; returns the exit code."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    import shardplan
    from models.gpt import text_batches, train_step
    from shardplan.report.plan_text import plan_text
    from shardplan.report.verified_text import verified_text
    from shardplan.verify.verify import verify

    shown = ", ".join(f"{name}={value}" for name, value in OPTIONS.items())
    title("1. Plan", f"models.gpt ({shown}) on {CLUSTER}")
    step, args = train_step(**OPTIONS, concrete=True)
    plan = shardplan.plan(step, *args, cluster=CLUSTER)
    print(plan_text(plan.completed(), title="GPT train step (AdamW)"))

    title("2. Verify", f"three steps on {DEVICES} simulated devices beside one device")
    found = verify(plan, step, args)
    print(verified_text(found.json))

    title("3. Train", f"{STEPS} steps on the standard library's source text, characters")
    agree = train(plan, step, args[0], list(islice(text_batches(**OPTIONS), STEPS)))
    if not plan.collectives:
        print("\nthe plan communicates nothing: choose a larger model")
    good = found.passed and agree and bool(plan.collectives)
    print(f"\n{'All agrees.' if good else 'NOT everything agrees.'}")
    return 0 if good else 1


def train(plan, step, state, batches) -> bool:
    """One device and both backends over the same batches; whether all losses agree."""
    single = jax.jit(step)
    sharded = {backend: plan.jit(step, backend=backend) for backend in ("explicit", "specs")}
    alone, ours = state, {backend: plan.put((state, batches[0]))[0] for backend in sharded}
    started = time.perf_counter()
    print("step   one device   explicit   difference      specs   difference")
    agree = True
    for number, batch in enumerate(batches, 1):
        alone, expected = single(alone, batch)
        a, row = float(expected), ""
        for backend, run in sharded.items():
            ours[backend], loss = run(ours[backend], plan.put((ours[backend], batch))[1])
            b = float(loss)
            agree &= abs(a - b) <= AGREE * abs(a)
            row += f"   {b:8.5f}   {b - a:+10.1e}"
        print(f"{number:4d}   {a:10.5f}{row}", flush=True)
    took = f"{time.perf_counter() - started:.0f} s, compiling included"
    print(f"\nlosses agree within {AGREE:g}: {'yes' if agree else 'NO'}   ({took})")
    return agree


def title(name: str, what: str) -> None:
    """A heading."""
    print(f"\n{name}: {what}\n{'=' * (len(name) + len(what) + 2)}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
