"""Templates of ops that move numbers: reshapes, transposes, slices, pads, joins."""

from __future__ import annotations

import math

from tests.fuzz.draw import Drawer, UnfitError
from tests.fuzz.program import Shape
from tests.fuzz.templates import template


@template(2.0)
def reshape(d: Drawer, name: str) -> None:
    x = d.value("any")
    d.add(name, f"{{0}}.reshape({_reshaped(d, d.values[x].shape)})", x, exact=True)


def _reshaped(d: Drawer, shape: Shape) -> Shape:
    """Neighbouring dims merged, a dim split, a dim of one added or left out, or all flat."""
    at = d.below(len(shape))
    splits = [k for k in (2, 3, 4, 5, 8) if shape[at] % k == 0 and shape[at] > k]
    ways = ["flat", "one"] + ["merge"] * 2 * (len(shape) > at + 1) + ["split"] * 3 * bool(splits) + ["none"] * (1 in shape)
    match d.choice(ways):
        case "merge":
            return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
        case "split":
            k = d.choice(splits)
            return (*shape[:at], *d.choice([(k, shape[at] // k), (shape[at] // k, k)]), *shape[at + 1 :])
        case "one":
            return (*shape[:at], 1, *shape[at:])
        case "none":
            return tuple(n for n in shape if n > 1) or (1,)
        case _:
            return (math.prod(shape),)


@template(2.0)
def transpose(d: Drawer, name: str) -> None:
    x = d.value("any", 2)
    order = tuple(int(i) for i in d.rng.permutation(len(d.values[x].shape)))
    d.add(name, f"jnp.transpose({{0}}, {order})", x, exact=True)


@template()
def broadcast(d: Drawer, name: str) -> None:
    x = d.value("any", 0, 3)
    shape = d.values[x].shape
    if 1 in shape and d.chance(0.5):
        wider = tuple(d.size() if n == 1 else n for n in shape)
        d.add(name, f"jnp.broadcast_to({{0}}, {wider})", x, exact=True)
    elif d.chance(0.5):
        d.add(name, f"jnp.broadcast_to({{0}}, {(d.size(), *shape)})", x, exact=True)
    else:
        d.add(name, f"jnp.broadcast_to({{0}}[..., None], {(*shape, d.size())})", x, exact=True)


@template(2.0)
def slices(d: Drawer, name: str) -> None:
    x = d.value("any", where=lambda s: max(s, default=1) > 1)
    words = [_slice(d, n) if d.chance(0.6) else ":" for n in d.values[x].shape]
    d.add(name, f"{{0}}[{', '.join(words)}]", x, exact=True)


def _slice(d: Drawer, n: int) -> str:
    low = d.below(max(1, n // 2))
    high = d.below(n + 1, low + 1)
    step = d.choice([1, 1, 2, 3, -1])
    if step < 0:
        return "::-1"
    return f"{low or ''}:{high if high < n else ''}{f':{step}' if step > 1 else ''}"


@template()
def one_row(d: Drawer, name: str) -> None:
    x = d.value("any", 2)
    axis = d.axis(x)
    words = [":"] * axis + [str(d.below(d.values[x].shape[axis]))]
    d.add(name, f"{{0}}[{', '.join(words)}]", x, exact=True)


@template(1.5)
def pad(d: Drawer, name: str) -> None:
    x = d.value("real")
    config = tuple(_pad(d, n) for n in d.values[x].shape)
    d.add(name, f"lax.pad({{0}}, {{0}}.dtype.type({d.choice([0, 1])}), {config})", x, exact=True)


def _pad(d: Drawer, n: int) -> tuple[int, int, int]:
    low, high, inner = d.below(3), d.below(3), d.choice([0, 0, 1])
    if n > 4 and d.chance(0.3):
        low = -1
    if n > 4 and d.chance(0.3):
        high = -2
    return (low, high, inner) if d.chance(0.7) else (0, 0, 0)


@template(0.7)
def pad_by_edge(d: Drawer, name: str) -> None:
    x = d.value("real", 1, 2)
    widths = [(d.below(2), d.below(3)) for _ in d.values[x].shape]
    d.add(name, f"jnp.pad({{0}}, {widths}, mode={d.choice(['edge', 'wrap'])!r})", x, exact=True)


@template(1.5)
def concatenate(d: Drawer, name: str) -> None:
    x = d.value("any")
    shape, axis = list(d.values[x].shape), d.axis(x)
    fit = [n for n, v in d.values.items() if v.dtype == d.values[x].dtype and _joins(v.shape, tuple(shape), axis)]
    shape[axis] = d.size()
    y = d.choice(fit) if d.chance(0.6) else d.argument(tuple(shape), d.values[x].dtype)
    d.add(name, f"jnp.concatenate([{{0}}, {{1}}], {axis})", *d.choice([(x, y), (y, x)]), exact=True)


def _joins(a: Shape, b: Shape, axis: int) -> bool:
    return len(a) == len(b) and all(m == n or i == axis for i, (m, n) in enumerate(zip(a, b, strict=True)))


@template()
def stack(d: Drawer, name: str) -> None:
    x = d.value("any", 0, 3)
    y = d.like(x, broadcast=False)
    d.add(name, f"jnp.stack([{{0}}, {{1}}, {{0}}], {d.below(len(d.values[x].shape) + 1)})", x, y, exact=True)


@template()
def split(d: Drawer, name: str) -> None:
    x = d.value("real", where=lambda s: any(n % 2 == 0 for n in s))
    axis = d.choice([i for i, n in enumerate(d.values[x].shape) if n % 2 == 0])
    d.add(name, f"(lambda u, v: u - 2 * v)(*jnp.split({{0}}, 2, {axis}))", x)


@template(0.7)
def unstack(d: Drawer, name: str) -> None:
    x = d.value("real", 2, where=lambda s: s[0] <= 6)
    n = d.values[x].shape[0]
    d.add(name, f"(lambda *u: u[0] + 3 * u[{n - 1}])(*jnp.unstack({{0}}))", x)


@template()
def flip(d: Drawer, name: str) -> None:
    x = d.value("any")
    d.add(name, f"jnp.flip({{0}}, {d.axis(x)})", x, exact=True)


@template(0.8)
def roll(d: Drawer, name: str) -> None:
    x = d.value("any")
    d.add(name, f"jnp.roll({{0}}, {d.choice([1, -1, 2, 3])}, {d.axis(x)})", x, exact=True)


@template(0.8)
def repeat(d: Drawer, name: str) -> None:
    x = d.value("any", 1, 3)
    axis = d.axis(x)
    times = tuple(2 if i == axis else 1 for i in range(len(d.values[x].shape)))
    d.add(name, d.choice([f"jnp.repeat({{0}}, 2, {axis})", f"jnp.tile({{0}}, {times})"]), x, exact=True)


@template(0.7)
def triangle(d: Drawer, name: str) -> None:
    x = d.value("real", 2)
    d.add(name, f"jnp.{d.choice(['tril', 'triu'])}({{0}}, {d.below(3) - 1})", x, exact=True)


@template(0.5)
def diagonal(d: Drawer, name: str) -> None:
    x = d.value("real", 2, 2)
    d.add(name, "jnp.diagonal({0})", x, exact=True)


@template()
def dynamic_slice(d: Drawer, name: str) -> None:
    x = d.value("any")
    axis, at = d.axis(x), d.scalar()
    n = d.values[x].shape[axis]
    text = f"lax.dynamic_slice_in_dim({{0}}, {{1}} {d.choice([f'% {n}', '+ 1', '- 2'])}, {d.below(n + 1, 1)}, {axis})"
    d.add(name, text, x, at, exact=True)


@template()
def dynamic_update(d: Drawer, name: str) -> None:
    x = d.value("any")
    axis, at = d.axis(x), d.scalar()
    shape = list(d.values[x].shape)
    shape[axis] = d.below(shape[axis] + 1, 1)
    y = d.argument(tuple(shape), d.values[x].dtype)
    d.add(name, f"lax.dynamic_update_slice_in_dim({{0}}, {{1}}, {{2}} {d.choice(['% 5', '- 1'])}, {axis})", x, y, at, exact=True)


@template(0.7)
def window_at(d: Drawer, name: str) -> None:
    x = d.value("any", 2, 3, where=lambda s: min(s) > 1)
    sizes = tuple(d.below(n + 1, 1) for n in d.values[x].shape)
    starts = ", ".join(["{1}", "{2}", "0"][: len(sizes)])
    if len(sizes) < 2:
        raise UnfitError
    d.add(name, f"lax.dynamic_slice({{0}}, ({starts}), {sizes})", x, d.scalar(), d.scalar(), exact=True)
