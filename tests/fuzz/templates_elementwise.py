"""Templates of elementwise ops: unary, binary, comparisons, choices and casts."""

from __future__ import annotations

from tests.fuzz.draw import Drawer
from tests.fuzz.templates import template

UNARY = (
    """
jnp.tanh({0}); jax.nn.sigmoid({0}); jax.nn.relu({0}); jax.nn.gelu({0}); jax.nn.silu({0}); jax.nn.softplus({0}); jnp.sin({0})
jnp.cos({0}); jnp.exp(-jnp.abs({0})); jnp.log1p(jnp.abs({0})); jnp.sqrt({0} * {0} + 1); lax.rsqrt({0} * {0} + 1); lax.erf({0})
jnp.square({0}) * 0.5; lax.integer_pow({0}, 3) * 0.1; -{0}; jnp.abs({0}); jnp.expm1(jnp.tanh({0})); jnp.log({0} * {0} + 0.5)
jnp.arctan({0}); jnp.arcsinh({0}); jnp.cbrt({0} * {0} + 1); {0} / (1 + jnp.abs({0})); jnp.exp2(jnp.sin({0}))
lax.erf_inv(jnp.tanh({0}) * 0.9); lax.lgamma({0} * {0} + 1); lax.digamma({0} * {0} + 1); jnp.tan(jnp.sin({0})); 2 * {0} - 1
jnp.cosh(jnp.sin({0})); jnp.sinh(jnp.sin({0})); jnp.arccos(jnp.sin({0}) * 0.9); jnp.arctanh(jnp.sin({0}) * 0.9); lax.erfc({0})
jnp.reciprocal({0} * {0} + 1); lax.stop_gradient({0}); lax.optimization_barrier({0}); jax.nn.leaky_relu({0}); jax.nn.elu({0})
""".strip()
    .replace("\n", "; ")
    .split("; ")
)
BINARY = (
    """
{0} + {1}; {0} - {1}; {0} * {1}; jnp.maximum({0}, {1}); jnp.minimum({0}, {1}); {0} / (1 + {1} * {1}); jnp.logaddexp({0}, {1})
jnp.arctan2({0}, 1 + jnp.abs({1})); (jnp.abs({0}) + 0.5) ** jnp.tanh({1}); 0.5 * ({0} + {1}); {0} * jax.nn.sigmoid({1})
lax.square({0} - {1}); jnp.clip({0}, -1, jnp.abs({1}))
""".strip()
    .replace("\n", "; ")
    .split("; ")
)
INT_UNARY = (
    "-{0}; ~{0}; jnp.abs({0}); {0} * 3 + 1; {0} % 5; {0} // 3; lax.population_count({0}); lax.clz({0}); {0} ** 2; jnp.sign({0})"
)
INT_BINARY = (
    """
{0} + {1}; {0} - {1}; {0} * {1}; {0} & {1}; {0} | {1}; {0} ^ {1}; {0} << ({1} & 7); {0} >> ({1} & 7); jnp.maximum({0}, {1})
jnp.minimum({0}, {1}); {0} // jnp.maximum({1} % 5, 1); {0} % jnp.maximum({1}, 1)
lax.shift_right_logical({0}, jnp.broadcast_to({1} & 7, {0}.shape))
""".strip()
    .replace("\n", "; ")
    .split("; ")
)


@template(4.0)
def unary(d: Drawer, name: str) -> None:
    d.add(name, d.choice(UNARY), d.value("float", 0))


@template(4.0)
def binary(d: Drawer, name: str) -> None:
    x = d.value("float", 0)
    d.add(name, d.choice(BINARY), x, d.like(x))


@template()
def outer_binary(d: Drawer, name: str) -> None:
    x = d.value("float", 1, 2)
    d.add(name, "{0}[..., None] * {1}.reshape(-1).astype({0}.dtype)", x, d.value("float", 1, 2))


