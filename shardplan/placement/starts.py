"""Strategies that people use, from which a search starts: data parallel, the experts', random ones, a plan on all devices."""

from __future__ import annotations

import math
import posixpath
from collections.abc import Sequence

import numpy as np

from shardplan.constants import CONSTANTS
from shardplan.ir import Choices, Factor
from shardplan.mesh.factoring import coordinates
from shardplan.placement.configurations import Configuration, Strategy, divisors, random_configuration
from shardplan.placement.operators import Kind, Operator, OperatorGraph
from shardplan.placement.placement_problem import PlacementProblem


def data_parallel(problem: PlacementProblem) -> Strategy:
    """Every operator cut over samples alone, on as many devices as divide them. Absent devices are left out."""
    return tuple(data_parallel_on(problem, o, problem.machine.present) for o in problem.graph.operators)


def data_parallel_on(problem: PlacementProblem, operator: Operator, devices: Sequence[int]) -> Configuration:
    """An operator cut over samples alone, on as many of these devices as divide them."""
    ways = _fitting(operator, "S", len(devices))
    if problem.machine.absent:
        n = operator.loop_of("S")
        ways = 1 if n is None else divisors(operator.loops[n].extent, len(devices))[-1]
    return _cut(operator, {"S": ways}, devices)


def expert(problem: PlacementProblem) -> Strategy:
    """The strategy of experts for this kind of network (FlexFlow, section 8.1.1).

    Recurrent networks: samples over nodes, a layer for each device of a node (Wu et al. 2016). Convolutional ones: samples, but
    parameters in dense layers (Krizhevsky 2014). Others: samples over nodes, parameters inside (Megatron, Shoeybi et al. 2019).
    The parts of absent devices go to the next ones.
    """
    return tuple(_on_present(problem, c) for c in _expert(problem))


def _on_present(problem: PlacementProblem, chosen: Configuration) -> Configuration:
    """The parts of absent devices on the next devices that are present, after the last one the first."""
    machine = problem.machine
    following = [next((p for p in machine.present if p >= d), machine.present[0]) for d in range(machine.count)]
    return Configuration(chosen.degrees, tuple(following[d] for d in chosen.devices))


def _expert(problem: PlacementProblem) -> Strategy:
    graph = problem.graph
    if any(len(w.users) >= CONSTANTS.timesteps for w in graph.weights):
        return _layers_in_nodes(problem)
    if any(o.anchor is not None and o.anchor.convolves for o in graph.operators):
        return tuple(_dense_or_samples(o, problem.machine.count) for o in graph.operators)
    inside = problem.machine.cluster.shape[-1]
    return tuple(_cut_both(problem, o, inside) for o in graph.operators)


def _dense_or_samples(operator: Operator, count: int) -> Configuration:
    """A dense layer cut over parameters, any other operator over samples."""
    dense = operator.contracts and not (operator.anchor and operator.anchor.convolves) and operator.loop_of("P") is not None
    kind: Kind = "P" if dense else "S"
    return _cut(operator, {kind: _fitting(operator, kind, count)}, range(count))


def _layers_in_nodes(problem: PlacementProblem) -> Strategy:
    shape = problem.machine.cluster.shape
    inside = math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
    nodes = problem.machine.count // inside
    layers = _layers(problem.graph)
    strategy: list[Configuration] = []
    for i, operator in enumerate(problem.graph.operators):
        at = layers[i] * inside // (max(layers) + 1)
        strategy.append(_cut(operator, {"S": _fitting(operator, "S", nodes)}, range(at, nodes * inside, inside)))
    return tuple(strategy)


def _layers(graph: OperatorGraph) -> list[int]:
    """The layer of each operator: the layer of its weights, which are in one folder of the state; without weights, the layer of
    the operator that it reads.
    """
    common = posixpath.commonprefix([w.path.rpartition("/")[0] + "/" for w in graph.weights]).rfind("/")
    numbers: dict[str, int] = {}
    layer_of: dict[int, int] = {}
    for w in sorted(graph.weights, key=lambda w: w.users[0]):
        folder = w.path.rpartition("/")[0]
        number = numbers.setdefault(folder if len(folder) > common else w.path, len(numbers))
        for u in w.users:
            layer_of.setdefault(u, number)
    made = {e.consumer: e.producer for e in graph.edges}
    for i in range(len(graph.operators)):
        if i not in layer_of:
            layer_of[i] = layer_of[made[i]] if i in made else 0
    return [layer_of[i] for i in range(len(graph.operators))]


