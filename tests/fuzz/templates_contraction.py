"""Templates of products: matrices, batches, several dims at once, attention, convolutions."""

from __future__ import annotations

import math

from tests.fuzz.draw import Drawer, UnfitError
from tests.fuzz.program import Shape
from tests.fuzz.templates import template


def weight(d: Drawer, shape: Shape, dtype: str) -> str:
    """An existing value or a new argument of that type."""
    fit = [n for n, v in d.values.items() if v.like == (shape, dtype)]
    return d.choice(fit) if fit and d.chance(0.5) else d.argument(shape, dtype)


def scaled(n: int) -> str:
    """The factor that keeps a sum of so many products as large as one."""
    return f"{round(max(n, 1) ** -0.5, 3)}"


@template(5.0)
def dense(d: Drawer, name: str) -> None:
    x = d.value("float", 1)
    v = d.values[x]
    w = weight(d, (v.shape[-1], d.size()), v.dtype)
    d.add(name, d.choice(["({0} @ {1}) * ", "jnp.tanh({0} @ {1}) * "]) + scaled(v.shape[-1]), x, w)


@template(1.5)
def tied(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    v = d.values[x]
    w = weight(d, (d.size(), v.shape[-1]), v.dtype)
    d.add(name, f"({{0}} @ {{1}}.T) * {scaled(v.shape[-1])}", x, w)


@template(1.2)
def gram(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    text = d.choice(["jnp.einsum('...ij,...kj->...ik', {0}, {0})", "jnp.einsum('...ij,...ik->...jk', {0}, {0})"])
    d.add(name, f"jnp.tanh({text} * {scaled(math.prod(d.values[x].shape[-2:]))})", x)


@template(1.2)
def batched(d: Drawer, name: str) -> None:
    x = d.value("float", 3, 4)
    v = d.values[x]
    w = weight(d, (*v.shape[:-2], v.shape[-1], d.size()), v.dtype)
    d.add(name, f"jnp.matmul({{0}}, {{1}}) * {scaled(v.shape[-1])}", x, w)


@template(1.2)
def two_dims(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    v = d.values[x]
    w = weight(d, (*v.shape[-2:], d.size()), v.dtype)
    text = d.choice(["jnp.tensordot({0}, {1}, 2)", "jnp.einsum('...ij,ijk->k...', {0}, {1})"])
    d.add(name, f"{text} * {scaled(math.prod(v.shape[-2:]))}", x, w)


@template()
def heads(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    v = d.values[x]
    w = weight(d, (v.shape[-1], d.choice([2, 3, 4]), d.choice([2, 4, 5])), v.dtype)
    d.add(name, f"jnp.einsum('...d,dhe->...he', {{0}}, {{1}}) * {scaled(v.shape[-1])}", x, w)


@template()
def general(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 4)
    v = d.values[x]
    rank = len(v.shape)
    order = [int(i) for i in d.rng.permutation(rank)]
    joined = order[: d.below(rank, 1)]
    batch = order[len(joined) : len(joined) + d.below(2)]
    w = weight(d, (*[v.shape[i] for i in batch], d.size(), *[v.shape[i] for i in joined]), v.dtype)
    places = (tuple(joined), tuple(range(len(batch) + 1, len(batch) + 1 + len(joined))))
    numbers = (places, (tuple(batch), tuple(range(len(batch)))))
    d.add(name, f"lax.dot_general({{0}}, {{1}}, {numbers}) * {scaled(math.prod(v.shape[i] for i in joined))}", x, w)


@template()
def int_product(d: Drawer, name: str) -> None:
    x = d.value("int32", 1, 3)
    w = weight(d, (d.values[x].shape[-1], d.size()), "int32")
    d.add(
        name,
        d.choice(["{0} @ {1}", "jnp.matmul({0}.astype(jnp.int8), {1}.astype(jnp.int8), preferred_element_type=jnp.int32)"]),
        x,
        w,
    )


@template()
def narrow_product(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    w = weight(d, (d.values[x].shape[-1], d.size()), "float32")
    text = "jnp.matmul({0}.astype(jnp.bfloat16), {1}.astype(jnp.bfloat16), preferred_element_type=jnp.float32)"
    d.add(name, f"{text} * {scaled(d.values[x].shape[-1])}", x, w)


@template(1.5)
def attention(d: Drawer, name: str) -> None:
    x = d.value("f32", 2, 3)
    v = d.values[x]
    q, k = (weight(d, (v.shape[-1], d.size()), v.dtype) for _ in "qk")
    n = d.values[q].shape[-1]
    if d.values[k].shape[-1] != n:
        k = q
    mask = " + jnp.triu(jnp.full(({0}.shape[-2],) * 2, -1e9), 1)" if d.chance(0.5) else ""
    scores = f"jnp.einsum('...td,...sd->...ts', {{0}} @ {{1}}, {{0}} @ {{2}}) * {scaled(n * v.shape[-1])}{mask}"
    d.add(name, f"jnp.einsum('...ts,...sd->...td', jax.nn.softmax({scores}), {{0}})", x, q, k)


@template()
def vectors(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 2)
    y = d.like(x, broadcast=False)
    d.add(name, d.choice(["jnp.vdot({0}, {1}) * 0.1", "jnp.einsum('...i,...j->...ij', {0}, {1})"]), x, y)


@template(0.7)
def cycle(d: Drawer, name: str) -> None:
    n = d.size()
    x, y, z = (d.argument((n, d.size()) if i else (d.size(), n)) for i in range(3))
    d.add(name, f"jnp.einsum('an,nb,nc->abc', {{0}}, {{1}}, {{2}}) * {scaled(n)}", x, y, z)


# -- convolutions ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    1: [("NHC", "HIO", "NHC"), ("NCH", "OIH", "NCH"), ("HNC", "OIH", "HCN"), ("NHC", "OIH", "NCH")],
    2: [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"), ("NHWC", "OIHW", "NCHW"), ("HWNC", "HWIO", "NHWC")],
}


@template(3.0)
def convolution(d: Drawer, name: str) -> None:
    rank = d.choice([1, 2])
    x = d.value("float", rank + 2, rank + 2)
    shape = d.values[x].shape
    layout = d.choice(LAYOUTS[rank])
    sizes = dict(zip(layout[0], shape, strict=True))
    features = sizes["C"]
    groups = d.choice([1, 1, 1, features]) if features <= 8 else 1
    out = groups * d.choice([1, 2]) if groups > 1 else d.size()
    window = [d.choice([1, 2, 3, 4]) for _ in range(rank)]
    kernel = {"I": features // groups, "O": out, **dict(zip("HW", window, strict=False))}
    w = d.argument(tuple(kernel[c] for c in layout[1]), d.values[x].dtype)
    padding, words = _options(d, rank, [sizes[c] for c in "HW"[:rank]], window)
    text = f"lax.conv_general_dilated({{0}}, {{1}}, {words[0]}, {padding}, {words[1]}dimension_numbers={layout}"
    grouped = f", feature_group_count={groups}" if groups > 1 else ""
    d.add(name, f"{text}{grouped}) * {scaled(math.prod(window) * features // groups)}", x, w)


def _options(d: Drawer, rank: int, sizes: list[int], window: list[int]) -> tuple[str, tuple[str, str]]:
    """(the padding, (the strides, dilations)) of a convolution."""
    strides = tuple(d.choice([1, 1, 1, 2, 3]) for _ in range(rank))
    left = tuple(d.choice([1, 1, 2]) for _ in range(rank)) if d.chance(0.25) else (1,) * rank
    right = tuple(d.choice([1, 2, 3]) for _ in range(rank)) if d.chance(0.25) else (1,) * rank
    words = (f"lhs_dilation={left}, " if max(left) > 1 else "") + (f"rhs_dilation={right}, " if max(right) > 1 else "")
    if max(left) > 1 or d.chance(0.3):
        return str([(d.below(3), d.below(3) + (w - 1) * r) for w, r in zip(window, right, strict=True)]), (str(strides), words)
    reach = [(w - 1) * r + 1 for w, r in zip(window, right, strict=True)]
    fits = all(n >= r for n, r in zip(sizes, reach, strict=True))
    return repr(d.choice(["SAME", "VALID"]) if fits else "SAME"), (str(strides), words)


@template(0.8)
def convolve(d: Drawer, name: str) -> None:
    x = d.value("f32", 1, 1, where=lambda s: s[0] > 1)
    k = d.argument((d.choice([2, 3, 4]),))
    if d.values[x].shape < d.values[k].shape:
        raise UnfitError
    d.add(name, f"jnp.convolve({{0}}, {{1}}, mode={d.choice(['same', 'full', 'valid'])!r}) * 0.5", x, k)


@template(0.8)
def transposed_convolution(d: Drawer, name: str) -> None:
    x = d.value("f32", 4, 4)
    features = d.values[x].shape[-1]
    w = d.argument((2, 2, features, d.size()))
    layout = LAYOUTS[2][0]
    text = f"lax.conv_transpose({{0}}, {{1}}, (2, 2), 'SAME', dimension_numbers={layout}) * {scaled(features)}"
    d.add(name, text, x, w)


@template(1.5)
def patches(d: Drawer, name: str) -> None:
    size = d.choice([2, 4])
    x = d.argument((d.choice([1, 4, 8]), size * d.choice([2, 4]), size * d.choice([1, 2, 4]), d.choice([1, 2, 3])))
    features = d.values[x].shape[-1]
    w = d.argument((size, size, features, d.size()))
    text = f"lax.conv_general_dilated({{0}}, {{1}}, {(size, size)}, 'VALID', dimension_numbers={LAYOUTS[2][0]})"
    d.add(name, f"{text} * {scaled(size * size * features)}", x, w)
