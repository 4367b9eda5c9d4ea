"""The small step that docs/search.md works through: its plan beside data parallelism.

``python benchmarks/worked_example.py``
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp

import shardplan

Array = jax.Array


def step(w: Array, x: Array) -> Array:
    """Gradient descent on the mean square of a product."""
    g = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * g


def main() -> int:
    """Prints the plans and what they communicate, in microseconds."""
    w, x = (jax.ShapeDtypeStruct((rows, 2048), jnp.float32) for rows in (2048, 16384))
    plan = shardplan.plan(step, w, x, cluster="4", donate_argnums=0)
    print("| | w | x | step us | compute | communication | collectives |\n|---|---|---|---:|---:|---:|---|")
    for name, one in (("the plan", plan), ("data parallel", plan.as_baseline("data parallel"))):
        print(line(name, one))
    return 0


def line(name: str, plan: Any) -> str:
    """A row of the table."""
    w, x = (f"`P({', '.join(map(repr, plan.specs_by_path[path]))})`" for path in ("w", "x"))
    sent = ", ".join(f"{one.kind} {one.seconds * 1e6:.1f}" for one in plan.collectives)
    spent = " | ".join(f"{s * 1e6:.1f}" for s in (plan.step_time_s, plan.compute_s, plan.communication_s))
    return f"| {name} | {w} | {x} | {spent} | {sent or 'none'} |"


if __name__ == "__main__":
    sys.exit(main())
