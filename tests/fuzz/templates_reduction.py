"""Templates of reductions, running ones too, and of the layers that consist of them."""

from __future__ import annotations

import math

from tests.fuzz.draw import Drawer, UnfitError
from tests.fuzz.templates import template


def _axes(d: Drawer, name: str) -> tuple[int, ...]:
    """Some dims of a value, at least one."""
    rank = len(d.values[name].shape)
    if d.chance(0.25):
        return tuple(range(rank))
    return tuple(sorted({d.below(rank) for _ in range(d.choice([1, 1, 2]))}))


def _kept(d: Drawer) -> str:
    return ", keepdims=True" if d.chance(0.3) else ""


@template(3.0)
def total(d: Drawer, name: str) -> None:
    x = d.value("float")
    axes = _axes(d, x)
    scale = round(math.prod(d.values[x].shape[a] for a in axes) ** -0.5, 3)
    d.add(name, f"jnp.sum({{0}}, {axes}{_kept(d)}) * {scale}", x)


@template(2.0)
def mean(d: Drawer, name: str) -> None:
    x = d.value("float")
    op = d.choice(["mean", "mean", "max", "min"])
    d.add(name, f"jnp.{op}({{0}}, {_axes(d, x)}{_kept(d)})", x)


@template()
def variance(d: Drawer, name: str) -> None:
    x = d.value("float")
    text = d.choice(["jnp.var({0}, {axes})", "jnp.sqrt(jnp.var({0}, {axes}) + 0.1)"])
    d.add(name, text.replace("{axes}", str(_axes(d, x))), x)


@template()
def logsumexp(d: Drawer, name: str) -> None:
    x = d.value("float")
    d.add(name, f"jax.nn.logsumexp({{0}}, {_axes(d, x)}{_kept(d)})", x)


@template()
def product(d: Drawer, name: str) -> None:
    x = d.value("float")
    d.add(name, f"jnp.prod(1 + 0.1 * jnp.tanh({{0}}), {_axes(d, x)})", x)


@template(1.5)
def int_reduction(d: Drawer, name: str) -> None:
    x = d.value("int")
    axes, op = _axes(d, x), d.choice(["sum", "max", "min", "prod", "or", "and", "xor"])
    d.add(name, f"lax.reduce_{op}({{0}}, {axes})", x)


@template()
def bool_reduction(d: Drawer, name: str) -> None:
    x = d.value("bool")
    d.add(name, f"jnp.{d.choice(['any', 'all', 'sum'])}({{0}}, {_axes(d, x)})", x)


@template()
def argmax(d: Drawer, name: str) -> None:
    x = d.value("real", exact=True)
    d.add(name, f"jnp.{d.choice(['argmax', 'argmin'])}({{0}}, {d.axis(x)})", x)


@template(1.5)
def running(d: Drawer, name: str) -> None:
    x = d.value("float")
    axis, back = d.axis(x), ", reverse=True" if d.chance(0.3) else ""
    texts = [
        f"lax.cumsum({{0}}, {axis}{back}) * 0.2",
        f"lax.cummax({{0}}, {axis}{back})",
        f"lax.cummin({{0}}, {axis}{back})",
        f"lax.cumprod(1 + 0.1 * jnp.tanh({{0}}), {axis}{back})",
        f"lax.cumlogsumexp({{0}}, {axis}{back})",
    ]
    d.add(name, d.choice(texts), x)


@template()
def int_running(d: Drawer, name: str) -> None:
    x = d.value("int")
    d.add(name, f"lax.{d.choice(['cumsum', 'cummax', 'cummin'])}({{0}}, {d.axis(x)})", x)


@template(0.7)
def own_reduction(d: Drawer, name: str) -> None:
    x = d.value("int32")
    start, step = d.choice([("0", "p + q"), ("0", "p * q + p + q"), ("-(2**31)", "jnp.maximum(p, q)"), ("-1", "p & q")])
    d.add(name, f"lax.reduce({{0}}, jnp.int32({start}), lambda p, q: {step}, {_axes(d, x)})", x)


@template(1.2)
def softmax(d: Drawer, name: str) -> None:
    x = d.value("float")
    op = d.choice(["softmax", "log_softmax"])
    d.add(name, f"jax.nn.{op}({{0}}, {d.axis(x)})", x)


@template(1.5)
def layernorm(d: Drawer, name: str) -> None:
    x = d.value("float", 2, where=lambda s: s[-1] > 1)
    scale = d.argument(d.values[x].shape[-1:])
    text = "({0} - {0}.mean(-1, keepdims=True)) * lax.rsqrt({0}.var(-1, keepdims=True) + 0.1) * {1}"
    d.add(name, text, x, scale)


@template(0.7)
def batchnorm(d: Drawer, name: str) -> None:
    x = d.value("float", 2, where=lambda s: s[0] > 1)
    d.add(name, "({0} - {0}.mean(0)) / jnp.sqrt({0}.var(0) + 0.1)", x)


@template(0.7)
def norm(d: Drawer, name: str) -> None:
    x = d.value("float", 1)
    d.add(name, "{0} / jnp.sqrt(jnp.sum({0} * {0}, -1, keepdims=True) + 0.1)", x)


@template(1.2)
def pool(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 4)
    shape = d.values[x].shape
    window = tuple(d.choice([1, 2, 3]) for _ in shape)
    steps = tuple(d.choice([1, 1, 2]) for _ in shape)
    padding = d.choice(["SAME", "VALID"])
    if padding == "VALID" and any(w > n for w, n in zip(window, shape, strict=True)):
        raise UnfitError
    init, op = d.choice([("-jnp.inf", "lax.max"), ("0.0", "lax.add")])
    text = f"lax.reduce_window({{0}}, {{0}}.dtype.type({init}), {op}, {window}, {steps}, {padding!r})"
    d.add(name, text if op == "lax.max" else f"{text} / {math.prod(window)}", x)


@template(0.7)
def dilated_pool(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 2)
    n = len(d.values[x].shape)
    window, dilation = (2,) * n, tuple(d.choice([1, 2]) for _ in range(n))
    edges = tuple((d.below(3), d.below(3, 2)) for _ in range(n))
    text = f"lax.reduce_window({{0}}, {{0}}.dtype.type(0), lax.add, {window}, {(1,) * n}, {edges}, None, {dilation}) * 0.5"
    d.add(name, text.replace("None", str((d.choice([1, 2]),) * n)), x)
