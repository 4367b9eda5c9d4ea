"""The attention kernel of tokamax (``implementation="triton"``), in a form that is compiled for GPUs and interpreted on CPUs.

tokamax launches its kernels for GPUs alone. So while it traces them, `pl.pallas_call` is replaced by a function that chooses by
platform. Pallas's interpreter does not know `pl.program_id` inside a branch of a kernel: it is asked at the kernel's start.

The blocks are those of tokamax's heuristics, and not of its cache of tuned ones, which depend on the device that traces: a step
that is traced on a CPU is the one that a GPU runs.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

_BLOCK = 64
"""The keys in a block of the backward pass. Under a causal mask, tokamax 0.0.17 reads queries beyond the end of a last block that
is not full."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """q, k, v [batch, sequence, heads, head] -> as q. What is kept for the backward pass is linear in the sequence."""
    length = q.shape[1]
    if causal and length % _BLOCK:  # no query reads the keys that are added behind it
        q, k, v = (jnp.pad(x, ((0, 0), (0, -length % _BLOCK), (0, 0), (0, 0))) for x in (q, k, v))
    return _attend(q, k, v, scale, causal)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _attend(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    return _forward(q, k, v, scale, causal)[0]


def _forward(q, k, v, scale, causal):
    with _launched_by_platform():
        out, statistics = _kernel()(q, k, v, logits_scale=scale, is_causal=causal, return_residuals=True)
    return out, (q, k, v, out, statistics)


def _backward(scale, causal, kept, gradient):
    q, k, v, out, statistics = kept
    with _launched_by_platform():
        bound = _kernel().bind(q, k, v, logits_scale=scale, is_causal=causal)
        options = {name: value for name, value in bound.kwargs.items() if name != "return_residuals"}
        gradients = _kernel().vjp(statistics, out, gradient, *bound.args, **options)
    return gradients["q"], gradients["k"], gradients["v"]


_attend.defvjp(_forward, _backward)


def _kernel() -> Any:
    """Forward, and backward as its ``vjp``. tokamax takes long to import and may be missing: it is imported at the first use."""
    return importlib.import_module("tokamax._src.ops.attention.api").IMPLEMENTATIONS["triton"]


@contextlib.contextmanager
def _launched_by_platform() -> Iterator[None]:
    pl, config = importlib.import_module("jax.experimental.pallas"), importlib.import_module("tokamax").config
    with (
        mock.patch.object(pl, "pallas_call", functools.partial(_by_platform, pl, pl.pallas_call, pl.program_id)),
        config.cross_compile(True),
        config.ignore_autotuning_cache(True),
    ):
        yield


def _by_platform(pl: Any, pallas_call: Any, program_id: Any, kernel: Callable[..., None], *args: Any, **options: Any) -> Any:
    """`pl.pallas_call`, interpreted on CPUs."""

    @functools.wraps(kernel)
    def numbered(*refs: Any) -> None:
        numbers = [program_id(axis) for axis in range(len(options["grid_spec"].grid))]

        def number(axis: int) -> Any:
            if axis >= len(numbers):
                raise ValueError(f"the grid has no axis {axis}")
            return numbers[axis]

        with mock.patch.object(pl, "program_id", number):
            kernel(*refs)

    def launch(interpret: bool) -> Callable[..., Any]:
        return pallas_call(numbered, *args, interpret=interpret, **options)

    return lambda *operands: jax.lax.platform_dependent(*operands, cpu=launch(True), default=launch(False))
