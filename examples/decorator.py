"""A plain JAX step under the decorator: the first call plans it, later calls run it.

python examples/decorator.py
"""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp

import shardplan

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
logging.basicConfig(format="%(message)s")
logging.getLogger("shardplan").setLevel(logging.INFO)


@shardplan.parallelize(cluster="2x4")
def train_step(params, batch):
    """One step of gradient descent on a regression by two layers."""

    def loss_of(params):
        hidden = jax.nn.gelu(batch["x"] @ params["up"])
        return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


def main() -> None:
    """Ten steps."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"up": jax.random.normal(keys[0], (512, 2048)) / 23, "down": jax.random.normal(keys[1], (2048, 512)) / 45}
    x = jax.random.normal(keys[2], (4096, 512))
    batch = {"x": x, "y": jnp.sin(x)}
    for number in range(1, 11):
        params, loss = train_step(params, batch)
        print(f"step {number:2d}   loss {float(loss):.4f}")
    print()
    print(train_step.plan.explain())


if __name__ == "__main__":
    main()
