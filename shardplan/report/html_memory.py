"""The memory of a device over the step, for the HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.graph import Node
from shardplan.report.peak_text import peak_lines
from shardplan.search.memory.liveness import liveness, profile
from shardplan.search.session import Session

_COLUMNS = 600
"""The most points of the curve; each is the maximum over its ops."""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes that a device holds over the ops of a step, in program order.

    Point i is the maximum of the bytes (``held``) over the ops from ``ops[i]`` to the next point. ``lines`` are the source
    lines of the ops at these maxima. ``backward`` is the first op of the backward pass (None: there is none), ``peak_op`` the
    op at the peak, and ``peak`` says in words what is held there.
    """

    length: int
    ops: tuple[int, ...]
    held: tuple[float, ...]
    lines: tuple[str, ...]
    backward: int | None
    peak_op: int
    peak: tuple[str, ...]


def memory_curve(session: Session) -> MemoryCurve:
    """The memory of a plan's step, with its peak in words."""
    problem, solution, nodes = session.problem, session.solution, session.graph.nodes
    live = liveness(problem, session.donated)
    held = profile(problem, live, solution.states, solution.keep, solution.limits)
    starts = _starts(len(held))
    highest = [int(first + held[first:end].argmax()) for first, end in zip(starts, [*starts[1:], len(held)], strict=True)]
    return MemoryCurve(
        length=len(held),
        ops=tuple(starts),
        held=tuple(float(held[i]) for i in highest),
        lines=tuple(_line(nodes, i) for i in highest),
        backward=next((n.id for n in nodes if n.backward), None),
        peak_op=int(held.argmax()),
        peak=tuple(peak_lines(session)),
    )


def _starts(length: int) -> list[int]:
    """The first op of each point."""
    edges: NDArray[np.int64] = np.linspace(0, length, min(length, _COLUMNS), endpoint=False).astype(np.int64)
    return edges.tolist()


def _line(nodes: Sequence[Node], at: int) -> str:
    return f"{nodes[at].op.primitive} at {nodes[at].op.source}" if at < len(nodes) else "after the last op"
