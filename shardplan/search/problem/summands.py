"""The summands of a step's cost: one list from which tables, bounds, assignment prices and collectives follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["interior", "op", "link", "view"]


@dataclass(frozen=True, slots=True)
class Summand:
    """One summand of a step's cost: a function of the layouts of the variables in ``scope`` (distinct), paid ``weight`` times.

    ``at`` says what it prices:

    - ``interior``: the elementwise ops inside variable ``at``.
    - ``op``: op ``at`` of the graph, which joins variables: its compute, and the resharding of its operands and results.
    - ``link``: link ``at`` of the graph: the resharding of a tensor that enters or leaves a loop.
    - ``view``: view ``at``: the copy of a variable for readers that want another layout.
    """

    kind: Kind
    at: int
    scope: tuple[int, ...]
    weight: float


def by_variable(summands: Sequence[Summand]) -> dict[int, list[Summand]]:
    """The summands that each variable appears in."""
    groups: dict[int, list[Summand]] = {}
    for s in summands:
        for v in s.scope:
            groups.setdefault(v, []).append(s)
    return groups
