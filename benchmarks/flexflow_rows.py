"""The rows of `benchmarks.flexflow`: what each search finds, and what proposals take."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.flexflow_cases import PAPER_NAMES, Case, plan_on_all_devices, problem
from benchmarks.flexflow_figures import totals
from benchmarks.placement import walks
from shardplan.placement.configurations import Strategy
from shardplan.placement.mcmc import ChainLimits, anneal
from shardplan.placement.restrictions import colocrl, optcnn
from shardplan.placement.search import search
from shardplan.placement.starts import data_parallel, expert, random_strategy

OPTCNN = ("flexflow-p100:4", ("inception", "rnntc", "rnnlm", "nmt"), "1.2 to 1.6")
"""Section 8.1.3: for the models whose operators are no chain; AlexNet and ResNet get the same strategies."""
COLOCRL = ("flexflow-k80:1", ("inception", "nmt"), "3.4 to 3.8")
"""Section 8.1.3: the two models of which ColocRL's placement is published."""
MOMENTS = 10
TABLE_5 = Path(__file__).parent / "flexflow_table5.csv"


@dataclass(frozen=True, slots=True)
class Given:
    """What all searches of a run share."""

    budget_s: float
    steps: int
    seed: int
    small: bool

    def case(self, model: str, cluster: str) -> Case:
        """A model on a cluster."""
        return Case(model, cluster, self.steps, self.small)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step of a model on a cluster under each strategy; ``best_s`` is what MCMC found.

    ``computing`` is the part of a data-parallel step in which its devices compute: a strategy that computes as much cannot save
    more than the rest.
    """

    model: str
    cluster: str
    unrolled: int | None
    operators: int
    batch: int
    data_parallel_s: float
    expert_s: float
    plan_s: float
    best_s: float
    computing: float
    proposals: int

    @property
    def slower(self) -> bool:
        """Whether the best is slower than a baseline."""
        return self.best_s > min(self.data_parallel_s, self.expert_s, self.plan_s)

    @property
    def over_baselines(self) -> float:
        """The better of data parallel and expert, relative to the best."""
        return min(self.data_parallel_s, self.expert_s) / self.best_s


@dataclass(frozen=True, slots=True)
class Restricted:
    """Seconds of a step as found in a restricted space and in the whole one."""

    search: str
    model: str
    cluster: str
    restricted_s: float
    best_s: float
    paper: str


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one search by full and by delta simulation; ``paper`` is the ratio in FlexFlow's Table 5."""

    model: str
    devices: int
    start: str
    full_s: float
    delta_s: float
    paper: float | None

    @property
    def ratio(self) -> float:
        """Full over delta."""
        return self.full_s / self.delta_s


@dataclass(frozen=True, slots=True)
class Stopped:
    """What a chain from a strategy (``start``) has found when the stop rule ends it, and after several times as many proposals.

    ``elapsed_s`` are the seconds of this process until the rule.
    """

    model: str
    cluster: str
    start: str
    proposals: int
    elapsed_s: float
    rule_s: float
    longer_s: float


@dataclass(frozen=True, slots=True)
class Moment:
    """A point of Figure 11: the best step so far, and the seconds of the search by delta and by full simulation until then.

    Both simulations give each proposal the same cost, so both searches are one chain. ``full_s`` is its number of proposals times
    the seconds that a proposal takes by full simulation, as measured on some of the first hundred.
    """

    proposals: int
    best_s: float
    delta_s: float
    full_s: float


@dataclass(frozen=True, slots=True)
class Best:
    """The strategies from which a search starts, their seconds, and the best that it found."""

    starts: dict[str, Strategy]
    seconds: dict[str, float]
    strategy: Strategy
    best_s: float
    proposals: int


@cache
def best_of(case: Case, given: Given) -> Best:
    """The strategies to start from, and the best that MCMC finds."""
    here = problem(case)
    starts = {
        "dp": data_parallel(here),
        "expert": expert(here),
        "random": random_strategy(here, np.random.default_rng((given.seed, 1 << 20))),
        "plan": plan_on_all_devices(case),
    }
    found = search(here, starts, ChainLimits(given.budget_s), seed=given.seed, workers=1)
    return Best(starts, dict(found.starts), found.strategy, found.seconds, found.proposals)


