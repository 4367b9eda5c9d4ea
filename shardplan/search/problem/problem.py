"""One problem: tables over the layouts of variables. Recursion, polish, baselines, pins and the joint solve restrict its domains.

An op's table gives, for each choice of its operands' and results' layouts, the minimum over its strategies of compute plus
resharding: operands into the layouts that the strategy requires, results (partial sums among them) into theirs. Each resharding
is priced whole, as the best program. Every factor may cut a different loop of the op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.layouts import LayoutSpace
from shardplan.collectives.reshard import Family, Programs, Resharder
from shardplan.cost import TIME, Objective
from shardplan.cost.overlap import NO_WINDOW, Window
from shardplan.graph.nodes import Graph, Link
from shardplan.ir import Factor, Layout, Tensor
from shardplan.mesh import Cluster
from shardplan.search.coarsening.coarsen import FREE, Coarse
from shardplan.search.problem.composite_strategies import Groups
from shardplan.search.problem.cost_tables import BIG, MOST_BYTES, Costs, TableStore, Term, picoseconds, seconds_of
from shardplan.search.problem.host_copies import host_copies
from shardplan.search.problem.interiors import Inside, interiors
from shardplan.search.problem.op_classes import OpClasses
from shardplan.search.problem.ops import Ops
from shardplan.search.problem.pricing import Domain, Limits, Pricer
from shardplan.search.problem.summands import Summand, by_variable, summands_of
from shardplan.search.problem.windows import NO_WINDOWS, Windows, windows_of

Company = Mapping[str, float]
"""The bytes of the values in each pool that travel together."""

_ROUNDED_S = 0.5e-12  # the largest rounding error of a table entry


class Problem:
    """A graph on a cluster: its variables' domains and its terms.

    It shares what it can with ``like``, another problem of this cluster: prices of collectives, the windows of the same graph,
    and the strategies of its ops over the same factors. ``company`` are the bytes that travel together, by pool
    (`shardplan.cost.overlap.Window`), where they are known.
    """

    def __init__(
        self,
        graph: Graph,
        coarse: Coarse,
        cluster: Cluster,
        factors: Sequence[Factor],
        *,
        objective: Objective = TIME,
        like: Problem | None = None,
        company: Company | None = None,
    ) -> None:
        assert like is None or like.shares_prices(cluster, objective), "prices of another problem"
        self.graph, self.coarse, self.cluster = graph, coarse, cluster
        self.objective = objective
        self.factors = tuple(factors)
        self.sizes = tuple(f.size for f in factors)
        self.family: Family = like.family if like is not None else {}
        if self.factors not in self.family:
            network = objective.network(cluster, self.factors) if like is None else like.resharder.network.over(self.factors)
            Resharder(network, self.sizes, self.family)
        self.resharder = self.family[self.factors]
        self.store = TableStore()
        alike = like is not None and like.graph is graph and like.objective.overlaps == objective.overlaps
        self.all_windows = like.all_windows if like is not None and alike else self._windows()
        self.company = company
        self.windows = self.all_windows if company is None else self.all_windows.among(company)
        if like is not None and like.graph is graph and like.resharder is self.resharder:
            self.pricer = like.pricer.at(objective)
        else:
            self.pricer = Pricer(self.resharder, objective.device(cluster), objective)
        self.ops = Ops(graph, coarse, self.pricer, self.store, self.windows)
        self._terms: dict[tuple[object, ...], tuple[int, int]] = {}
        self._multiples: dict[tuple[int, int], int] = {}
        self._agreeing: dict[tuple[int, int | None, tuple[int, ...], Domain, bool], Domain] = {}
        self._near: dict[tuple[int, int, Domain], Domain] = {}
        self._together: dict[tuple[int, Domain, Groups], Domain] = {}
        self.derived: dict[str, Any] = {}  # what others work out once for this problem

    def shares_prices(self, cluster: Cluster, objective: Objective) -> bool:
        """Whether a problem on this cluster with this objective has the same prices of collectives."""
        return (replace(self.cluster, name=cluster.name), self.objective.counts_time) == (cluster, objective.counts_time)

    def among(self, company: Company) -> Problem:
        """The same problem where so many bytes travel together."""
        own = self.graph, self.coarse, self.cluster, self.factors
        return Problem(*own, objective=self.objective, like=self, company=company)

    def _windows(self) -> Windows:
        """The compute that collectives can hide behind; none if the objective is a plain sum."""
        device = self.objective.device(self.cluster)
        if device is None or not self.objective.overlaps:
            return NO_WINDOWS
        return windows_of(self.graph, device, self.cluster.size)

    @cached_property
    def programs(self) -> Programs:
        """The cheapest programs between layouts, each computed once for all schedules."""
        return Programs(self.resharder)

    # -- domains ---------------------------------------------------------------------------------------------------

    @cached_property
    def domains(self) -> tuple[Domain, ...]:
        """Every layout that each variable may have.

        The program's inputs and outputs must divide evenly, all other tensors may be padded. Only deferred ones may be partial.
        Stacks are whole along their first dim.
        """
        memo: dict[tuple[tuple[int, ...], bool, bool, bool], Domain] = {}
        ends = {self.coarse.of[t] for t in (*self.graph.inputs, *self.graph.outputs) if t >= 0}
        stacks = {self.coarse.of[t] for t in self.graph.stacks if self.graph.tensors[t].shape[0] > 1}
        result: list[Domain] = []
        for variable in self.coarse.variables:
            key = (variable.shape, variable.id in ends, variable.deferred, variable.id in stacks)
            if key not in memo:
                legal = self.resharder.legal(variable.shape, pad=not key[1])
                space = self.resharder.space(variable.shape)
                if key[3]:
                    first = next(d for d, n in enumerate(variable.shape) if n > 1)
                    legal = legal & ~(space.roles == first).any(axis=1)
                memo[key] = tuple(s for s in (space.deferred if variable.deferred else space.stored) if legal[s])
            result.append(memo[key])
        return tuple(result)

    def space(self, v: int) -> LayoutSpace:
        """The layouts of a variable's tensors."""
        return self.resharder.space(self.coarse.variables[v].shape)

    @cached_property
    def summands(self) -> tuple[Summand, ...]:
        """The summands of the cost."""
        key = "summands", self.objective.device(self.cluster)
        inner = self.interior, self.host
        return self.coarse.once(
            key, lambda: summands_of(self.graph, self.coarse, *inner, lambda n: self.ops.slots(n)[0], self.view_weight)
        )

    @cached_property
    def around(self) -> Mapping[int, Sequence[Summand]]:
        """The summands that each variable appears in."""
        return by_variable(self.summands)

    @cached_property
    def op_classes(self) -> OpClasses:
        """The ops that cost the same in the same variables."""
        return OpClasses(self.summands, self.ops)

    @cached_property
    def scopes(self) -> tuple[tuple[int, ...], ...]:
        """The variables of each term, the same for every restriction that opens no op."""
        return tuple(s.scope for s in self.summands)

    def scopes_on(self, domains: Sequence[Domain]) -> list[tuple[int, ...]]:
        """The variables of each of `terms` on these domains."""
        opened = self.ops.opened(domains)
        result: list[tuple[int, ...]] = []
        for s in self.summands:
            strategy = opened.get(s.at) if s.kind == "op" else None
            result += [s.scope] if strategy is None else [(strategy, v) for v in s.scope]
        return result

    @cached_property
    def rounding_s(self) -> float:
        """The largest rounding error of a sum of terms, in seconds."""
        return _ROUNDED_S * sum(len(scope) + 1 for scope in self.scopes)

    @cached_property
    def backward_views(self) -> tuple[int, ...]:
        """The views of weights that the backward pass reads."""
        return tuple(v.id for v in self.coarse.variables if v.kind == "backward")

    def narrowest(self, domains: Sequence[Domain]) -> tuple[int, ...]:
        """The state of each domain that uses the fewest factors."""
        used = [(self.space(v).roles[list(d)] != -1).sum(axis=1) for v, d in enumerate(domains)]
        return tuple(min(zip(n.tolist(), d, strict=True))[1] for n, d in zip(used, domains, strict=True))

    def with_factors(self, v: int, state: int | None, free: Sequence[int], domain: Domain, *, later: bool) -> Domain:
        """The states of ``domain`` that agree with ``state`` (None: the unsplit one) on all factors but the ``free`` ones.

        With ``later``, they use as few factors as possible after the free ones. If none agrees, all of ``domain`` may be taken.
        """
        key = (self.space(v).rank, state, tuple(free), domain, later)
        result = self._agreeing.get(key)
        if result is None:
            roles = self.space(v).roles
            want = roles[state] if state is not None else np.full(len(self.sizes), -1)
            fixed = [f for f in range(len(self.sizes)) if f not in free and (not later or f < min(free))]
            after = [f for f in range(len(self.sizes)) if later and f > max(free)]
            candidates = np.array(domain)
            agree = candidates[(roles[candidates][:, fixed] == want[fixed]).all(axis=1)]
            agree = agree if len(agree) else candidates
            used = (roles[agree][:, after] != -1).sum(axis=1)
            result = self._agreeing[key] = tuple(agree[used == used.min()].tolist())
        return result

    def near(self, v: int, state: int, domain: Domain) -> Domain:
        """The states of ``domain`` that differ from ``state`` (one of them) on at most one factor."""
        key = (self.space(v).rank, state, domain)
        result = self._near.get(key)
        if result is None:
            roles = self.space(v).roles
            candidates = np.array(domain)
            result = self._near[key] = tuple(candidates[(roles[candidates] != roles[state]).sum(axis=1) <= 1].tolist())
        assert result, "a state is near itself"
        return result

    def together(
        self, domains: Sequence[Domain], groups: Groups, otherwise: Sequence[Domain] | None = None
    ) -> tuple[Domain, ...]:
        """The states of each domain that treat the factors of each group alike.

        Where there is none, the domain of ``otherwise`` (by default the whole domain).
        """
        result: list[Domain] = []
        for variable, domain, fallback in zip(self.coarse.variables, domains, otherwise or domains, strict=True):
            space = self.space(variable.id)
            key = space.rank, domain, groups
            if key not in self._together:
                alike = space.alike(groups)[list(domain)]
                self._together[key] = tuple(itertools.compress(domain, alike.tolist()))
            result.append(self._together[key] or fallback)
        return tuple(result)

    def inside(self, summand: Summand) -> Inside:
        """The work inside a variable: its ops, or its copies from host memory and back."""
        return (self.interior if summand.kind == "interior" else self.host)[summand.at]

    def local(self, v: int, domain: Domain) -> NDArray[np.float64]:
        """[domain]: the fraction of a variable's tensors that one device holds in each state."""
        return self.space(v).local[list(domain)]

    def regathered(self, keep: frozenset[int]) -> dict[int, float]:
        """Prices (``keep_s``) at which all backward views except those in ``keep`` are gathered again."""
        return {v: math.inf for v in self.backward_views if v not in keep}

    def keeps(self, v: int, states: Sequence[int], keep_s: float) -> bool:
        """Whether making a backward view from the kept forward copy is the cheaper way, at this price of keeping it."""
        variable = self.coarse.variables[v]
        regather_s = self.copying_s(v, (states[variable.of],), (states[v],))[0, 0]
        kept = self.kept_seconds(v, (states[variable.sibling],), (states[v],), keep_s)[0, 0]
        return bool(kept < regather_s)

    def seconds(self, states: Sequence[int], keep_s: Mapping[int, float], limits: Limits | None = None) -> float:
        """The cost of one assignment."""
        terms = self.terms([(s,) for s in states], keep_s, limits)
        return seconds_of(sum(t.constant + self.store.tables[t.table].item() for t in terms))

    def tidy(self, most_bytes: int = MOST_BYTES) -> None:
        """Frees what can be computed again where it takes more than this. Nobody may hold an elimination's tables meanwhile."""
        self.pricer.tidy(most_bytes)
        self.store.tidy(most_bytes)

    @cached_property
    def view_sources(self) -> Mapping[tuple[int, int], str]:
        """The source line of the first op that reads each (view, tensor)."""
        result: dict[tuple[int, int], str] = {}
        for (n, slot), v in sorted(self.coarse.read.items()):
            result.setdefault((v, self.graph.nodes[n].inputs[slot]), self.graph.nodes[n].op.source)
        return result

    # -- terms -----------------------------------------------------------------------------------------------------

    def terms(
        self, domains: Sequence[Domain], keep_s: Mapping[int, float] | None = None, limits: Limits | None = None
    ) -> list[Term]:
        """The terms of the problem on these domains, over the variables of `Ops.sizes`.

        ``keep_s`` prices keeping a weight's forward copy for the backward pass, in seconds per whole copy (infinite: always
        gathered again). ``limits`` restricts the strategies.
        """
        opened = self.ops.opened(domains)
        return [
            term if times == 1 else self._times(term, times)
            for s, times in self.op_classes.under(limits).summands
            for term in self._terms_of(s, domains, keep_s or {}, limits, opened)
        ]

    def terms_of(
        self,
        v: int,
        domains: Sequence[Domain],
        keep_s: Mapping[int, float] | None = None,
        limits: Limits | None = None,
        *,
        ops: bool = True,
    ) -> list[Term]:
        """The `terms` that variable ``v`` appears in, one table for each op; ``ops=False`` leaves ops out."""
        around = [s for s in self.around.get(v, ()) if ops or s.kind != "op"]
        return [term for s in around for term in self._terms_of(s, domains, keep_s or {}, limits, {})]

    def _terms_of(
        self,
        summand: Summand,
        domains: Sequence[Domain],
        keep_s: Mapping[int, float],
        limits: Limits | None,
        opened: Mapping[int, int],
    ) -> list[Term]:
        """The table of a summand over its scope; several tables for an ``opened`` op."""
        at, scope, weight = summand.at, summand.scope, summand.weight
        match summand.kind:
            case "op":
                return self.ops.terms_of(at, domains, limits, opened.get(at))
            case "interior" | "host":
                each, costs = self.objective.weights.compute if summand.kind == "interior" else 1.0, self.inside(summand)
                key = "unary", each, costs
                return [self._term(key, scope, domains, lambda own: picoseconds(each * costs.seconds_at(self.local(at, own[0]))))]
            case "link":
                return [self._link(self.graph.links[at], scope, domains)]
            case "view":
                return [self._view(at, scope, weight, domains, keep_s.get(at, 0.0))]

    def standing_for(self, n: int, limits: Limits | None = None) -> int:
        """The op whose term stands for op ``n`` in `terms`: the first that costs the same in the same variables."""
        return self.op_classes.under(limits).first[n]

    def _times(self, term: Term, times: int) -> Term:
        """The sum of so many equal terms."""
        key = (term.table, times)
        if key not in self._multiples:
            table = self.store.tables[term.table]
            self._multiples[key] = self.store.intern(np.where(table > BIG // times, BIG, table * times))[0]
        return Term(term.scope, self._multiples[key], min(term.constant * times, BIG))

    def _term(
        self,
        key: tuple[object, ...],
        scope: tuple[int, ...],
        domains: Sequence[Domain],
        build: Callable[[tuple[Domain, ...]], Costs],
    ) -> Term:
        candidates = tuple(domains[v] for v in scope)
        memo = (*key, candidates)
        result = self._terms.get(memo)
        if result is None:
            result = self._terms[memo] = self.store.intern(build(candidates))
        return Term(scope, *result)

    @cached_property
    def interior(self) -> Mapping[int, Inside]:
        """By variable: the elementwise ops inside it."""
        device = self.objective.device(self.cluster)
        return {} if not device else self.coarse.once(("interior", device), lambda: interiors(self.graph, self.coarse, device))

    @cached_property
    def host(self) -> Mapping[int, Inside]:
        """By variable: the copies of its arrays from host memory and back."""
        return {} if self.objective.device(self.cluster) is None else host_copies(self.graph, self.coarse, self.cluster)

    @cached_property
    def turned(self) -> Mapping[int, tuple[int, int]]:
        """Variables that only one op and one transpose touch: (the transpose, the variable on its other side).

        The transposed layout of the other side costs such a variable no more than any other: the transpose itself is free, and a
        resharding on one side of it can be done on the other. This needs that no elementwise op runs inside the variable, that
        its op runs no more often than the transpose, and that either both sides may be partial or neither.
        """
        graph, coarse, around = self.graph, self.coarse, self.ops.around
        ends = {*graph.inputs, *graph.outputs, *(t for link in graph.links for t in (link.source, link.target))}
        copied = {v.of for v in coarse.variables if v.kind != "stored"}

        def behind(n: int, v: int, other: int) -> bool:
            variable, weights = coarse.variables[v], [graph.nodes[m].weight for m in around[v] if m != n]
            if variable.kind != "stored" or v in copied or v in self.interior or not ends.isdisjoint(variable.tensors):
                return False
            return (
                variable.deferred == coarse.variables[other].deferred
                and len(weights) == 1
                and weights[0] <= graph.nodes[n].weight
            )

        result: dict[int, tuple[int, int]] = {}
        for n in coarse.joins:
            scope, _, _ = self.ops.slots(graph.nodes[n])
            if len(scope) == 2 and graph.nodes[n].signature.turns:
                result |= {v: (n, other) for v, other in (scope, scope[::-1]) if behind(n, v, other)}
        return result

    def _link(self, link: Link, scope: tuple[int, ...], domains: Sequence[Domain]) -> Term:
        tensor = self.crossing_tensor(link)
        kind = tensor.shape, tensor.itemsize, tensor.hosted
        key = "link", kind, link.lift, link.weight, self.link_window(link), self.windows.read(tensor.id)

        def build(candidates: tuple[Domain, ...]) -> Costs:
            return picoseconds(self.crossing_seconds(link, candidates) * link.weight)

        return self._term(key, scope, domains, build)

    def crossing_tensor(self, link: Link) -> Tensor:
        """The tensor that a link may reshard: the one outside the loop."""
        return self.graph.tensors[link.target if link.lift < 0 else link.source]

    def outside(self, link: Link, before: Domain, after: Domain) -> tuple[Domain, Domain]:
        """The states of a link's two ends as states of its tensor outside the loop, which may have one more dim."""
        tensors = self.graph.tensors
        source, target = tensors[link.source].shape, tensors[link.target].shape
        return (
            self.lifted(before, source, target) if link.lift < 0 else before,
            self.lifted(after, target, source) if link.lift > 0 else after,
        )

    def entering(self, link: Link, domain: Domain) -> Domain:
        """The states of a link's target among which ``domain`` chooses: one, where every device has the slices whole."""
        if self.coarse.of[link.target] != FREE:
            return domain
        shape = self.graph.tensors[link.target].shape
        return (self.resharder.state(shape, Layout.whole(len(shape))),)

    def crossing_seconds(self, link: Link, candidates: Sequence[Domain]) -> NDArray[np.float64]:
        """[the states of its variables, one or two]: weighted seconds of one resharding on a link."""
        tensor = self.crossing_tensor(link)
        first, last = self.outside(link, candidates[0], self.entering(link, candidates[-1]))
        seconds = self.pricer.costs(tensor.shape, tensor.nbytes, first, self.link_window(link), self.windows.read(tensor.id))[
            :, list(last)
        ]
        if tensor.hosted:  # nothing moves between devices' hosts
            seconds = np.where(np.equal.outer(first, last), seconds, np.inf)
        if len(candidates) == 2:
            return seconds
        return seconds[:, 0] if self.coarse.of[link.target] == FREE else np.diag(seconds)

    def lifted(self, states: Domain, shape: tuple[int, ...], stacked: tuple[int, ...]) -> Domain:
        """The same layouts for the stacked tensor, whose additional leading dim is not split."""
        space, above = self.resharder.space(shape), self.resharder.space(stacked)
        if space is above:
            return states
        result = [space.state(s) for s in states]
        return tuple(above.number((((), *dims), partial)) for dims, partial in result)

    def _view(self, v: int, scope: tuple[int, ...], weight: float, domains: Sequence[Domain], keep_s: float) -> Term:
        tensor = self.graph.tensors[self.coarse.variables[v].tensors[0]]
        if len(scope) == 2:
            key = ("view", tensor.shape, tensor.itemsize, weight, self.view_window[v], self.windows.read(tensor.id))
            return self._term(key, scope, domains, lambda candidates: picoseconds(self.copying_s(v, *candidates) * weight))

        def backward(candidates: tuple[Domain, ...]) -> Costs:
            regather_s = self.copying_s(v, candidates[0], candidates[2])[:, None, :]
            kept = self.kept_seconds(v, candidates[1], candidates[2], keep_s)[None, :, :]
            return picoseconds(np.minimum(regather_s, kept) * weight)

        key = ("backward", tensor.shape, tensor.itemsize, weight, keep_s, self.view_window[v], self.windows.read(tensor.id))
        return self._term(key, scope, domains, backward)

    def copying_s(self, v: int, of: Domain, mine: Domain) -> NDArray[np.float64]:
        """[of, mine]: weighted seconds to make each state of a view from each state of the tensor that it copies."""
        tensor = self.graph.tensors[self.coarse.variables[v].tensors[0]]
        return self.pricer.costs(tensor.shape, tensor.nbytes, of, self.view_window[v], self.windows.read(tensor.id))[
            :, list(mine)
        ]

    def kept_seconds(self, v: int, first: Domain, mine: Domain, keep_s: float) -> NDArray[np.float64]:
        """[first, mine]: weighted seconds to make the backward view from the forward one, plus the price of keeping that."""
        tensor = self.graph.tensors[self.coarse.variables[v].tensors[0]]
        costs = self.copying_s(v, first, mine)
        return costs + (keep_s * self.resharder.space(tensor.shape).local[list(first)][:, None] if keep_s else 0.0)

    @cached_property
    def view_window(self) -> Mapping[int, Window]:
        """The windows of making each view: the median, over its tensors, of the least window among their readers."""
        of: dict[int, dict[int, Window]] = {}
        for (n, slot), v in self.coarse.read.items():
            windows, t = of.setdefault(v, {}), self.graph.nodes[n].inputs[slot]
            window = self.windows.operands.get((n, slot), NO_WINDOW)
            windows[t] = min(windows.get(t, window), window)
        return {v: sorted(windows.values())[len(windows) // 2] for v, windows in of.items()}

    def link_window(self, link: Link) -> Window:
        """The window of a resharding on a link."""
        return self.windows.links.get((link.source, link.target), NO_WINDOW)

    @cached_property
    def view_weight(self) -> Mapping[int, float]:
        """The number of copies per step of all tensors of each view."""
        return {v: sum(times.values()) for v, times in self.copies.items()}

    @cached_property
    def copies(self) -> Mapping[int, Mapping[int, float]]:
        """By view and tensor, the number of copies per step: as often as the tensor's most frequent reader runs."""
        result: dict[int, dict[int, float]] = {}
        for (n, slot), v in self.coarse.read.items():
            node = self.graph.nodes[n]
            times, t = result.setdefault(v, {}), node.inputs[slot]
            times[t] = max(times.get(t, 0.0), node.weight)
        return result
