"""Strategies as JSON values, and what makes two placement problems the same."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from shardplan.errors import PlacementError
from shardplan.placement.configurations import Configuration, Strategy
from shardplan.placement.operators import OperatorGraph
from shardplan.placement.placement_problem import PlacementProblem

FORMAT = "shardplan-strategy"
VERSION = 1


def fingerprint(graph: OperatorGraph) -> str:
    """A short digest of the operators, their loops and tensors: equal steps have equal ones."""
    content = [
        [(o.name, [(x.name, x.extent, x.kind) for x in o.loops]) for o in graph.operators],
        [(e.producer, e.consumer, e.shape, e.itemsize, e.produced, e.read) for e in graph.edges],
        [(w.path, w.shape, w.itemsize, w.users, w.labels) for w in graph.weights],
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def strategy_json(problem: PlacementProblem, strategy: Strategy, seconds: float) -> dict[str, Any]:
    """A strategy as JSON values: degrees and devices of each operator, and the step and cluster that it is for."""
    cluster = problem.machine.cluster
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": fingerprint(problem.graph),
        "cluster": {"name": cluster.name, "fingerprint": cluster.fingerprint()},
        "step_time_s": seconds,
        "operators": {
            o.name: {"degrees": list(c.degrees), "devices": list(c.devices)}
            for o, c in zip(problem.graph.operators, strategy, strict=True)
        },
    }


def read_strategy_file(file: str, problem: PlacementProblem) -> Strategy:
    """The strategy in a file.

    Raises:
        PlacementError: if the file cannot be read, or as `read_strategy`.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlacementError(f"cannot read the strategy {file}: {getattr(error, 'strerror', None) or error}") from error
    return read_strategy(text, problem, file)


def read_strategy(text: str, problem: PlacementProblem, name: str) -> Strategy:
    """The strategy in the text of a file ``name``.

    Raises:
        PlacementError: if the text is not a strategy, or is the strategy of another step or cluster.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, a number too long to read
        raise PlacementError(f"{name} is not JSON ({error}): give a file that shardplan place -o wrote") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT or values.get("version") != VERSION:
        raise PlacementError(f"{name} is no strategy of this version of shardplan: give a file that shardplan place -o wrote")
    cluster = problem.machine.cluster
    own, operators = (_table(values, key, name) for key in ("cluster", "operators"))
    if own.get("fingerprint") != cluster.fingerprint():
        of = own.get("name")
        other = f"the cluster {of}, not for {cluster.name}" if of != cluster.name else f"a {of} with other devices or links"
        raise PlacementError(f"{name} is a strategy for {other}: search again")
    if values.get("step") != fingerprint(problem.graph):
        raise PlacementError(f"{name} is a strategy of another step, or of other shapes: search again")
    if foreign := sorted(set(operators) - set(problem.graph.names)):
        raise PlacementError(f"{name} places {foreign[0]}, which is no operator of the step: search again")
    strategy = tuple(_configuration(operators.get(o.name), name, o.name) for o in problem.graph.operators)
    problem.check(strategy, name)
    return strategy


def _table(values: dict[str, Any], key: str, file: str) -> dict[str, Any]:
    table = values.get(key)
    if not isinstance(table, dict):
        raise PlacementError(f"{file}: {key} must be a table, got {table!r}: give a file that shardplan place -o wrote")
    return table


def _configuration(value: Any, file: str, operator: str) -> Configuration:
    degrees, devices = (_numbers(value.get(k) if isinstance(value, dict) else None) for k in ("degrees", "devices"))
    if degrees is None or devices is None or math.prod(degrees) != len(devices):
        raise PlacementError(f"{file} has no degrees and devices for {operator}, one device for each part: search again")
    return Configuration(degrees, devices)


def _numbers(value: Any) -> tuple[int, ...] | None:
    """A list of whole numbers; None for anything else."""
    return tuple(value) if isinstance(value, list) and all(type(n) is int for n in value) else None
