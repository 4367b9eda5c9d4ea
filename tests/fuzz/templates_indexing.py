"""Templates of lookups and scatters, sorting and everything that goes by traced whole numbers."""

from __future__ import annotations

from tests.fuzz.draw import Drawer
from tests.fuzz.templates import template
from tests.fuzz.templates_contraction import scaled, weight


def _rows(d: Drawer, name: str, axis: int, rank: int = 2) -> str:
    """Indices into a dim, a few of which may lie beyond it."""
    shape = d.shape(1, rank, largest=64)
    return d.index(shape, d.values[name].shape[axis], d.choice([0, 0, 2]))


@template(1.5)
def take(d: Drawer, name: str) -> None:
    x = d.value("any", 1, 3)
    axis = d.axis(x)
    i = _rows(d, x, axis)
    mode = d.choice(['mode="clip"', 'mode="fill", fill_value=0', 'mode="wrap"'])
    d.add(name, f"jnp.take({{0}}, {{1}}, axis={axis}, {mode})", x, i, exact=True)


@template(1.5)
def embedding(d: Drawer, name: str) -> None:
    rows = d.size(2)
    table = d.argument((rows, d.size()))
    tokens = d.index(d.shape(1, 2, largest=256), rows)
    d.add(name, "{0}[{1}]", table, tokens)


@template(1.2)
def two_lookups(d: Drawer, name: str) -> None:
    width, rows, places = d.size(2), d.size(2), d.size(2)
    tokens = d.index(d.shape(1, 2, largest=256), rows)
    shape = d.values[tokens].shape
    other = d.index(shape, places) if d.chance(0.5) else d.index(shape[-1:], places)
    text = d.choice(["{0}[{1}] + {2}[{3}]", "jnp.take({0}, {1}, axis=0) + jnp.take({2}, {3}, axis=0)"])
    d.add(name, text, d.argument((rows, width)), tokens, d.argument((places, width)), other)


@template(1.5)
def lookups_of_products(d: Drawer, name: str) -> None:
    """Lookups that depend on no argument, in products whose terms may wait for each other."""
    x = d.value("float", 2, 2)
    rows, columns = d.values[x].shape
    width, dtype = d.size(2), d.values[x].dtype
    w, other = weight(d, (columns, width), dtype), weight(d, (columns, width), dtype)
    at = [d.below(rows + 2) for _ in range(d.size(2))]
    mode = d.choice(['mode="clip"', 'mode="fill", fill_value=0', 'mode="wrap"'])
    text = f"(jnp.take({{0}} @ {{1}}, np.array({at}), axis=0, {mode}) + jnp.take({{0}} @ {{2}}, np.array({at}), axis=0, {mode}))"
    d.add(name, f"{text} * {scaled(columns)}", x, w, other)


@template()
def two_indices(d: Drawer, name: str) -> None:
    x = d.value("any", 2, 3)
    m, n = d.values[x].shape[:2]
    shape = d.shape(1, 1)
    d.add(name, "{0}[{1}, {2}]", x, d.index(shape, m), d.index(shape, n), exact=True)


@template()
def middle_index(d: Drawer, name: str) -> None:
    x = d.value("any", 2, 3)
    i = d.index(d.shape(1, 2, largest=32), d.values[x].shape[1])
    d.add(name, "{0}[:, {1}]", x, i, exact=True)


@template()
def take_along(d: Drawer, name: str) -> None:
    x = d.value("any", 1, 3)
    shape, axis = list(d.values[x].shape), d.axis(x)
    limit, shape[axis] = shape[axis], d.below(6, 1)
    d.add(name, f"jnp.take_along_axis({{0}}, {{1}}, {axis})", x, d.index(tuple(shape), limit), exact=True)


@template()
def chosen_logits(d: Drawer, name: str) -> None:
    x = d.value("float", 2, 3)
    shape = d.values[x].shape
    labels = d.index(shape[:-1], shape[-1])
    d.add(name, "jnp.take_along_axis(jax.nn.log_softmax({0}), {1}[..., None], -1)[..., 0]", x, labels)


@template(0.7)
def computed_index(d: Drawer, name: str) -> None:
    x, i = d.value("any", 1, 2), d.value("int32", 1, 2)
    d.add(name, f"{{0}}[{{1}} % {d.values[x].shape[0]}]", x, i, exact=True)


@template(2.0)
def scatter(d: Drawer, name: str) -> None:
    x = d.value("real", 1, 3)
    shape = d.values[x].shape
    i = d.index(d.shape(1, 1), shape[0], d.choice([0, 2]))
    y = d.argument((*d.values[i].shape, *shape[1:]), d.values[x].dtype)
    op = d.choice(["add", "add", "max", "min"])
    d.add(name, f"{{0}}.at[{{1}}].{op}({{2}})", x, i, y, smooth=op == "add")


