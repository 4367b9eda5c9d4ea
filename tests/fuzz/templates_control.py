"""Templates of loops, branches, checkpoints, maps and functions with derivatives of their own."""

from __future__ import annotations

from tests.fuzz.draw import Drawer
from tests.fuzz.templates import template
from tests.fuzz.templates_contraction import scaled, weight


@template(1.5)
def scan_rows(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    v = d.values[x]
    c = weight(d, v.shape[1:], v.dtype)
    back = ", reverse=True" if d.chance(0.3) else ""
    body = d.choice(
        ["(jnp.tanh(c + u) * 0.5, c * u)", "(0.5 * c + u, c)", "(u, c + u)", "(c, c)", "(c * 0.9 + 0.1, jnp.sin(u) * c)"]
    )
    if d.chance(0.5):
        d.add(name, f"lax.scan(lambda c, u: {body}, {{1}}, {{0}}{back})[{d.below(2)}]", x, c)
    else:
        d.add(name, f"(lambda c, y: y * 0.5 + c)(*lax.scan(lambda c, u: {body}, {{1}}, {{0}}{back}))", x, c)


@template(1.2)
def scan_layers(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 3)
    v = d.values[x]
    n = v.shape[-1]
    w = weight(d, (d.choice([2, 3, 4]), n, n), v.dtype)
    scale = scaled(n)
    body = d.choice([f"(jnp.tanh(c @ w) * {scale}, None)", f"(c + jnp.tanh(c @ w) * {scale}, None)"])
    cell = f"lambda c, w: {body}"
    cell = f"jax.checkpoint({cell})" if d.chance(0.3) else cell
    d.add(name, f"lax.scan({cell}, {{0}}, {{1}})[0]", x, w)


@template()
def recurrence(d: Drawer, name: str) -> None:
    x = d.value("float", 3, 3)
    v = d.values[x]
    n = d.size()
    w, r = weight(d, (v.shape[-1], n), v.dtype), weight(d, (n, n), v.dtype)
    start = f"jnp.zeros({(v.shape[1], n)}, {{0}}.dtype)"
    text = f"lax.scan(lambda h, u: (jnp.tanh(u @ {{1}} + h @ {{2}} * {scaled(n)}),) * 2, {start}, {{0}})"
    d.add(name, f"{text}[{d.below(2)}]", x, w, r)


@template(0.8)
def int_scan(d: Drawer, name: str) -> None:
    x = d.value("int32", 2, 3)
    c = weight(d, d.values[x].shape[1:], "int32")
    d.add(name, f"lax.scan(lambda c, u: (c * 3 + u, jnp.maximum(c, u)), {{1}}, {{0}})[{d.below(2)}]", x, c)


@template()
def fori(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 3)
    y = d.like(x)
    body = d.choice(["jnp.sin(c) + 0.3 * {1}", "c * 0.7 + {1} * i", "jnp.tanh(c * {1}) + 0.1 * c"])
    d.add(name, f"lax.fori_loop(0, {d.choice([2, 3, 5])}, lambda i, c: ({body}).astype(c.dtype), {{0}})", x, y)


@template(0.8)
def fori_updates(d: Drawer, name: str) -> None:
    x = d.value("f32", 2, 3)
    n = d.values[x].shape[0]
    body = f"c.at[i].{d.choice(['set', 'add'])}(jnp.tanh({{0}}[i] * 0.5 + c[(i + 1) % {n}]))"
    d.add(name, f"lax.fori_loop(0, {min(n, 4)}, lambda i, c: {body}, {{0}})", x)


@template()
def while_loop(d: Drawer, name: str) -> None:
    x, n = d.value("float", 1, 3), d.scalar()
    body = d.choice(["jnp.sin(s[1]) + 0.1", "jnp.roll(s[1], 1, 0) * 0.9", "s[1] - s[1].mean() * 0.5"])
    text = f"lax.while_loop(lambda s: s[0] < {{1}} % 4, lambda s: (s[0] + 1, ({body}).astype(s[1].dtype)), (0, {{0}}))[1]"
    d.add(name, text, x, n, smooth=False)


@template()
def cond(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 3)
    y = d.like(x, broadcast=False)
    p = d.scalar("bool") if d.chance(0.5) else d.scalar()
    test = "{2}" if d.values[p].dtype == "bool" else "{2} % 2 == 0"
    branches = d.choice(["lambda u, v: u * v, lambda u, v: jnp.sin(u)", "lambda u, v: u - v.mean(), lambda u, v: jnp.flip(v, 0)"])
    d.add(name, f"lax.cond({test}, {branches}, {{0}}, {{1}})", x, y, p)


@template(0.8)
def switch(d: Drawer, name: str) -> None:
    x, i = d.value("float", 1, 3), d.scalar()
    branches = "[jnp.tanh, lambda u: u * 2, lambda u: jnp.broadcast_to(u.mean(0), u.shape)]"
    d.add(name, f"lax.switch({{1}} % 4, {branches}, {{0}})", x, i)


@template()
def checkpoint(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 3)
    v = d.values[x]
    w = weight(d, (v.shape[-1], d.size()), v.dtype)
    d.add(name, f"jax.checkpoint(lambda u, w: jnp.tanh(jnp.sin(u) @ w))({{0}}, {{1}}) * {scaled(v.shape[-1])}", x, w)


@template()
def vmapped(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    v = d.values[x]
    w = weight(d, (v.shape[-1], d.size()), v.dtype)
    axis = d.below(len(v.shape) - 1)
    text = d.choice(
        [f"jax.vmap(lambda u: jnp.tanh(u @ {{1}}), {axis})({{0}})", "jax.vmap(lambda u: jax.nn.softmax(u @ {1}))({0})"]
    )
    d.add(name, text, x, w)


@template(0.7)
def vmapped_scan(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    d.add(name, "jax.vmap(lambda u: lax.scan(lambda c, w: (0.5 * c + w, c), jnp.zeros_like(u[0]), u)[1])({0})", x)


@template(0.7)
def mapped(d: Drawer, name: str) -> None:
    d.add(name, "lax.map(lambda u: u - u.mean(), {0})", d.value("float", 2, 3))


@template(0.7)
def associative_scan(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 3)
    d.add(name, f"lax.associative_scan(lambda u, v: 0.5 * (u + v), {{0}}, axis={d.axis(x)})", x)


@template()
def inner_gradient(d: Drawer, name: str) -> None:
    x = d.value("f32", 1, 3)
    n = d.values[x].shape[-1]
    texts = [
        "jnp.sum(jnp.sin(u) ** 2)",
        "jax.nn.logsumexp(u)",
        f"jnp.mean(jnp.tanh(u @ u.T)) * {n}",
        "jnp.sum(lax.cumsum(u, 0) ** 2) * .1",
    ]
    text = d.choice(texts if len(d.values[x].shape) == 2 else [t for t in texts if "@" not in t])
    d.add(name, f"jax.grad(lambda u: {text})({{0}})", x)


@template(0.7)
def own_gradient(d: Drawer, name: str) -> None:
    x = d.value("f32", 1, 3)
    d.add(name, d.choice(["own_vjp({0})", "own_jvp({0})"]), x)


@template(0.7)
def nested_jit(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 3)
    y = d.like(x)
    d.add(name, "jax.jit(lambda u, v: (u + v) * jnp.cos(u))({0}, {1})", x, y)
