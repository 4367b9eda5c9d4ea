"""The kernels that a calibration measures: matrix products, convolutions, elementwise ops, reductions, gathers, tiny kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAUNCHES = "launches"
"""The family of kernels that take no longer than their launch."""
_CHAIN = 128
"""Tiny kernels in a row: enough to tell the launch of a kernel from that of the program."""


@dataclass(frozen=True, slots=True)
class KernelArgument:
    """An argument of one device: normal floats from a seed, or whole numbers ``below`` a bound."""

    shape: tuple[int, ...]
    dtype: str
    below: int = 0

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """The shape, to trace with."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def values(self, seed: int) -> np.ndarray[Any, Any]:
        """The argument on the host."""
        rng = np.random.default_rng(seed)
        if self.below:
            return rng.integers(0, self.below, self.shape).astype(self.dtype)
        scale = max(1, self.shape[0] if self.shape else 1) ** -0.5  # products of long chains keep their size
        return (scale * rng.standard_normal(self.shape)).astype(jnp.dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function of one device's arrays whose seconds are measured; ``family`` groups kernels in reports."""

    family: str
    name: str
    function: Callable[..., Any]
    arguments: tuple[KernelArgument, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes at which a platform's kernels run long enough to be measured and short enough to be repeated."""

    square: tuple[int, ...]
    elements: tuple[int, ...]
    image: int
    dtypes: tuple[str, ...]


CPU = Sizes((128, 256, 512), (1 << 15, 1 << 18, 1 << 21), 16, ("float32", "bfloat16", "float16", "float64"))
ACCELERATOR = Sizes((1024, 2048, 4096, 8192), (1 << 20, 1 << 24, 1 << 27), 64, ("float32", "bfloat16", "float16", "float64"))


def sizes_of(platform: str) -> Sizes:
    """The sizes for a platform, in JAX's word for it."""
    return CPU if platform == "cpu" else ACCELERATOR


def kernels(sizes: Sizes) -> tuple[Kernel, ...]:
    """All kernels of a calibration, in a fixed order."""
    return (
        *_products(sizes),
        *_convolutions(sizes),
        *_elementwise(sizes),
        *_reductions(sizes),
        *_gathers(sizes),
        *_launches(),
    )


def _products(sizes: Sizes) -> Iterator[Kernel]:
    for dtype in sizes.dtypes:
        wide = dtype == "float32"
        for n in sizes.square if wide else sizes.square[:2]:
            yield _product(f"{n}x{n}x{n}", (n, n), (n, n), dtype)
        n = sizes.square[1]
        yield _product(f"{n // 8}x{4 * n}x{n}", (n // 8, 4 * n), (4 * n, n), dtype)
        if wide:
            yield _product(f"{8 * n}x{n // 8}x{n}", (8 * n, n // 8), (n // 8, n), dtype)
            yield _product(f"8x{2 * n}x{2 * n}", (8, 2 * n), (2 * n, 2 * n), dtype)
            yield _product(f"{n}x{8 * n}x{n // 8}", (n, 8 * n), (8 * n, n // 8), dtype)
            heads = (KernelArgument((8, n // 2, n // 4), dtype), KernelArgument((8, n // 4, n // 2), dtype))
            yield Kernel("products", f"8 of {n // 2}x{n // 4}x{n // 2} {dtype}", lambda a, b: a @ b, heads)


def _product(name: str, left: tuple[int, int], right: tuple[int, int], dtype: str) -> Kernel:
    return Kernel("products", f"{name} {dtype}", lambda a, b: a @ b, (KernelArgument(left, dtype), KernelArgument(right, dtype)))


def _convolution(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _convolutions(sizes: Sizes) -> Iterator[Kernel]:
    side, features = sizes.image, 2 * sizes.image
    x = KernelArgument((4, side, side, features), "float32")
    for window in (1, 3):
        w = KernelArgument((window, window, features, features), "float32")
        name = f"{window}x{window} on 4x{side}x{side}x{features}"
        yield Kernel("convolutions", f"{name} float32", _convolution, (x, w))
        yield Kernel("convolutions", f"{name} float32, gradient of the input", _input_gradient, (x, w))
        yield Kernel("convolutions", f"{name} float32, gradient of the filter", _filter_gradient, (x, w))


def _input_gradient(x: Any, w: Any) -> Any:
    return jax.vjp(lambda v: _convolution(v, w), x)[1](x)[0]  # as many features in as out


def _filter_gradient(x: Any, w: Any) -> Any:
    return jax.vjp(lambda v: _convolution(x, v), w)[1](x)[0]


_MAPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "multiply-add": lambda a, b: a * 0.9 + b * 0.1,
    "gelu": lambda a, b: jax.nn.gelu(a) * b,
    "rsqrt update": lambda a, b: a - 0.1 * a * lax.rsqrt(b * b + 1e-6),
}


def _elementwise(sizes: Sizes) -> Iterator[Kernel]:
    for n in sizes.elements:
        for name, function in _MAPS.items():
            yield Kernel("elementwise", f"{name} of {n} float32", function, (KernelArgument((n,), "float32"),) * 2)
    n = sizes.elements[1]
    yield Kernel("elementwise", f"add of {n} bfloat16", _MAPS["add"], (KernelArgument((n,), "bfloat16"),) * 2)
    yield Kernel("elementwise", f"bfloat16 from float32, {n}", lambda a: a.astype("bfloat16"), (KernelArgument((n,), "float32"),))


def _reductions(sizes: Sizes) -> Iterator[Kernel]:
    for n in sizes.elements[1:]:
        rows = KernelArgument((n // 256, 256), "float32")
        yield Kernel("reductions", f"rows of {n // 256}x256", lambda a: a.sum(1), (rows,))
        yield Kernel("reductions", f"columns of {n // 256}x256", lambda a: a.sum(0), (rows,))
        yield Kernel("reductions", f"softmax of {n // 256}x256", lambda a: jax.nn.softmax(a), (rows,))
        yield Kernel("reductions", f"transpose of {n // 256}x256", lambda a: a.T + 1, (rows,))


def _gathers(sizes: Sizes) -> Iterator[Kernel]:
    for n in sizes.elements[1:]:
        table, picks = KernelArgument((n // 64, 64), "float32"), KernelArgument((n // 256,), "int32", n // 64)
        yield Kernel("gathers", f"{n // 256} of {n // 64} rows of 64", lambda t, i: jnp.take(t, i, axis=0), (table, picks))
        made = KernelArgument((n // 256, 64), "float32")
        yield Kernel("gathers", f"{n // 256} rows of 64 added to {n // 64}", lambda t, i, x: t.at[i].add(x), (table, picks, made))


def _launches() -> Iterator[Kernel]:
    tiny = (KernelArgument((8, 8), "float32"), KernelArgument((8, 8), "float32"))
    yield Kernel(LAUNCHES, f"{_CHAIN} products of 8x8", _chain(lambda x, w: x @ w), tiny)
    yield Kernel(LAUNCHES, f"{_CHAIN} products of 8x8, each with its tanh", _chain(lambda x, w: jnp.tanh(x @ w)), tiny)


def _chain(one: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def chained(x: Any, w: Any) -> Any:
        for _ in range(_CHAIN):
            x = one(x, w)
        return x

    return chained
