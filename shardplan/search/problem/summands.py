"""What the cost of a step is the sum of: one list, from which tables, bounds, prices of an assignment and collectives follow."""

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
    - ``link``: link ``at`` of the graph, where a loop's end may reshard.
    - ``view``: the copy ``at`` of a variable, made for readers that want another layout.
    """

    kind: Kind
    at: int
    scope: tuple[int, ...]
    weight: float


def by_variable(summands: Sequence[Summand]) -> dict[int, list[Summand]]:
    """The summands that each variable is in."""
    found: dict[int, list[Summand]] = {}
    for s in summands:
        for v in s.scope:
            found.setdefault(v, []).append(s)
    return found
