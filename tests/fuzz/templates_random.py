"""Templates of random numbers, complex numbers, transforms and linear algebra."""

from __future__ import annotations

from tests.fuzz.draw import Drawer
from tests.fuzz.templates import template


@template()
def new_key(d: Drawer, name: str) -> None:
    k = d.value("key", 0, 0)
    d.add(name, d.choice(["jax.random.split({0})[1]", "jax.random.fold_in({0}, 3)"]), k)


@template(1.5)
def dropout(d: Drawer, name: str) -> None:
    x, k = d.value("float"), d.value("key", 0, 0)
    d.add(name, "jnp.where(jax.random.bernoulli({1}, 0.8, {0}.shape), {0} / 0.8, 0)", x, k)


@template()
def noise(d: Drawer, name: str) -> None:
    x, k = d.value("float"), d.value("key", 0, 0)
    op = d.choice(["normal", "uniform", "laplace"])
    d.add(name, f"{{0}} + jax.random.{op}({{1}}, {{0}}.shape, {{0}}.dtype)", x, k)


@template(0.8)
def draw_ints(d: Drawer, name: str) -> None:
    op = d.choice(["jax.random.randint({0}, {shape}, 0, 9)", "jax.random.bits({0}, {shape})"])
    d.add(name, op.replace("{shape}", str(d.shape())), d.value("key", 0, 0))


@template(0.8)
def shuffle(d: Drawer, name: str) -> None:
    x, k = d.value("any", 1, 3), d.value("key", 0, 0)
    d.add(name, "jax.random.permutation({1}, {0})", x, k, exact=True)


@template(0.7)
def keys_of_rows(d: Drawer, name: str) -> None:
    x, k = d.value("float", 2, 3), d.value("key", 0, 0)
    n = d.values[x].shape[0]
    d.add(name, f"jax.vmap(lambda k, u: u * jax.random.uniform(k, u.shape, u.dtype))(jax.random.split({{1}}, {n}), {{0}})", x, k)


@template()
def to_complex(d: Drawer, name: str) -> None:
    x = d.value("f32")
    d.add(name, "lax.complex({0}, jnp.broadcast_to({1}, {0}.shape))", x, d.like(x))


@template()
def from_complex(d: Drawer, name: str) -> None:
    d.add(name, d.choice(["jnp.real({0})", "jnp.imag({0})", "jnp.real({0} * jnp.conj({0}))"]), d.value("complex"))


@template()
def complex_arithmetic(d: Drawer, name: str) -> None:
    z = d.value("complex")
    d.add(name, d.choice(["{0} * {1}", "{0} + 1j * {1}", "jnp.conj({0}) - {1}", "{0} / (2 + {1} * jnp.conj({1}))"]), z, d.like(z))


@template(0.8)
def complex_product(d: Drawer, name: str) -> None:
    z = d.value("complex", 2, 3)
    w = d.argument((d.values[z].shape[-1], d.size()), "complex64")
    d.add(name, "({0} @ {1}) * 0.3", z, w)


@template()
def fourier(d: Drawer, name: str) -> None:
    if d.chance(0.5):
        z = d.value("complex")
        d.add(name, f"jnp.fft.{d.choice(['fft', 'ifft'])}({{0}}, axis={d.axis(z)}) * 0.4", z)
    elif d.chance(0.6):
        d.add(name, "jnp.fft.rfft({0}) * 0.4", d.value("f32", where=lambda s: s[-1] > 1))
    else:
        d.add(name, "jnp.fft.irfft({0}) * 2", d.value("complex", where=lambda s: s[-1] > 1))


@template()
def cholesky(d: Drawer, name: str) -> None:
    x = d.value("f32", 2, 3, where=lambda s: s[-2] <= 8)
    n, scale = d.values[x].shape[-2], round(1 / d.values[x].shape[-1], 4)
    text = f"jnp.linalg.cholesky(jnp.einsum('...ij,...kj->...ik', {{0}}, {{0}}) * {scale} + 2 * jnp.eye({n}))"
    d.add(name, text, x)


@template()
def solve_triangular(d: Drawer, name: str) -> None:
    x = d.value("f32", 2, 3, where=lambda s: s[-1] <= 16)
    shape = d.values[x].shape
    a = d.argument((*shape[:-1], shape[-2]))
    lower = d.choice([True, False])
    text = f"lax.linalg.triangular_solve(jnp.tanh({{1}}) * 0.3 + 2 * jnp.eye({shape[-2]}), {{0}}, left_side=True, lower={lower})"
    d.add(name, text, x, a)


@template(0.7)
def solve(d: Drawer, name: str) -> None:
    n = d.choice([2, 3, 4, 5])
    a, b = d.argument((d.size(), n, n)), d.argument((n, 3))
    d.add(name, f"jax.vmap(lambda a: jnp.linalg.solve(jnp.tanh(a) * 0.2 + 2 * jnp.eye({n}), {{1}}))({{0}})", a, b)


@template(0.6)
def inverse(d: Drawer, name: str) -> None:
    n = d.choice([2, 3, 4])
    x = d.argument((d.size(), n, n))
    d.add(name, f"jnp.linalg.{d.choice(['inv', 'det'])}(jnp.tanh({{0}}) * 0.2 + jnp.eye({n}))", x)
