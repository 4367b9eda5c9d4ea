"""Small steps for the search: drawn at random from real JAX operations, and the problems that they make."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.mesh import Cluster, factors
from shardplan.search.coarsening import coarsen
from shardplan.search.coarsening.variables import OneChoice
from shardplan.search.inference.eliminate import Eliminator, find_order
from shardplan.search.problem.cost_tables import TableStore, Term, picoseconds
from shardplan.search.problem.pricing import Domain
from shardplan.search.problem.problem import Problem
from tests.oracles import brute

Shape = tuple[int, int]
SIZES = (4, 6, 8)


def cluster(
    shape: str = "2x2", *, gbps: Sequence[float] = (10.0, 100.0), gflops: float = 1000.0, latency_s: float = 1e-9
) -> Cluster:
    """A cluster slow enough that matrices of a few elements are worth splitting."""
    base = Cluster.load(shape)
    levels = tuple(
        replace(level, bandwidth_bytes_per_s=g * 1e9, latency_s=latency_s, rails=1, ring_efficiency=1.0, tree_efficiency=1.0)
        for level, g in zip(base.levels, gbps, strict=False)
    )
    device = replace(
        base.device,
        flops_per_s={"float32": gflops * 1e9},
        memory_bytes_per_s=1e11,
        launch_s=0.0,
        collective_launch_s=0.0,
        compute_units=None,  # they are less than a tile
    )
    return replace(base, name="small", levels=levels, device=device)


def problem(
    step: Callable[..., Any], *args: Any, on: Cluster, donate: Sequence[int] = (), one_choice: OneChoice = "timesteps"
) -> Problem:
    """The problem of a step on a cluster, levels whole."""
    graph = flatten(trace(step, *args, donate_argnums=tuple(donate)).program)
    return Problem(graph, coarsen(graph, one_choice), on, factors(on))


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclass(frozen=True)
class Recipe:
    """A drawn step: each move reads values by number and adds one; ``trained`` takes gradients and updates the weights."""

    rows: int
    columns: int
    weights: tuple[Shape, ...]
    moves: tuple[tuple[str, int, int], ...]
    trained: bool

    def args(self) -> tuple[Any, Any]:
        return {f"w{i}": array(*s) for i, s in enumerate(self.weights)}, array(self.rows, self.columns)

    def step(self, weights: dict[str, jax.Array], x: jax.Array) -> Any:
        if not self.trained:
            return self._loss(weights, x)
        loss, gradients = jax.value_and_grad(self._loss)(weights, x)
        return {k: w - 0.1 * gradients[k] for k, w in weights.items()}, loss

    def _loss(self, weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        values = [x]
        for name, a, b in self.moves:
            values.append(MOVES[name](values[a % len(values)], values[b % len(values)], b, weights))
        unread = [v for i, v in enumerate(values) if i == len(values) - 1 or not self._is_read(i)]
        return sum((jnp.sum(v * v) for v in unread), start=jnp.zeros(()))

    def _is_read(self, value: int) -> bool:
        return any(value in (a % (i + 1), b % (i + 1)) for i, (_, a, b) in enumerate(self.moves))


def _dot(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    fitting = [w for w in weights.values() if w.shape[0] == x.shape[1]]
    return x @ fitting[b % len(fitting)] if fitting else jnp.tanh(x)


def _tied(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    fitting = [w for w in weights.values() if w.shape[1] == x.shape[1]]
    return x @ fitting[b % len(fitting)].T if fitting else x


def _add(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    return x + y if x.shape == y.shape else jnp.sin(x)


def _multiply(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    return x * y if x.shape == y.shape else x * x


def _normalise(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    return x - jnp.max(x, axis=b % 2, keepdims=True)


def _transpose(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    return x.T


def _inner(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    return x @ y.T if x.shape[1] == y.shape[1] else x @ x.T


def _scan(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    square = [w for w in weights.values() if w.shape == (x.shape[1], x.shape[1])]

    def body(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(carry @ square[b % len(square)] if square else carry), None

    return jax.lax.scan(body, x, None, length=3)[0]


def _pair(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    """Two results of one op, both read."""
    keys, values = jax.lax.sort_key_val(x, y if x.shape == y.shape else jnp.cos(x), dimension=b % 2)
    return keys * values


def _sums(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    """Two sums that may be added up before they are reduced."""
    other = y if x.shape[0] == y.shape[0] else jnp.sin(x)
    return x.T @ other + (x * x).T @ other


def _accumulate(x: jax.Array, y: jax.Array, b: int, weights: dict[str, jax.Array]) -> jax.Array:
    """A sum carried around a loop."""
    parts = x.reshape(2, x.shape[0] // 2, x.shape[1])
    return jax.lax.scan(lambda total, part: (total + part.T @ part, None), jnp.zeros((x.shape[1],) * 2), parts)[0]


MOVES = {
    "dot": _dot,
    "tied": _tied,
    "add": _add,
    "multiply": _multiply,
    "normalise": _normalise,
    "transpose": _transpose,
    "inner": _inner,
    "scan": _scan,
    "pair": _pair,
    "sums": _sums,
    "accumulate": _accumulate,
}


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    size = st.sampled_from(SIZES)
    weights = tuple(draw(st.lists(st.tuples(size, size), min_size=1, max_size=3)))
    names = st.sampled_from(["dot", "dot", *MOVES])
    moves = tuple(draw(st.lists(st.tuples(names, st.integers(0, 7), st.integers(0, 7)), min_size=2, max_size=6)))
    return Recipe(draw(size), draw(size), weights, moves, draw(st.booleans()))


@st.composite
def subdomains(draw: st.DrawFn, of: Problem, most: int) -> tuple[Domain, ...]:
    """For each variable up to ``most`` of its states, drawn."""
    found: list[Domain] = []
    for domain in of.domains:
        chosen = draw(st.sets(st.sampled_from(domain), min_size=1, max_size=most))
        found.append(tuple(s for s in domain if s in chosen))
    return tuple(found)


def thinned(of: Problem, *, assignments: int) -> tuple[Domain, ...]:
    """Each variable's states with some left out, evenly, until there are at most so many assignments."""
    most = max(len(d) for d in of.domains)
    while math.prod(min(most, len(d)) for d in of.domains) > assignments:
        most -= 1
    return tuple(
        tuple(sorted({d[(v + i * len(d) // most) % len(d)] for i in range(most)})) if len(d) > most else d
        for v, d in enumerate(of.domains)
    )


def uncoarsened_seconds(of: Problem) -> float:
    """The optimum where every tensor has a layout of its own: the oracle's summands, eliminated."""
    oracle = brute.uncoarsened(of)
    domains = oracle.problem.domains
    store = TableStore()
    terms: list[Term] = []
    for s in oracle.summands():
        own = [domains[v] for v in s.scope]
        table = np.array([s.seconds(at) for at in itertools.product(*own)]).reshape([len(d) for d in own])
        terms.append(Term(s.scope, *store.intern(picoseconds(table))))
    sizes = [len(d) for d in domains]
    return Eliminator(store).solve(terms, sizes, find_order([t.scope for t in terms], sizes))[0] / 1e12
