"""The whole search: starts, chains, and the best strategy beside the strategies that it is compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from shardplan.errors import PlacementError
from shardplan.placement.chains import cores, run_all, tasks_of
from shardplan.placement.configurations import Strategy
from shardplan.placement.held_bytes import check_memory
from shardplan.placement.mcmc import Chain, ChainLimits, Observer
from shardplan.placement.placement_problem import PlacementProblem
from shardplan.placement.simulation import Engine
from shardplan.placement.starts import data_parallel, expert, random_strategy

STARTS = ("dp", "expert", "random", "plan")


@dataclass(frozen=True, slots=True)
class BestStrategy:
    """The best strategy, the seconds of a step, which start or chain it came from, and the seconds of each start."""

    strategy: Strategy
    seconds: float
    origin: str
    starts: Mapping[str, float]
    chains: tuple[Chain, ...]

    @property
    def proposals(self) -> int:
        """Proposals of all chains."""
        return sum(c.proposals for c in self.chains)

    @property
    def interrupted(self) -> bool:
        """Whether an interrupt ended the search: this is the best so far."""
        return any(c.interrupted for c in self.chains)

    @property
    def simulations_per_s(self) -> float:
        """Proposals that one core decides in a second, those that a bound rejects without a simulation included."""
        elapsed = sum(c.elapsed_s for c in self.chains)
        return self.proposals / elapsed if elapsed > 0 else 0.0


def check_limits(budget_s: float, *, chains: int | None = None, proposals: int | None = None, seed: int = 0) -> None:
    """Refuses a budget, number of chains or of proposals, or seed that cannot be used.

    Raises:
        PlacementError: naming what is wrong.
    """
    if isinstance(budget_s, bool) or not isinstance(budget_s, int | float) or not math.isfinite(budget_s) or budget_s <= 0:
        raise PlacementError(f"budget_s is {budget_s!r}: give a finite number of seconds above 0 for the search")
    given = {name: n for name, n in (("chains", chains), ("proposals", proposals)) if n is not None}
    for name, value in {**given, "seed": seed}.items():
        least = 0 if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise PlacementError(f"{name} is {value!r}: give a whole number of at least {least}")


def check_names(names: Sequence[str], files: Sequence[str] = ()) -> None:
    """Refuses names that are no starts, and no start at all.

    Raises:
        PlacementError: naming those that can be used.
    """
    unknown = [name for name in names if name not in STARTS]
    if unknown or not (names or files):
        raise PlacementError(f"no start {', '.join(map(repr, unknown)) or 'is given'}: use some of {', '.join(STARTS)}")


def starts_of(problem: PlacementProblem, names: Sequence[str], seed: int, plan: Strategy | None) -> dict[str, Strategy]:
    """The strategies of these names; ``plan`` is that of a plan on all devices."""
    made: dict[str, Strategy] = {}
    for name in dict.fromkeys(names):
        match name:
            case "dp":
                made[name] = data_parallel(problem)
            case "expert":
                made[name] = expert(problem)
            case "random":
                made[name] = random_strategy(problem, np.random.default_rng((seed, 1 << 20)))
            case _:
                assert plan is not None, "a plan is there if it is a start"
                made[name] = plan
    return made


def search(
    problem: PlacementProblem,
    starts: Mapping[str, Strategy],
    limits: ChainLimits,
    *,
    chains: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    observer: Observer | None = None,
    engine: Engine = "auto",
) -> BestStrategy:
    """The best strategy that chains from these starts find; never worse than a start that fits in memory.

    Raises:
        PlacementMemoryError: if no start fits.
    """
    for name, strategy in starts.items():
        problem.check(strategy, f"the start {name!r}")
    starts, all_starts = check_memory(problem, starts), starts
    every = {name: problem.seconds(strategy, engine) for name, strategy in all_starts.items()}
    seconds = {name: every[name] for name in starts}
    count = len(starts) if chains is None else chains
    workers = min(count, cores()) if workers is None else workers
    tasks = tasks_of(problem, starts, limits, chains=chains, seed=seed, workers=workers, engine=engine)
    found = run_all(tasks, workers=workers, observer=observer)
    least, n = min((c.seconds, n) for n, c in found.items())
    name = min(seconds, key=lambda s: seconds[s])
    if seconds[name] <= least:
        return BestStrategy(starts[name], seconds[name], name, every, tuple(found.values()))
    return BestStrategy(found[n].strategy, least, f"a chain from {tasks[n].start}", every, tuple(found.values()))