@template()
def int_unary(d: Drawer, name: str) -> None:
    d.add(name, d.choice(INT_UNARY.split("; ")), d.value("int", 0))


@template(1.5)
def int_binary(d: Drawer, name: str) -> None:
    x = d.value("int", 0)
    d.add(name, d.choice(INT_BINARY), x, d.like(x))


@template()
def compare(d: Drawer, name: str) -> None:
    op = d.choice(["<", "<=", ">", ">=", "==", "!="])
    if d.chance(0.5):
        x = d.value("int", 0)
        d.add(name, f"{{0}} {op} {{1}}", x, d.like(x))
    else:
        d.add(name, f"{{0}} {op[0] if op[0] in '<>' else '>'} {d.choice([-0.5, 0.0, 0.3])}", d.value("float", exact=True))


@template(0.7)
def logic(d: Drawer, name: str) -> None:
    x = d.value("bool", 0)
    d.add(name, d.choice(["~{0} & {1}", "{0} & {1}", "{0} | {1}", "{0} ^ {1}"]), x, d.like(x))


@template(1.5)
def where(d: Drawer, name: str) -> None:
    x = d.value("any")
    mask, y = d.like(x, dtype="bool"), d.like(x)
    d.add(name, "jnp.where({1}, {0}, {2})", x, mask, y, exact=True)


@template(0.5)
def where_positive(d: Drawer, name: str) -> None:
    x = d.value("float")
    chooser = d.like(x, broadcast=False, exact=True)
    d.add(name, "jnp.where({1} > 0, {0}, 0.1 * {0})", x, chooser)


@template(0.7)
def clamp(d: Drawer, name: str) -> None:
    x = d.value("float")
    d.add(name, d.choice(["jnp.clip({0}, -0.7, 0.9)", "lax.clamp({0}.dtype.type(-1), {0}, {0}.dtype.type(1))"]), x)


@template(1.2)
def narrowed(d: Drawer, name: str) -> None:
    x = d.value("float")
    d.add(name, "{0}.astype(jnp.float32)" if d.values[x].dtype == "bfloat16" else "{0}.astype(jnp.bfloat16)", x, exact=True)


@template()
def int_to_float(d: Drawer, name: str) -> None:
    d.add(name, "({0} % 8).astype(jnp.float32) * 0.25", d.value("int"), exact=True)


@template()
def bool_to_number(d: Drawer, name: str) -> None:
    d.add(name, d.choice(["{0}.astype(jnp.float32)", "{0}.astype(jnp.int32)", "{0} * 2.5"]), d.value("bool"), exact=True)


@template()
def float_to_int(d: Drawer, name: str) -> None:
    texts = ["jnp.floor({0} * 4).astype(jnp.int32)", "lax.bitcast_convert_type({0}.astype(jnp.float32), jnp.int32)"]
    d.add(name, d.choice(texts), d.value("float", exact=True), smooth=False)


@template(0.7)
def int_to_int(d: Drawer, name: str) -> None:
    x = d.value("int")
    others = [t for t in ("int32", "uint32", "int8") if t != d.values[x].dtype]
    d.add(name, f"{{0}}.astype(jnp.{d.choice(others)})", x)


@template(0.7)
def rounded(d: Drawer, name: str) -> None:
    texts = "jnp.floor({0} * 3); jnp.ceil({0} * 3); jnp.round({0} * 3); jnp.sign({0}); jnp.trunc({0} * 3)".split("; ")
    d.add(name, d.choice(texts), d.value("float", exact=True), exact=True)


@template(0.7)
def iota(d: Drawer, name: str) -> None:
    x = d.value("real", 1)
    axis = d.axis(x)
    text = f"{{0}} + lax.broadcasted_iota(jnp.int32, {d.values[x].shape}, {axis}).astype({{0}}.dtype)"
    d.add(name, text if d.values[x].dtype != "float32" else f"{text} / 16", x, exact=True)
