"""FlexFlow's evaluation (Jia, Zaharia and Aiken 2018, section 8) in this simulator: six models on its two clusters.

``python -m benchmarks.flexflow [--models NAME ...] [--clusters NAME ...] [--budget SECONDS] [--steps N] [--devices N ...]``

Each table is simulated as `shardplan place` simulates: nothing ran on P100s or K80s. Sizes and the batch of a device are the
paper's, but recurrences have ``--steps`` unrolled steps instead of 40. ``--budget`` is the seconds of each search.

1. A step under data parallelism, the experts' strategy and the plan on all devices, and the best that MCMC finds from these and a
   random strategy.
2. The restricted searches: OptCNN's space on 16 P100s, ColocRL's on 4 K80s.
3. NMT's best strategy beside Figure 7, Inception's beside section 8.4.
4. Table 5: seconds of a search of ``--proposals`` proposals by full and by delta simulation, from data parallelism and from a
   random strategy. Seconds are those of this process; full simulation is timed on 12 proposals, spread evenly over the search.
5. What the paper's stop rule ends with from data parallelism and from the plan, beside chains of ``--longer`` (10) times as many
   proposals, on the first cluster.
6. Figure 11: NMT's best step over the seconds of a search by delta and by full simulation, on 16 P100s.

Exits with 1 where the best is slower than data parallelism, the experts' strategy or the plan. ``--parts`` restricts it to some
of the six, and ``--small`` takes models of toy size.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.flexflow_cases import PAPER, Case, problem
from benchmarks.flexflow_figures import Totals, splits, totals
from benchmarks.flexflow_rows import (
    Given,
    Moment,
    Restricted,
    Row,
    Stopped,
    Timing,
    best_of,
    computing_of,
    restrictions,
    search_over_time,
    steps,
    stopped,
    timings,
)
from shardplan.placement.configurations import Strategy
from shardplan.shell.target import use_cpu

CLUSTERS = ("flexflow-p100:4", "flexflow-k80:16")
PARTS = ("steps", "restrictions", "strategies", "table-5", "stop-rule", "figure-11")


def print_steps(rows: Sequence[Row]) -> None:
    """Part 1."""
    _table(
        "model | cluster | unrolled | operators | data parallel ms | of it compute | expert ms | the plan ms | MCMC ms "
        "| samples/s | over data parallel | over expert | over the plan",
        2,
        (
            (
                *(r.model, r.cluster, r.unrolled or "", r.operators),
                *(f"{r.data_parallel_s * 1e3:.1f}", f"{r.computing:.0%}"),
                *(f"{s * 1e3:.1f}" for s in (r.expert_s, r.plan_s, r.best_s)),
                f"{r.batch / r.best_s:,.0f}",
                *(f"{s / r.best_s:.2f}x" for s in (r.data_parallel_s, r.expert_s, r.plan_s)),
            )
            for r in rows
        ),
    )
    gains = [r.over_baselines for r in rows if r.model != "resnet"]
    if gains:
        print(
            f"Over the better of data parallel and expert, without ResNet: {min(gains):.2f}x to {max(gains):.2f}x. "
            "FlexFlow has 1.3x to 3.3x, and about data parallelism for ResNet.\n"
        )


def print_restrictions(rows: Sequence[Restricted]) -> None:
    """Part 2."""
    _table(
        "search | model | cluster | restricted ms | MCMC ms | ratio | FlexFlow has",
        3,
        (
            (
                *(r.search, r.model, r.cluster, f"{r.restricted_s * 1e3:.1f}", f"{r.best_s * 1e3:.1f}"),
                *(f"{r.restricted_s / r.best_s:.2f}x", r.paper),
            )
            for r in rows
        ),
    )


def print_nmt(case: Case, given: Given) -> dict[str, Any]:
    """NMT's time, bytes and compute beside Figure 7, and how each layer is cut."""
    here, best = problem(case), best_of(case, given)
    names = {"dp": "data parallel", "expert": "expert", "plan": "the plan"}
    known = {name: (best.seconds[start], totals(here, best.starts[start])) for start, name in names.items()}
    known["MCMC"] = best.best_s, totals(here, best.strategy)
    _table(
        f"nmt on {case.cluster} | step ms | GB sent | compute s of all devices",
        1,
        ((n, f"{s * 1e3:.1f}", f"{t.sent_bytes / 1e9:.2f}", f"{t.compute_s:.2f}") for n, (s, t) in known.items()),
    )
    print(
        "Figure 7, 64 K80s: 1.7 to 2.4 times faster than data parallel and expert, 2 to 5.5 times fewer bytes, compute like the "
        "experts' and 20% below data parallelism.\n"
    )
    layers = splits(here, best.strategy)
    _table(
        "layer of nmt | operators | most have | of them | devices of one | devices of all",
        1,
        ((x.layer, x.operators, x.cut, x.have_it, f"{x.devices_each:.1f}", x.devices) for x in layers),
    )
    print(
        "Section 8.4, 4 P100s: embeddings on one device, the softmax layer cut over parameters, recurrent layers and attention "
        "cut inside and beside one another.\n"
    )
    return {"totals": {n: asdict(t) for n, (_, t) in known.items()}, "layers": [asdict(x) for x in layers]}