def steps(models: Sequence[str], clusters: Sequence[str], given: Given) -> list[Row]:
    """The rows of part 1."""
    rows: list[Row] = []
    for cluster in clusters:
        for model in models:
            case = given.case(model, cluster)
            best = best_of(case, given)
            count, s = len(problem(case).graph.operators), best.seconds
            rows.append(
                Row(
                    *(model, cluster, case.unrolled, count, case.options["batch"]),
                    *(s["dp"], s["expert"], s["plan"], best.best_s, computing_of(case, best), best.proposals),
                )
            )
            _tell(f"{model} on {cluster}: {best.best_s:.4g} s")
    return rows


def computing_of(case: Case, best: Best) -> float:
    """The part of a data-parallel step in which devices compute, on average."""
    here = problem(case)
    return totals(here, best.starts["dp"]).compute_s / here.machine.count / best.seconds["dp"]


def restrictions(models: Sequence[str], given: Given) -> list[Restricted]:
    """The rows of part 2."""
    rows: list[Restricted] = []
    for name, (cluster, compared, paper) in (("OptCNN", OPTCNN), ("ColocRL", COLOCRL)):
        for model in (m for m in compared if m in models):
            case = given.case(model, cluster)
            best, limits = best_of(case, given), ChainLimits(given.budget_s)
            if name == "OptCNN":
                chain = optcnn(problem(case), [best.starts["dp"], best.starts["plan"]], limits, given.seed)
            else:
                chain = colocrl(problem(case), limits, given.seed)
            rows.append(Restricted(name, model, cluster, chain.seconds, best.best_s, paper))
            _tell(f"{name}, {model}: {chain.seconds:.4g} s")
    return rows


def timings(models: Sequence[str], devices: Sequence[int], proposals: int, given: Given) -> list[Timing]:
    """The rows of part 4."""
    paper = _published()
    rows: list[Timing] = []
    for n in devices:
        for model in models:
            here = problem(given.case(model, f"flexflow-k80:{n // 4}"))
            starts = {
                "data parallel": data_parallel(here),
                "random": random_strategy(here, np.random.default_rng((given.seed, 1 << 20))),
            }
            for name, start in starts.items():
                full_s, delta_s = (each_s * proposals for each_s in walks(here, start, proposals, given.seed))
                rows.append(Timing(model, n, name, full_s, delta_s, paper.get((PAPER_NAMES[model], n))))
                _tell(f"{model} on {n} from {name}: {rows[-1].ratio:.1f}x")
    return rows


def stopped(models: Sequence[str], cluster: str, longer: int, given: Given) -> list[Stopped]:
    """The rows of part 5."""
    rows: list[Stopped] = []
    for model in models:
        here = problem(case := given.case(model, cluster))
        for name, start in {"data parallel": data_parallel(here), "the plan": plan_on_all_devices(case)}.items():
            began = time.process_time()
            ruled = anneal(here, start, np.random.default_rng(given.seed), ChainLimits())
            elapsed_s = time.process_time() - began
            many = ChainLimits(proposals=longer * ruled.proposals, rule=False)
            found = ruled if longer == 1 else anneal(here, start, np.random.default_rng(given.seed), many)
            rows.append(Stopped(model, cluster, name, ruled.proposals, elapsed_s, ruled.seconds, found.seconds))
            _tell(f"{model} on {cluster} from {name}: {ruled.seconds:.4g} s by the stop rule, {found.seconds:.4g} s")
    return rows


def search_over_time(case: Case, given: Given) -> list[Moment]:
    """The rows of part 6: the improvements of one chain from data parallelism, `MOMENTS` of them at most."""
    here = problem(case)
    start = data_parallel(here)
    full_s, _ = walks(here, start, 100, given.seed)
    chain = anneal(here, start, np.random.default_rng(given.seed), ChainLimits(), engine="numba")
    at = np.unique(np.linspace(0, len(chain.history) - 1, MOMENTS).astype(int))
    history = [chain.history[i] for i in at]
    return [Moment(n, best_s, elapsed_s, n * full_s) for n, elapsed_s, best_s in history]


def _published() -> dict[tuple[str, int], float]:
    _, *lines = TABLE_5.read_text().splitlines()
    cells = [line.split(",") for line in lines]
    return {(model, int(n)): float(ratio) for n, model, _, _, ratio in cells}


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