def _cut_both(problem: PlacementProblem, operator: Operator, inside: int) -> Configuration:
    n = problem.machine.count
    kind: Kind = "P" if operator.loop_of("P") is not None else "A"
    own = _fitting(operator, kind, inside) if operator.contracts else 1
    if own != inside:
        return _cut(operator, {"S": _fitting(operator, "S", n)}, range(n))
    return _cut(operator, {"S": _fitting(operator, "S", n // inside), kind: inside}, range(n))


def _fitting(operator: Operator, kind: Kind, most: int) -> int:
    """The largest degree of its first loop of a kind that divides the loop and ``most``."""
    n = operator.loop_of(kind)
    return 1 if n is None else math.gcd(operator.loops[n].extent, most)


def _cut(operator: Operator, ways: dict[Kind, int], devices: Sequence[int]) -> Configuration:
    """The operator cut along its first loops of these kinds, on the first of these devices that its parts need."""
    degrees = [1] * len(operator.loops)
    for kind, k in ways.items():
        n = operator.loop_of(kind)
        if n is not None:
            degrees[n] = k
    parts = math.prod(degrees)
    own = list(devices)
    spread = own[:: len(own) // parts] if len(own) % parts == 0 and parts > 1 else own
    return Configuration(tuple(degrees), tuple(spread[:parts]) if parts > 1 else (own[0],))


def random_strategy(problem: PlacementProblem, draw: np.random.Generator) -> Strategy:
    """A random configuration for every operator."""
    machine = problem.machine
    return tuple(random_configuration(o, machine.cluster.shape, draw, machine.absent) for o in problem.graph.operators)


def from_plan(problem: PlacementProblem, choices: Choices, factors: Sequence[Factor]) -> Strategy:
    """The cuts of a plan as configurations over all devices.

    Operators cannot be cut into terms of a sum. If a plan cuts a reduction, samples or else another loop are cut instead, as far
    as they divide. Several devices cannot do the same work either. If a plan leaves an operator whole, it is either cut in the
    same way, or one device does it and sends the others what they need. The faster of these two in simulation is returned.
    """
    at = coordinates(problem.machine.cluster, factors)
    operators = problem.graph.operators
    both = [tuple(_planned(o, choices, factors, at, whole) for o in operators) for whole in (False, True)]
    return min(both, key=problem.seconds)


def _planned(operator: Operator, choices: Choices, factors: Sequence[Factor], at: np.ndarray, whole: bool) -> Configuration:
    """``whole``: what the plan leaves whole over a factor runs on the first of its devices."""
    anchor = operator.anchor
    use = choices.use(anchor.where, anchor.op) if anchor is not None and anchor.where in choices.bodies else None
    cut: dict[int, list[int]] = {}
    spare: list[int] = []
    kept: list[int] = []
    loops = dict(anchor.cut) if anchor is not None else {}

    def divides(f: int, n: int) -> bool:
        return operator.loops[n].extent % (factors[f].size * math.prod(factors[g].size for g in cut.get(n, ()))) == 0

    for f in range(len(factors)):
        n = loops.get(use.loops[f]) if use is not None else None
        if n is not None and divides(f, n):
            cut.setdefault(n, []).append(f)
        elif whole and use is not None and use.loops[f] == -1:
            kept.append(f)
        else:
            spare.append(f)
    order = sorted(range(len(operator.loops)), key=lambda n: "SPA".index(operator.loops[n].kind))
    for f in list(spare):
        n = next((n for n in order if divides(f, n)), None)
        if n is not None:
            cut.setdefault(n, []).append(f)
            spare.remove(f)
    degrees = tuple(math.prod(factors[f].size for f in cut.get(n, ())) for n in range(len(operator.loops)))
    own = np.flatnonzero((at[:, spare + kept] == 0).all(axis=1))
    part = np.zeros(len(own), np.int64)
    for n, degree in enumerate(degrees):
        along = np.zeros(len(own), np.int64)
        for f in cut.get(n, ()):
            along = along * factors[f].size + at[own, f]
        part = part * degree + along
    return Configuration(degrees, tuple(own[np.argsort(part)].tolist()))
