"""The bytes that each device holds under a strategy: one static sum of everything that a step holds.

- Weights: each shard that a device holds, once, with its gradient and the optimizer's state.
- Arguments without gradients (data, weights that are not trained): each shard that a device reads, once.
- Activations: for each part, the values that its operator makes in the forward pass and that the backward pass reads.
- Tensors that a part receives from other devices.

All of these are counted as if they lived through the whole step. Temporary buffers are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shardplan.errors import PlacementMemoryError
from shardplan.placement.configurations import Configuration, Strategy
from shardplan.placement.operators import Edge, Labels, OperatorGraph, Weight
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.shared_regions import shared_bytes
from shardplan.placement.synchronisation import holders
from shardplan.placement.tensor_transfers import forward_transfers

Ints = NDArray[np.int64]


class Memory:
    """``bytes`` [n] that each device holds under a strategy, which may cover only the first operators."""

    def __init__(self, problem: PlacementProblem, strategy: Sequence[Configuration]) -> None:
        self._problem = problem
        count = problem.machine.count
        self._edges = [
            [e for e in problem.graph.edges if i in (e.producer, e.consumer)] for i in range(len(problem.graph.operators))
        ]
        sizes = _argument_bytes(problem.graph)
        self._arguments = [[a for a in sizes if i in a[0].users] for i in range(len(problem.graph.operators))]
        self.bytes = np.zeros(count, np.int64)
        for i, chosen in enumerate(strategy):
            self.bytes += _activations(problem.graph.operators[i].saved, chosen, count)
        for e in problem.graph.edges:
            if e.consumer < len(strategy):
                self.bytes += self._received(e, strategy)
        for w, nbytes in sizes:
            self.bytes += _held(w, nbytes, strategy, count)

    @property
    def fits(self) -> bool:
        """Whether no device holds more than its memory."""
        return bool(np.all(self.bytes <= self._problem.machine.memory_bytes))

    def changed(self, strategy: Sequence[Configuration], before: Mapping[int, Configuration]) -> bool:
        """Takes over a strategy, some operators of which were configured otherwise ``before``, if it fits in memory; whether it
        does.
        """
        was = [before.get(i, own) for i, own in enumerate(strategy)]
        held = self.bytes - self._around(was, before) + self._around(strategy, before)
        if np.any(held > self._problem.machine.memory_bytes):
            return False
        self.bytes = held
        return True

    def extended(self, strategy: Sequence[Configuration]) -> Memory:
        """The bytes of a strategy that has one operator more."""
        i, count = len(strategy) - 1, self._problem.machine.count
        received = [self._received(e, strategy) for e in self._edges[i] if e.consumer == i]
        weights = [_held(w, n, strategy, count) - _held(w, n, strategy[:-1], count) for w, n in self._arguments[i]]
        more = copy(self)
        more.bytes = sum(
            [*received, *weights], self.bytes + _activations(self._problem.graph.operators[i].saved, strategy[i], count)
        )
        return more

    def _around(self, strategy: Sequence[Configuration], operators: Iterable[int]) -> Ints:
        """[n]: the bytes that depend on the configurations of some operators."""
        count, total = self._problem.machine.count, np.zeros(self._problem.machine.count, np.int64)
        for i in operators:
            total += _activations(self._problem.graph.operators[i].saved, strategy[i], count)
        for e in {id(e): e for i in operators for e in self._edges[i]}.values():
            total += self._received(e, strategy)
        for w, nbytes in {id(row): row for i in operators for row in self._arguments[i]}.values():
            total += _held(w, nbytes, strategy, count)
        return total

    def _received(self, edge: Edge, strategy: Sequence[Configuration]) -> Ints:
        made, read = strategy[edge.producer], strategy[edge.consumer]
        machine = self._problem.machine
        if made.devices == read.devices and len(made.used) == 1:
            return np.zeros(machine.count, np.int64)
        sent = forward_transfers(edge, made, read, machine)
        remote = sent.message >= 0
        nbytes = shared_bytes(edge, made.degrees, read.degrees)[sent.source[remote], sent.target[remote]]
        return np.bincount(np.array(read.devices)[sent.target[remote]], nbytes, machine.count).astype(np.int64)


def whole_bytes(problem: PlacementProblem) -> list[int]:
    """[operators]: the bytes that each holds on one device, at most: as if it received all that it reads, and shared nothing."""
    graph = problem.graph
    held = [sum(nbytes for _, nbytes in o.saved) for o in graph.operators]
    for e in graph.edges:
        held[e.consumer] += math.prod(e.shape) * e.itemsize
    for w, nbytes in _argument_bytes(graph):
        for i in set(w.users):
            held[i] += nbytes
    return held


def may_exceed(problem: PlacementProblem) -> bool:
    """Whether a strategy may need more memory than a device has; if one device can hold everything, none does."""
    graph, least = problem.graph, min(int(problem.machine.memory_bytes[d]) for d in problem.machine.present)
    weights = sum(nbytes for _, nbytes in _argument_bytes(graph))
    made = sum(nbytes for o in graph.operators for _, nbytes in o.saved)
    received = sum(math.prod(e.shape) * e.itemsize for e in graph.edges) * problem.machine.count
    return weights + made + received > least


def check_memory(problem: PlacementProblem, strategies: Mapping[str, Strategy]) -> dict[str, Strategy]:
    """The strategies, by name, that fit in the memory of all devices.

    Raises:
        PlacementMemoryError: if none does, with the fullest device of each.
    """
    if not may_exceed(problem):
        return dict(strategies)
    needs = {name: Memory(problem, strategy) for name, strategy in strategies.items()}
    fitting = {name: strategies[name] for name, memory in needs.items() if memory.fits}
    if not fitting:
        limits = problem.machine.memory_bytes
        fullest = {name: int(np.argmax(memory.bytes / limits)) for name, memory in needs.items()}
        raise PlacementMemoryError({name: (d, int(needs[name].bytes[d]), int(limits[d])) for name, d in fullest.items()})
    return fitting


@lru_cache(maxsize=1 << 16)
def _activations(saved: tuple[tuple[Labels, int], ...], chosen: Configuration, count: int) -> Ints:
    """[n]: the bytes of the values that the parts make for the backward pass."""
    part = 0
    for labels, nbytes in saved:
        part += nbytes // math.prod(chosen.degrees[n] for n in set(labels) if n >= 0)
    return np.bincount(np.array(chosen.devices), minlength=count) * part


def _held(weight: Weight, nbytes: int, strategy: Sequence[Configuration], count: int) -> Ints:
    """[n]: the bytes, of ``nbytes`` in all, of the shards of an argument that its users of a strategy hold."""
    users = tuple((x, strategy[u]) for u, x in zip(weight.users, weight.labels, strict=True) if u < len(strategy))
    return _shards(weight.shape, nbytes, users, count)


@lru_cache(maxsize=1 << 16)
def _shards(shape: tuple[int, ...], nbytes: int, users: tuple[tuple[tuple[int, ...], Configuration], ...], count: int) -> Ints:
    if not users:
        return np.zeros(count, np.int64)
    masks = holders(shape, [labels for labels, _ in users], [c for _, c in users])
    held = [sum(mask >> d & 1 for mask in masks) for d in range(count)]
    return np.array([nbytes * cells // len(masks) for cells in held], np.int64)


def _argument_bytes(graph: OperatorGraph) -> list[tuple[Weight, int]]:
    """All arguments with their bytes; a weight's include its gradient and its share of the optimizer's state."""
    own = [(w, 2, w.state_bytes) for w in graph.weights] + [(w, 1, 0) for w in graph.arguments]
    return [(w, times * math.prod(w.shape) * w.itemsize + more) for w, times, more in own]
