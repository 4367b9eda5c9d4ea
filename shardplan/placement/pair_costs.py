"""The cost of two configurations of neighbouring operators, memoised, and the least cost behind a configuration of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.placement.configurations import Configuration
from shardplan.placement.operators import BACKWARD, FORWARD, UPDATE, Edge
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.structure import structure_of
from shardplan.placement.synchronisation import sync_groups
from shardplan.placement.task_graph import TaskGraphBuilder
from shardplan.placement.tensor_transfers import SharedRegions, backward_transfers, forward_transfers

Ints = NDArray[np.int64]

NEVER_SENT = -(1 << 60)
"""The ticks between two parts that share nothing."""


@dataclass(frozen=True, slots=True)
class PairTicks:
    """The ticks [parts of the producer, parts of the consumer] of a tensor and of its gradient, and the ticks on each link."""

    there: Ints
    back: Ints
    links: Ints

    @property
    def first_there(self) -> int:
        """The least ticks until some part of the consumer has all that it reads."""
        return int(self.there.max(axis=0).min())

    @property
    def first_back(self) -> int:
        """The least ticks until some part of the producer has all gradients."""
        return int(self.back.max(axis=1).min())


class PairCosts:
    """Costs of the candidates of a problem; candidate n of operator i is (i, n)."""

    def __init__(self, problem: PlacementProblem, candidates: Sequence[Sequence[Configuration]]) -> None:
        self.problem, self.candidates = problem, candidates
        self.structure = structure_of(problem.graph)
        self._builder = TaskGraphBuilder(self.structure, problem.machine, problem.tables)
        self._pairs: dict[tuple[int, int, int], PairTicks] = {}
        self._reductions: dict[tuple[int, tuple[int, ...]], Ints] = {}
        self.phases = [[self._builder.phase_ticks(i, c) for c in own] for i, own in enumerate(candidates)]  # [phases, parts] each

    def pair(self, k: int, produced: int, read: int) -> PairTicks:
        """The costs of tensor k between two candidates of its operators."""
        key = k, produced, read
        if key not in self._pairs:
            edge = self.problem.graph.edges[k]
            self._pairs[key] = self._pair(edge, self.candidates[edge.producer][produced], self.candidates[edge.consumer][read])
        return self._pairs[key]

    def reduction(self, w: int, users: Sequence[int]) -> Ints:
        """[links]: the ticks of the reductions of weight w under the candidates ``users`` of its users."""
        key = w, tuple(users)
        if key not in self._reductions:
            weight, prices = self.problem.graph.weights[w], self._builder.prices
            ticks = np.zeros(len(self.problem.machine.links), np.int64)
            for mask, nbytes in sync_groups(weight, [self.candidates[u][n] for u, n in zip(weight.users, users, strict=True)]):
                ticks[list(prices.links(mask))] += prices.ticks(mask, nbytes)
            self._reductions[key] = ticks
        return self._reductions[key]

    def _pair(self, edge: Edge, produced: Configuration, read: Configuration) -> PairTicks:
        machine = self.problem.machine
        shape = len(produced.devices), len(read.devices)
        links = np.zeros(len(machine.links), np.int64)
        there, back = (np.full(shape, NEVER_SENT) for _ in range(2))
        sent = forward_transfers(edge, produced, read, machine)
        there[sent.source, sent.target] = _takes(sent)
        np.add.at(links, sent.link, sent.ticks)
        if edge.gradient:
            sent = backward_transfers(edge, produced, read, machine)
            back[sent.target, sent.source] = _takes(sent)
            np.add.at(links, sent.link, sent.ticks)
        return PairTicks(there, back, links)


class Behind:
    """Lower bounds from the forward end of a candidate through the operators behind it, each with its best candidate.

    ``around[i][n]``: until some part of operator i has its gradients. ``ends[i][n]``: until the step ends. ``turn[i][n]``: until
    the first backward task of the last operator ends, or 0 where gradients of some operator do not come from it.
    """

    def __init__(self, costs: PairCosts) -> None:
        self.costs = costs
        counts = [len(own) for own in costs.candidates]
        self.around, self.ends, self.turn = ([np.zeros(n, np.int64) for n in counts] for _ in range(3))
        graph, last = costs.problem.graph, len(counts) - 1
        rooted = {last} if costs.structure.backward[last] else set[int]()
        for k, e in sorted(enumerate(graph.edges), key=lambda item: -item[1].consumer):
            self._add(k, e, e.gradient and e.consumer in rooted, last)
            if e.gradient and e.consumer in rooted:
                rooted.add(e.producer)
        self.rooted = all(i in rooted for i, there in enumerate(costs.structure.backward) if there)

    def _add(self, k: int, e: Edge, rooted: bool, last: int) -> None:
        phases = self.costs.phases[e.consumer]
        own = [self._after(e.consumer, n) for n in range(len(phases))]
        for p in range(len(self.around[e.producer])):
            best = [1 << 60] * 3
            for n, ticks in enumerate(phases):
                pair = self.costs.pair(k, p, n)
                begins = pair.first_there + int(ticks[FORWARD].min())
                returns = begins + int(self.around[e.consumer][n]) + int(ticks[BACKWARD].min())
                turn = begins + (int(ticks[BACKWARD].min()) if e.consumer == last else int(self.turn[e.consumer][n]))
                ends = max(begins + int(self.ends[e.consumer][n]), returns + own[n] if ticks[BACKWARD].any() else 0)
                best = [min(best[0], returns + pair.first_back if e.gradient else 0), min(best[1], ends), min(best[2], turn)]
            for bound, least in zip((self.around, self.ends, self.turn), best, strict=True):
                if bound is not self.turn or rooted:
                    bound[e.producer][p] = max(int(bound[e.producer][p]), least)

    def _after(self, i: int, n: int) -> int:
        """Ticks from the end of the backward task of any part of a candidate: reductions of its own weights, and the update."""
        structure, graph = self.costs.structure, self.costs.problem.graph
        own = [w for w in structure.weights_of[i] if graph.weights[w].users == (i,)]
        reduced = max((int(self.costs.reduction(w, [n]).max(initial=0)) for w in own), default=0)
        return reduced + int(self.costs.phases[i][n][UPDATE].min())


def _takes(sent: SharedRegions) -> Ints:
    """[pairs]: the ticks of each message; 0 on one device."""
    return np.where(sent.message >= 0, np.append(sent.ticks, 0)[sent.message], 0)