def print_inception(case: Case, given: Given) -> dict[str, Any]:
    """How much synchronisation of Inception the best strategy saves."""
    here, best = problem(case), best_of(case, given)
    before, after = (totals(here, s) for s in (best.starts["dp"], best.strategy))
    saved_s, apart = 1 - best.best_s / best.seconds["dp"], _single(best.strategy, here.machine.count)
    print(
        f"Inception on {case.cluster}: {before.reduced_bytes / 1e9:.2f} GB of gradients reduced by data parallelism, "
        f"{after.reduced_bytes / 1e9:.2f} GB by the best strategy ({_less(before, after):+.0%}); the step {-saved_s:+.1%}; "
        f"{apart} of {len(best.strategy)} operators on some of the devices. Devices compute {computing_of(case, best):.1%} of a "
        "data-parallel step. FlexFlow has -75% and -12% on 4 P100s.\n"
    )
    return {"data_parallel": asdict(before), "best": asdict(after), "step": -saved_s, "on_some_devices": apart}


def _less(before: Totals, after: Totals) -> float:
    return after.reduced_bytes / before.reduced_bytes - 1


def _single(strategy: Strategy, devices: int) -> int:
    return sum(len(c.used) < devices for c in strategy)


def print_timings(rows: Sequence[Timing], proposals: int) -> None:
    """Part 4."""
    _table(
        f"model | start | devices | full s | delta s | full / delta over {proposals} proposals | FlexFlow has",
        2,
        (
            (
                *(r.model, r.start, r.devices, f"{r.full_s:.2f}", f"{r.delta_s:.2f}", f"{r.ratio:.1f}x"),
                f"{r.paper}x" if r.paper else "",
            )
            for r in rows
        ),
    )


def print_stopped(rows: Sequence[Stopped], longer: int) -> None:
    """Part 5."""
    _table(
        f"model | cluster | start | proposals by the rule | seconds of search | step ms | ms after {longer}x as many | longer by",
        3,
        (
            (
                *(r.model, r.cluster, r.start, f"{r.proposals:,}", f"{r.elapsed_s:.1f}"),
                *(f"{r.rule_s * 1e3:.2f}", f"{r.longer_s * 1e3:.2f}", f"{r.rule_s / r.longer_s - 1:.1%}"),
            )
            for r in rows
        ),
    )


def print_moments(rows: Sequence[Moment]) -> None:
    """Part 6."""
    _table(
        "proposals | best step of NMT, ms | seconds by delta | seconds by full",
        0,
        ((f"{r.proposals:,}", f"{r.best_s * 1e3:.2f}", f"{r.delta_s:.2f}", f"{r.full_s:.1f}") for r in rows),
    )


def _table(headers: str, words: int, rows: Iterable[Sequence[object]]) -> None:
    """A table whose columns after the first ``words`` are figures."""
    count = headers.count("|") + 1
    print(f"| {headers} |\n|" + "|".join("---" if n < words else "---:" for n in range(count)) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts and prints each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(PAPER), choices=list(PAPER))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--budget", type=float, default=8.0, help="seconds of each search")
    parser.add_argument("--steps", type=int, default=10, help="unrolled steps of recurrences")
    parser.add_argument("--devices", nargs="+", type=int, default=[4, 16, 64], help="those of table 5, multiples of 4")
    parser.add_argument("--proposals", type=int, default=200, help="those of table 5")
    parser.add_argument("--longer", type=int, default=10, help="proposals of the last chain over those of the stop rule")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    use_cpu()
    given = Given(options.budget, options.steps, options.seed, options.small)
    figures: dict[str, Any] = {"options": {k: v for k, v in vars(options).items() if k != "json"}}
    rows: list[Row] = []
    if "steps" in options.parts:
        rows = steps(options.models, options.clusters, given)
        print_steps(rows)
        figures["steps"] = [asdict(r) for r in rows]
    if "restrictions" in options.parts:
        restricted = restrictions(options.models, given)
        print_restrictions(restricted)
        figures["restrictions"] = [asdict(r) for r in restricted]
    if "strategies" in options.parts and "nmt" in options.models:
        figures["nmt"] = print_nmt(given.case("nmt", options.clusters[-1]), given)
    if "strategies" in options.parts and "inception" in options.models:
        figures["inception"] = print_inception(given.case("inception", "flexflow-p100:1"), given)
    if "table-5" in options.parts:
        timed = timings(options.models, options.devices, options.proposals, given)
        print_timings(timed, options.proposals)
        figures["timings"] = [asdict(r) for r in timed]
    if "stop-rule" in options.parts:
        ended = stopped(options.models, options.clusters[0], options.longer, given)
        print_stopped(ended, options.longer)
        figures["stop_rule"] = [asdict(r) for r in ended]
    if "figure-11" in options.parts and "nmt" in options.models:
        moments = search_over_time(given.case("nmt", CLUSTERS[0]), given)
        print_moments(moments)
        figures["figure_11"] = [asdict(r) for r in moments]
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(any(r.slower for r in rows))


if __name__ == "__main__":
    sys.exit(main())
