"""What a search is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardplan.cost import TIME, Objective
from shardplan.ir import Backend, Factor
from shardplan.search.inference.anytime import Observer, ignored
from shardplan.search.problem.problem import Company, Problem
from shardplan.search.strategy.pins import Pins
from shardplan.search.strategy.purposes import Purpose
from shardplan.search.strategy.solve import Outcome

Found = tuple[Problem, Outcome]

Known = dict[tuple[Factor, ...], Problem]
"""The problems of one graph by their factors, each at the weights at which it was last searched: others share its prices."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The conditions of a search: bytes per device, donated leaves, pins, a deadline (an instant of `anytime.now_s`), an observer
    of its progress, and the objective to minimise; ``timed`` prices the plan where that is not time. ``factors`` fixes the
    factoring; without ``refine``, levels are taken apart only where no dim divides by them. ``axes`` fixes the sizes of purposes.
    ``again`` has what was found at another multiplier over the factorings that may still win: the search begins with those, from
    these solutions, and leaves out the factorings ``slower``. ``backend`` is what will run the plan. ``company`` are the bytes
    that travel together, where they are known. ``offer`` is called with what the search has found so far: an interrupt loses
    only what was not offered.
    """

    memory: int
    donated: frozenset[int]
    pins: Pins
    deadline: float | None
    observer: Observer
    objective: Objective
    factors: tuple[Factor, ...] | None = None
    refine: bool = True
    axes: Mapping[Purpose, int] | None = None
    timed: Objective = TIME
    backend: Backend = "explicit"
    company: Company | None = None
    again: Mapping[tuple[Factor, ...], Found] = field(default_factory=dict[tuple[Factor, ...], Found])
    slower: frozenset[tuple[Factor, ...]] = frozenset()
    offer: Callable[[Found], None] = ignored
