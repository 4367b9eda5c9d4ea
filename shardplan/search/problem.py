"""One problem: tables over the layouts of variables, from which recursion, polish, baselines, pins and the joint solve are domain restrictions.

An op's table is, for each choice of its operands' and results' layouts, the minimum over its strategies of compute plus resharding: operands into the
layouts that the strategy requires, results (partial sums among them) into theirs, each priced whole as the best program. An op may be cut by a
different loop on every factor.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.reshard import Resharder, Step
from shardplan.cost import Network, compute
from shardplan.ir import Factor, Layout, Partial, Split
from shardplan.mesh import Cluster
from shardplan.search.coarsen import FREE, Coarse
from shardplan.search.graph import Graph, Link, Node, Signature
from shardplan.search.tables import Costs, Store, Term, picoseconds
from shardplan.tdl import Strategy, cut

Domain = tuple[int, ...]
"""The states (of the variable's `LayoutSpace`) that a variable may take."""


@dataclass(frozen=True, slots=True)
class Options:
    """The composite strategies of one signature, a row each.

    ``loops[s][f]`` is the loop that factor f cuts (-1: none). ``needs[s, i]`` is the state that operand i must be in, ``gives[s, r]`` the one
    that result r is in; ``seconds[s]`` is compute, ``halo[s]`` the exchange with neighbours.
    """

    loops: tuple[tuple[int, ...], ...]
    needs: NDArray[np.int64]
    gives: NDArray[np.int64]
    compute_s: NDArray[np.float64]
    halo_s: NDArray[np.float64]


class Problem:
    """A graph on a cluster: its variables' domains and its terms."""

    def __init__(self, graph: Graph, coarse: Coarse, cluster: Cluster, factors: Sequence[Factor]) -> None:
        self.graph, self.coarse, self.cluster = graph, coarse, cluster
        self.factors = tuple(factors)
        self.sizes = tuple(f.size for f in factors)
        self.resharder = Resharder(Network(cluster, self.factors), self.sizes)
        self.store = Store()
        self._options: dict[int, Options] = {}
        self._prices: dict[tuple[tuple[int, ...], int, Domain, bool], NDArray[np.float64]] = {}
        self._terms: dict[tuple[object, ...], tuple[int, int]] = {}
        self._agreeing: dict[tuple[int, int | None, tuple[int, ...], Domain, bool], Domain] = {}

    # -- domains ---------------------------------------------------------------------------------------------------

    @cached_property
    def domains(self) -> tuple[Domain, ...]:
        """Every layout that each variable may have: its split dims divide evenly."""
        memo: dict[tuple[int, ...], Domain] = {}
        found: list[Domain] = []
        for variable in self.coarse.variables:
            shape = variable.shape
            if shape not in memo:
                legal = self.resharder.legal(shape)
                memo[shape] = tuple(s for s in self.resharder.space(len(shape)).stored if legal[s])
            found.append(memo[shape])
        return tuple(found)

    @cached_property
    def scopes(self) -> tuple[tuple[int, ...], ...]:
        """The variables of each term; the same for every restriction."""
        return tuple(term.scope for term in self.terms([d[:1] for d in self.domains]))

    @cached_property
    def backward_views(self) -> tuple[int, ...]:
        """The views of weights that the backward pass reads."""
        return tuple(v.id for v in self.coarse.variables if v.kind == "backward")

    def narrowest(self, domains: Sequence[Domain]) -> tuple[int, ...]:
        """In each domain the state that uses the fewest factors."""

        def used(v: int, s: int) -> int:
            return sum(len(d) for d in self.resharder.space(len(self.coarse.variables[v].shape)).states[s][0])

        return tuple(min(d, key=lambda s, v=v: (used(v, s), s)) for v, d in enumerate(domains))

    def with_factors(self, v: int, state: int | None, free: Sequence[int], domain: Domain, *, later: bool) -> Domain:
        """The states of ``domain`` that agree with ``state`` on all factors but ``free`` ones.

        With ``later``, factors after the free ones are not used yet; where the domain has no such state, the closest ones stay.
        """
        key = (len(self.coarse.variables[v].shape), state, tuple(free), domain, later)
        found = self._agreeing.get(key)
        if found is None:
            space = self.resharder.space(key[0])

            def roles(s: int) -> tuple[int, ...]:
                dims = space.states[s][0]
                return tuple(next((d for d, fs in enumerate(dims) if f in fs), -1) for f in range(len(self.sizes)))

            want = roles(state) if state is not None else (-1,) * len(self.sizes)
            rows = [(roles(s), s) for s in domain]
            fixed = [f for f in range(len(self.sizes)) if f not in free and (not later or f < min(free))]
            after = [f for f in range(len(self.sizes)) if later and f > max(free)]
            agree = [(r, s) for r, s in rows if all(r[f] == want[f] for f in fixed)] or rows
            fewest = min(sum(r[f] >= 0 for f in after) for r, _ in agree)
            found = self._agreeing[key] = tuple(s for r, s in agree if sum(r[f] >= 0 for f in after) == fewest)
        return found

    def keeps(self, v: int, states: Sequence[int], keep_s: float) -> bool:
        """Whether a backward view is made from the kept forward copy, at this price of keeping it."""
        variable = self.coarse.variables[v]
        tensor = self.graph.tensors[variable.tensors[0]]
        again = self.prices(tensor.shape, tensor.nbytes, (states[variable.of],))[0, states[v]]
        kept = self.kept_seconds(v, (states[variable.sibling],), (states[v],), keep_s)[0, 0]
        return bool(kept < again)

    def seconds(self, states: Sequence[int], keep_s: Mapping[int, float]) -> float:
        """The cost of one assignment."""
        terms = self.terms([(s,) for s in states], keep_s)
        return sum(t.constant + int(self.store.tables[t.table].flat[0]) for t in terms) / 1e12

    def floor_seconds(self) -> float:
        """A lower bound on any assignment: every op at its fastest, nothing communicated."""
        total = 0.0
        for n in self.coarse.joins:
            node = self.graph.nodes[n]
            total += float(self.options(node.signature).compute_s.min(initial=np.inf)) * node.weight
        for v, (seconds, shape) in self.interior.items():
            total += seconds * float(self.resharder.space(len(shape)).local[list(self.domains[v])].min())
        return total

    def view_source(self, v: int) -> str:
        """The source line of the first op that reads a view."""
        n = min(n for (n, _), view in self.coarse.read.items() if view == v)
        return self.graph.nodes[n].op.source

    def halo_steps(self, signature: Signature, loops: Sequence[int]) -> tuple[Step, ...]:
        """The exchanges with neighbours that a composite strategy makes."""
        steps: list[Step] = []
        if signature.description is None:
            return ()
        for v in sorted(set(loops) - {-1}):
            over = tuple(f for f, at in enumerate(loops) if at == v)
            k = int(np.prod([self.sizes[f] for f in over]))
            found = cut(signature.description, v, k)
            assert found is not None
            for i, place in enumerate(found.operands):
                if isinstance(place, Split) and place.halo != (0, 0):
                    shape = signature.call.operands[i]
                    slab = int(np.prod(shape)) // shape[place.dim] * sum(place.halo) * _itemsize(signature.call.dtypes[i])
                    empty = Layout(((),) * len(shape))
                    steps.append(Step("permute", over, float(slab), empty, empty, self.resharder.seconds("permute", over, float(slab))))
        return tuple(steps)

    # -- strategies ------------------------------------------------------------------------------------------------

    def options(self, signature: Signature) -> Options:
        """The composite strategies of a signature."""
        found = self._options.get(signature.id)
        if found is None:
            found = self._options[signature.id] = _options(self, signature)
        return found

    # -- prices ----------------------------------------------------------------------------------------------------

    def prices(self, shape: tuple[int, ...], nbytes: int, states: Domain, *, into: bool = False) -> NDArray[np.float64]:
        """[len(states), S] of `Resharder.prices`, remembered."""
        key = (shape, nbytes, states, into)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self.resharder.prices(shape, nbytes, states, into=into)
        return found

    # -- terms -----------------------------------------------------------------------------------------------------

    def terms(self, domains: Sequence[Domain], keep_s: Mapping[int, float] | None = None) -> list[Term]:
        """The summands of the problem on these domains.

        ``keep_s`` prices keeping a weight's forward copy for the backward pass, in seconds per whole copy (infinite: always gathered again).
        """
        result: list[Term] = []
        for v, costs in self.interior.items():
            result.append(self._term(("unary", *costs), (v,), domains, lambda ds, costs=costs: self._interior(costs, ds[0])))
        for n in self.coarse.joins:
            term = self._join(self.graph.nodes[n], domains)
            if term is not None:
                result.extend(term)
        for link in self.graph.links:
            term = self._link(link, domains)
            if term is not None:
                result.append(term)
        for variable in self.coarse.variables:
            if variable.kind != "stored":
                result.append(self._view(variable.id, domains, (keep_s or {}).get(variable.id, 0.0)))
        return result

    def terms_of(self, v: int, domains: Sequence[Domain], keep_s: Mapping[int, float] | None = None) -> list[Term]:
        """Those of `terms` that variable ``v`` is in."""
        result: list[Term] = []
        if v in self.interior:
            costs = self.interior[v]
            result.append(self._term(("unary", *costs), (v,), domains, lambda ds: self._interior(costs, ds[0])))
        joins, links, views = self._around.get(v, ((), (), ()))
        for n in joins:
            result.extend(self._join(self.graph.nodes[n], domains) or ())
        for k in links:
            term = self._link(self.graph.links[k], domains)
            result.extend([term] if term is not None else [])
        for view in views:
            result.append(self._view(view, domains, (keep_s or {}).get(view, 0.0)))
        return result

    @cached_property
    def _around(self) -> Mapping[int, tuple[list[int], list[int], list[int]]]:
        """For each variable the joins, links and views whose terms it is in."""
        found: dict[int, tuple[list[int], list[int], list[int]]] = {}

        def note(vs: set[int], kind: int, at: int) -> None:
            for v in sorted(vs - {FREE}):
                found.setdefault(v, ([], [], []))[kind].append(at)

        for n in self.coarse.joins:
            node = self.graph.nodes[n]
            reads = {self.coarse.read.get((n, i), self.coarse.of[t]) for i, t in enumerate(node.inputs) if t >= 0 and self.coarse.of[t] != FREE}
            note(reads | {self.coarse.of[t] for t in node.outputs}, 0, n)
        for k, link in enumerate(self.graph.links):
            note({self.coarse.of[link.source], self.coarse.of[link.target]}, 1, k)
        for variable in self.coarse.variables:
            if variable.kind != "stored":
                note({variable.id, variable.of, *([variable.sibling] if variable.kind == "backward" else [])}, 2, variable.id)
        return found

    def _term(self, key: tuple[object, ...], scope: tuple[int, ...], domains: Sequence[Domain], build: object) -> Term:
        own = tuple(domains[v] for v in scope)
        memo = (*key, own)
        found = self._terms.get(memo)
        if found is None:
            found = self._terms[memo] = self.store.intern(build(own))  # type: ignore[operator]
        return Term(scope, *found)

    @cached_property
    def interior(self) -> Mapping[int, tuple[float, tuple[int, ...]]]:
        """For each variable the seconds of its interior elementwise ops on one device that holds all, and its shape."""
        joined = set(self.coarse.joins)
        outside: set[int] = set(self.graph.inputs) | {o for n in joined for o in self.graph.nodes[n].outputs}
        outside.update(link.target for link in self.graph.links)
        read = {t for n in joined for t in self.graph.nodes[n].inputs} | {t for t in self.graph.outputs} | {k.source for k in self.graph.links}
        total: dict[int, float] = {}
        device = self.cluster.device
        for node in self.graph.nodes:
            if node.id in joined:
                continue
            v = self.coarse.of[node.outputs[0]]
            if v == FREE:
                continue
            moved = sum(self.graph.tensors[t].nbytes for t in set(node.inputs) if t in outside and self.coarse.of[t] == v)
            moved += sum(self.graph.tensors[t].nbytes for t in node.outputs if t in read)
            if moved:
                seconds = compute.seconds(device, 0.0, moved, "float32", matrix=False) - device.launch_s
                total[v] = total.get(v, 0.0) + seconds * node.weight
        return {v: (s, self.coarse.variables[v].shape) for v, s in sorted(total.items())}

    def _interior(self, costs: tuple[float, tuple[int, ...]], domain: Domain) -> Costs:
        seconds, shape = costs
        return picoseconds(seconds * self.resharder.space(len(shape)).local[list(domain)])

    def _join(self, node: Node, domains: Sequence[Domain]) -> list[Term] | None:
        slots: list[tuple[int, int, bool]] = []  # (variable, slot, is result)
        for i, t in enumerate(node.inputs):
            if t >= 0 and self.coarse.of[t] != FREE:
                slots.append((self.coarse.read.get((node.id, i), self.coarse.of[t]), i, False))
        for r, t in enumerate(node.outputs):
            if self.coarse.of[t] != FREE:
                slots.append((self.coarse.of[t], r, True))
        if not slots:
            return None
        scope = tuple(dict.fromkeys(v for v, _, _ in slots))
        pattern = tuple((scope.index(v), i, r) for v, i, r in slots)
        free = tuple(r for r, t in enumerate(node.outputs) if self.coarse.of[t] == FREE)
        key = ("op", node.signature.id, node.weight, pattern)

        def build(own: tuple[Domain, ...]) -> Costs:
            return picoseconds(_op_table(self, node.signature, pattern, free, own) * node.weight)

        return [self._term(key, scope, domains, build)]

    def _link(self, link: Link, domains: Sequence[Domain]) -> Term | None:
        a, b = self.coarse.of[link.source], self.coarse.of[link.target]
        if FREE in (a, b) or (a == b and link.lift == 0):
            return None
        source, target = self.graph.tensors[link.source], self.graph.tensors[link.target]
        outer = target if link.lift < 0 else source
        key = ("link", source.shape, target.shape, outer.itemsize, link.lift, link.weight)

        def build(own: tuple[Domain, ...]) -> Costs:
            froms, tos = own if a != b else (own[0], own[0])
            lifted = self.lifted(froms, source.shape, link.lift < 0), self.lifted(tos, target.shape, link.lift > 0)
            costs = self.prices(outer.shape, outer.nbytes, lifted[0])[:, list(lifted[1])]
            return picoseconds(costs * link.weight) if a != b else picoseconds(np.diag(costs) * link.weight)

        return self._term(key, (a, b) if a != b else (a,), domains, build)

    def lifted(self, states: Domain, shape: tuple[int, ...], lift: bool) -> Domain:
        """The same layouts of the stacked tensor: a leading dim more, not split."""
        if not lift:
            return states
        space, above = self.resharder.space(len(shape)), self.resharder.space(len(shape) + 1)
        return tuple(above.index[((), *space.states[s][0]), space.states[s][1]] for s in states)

    def _view(self, v: int, domains: Sequence[Domain], keep_s: float) -> Term:
        variable = self.coarse.variables[v]
        tensor = self.graph.tensors[variable.tensors[0]]
        weight = self.view_weight[v]

        def pair(of: Domain, mine: Domain) -> NDArray[np.float64]:
            return self.prices(tensor.shape, tensor.nbytes, of)[:, list(mine)]

        if variable.kind == "view":
            return self._term(
                ("view", tensor.shape, tensor.itemsize, weight), (variable.of, v), domains, lambda own: picoseconds(pair(*own) * weight)
            )

        def backward(own: tuple[Domain, ...]) -> Costs:
            again = pair(own[0], own[2])[:, None, :]
            kept = self.kept_seconds(v, own[1], own[2], keep_s)[None, :, :]
            return picoseconds(np.minimum(again, kept) * weight)

        return self._term(("backward", tensor.shape, tensor.itemsize, weight, keep_s), (variable.of, variable.sibling, v), domains, backward)

    def kept_seconds(self, v: int, first: Domain, mine: Domain, keep_s: float) -> NDArray[np.float64]:
        """[first, mine]: the backward view made from the forward one, which must be kept until then."""
        tensor = self.graph.tensors[self.coarse.variables[v].tensors[0]]
        costs = self.prices(tensor.shape, tensor.nbytes, first)[:, list(mine)]
        return costs + (keep_s * self.resharder.space(len(tensor.shape)).local[list(first)][:, None] if keep_s else 0.0)

    @cached_property
    def view_weight(self) -> Mapping[int, float]:
        """How often each view is made: as often as its readers run."""
        weights: dict[int, float] = {}
        for (n, _), v in self.coarse.read.items():
            weights[v] = max(weights.get(v, 0.0), self.graph.nodes[n].weight)
        return weights


def _op_table(
    problem: Problem, signature: Signature, pattern: tuple[tuple[int, int, bool], ...], free: tuple[int, ...], own: tuple[Domain, ...]
) -> NDArray[np.float64]:
    """[*domain sizes]: the cheapest strategy for every choice of layouts."""
    base, columns = strategy_costs(problem, signature, pattern, free, own)
    keep = np.ones(len(base), bool)
    if len(base) > 400:  # drop strategies that another one beats everywhere
        keep = base < np.inf
    base = base[keep]
    columns = [c[keep] for c in columns]
    if len(columns) == 1:
        return np.min(base[:, None] + columns[0], axis=0)
    total = np.full([len(d) for d in own], np.inf)
    letters = [tuple(slice(None) if i == j else None for j in range(len(own))) for i in range(len(own))]
    for s in range(len(base)):
        one = base[s] + columns[0][s][letters[0]]
        for c, at in zip(columns[1:], letters[1:], strict=True):
            one = one + c[s][at]
        np.minimum(total, one, out=total)
    return total


def strategy_costs(
    problem: Problem, signature: Signature, pattern: tuple[tuple[int, int, bool], ...], free: tuple[int, ...], own: tuple[Domain, ...]
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """(compute and halo seconds of each strategy, for each variable the resharding seconds [strategies, domain])."""
    options = problem.options(signature)
    base = options.compute_s + options.halo_s
    columns = [np.zeros((len(base), len(d))) for d in own]
    call = signature.call
    for at, slot, result in pattern:
        shape = call.results[slot] if result else call.operands[slot]
        dtype = call.result_dtypes[slot] if result else call.dtypes[slot]
        nbytes = int(np.prod(shape)) * _itemsize(dtype)
        prices = problem.prices(shape, nbytes, own[at], into=result)
        states = options.gives[:, slot] if result else options.needs[:, slot]
        columns[at] = columns[at] + prices[:, states].T
    for r in free:  # a scalar or unread result that is a partial sum is reduced all the same
        shape = call.results[r]
        if any(problem.resharder.space(len(shape)).states[s][1] for s in options.gives[:, r]):
            whole = problem.resharder.space(len(shape)).index[((),) * (len(shape) + 1), ()]
            prices = problem.prices(shape, int(np.prod(shape)) * 4, (whole,), into=True)
            base = base + prices[0][options.gives[:, r]]
    return base, columns


_SIZES = {"bool": 1, "bfloat16": 2, "int4": 1, "uint4": 1}


def _itemsize(dtype: str) -> int:
    if dtype in _SIZES:
        return _SIZES[dtype]
    if dtype.startswith("key"):
        return 8
    if dtype.startswith("float8"):
        return 1
    return np.dtype(dtype).itemsize


def _options(problem: Problem, signature: Signature) -> Options:
    """All ways to give each factor a loop (or none), with what they need, give and cost."""
    call, description = signature.call, signature.description
    spaces_in = [problem.resharder.space(len(s)) for s in call.operands]
    spaces_out = [problem.resharder.space(len(s)) for s in call.results]
    loops = () if description is None else tuple(v for v, info in enumerate(description.loops) if not info.whole)
    memo: dict[tuple[int, int], Strategy | None] = {}

    def strategy(loop: int, ways: int) -> Strategy | None:
        assert description is not None
        if (loop, ways) not in memo:
            memo[loop, ways] = cut(description, loop, ways)
        return memo[loop, ways]

    usable = [[-1, *(v for v in loops if strategy(v, k) is not None)] for k in problem.sizes]
    rows: list[tuple[tuple[int, ...], list[int], list[int], float, float]] = []
    work = _work(problem, signature)
    for assignment in itertools.product(*usable):
        row = _composite(problem, signature, assignment, strategy)
        if row is None:
            continue
        operands, results, halo, ways = row
        needs = [spaces_in[i].index[(*dims, ()), partial] for i, (dims, partial) in enumerate(operands)]
        gives = [spaces_out[i].index[(*dims, ()), partial] for i, (dims, partial) in enumerate(results)]
        moved = sum(work.operand_bytes[i] * spaces_in[i].local[s] for i, s in enumerate(needs))
        moved += sum(work.result_bytes[i] * spaces_out[i].local[s] for i, s in enumerate(gives))
        seconds = compute.seconds(problem.cluster.device, work.flops / ways, float(moved), work.dtype, matrix=work.matrix)
        rows.append((assignment, needs, gives, seconds if work.counts else 0.0, halo))
    return Options(
        tuple(r[0] for r in rows),
        np.array([r[1] for r in rows], np.int64).reshape(len(rows), len(call.operands)),
        np.array([r[2] for r in rows], np.int64).reshape(len(rows), len(call.results)),
        np.array([r[3] for r in rows]),
        np.array([r[4] for r in rows]),
    )


Roles = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]


def _composite(
    problem: Problem, signature: Signature, assignment: tuple[int, ...], strategy: object
) -> tuple[list[Roles], list[Roles], float, int] | None:
    """Operand and result layouts, halo seconds and the number of ways of one assignment of loops to factors; None if two loops clash."""
    call = signature.call
    chosen: dict[int, tuple[int, ...]] = {}
    for f, v in enumerate(assignment):
        if v >= 0:
            chosen[v] = (*chosen.get(v, ()), f)
    operands: list[dict[int, tuple[int, ...]]] = [{} for _ in call.operands]
    results: list[dict[int, tuple[int, ...]]] = [{} for _ in call.results]
    partial_in: list[tuple[int, ...]] = [() for _ in call.operands]
    partial_out: list[tuple[int, ...]] = [() for _ in call.results]
    halo, ways = 0.0, 1
    for v, over in chosen.items():
        k = int(np.prod([problem.sizes[f] for f in over]))
        found: Strategy | None = strategy(v, k)  # type: ignore[operator]
        if found is None:
            return None
        ways *= k
        for places, dims, partial in ((found.operands, operands, partial_in), (found.results, results, partial_out)):
            for i, place in enumerate(places):
                match place:
                    case Split(dim, (lo, hi)):
                        if dim in dims[i]:
                            return None
                        dims[i][dim] = over
                        if lo or hi:
                            halo += _halo_seconds(problem, signature, i, dim, k, lo + hi, over)
                    case Partial():
                        partial[i] = tuple(sorted((*partial[i], *over)))
                    case _:
                        pass
    ins: list[Roles] = [(tuple(d.get(n, ()) for n in range(len(s))), p) for d, s, p in zip(operands, call.operands, partial_in, strict=True)]
    outs: list[Roles] = [(tuple(d.get(n, ()) for n in range(len(s))), p) for d, s, p in zip(results, call.results, partial_out, strict=True)]
    return ins, outs, halo, ways


def _halo_seconds(problem: Problem, signature: Signature, operand: int, dim: int, ways: int, halo: int, over: tuple[int, ...]) -> float:
    shape = signature.call.operands[operand]
    dtype = signature.call.dtypes[operand]
    slab = int(np.prod(shape)) // shape[dim] * halo * _itemsize(dtype)
    return problem.resharder.seconds("permute", over, float(slab))


@dataclass(frozen=True, slots=True)
class _Work:
    flops: float
    operand_bytes: tuple[float, ...]
    result_bytes: tuple[float, ...]
    dtype: str
    matrix: bool
    counts: bool


def _work(problem: Problem, signature: Signature) -> _Work:
    call, description = signature.call, signature.description
    size = [float(np.prod(s)) * _itemsize(call.dtypes[i]) if call.dtypes[i] else 0.0 for i, s in enumerate(call.operands)]
    out = [float(np.prod(s)) * _itemsize(d) for i, (s, d) in enumerate(zip(call.results, call.result_dtypes, strict=True))]
    matrix = description is not None and compute.is_contraction(description)
    flop = compute.flops(description) if description is not None else 0.0
    # moving the same elements about, or spreading a smaller tensor, is fused into the reader
    moves = description is not None and all(info.reducer is None for info in description.loops) and len([s for s in size if s > 8]) <= 1
    return _Work(flop, tuple(size), tuple(out), next((d for d in call.dtypes if d), "float32"), matrix, not moves)
