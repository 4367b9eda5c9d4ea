"""One op and one of its composite strategies, emitted: what a backend makes of decisions that no search chose.

The strategy is forced, operands and results lie as the seed says: in the layouts that the strategy needs and gives, in others (so
that they are moved), or as terms of a sum that are handed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from shardplan.emit.explicit import ExplicitEmitter
from shardplan.emit.specs import SpecsEmitter
from shardplan.frontend.trace import trace
from shardplan.graph.flattening import flatten
from shardplan.graph.nodes import Node
from shardplan.ir import Layout, Use
from shardplan.mesh import Cluster, factors
from shardplan.schedule.planned import planned_program
from shardplan.search.coarsening.coarsen import coarsen
from shardplan.search.problem.composite_strategies import Late, Options, options
from shardplan.search.problem.extract import Decisions, Extractor
from shardplan.search.problem.problem import Problem
from shardplan.tdl import describe
from shardplan.tdl.cut_proof import Expected, expected, terms
from shardplan.tdl.localize import evaluate
from shardplan.tdl.proof import Case

MESHES = ("2x2", "2x4", "3x2", "2x2x2")


@dataclass(frozen=True)
class Emitted:
    """One strategy of one op, ready to run: ``arguments`` are its operands, those that are partial as arrays of their terms.

    ``kept[r]`` counts the leading dims of result r, which are terms to be added up. ``name`` says which strategy it is.
    """

    name: str
    emitter: Callable[..., list[Any]]
    arguments: tuple[Any, ...]
    kept: tuple[int, ...]
    exact: bool
    expected: Expected
    loops: tuple[int, ...]
    primitive: str
    uneven: bool
    classes: tuple[str, ...]

    def faults(self, results: Sequence[Any]) -> list[str]:
        """How the results differ from those of the whole op."""
        whole = [_added(x, n) for x, n in zip(results, self.kept, strict=True)]
        return [f"{self.name}: result {r} {how}" for r, how in self.expected.differences(whole, exact=self.exact)]


class Cuts:
    """All composite strategies of a call on one mesh, for one backend."""

    def __init__(self, case: Case, shape: str, backend: str = "specs") -> None:
        self.case, self.shape, self.explicit = case, shape, backend == "explicit"
        program = trace(lambda *xs: evaluate(case.call, xs), *case.operands).program
        cluster = Cluster.load(shape)
        graph = flatten(program, backend="explicit" if self.explicit else "specs")
        self.problem = Problem(graph, coarsen(graph), cluster, factors(cluster))
        self.extractor = Extractor(self.problem)
        self.program = program
        self.node = _node(graph.nodes, case)

    @property
    def options(self) -> Options:
        """Every strategy that a plan may choose, those that hand terms on among them."""
        signature = self.node.signature
        scalars = frozenset(i for i, s in enumerate(signature.call.operands) if math.prod(s) == 1)
        late = Late(scalars, scalars) if signature.defers else None
        return options(signature, self.problem.resharder, None, late=late)

    def emitted(self, rows: Options, row: int, mesh: Mesh, rng: np.random.Generator) -> Emitted:
        """One of the strategies."""
        call, resharder = self.node.signature.call, self.problem.resharder
        needs = [resharder.layout(s, int(n)) for s, n in zip(call.operands, rows.needs[row], strict=True)]
        gives = [resharder.layout(s, int(n)) for s, n in zip(call.results, rows.gives[row], strict=True)]
        loops = tuple(rows.loops[row].tolist())
        layouts: list[Layout | None] = [None] * len(self.problem.graph.tensors)
        given: list[Layout | None] = []
        for t, shape, need in zip(self.node.inputs, call.operands, needs, strict=True):
            scalar = t < 0 or math.prod(shape) == 1
            given.append(None if scalar else need)
            if not scalar:
                layouts[t] = self._end(shape, need if need.partial or rng.random() < 0.5 else self._any(shape, rng))
        keep = self.node.signature.defers and bool(rows.terms[row]) and rng.random() < 0.5
        stored = [self._stored(s, g, rng, keep=keep) for s, g in zip(call.results, gives, strict=True)]
        for t, layout in zip(self.node.outputs, stored, strict=True):
            layouts[t] = layout
        use = Use(loops, tuple(given), tuple(gives), tuple(stored), 0.0)
        free = {"compute_s": 0.0, "contention": 1.0, "host_s": 0.0}
        decisions = Decisions(layouts=tuple(layouts), uses={self.node.id: use}, views={}, kept=frozenset(), issued=(), **free)
        problem, choices = self.problem, self.extractor.choices(decisions)
        planned = planned_program(self.program, problem.graph, choices, problem.cluster, problem.factors, overlaps=False)
        emitter = _OnTerms(planned, mesh) if self.explicit else SpecsEmitter(planned, mesh)
        handed = [layouts[t] for t in self.problem.graph.inputs]
        arguments = tuple(_stacked(x, at, self.problem.sizes, rng) for x, at in zip(self.case.operands, handed, strict=True))
        summed = any(g.partial for g in gives) or any(n.partial for n in needs)
        known = describe(self.case.call)
        assert known is not None
        return Emitted(
            f"{self.shape} {_text(self.case)} loops {loops} from {_specs(handed)} to {_specs(stored)}",
            emitter,
            arguments,
            tuple(0 if (at := layouts[t]) is None else len(at.partial) for t in self.problem.graph.outputs),
            not summed,
            expected(call, self.case.operands, known),
            loops,
            call.primitive,
            any(known.loops[v].extent % self._ways(loops, v) for v in loops if v >= 0),
            _classes(self.case),
        )

    def _ways(self, loops: Sequence[int], loop: int) -> int:
        return math.prod(k for k, v in zip(self.problem.sizes, loops, strict=True) if v == loop)

    def _any(self, shape: tuple[int, ...], rng: np.random.Generator) -> Layout:
        """Any layout that a tensor inside a step may be stored in."""
        resharder = self.problem.resharder
        legal = resharder.legal(shape, pad=True)
        states = [s for s in resharder.space(shape).stored if legal[s]]
        return resharder.layout(shape, int(rng.choice(states)))

    def _end(self, shape: tuple[int, ...], layout: Layout) -> Layout:
        """A layout that an argument or a result of a step may have: under the explicit backend each has its true extent."""
        if not self.explicit:
            return layout
        sizes = self.problem.sizes
        ways = [math.prod(sizes[f] for f in factors) for factors in layout.dims]
        return replace(layout, dims=tuple(fs if n % k == 0 else () for n, k, fs in zip(shape, ways, layout.dims, strict=True)))

    def _stored(self, shape: tuple[int, ...], give: Layout, rng: np.random.Generator, *, keep: bool) -> Layout | None:
        if math.prod(shape) == 1:
            return None
        if give.partial and keep:
            left = tuple(f for f in give.partial if rng.random() < 0.7) or give.partial[:1]
            return self._end(shape, Layout(give.dims, left))
        return self._end(shape, Layout(give.dims) if rng.random() < 0.5 else self._any(shape, rng))


class _OnTerms(ExplicitEmitter):
    """Takes and gives partial values as arrays of their terms."""

    def local(self, *arguments: Any) -> tuple[Any, ...]:
        """The program of one device, which holds one term of each."""
        layouts = [self.planned.layouts[t] for t in self.planned.graph.inputs]
        own = [lax.squeeze(x, range(_terms(at))) for x, at in zip(arguments, layouts, strict=True)]
        results = zip(super().local(*own), self.schedule.results, strict=True)
        return tuple(lax.expand_dims(x, range(_terms(at))) for x, at in results)


def _terms(layout: Layout | None) -> int:
    return 0 if layout is None else len(layout.partial)


def _node(nodes: Sequence[Node], case: Case) -> Node:
    return next(n for n in nodes if n.op.primitive == case.call.primitive)


def _stacked(x: Any, layout: Layout | None, sizes: Sequence[int], rng: np.random.Generator) -> Any:
    """An operand as the array of its terms, where its layout is partial."""
    if layout is None or not layout.partial:
        return x
    ways = [sizes[f] for f in layout.partial]
    return np.stack(terms(np.asarray(x), math.prod(ways), rng)).reshape(*ways, *np.shape(x))


def _added(x: Any, leading: int) -> Any:
    """A result whose ``leading`` dims are terms of a sum."""
    if not leading:
        return x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x)
    x = np.asarray(x)
    wide = x.astype(np.float32) if x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating) else x
    return np.sum(wide, axis=tuple(range(leading)), dtype=wide.dtype).astype(x.dtype)


def _classes(case: Case) -> tuple[str, ...]:
    """The classes of a call's parameters on which the partitioner has been seen to depend."""
    params = case.call.params
    found = [case.call.dtypes[0]] if case.call.dtypes else []
    found += [str(params["mode"]).rsplit(".", 1)[-1]] if "mode" in params else []
    for name in ("window_strides", "lhs_dilation", "rhs_dilation", "strides"):
        found += [name] if any(int(n) > 1 for n in params.get(name) or ()) else []
    for name in ("feature_group_count", "batch_group_count"):
        found += [name] if int(params.get(name, 1)) > 1 else []
    found += ["inner padding"] if any(int(gap) for _, _, gap in params.get("padding_config", ())) else []
    return tuple(found)


def _text(case: Case) -> str:
    params = {k: v for k, v in case.call.params.items() if v is not None and k not in ("sharding", "out_sharding", "accuracy")}
    return f"{case.call.primitive} {case.call.operands} -> {case.call.results} {str(params)[:300]}"


def _specs(layouts: Sequence[Layout | None]) -> str:
    return ", ".join("scalar" if at is None else f"{at.dims}{f' partial {at.partial}' if at.partial else ''}" for at in layouts)