@template(1.2)
def scatter_computed(d: Drawer, name: str) -> None:
    y = d.value("real", 1, 3)
    shape = d.values[y].shape
    rows = d.size(2)
    i = d.index(shape[:1], rows)
    d.add(name, f"jnp.zeros({(rows, *shape[1:])}, {{0}}.dtype).at[{{1}}].add({{0}})", y, i)


@template()
def scatter_unique(d: Drawer, name: str) -> None:
    x = d.value("real", 1, 3)
    shape = d.values[x].shape
    i = d.argument(shape[:1], "int32", kind="permutation")
    op = d.choice(["set", "multiply", "add"])
    n = d.below(shape[0] + 1, 1)
    y = d.argument((n, *shape[1:]), d.values[x].dtype)
    d.add(name, f"{{0}}.at[{{1}}[:{n}]].{op}({{2}}, unique_indices=True)", x, i, y, exact=op == "set")


@template()
def scatter_column(d: Drawer, name: str) -> None:
    x = d.value("real", 2, 3)
    shape = d.values[x].shape
    i = d.index(d.shape(1, 1), shape[1])
    y = d.argument((shape[0], *d.values[i].shape, *shape[2:]), d.values[x].dtype)
    d.add(name, "{0}.at[:, {1}].add({2})", x, i, y)


@template()
def scatter_pairs(d: Drawer, name: str) -> None:
    x = d.value("real", 2, 3)
    shape, count = d.values[x].shape, d.shape(1, 1)
    i, j = d.index(count, shape[0]), d.index(count, shape[1])
    y = d.argument((*count, *shape[2:]), d.values[x].dtype)
    d.add(name, "{0}.at[{1}, {2}].add({3})", x, i, j, y)


@template(0.8)
def set_slice(d: Drawer, name: str) -> None:
    x = d.value("real", 1, 3, where=lambda s: s[0] > 1)
    n = d.values[x].shape[0]
    low = d.below(n - 1)
    high = d.below(n + 1, low + 1)
    y = d.argument((high - low, *d.values[x].shape[1:]), d.values[x].dtype)
    d.add(name, f"{{0}}.at[{low}:{high}].{d.choice(['set', 'add'])}({{1}})", x, y)


@template(1.2)
def segment_sum(d: Drawer, name: str) -> None:
    x = d.value("real", 1, 3)
    groups = d.size(2)
    i = d.index(d.values[x].shape[:1], groups)
    d.add(name, f"jax.ops.segment_sum({{0}}, {{1}}, {groups})", x, i)


@template()
def one_hot(d: Drawer, name: str) -> None:
    n = d.size(2)
    d.add(name, f"jax.nn.one_hot({{0}} % {n}, {n})", d.value("int32", 0, 2), exact=True)


@template()
def sort(d: Drawer, name: str) -> None:
    x = d.value("real", exact=True)
    d.add(name, f"jnp.sort({{0}}, {d.axis(x)}{', descending=True' if d.chance(0.3) else ''})", x, exact=True)


@template(0.8)
def argsort(d: Drawer, name: str) -> None:
    x = d.value("real", exact=True)
    d.add(name, f"jnp.argsort({{0}}, {d.axis(x)})", x)


@template(0.7)
def sort_pairs(d: Drawer, name: str) -> None:
    x = d.value("real", exact=True)
    y = d.like(x, dtype="float32", broadcast=False)
    d.add(name, f"lax.sort(({{0}}, {{1}}), dimension={d.axis(x)}, num_keys=1)[1]", x, y)


@template(0.8)
def top_k(d: Drawer, name: str) -> None:
    x = d.value("real", exact=True)
    k = d.below(d.values[x].shape[-1] + 1, 1)
    d.add(name, f"lax.top_k({{0}}, {k})[{d.below(2)}]", x, exact=True)


@template(0.7)
def unique(d: Drawer, name: str) -> None:
    x = d.value("int", 1, 2)
    d.add(name, f"jnp.unique({{0}}, size={d.below(9, 2)}, fill_value=0)", x)


@template(0.7)
def nonzero(d: Drawer, name: str) -> None:
    d.add(name, f"jnp.nonzero({{0}}, size={d.below(9, 2)}, fill_value=-1)[0]", d.value("bool", 1, 2))


@template(0.7)
def searchsorted(d: Drawer, name: str) -> None:
    x = d.value("int32", 1, 1)
    d.add(name, "jnp.searchsorted(jnp.sort({0}), {1})", x, d.value("int32", 1, 2))


@template(0.7)
def bincount(d: Drawer, name: str) -> None:
    d.add(name, f"jnp.bincount({{0}}.reshape(-1) % 7, length={d.below(10, 4)})", d.value("int32", 1, 3))
