"""Trains a small model in each process that Slurm, Open MPI or Kubernetes has started: see the scripts beside this file.

The variable CLUSTER names the cluster; its devices are those of all processes together.
"""

import os

import jax
import jax.numpy as jnp

jax.distributed.initialize()  # JAX reads the launcher's variables: who is process 0, how many there are, and which this is

import shardplan  # noqa: E402 - behind the line that has to come first


@shardplan.parallelize(os.environ.get("CLUSTER", "dgx-h100:2"), donate_argnums=0)
def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1.0) ** 2))(w)
    return w - 0.1 * gradient, loss


def main() -> None:
    """Process 0 plans, all train."""
    x = jax.ShapeDtypeStruct((256, 64), "float32")
    plan = train_step.prepare(jax.ShapeDtypeStruct((64, 64), "float32"), x)
    w = train_step.init(lambda: jnp.zeros((64, 64)))
    batch = plan.init(lambda: jnp.ones(x.shape), argument=1)
    for _ in range(3):
        w, loss = train_step(w, batch)
        print(f"process {jax.process_index()} of {jax.process_count()}: loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
