"""FD-DPS beside HEFT and the proven optimum on random DAGs, and a schedule made anew while it runs.

    python benchmarks/fd_dps.py [--dags N] [--seed N] [--exact N] [--png FILE] [--table]

Half of the DAGs are layered, half random; 10 to 100 tasks, 2 to 8 devices, half of them equal; transfers of 0.1 to 10 times a
task's seconds in the mean; links of unequal devices differ in half of the DAGs. HEFT is no part of FD-DPS here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardplan.dag import Dag, TaskSchedule, checked, planned, reschedule
from shardplan.dag.fd_dps import fd_dps
from shardplan.dag.lookahead import lookahead
from shardplan.dag.methods import built

RATIOS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
METHODS: dict[str, Callable[[Dag], TaskSchedule]] = {
    "fd-dps": planned,
    "the paper's rules": lambda dag: built(dag, fd_dps).schedule(),
    "look-ahead alone": lambda dag: built(dag, lookahead).schedule(),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A random DAG and what it was drawn from."""

    dag: Dag
    layered: bool
    equal: bool
    ratio: float  # mean seconds of a transfer / mean seconds of a task


def random_case(rng: np.random.Generator, tasks: int) -> Case:
    """A DAG of so many tasks."""
    layered, equal, ratio = bool(rng.integers(2)), bool(rng.integers(2)), float(rng.choice(RATIOS))
    devices = int(rng.integers(2, 9))
    edges = _layered(rng, tasks) if layered else _random(rng, tasks)
    times = np.repeat(rng.uniform(0.1, 1.9, (tasks, 1)), devices, 1)
    seconds: list[Any] = [float(s) for s in ratio * rng.uniform(0.1, 1.9, len(edges))]
    if not equal:
        speed = np.exp(rng.uniform(-0.5, 0.5, devices))
        spread = rng.choice([0.25, 0.5, 0.9])  # of a task's seconds around its mean
        times = times * rng.uniform(1 - spread, 1 + spread, times.shape) / speed
        if rng.integers(2):
            link = np.exp(rng.uniform(-0.7, 0.7, (devices, devices)))
            seconds = [s * (link + link.T) / 2 for s in seconds]
    return Case(checked(times, dict(zip(edges, seconds, strict=True))), layered, equal, ratio)


def _layered(rng: np.random.Generator, tasks: int) -> list[tuple[int, int]]:
    """Layers of random widths; each task has one to four parents in the layer before, some have one further up."""
    layers = min(tasks, max(2, round(tasks**0.5 / float(rng.choice([0.5, 1.0, 2.0])))))
    layer = np.sort(np.concatenate([np.arange(layers), rng.integers(0, layers, tasks - layers)]))
    edges: set[tuple[int, int]] = set()
    for j in np.flatnonzero(layer > 0):
        above = np.flatnonzero(layer == layer[j] - 1)
        parents = rng.choice(above, int(rng.integers(1, min(4, len(above)) + 1)), replace=False).tolist()
        if rng.random() < 0.2:
            parents.append(int(rng.choice(np.flatnonzero(layer < layer[j]))))
        edges |= {(int(i), int(j)) for i in parents}
    return sorted(edges)


def _random(rng: np.random.Generator, tasks: int) -> list[tuple[int, int]]:
    """Each task is a parent of each later one with the same probability, for one to four parents and children in the mean."""
    hit = np.triu(rng.random((tasks, tasks)) < 2 * rng.uniform(1, 4) / tasks, 1)
    return [(int(i), int(j)) for i, j in np.argwhere(hit)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dags", type=int, default=1000)
    parser.add_argument("--exact", type=int, default=100, help="small DAGs with proven optima")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--png", type=Path, help="write the two Gantt charts of the re-scheduling as a picture")
    parser.add_argument("--table", action="store_true", help="print the makespans beside HEFT's alone, as a Markdown table")
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(options.seed)
    cases = [random_case(rng, int(rng.integers(10, 101))) for _ in range(options.dags)]
    if options.table:
        print(heft_table(cases))
        return
    beside_heft(cases)
    beside_optimum([random_case(rng, int(rng.integers(6, 13))) for _ in range(options.exact)])
    rescheduled(options.png)


def beside_heft(cases: Sequence[Case]) -> None:
    """Makespans divided by HEFT's."""
    heft, heft_s = _timed(cases, lambda dag: planned(dag, "heft"))
    print(f"{len(cases)} DAGs of 10 to 100 tasks: makespan / HEFT's ({heft_s.mean() * 1e3:.1f} ms a DAG)\n")
    print(f"{'':34}  dags  quartile  median  quartile    mean  shorter  longer  ms a DAG   worst")
    for name, method in METHODS.items():
        spans, seconds = _timed(cases, method)
        ratio = spans / heft
        _row(name, ratio, f"{seconds.mean() * 1e3:9.1f}  {seconds.max() * 1e3:6.1f}")
        for part, chosen in _parts(cases).items() if name == "fd-dps" else ():
            _row(f"  {part}", ratio[chosen])


def heft_table(cases: Sequence[Case]) -> str:
    """Makespans divided by HEFT's; nothing in it depends on the machine."""
    heft = _timed(cases, lambda dag: planned(dag, "heft"))[0]
    lines = ["| makespan / HEFT's | DAGs | quartile | median | quartile | mean | shorter | longer |"]
    lines.append("|---|" + "---:|" * 7)
    for name, method in METHODS.items():
        cells = [f"{len(cases)}", *_figures(_timed(cases, method)[0] / heft)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _parts(cases: Sequence[Case]) -> dict[str, NDArray[np.bool_]]:
    layered, equal = np.array([c.layered for c in cases]), np.array([c.equal for c in cases])
    ratio, large = np.array([c.ratio for c in cases]), np.array([c.dag.tasks > 50 for c in cases])
    parts = {"equal devices": equal, "unequal devices": ~equal, "layered": layered, "random": ~layered}
    parts |= {"up to 50 tasks": ~large, "51 to 100 tasks": large}
    return parts | {f"transfer / task seconds {r:g}": ratio == r for r in RATIOS}


def _timed(cases: Sequence[Case], method: Callable[[Dag], TaskSchedule]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[cases] each: makespans, and the seconds that scheduling took."""
    spans, took = np.zeros(len(cases)), np.zeros(len(cases))
    for k, case in enumerate(cases):
        began = time.perf_counter()
        spans[k] = method(case.dag).makespan_s
        took[k] = time.perf_counter() - began
    return spans, took


def _row(name: str, ratio: NDArray[np.float64], rest: str = "") -> None:
    if not len(ratio):
        return
    low, middle, high, mean, wins, losses = _figures(ratio)
    print(f"{name:34} {len(ratio):5} {low:>9} {middle:>7} {high:>9} {mean:>7} {wins:>8} {losses:>7} {rest}".rstrip())


def _figures(ratio: NDArray[np.float64]) -> list[str]:
    """Quartile, median, quartile and mean, and how often a makespan is shorter and longer."""
    means = [*np.quantile(ratio, [0.25, 0.5, 0.75]), ratio.mean()]
    return [*(f"{x:.3f}" for x in means), *(f"{np.mean(x):.1%}" for x in (ratio < 1 - 1e-9, ratio > 1 + 1e-9))]


def beside_optimum(cases: Sequence[Case]) -> None:
    """Makespans divided by the proven shortest."""
    if not cases:
        return
    best, seconds = _timed(cases, lambda dag: planned(dag, "exact"))
    print(
        f"\n{len(cases)} DAGs of 6 to 12 tasks: makespan / the proven shortest (HiGHS, median {np.median(seconds):.2f} s, "
        f"most {seconds.max():.1f} s)\n"
    )
    print(f"{'':34}  optimal  median  quartile     90%    most")
    for name, method in {**METHODS, "heft": lambda dag: planned(dag, "heft")}.items():
        ratio = _timed(cases, method)[0] / best
        assert (ratio >= 1 - 1e-6).all(), "a schedule is shorter than the proven shortest"
        middle, high, most = np.quantile(ratio, [0.5, 0.75, 0.9])
        print(f"{name:34} {np.mean(ratio <= 1 + 1e-6):8.1%} {middle:7.3f} {high:9.3f} {most:7.3f} {ratio.max():7.3f}")


def rescheduled(picture: Path | None) -> None:
    """Three devices; when a third of the time is over, one slows down to a quarter, one leaves and one joins."""
    rng = np.random.default_rng(5)
    edges = dict.fromkeys(_layered(rng, 18), 0.3)
    seconds = rng.uniform(0.5, 1.5, 18)
    dag = checked(np.repeat(seconds[:, None], 3, 1), edges)
    old = planned(dag)
    at_s = old.makespan_s / 3
    new = reschedule(old, dag, at_s, times=seconds[:, None] * np.array([4.0, 1.0, 1.0, 1.0]), leaves=[1])
    before = f"as planned: {old.makespan_s:.2f} s"
    after = f"from {at_s:.2f} s on, device 0 is four times slower, 1 has left, 3 has joined: {new.makespan_s:.2f} s"
    width = max(old.makespan_s, new.makespan_s)
    print(f"\n{before}\n{chart(old, 3, width)}\n\n{after}\n{chart(new, 4, width, at_s)}")
    if picture is not None:
        draw(picture, [(before, old, None), (after, new, at_s)])
        print(f"\nwrote {picture}")


def chart(schedule: TaskSchedule, devices: int, until_s: float, at_s: float | None = None, columns: int = 100) -> str:
    """A Gantt chart as text: a row for each device, letters for tasks, dots for idle time, a mark at ``at_s``."""
    scale = columns / until_s
    lines = [f"  {'':9}{'':{round(at_s * scale)}}v"] if at_s is not None else []
    for d in range(devices):
        row = ["."] * columns
        for i in schedule.on(d):
            first, last = round(schedule.start_s[i] * scale), round(schedule.finish_s[i] * scale)
            row[first:last] = [chr(ord("A") + i)] * (min(last, columns) - first)
        lines.append(f"  device {d} {''.join(row)}")
    return "\n".join(lines)


def draw(path: Path, charts: Sequence[tuple[str, TaskSchedule, float | None]]) -> None:
    """The charts one above the other (needs matplotlib)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.4 * len(charts)), dpi=120)
    rows: Any = figure.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, schedule, at_s) in zip(rows, charts, strict=True):
        for i, d in enumerate(schedule.device):
            start, end = schedule.start_s[i], schedule.finish_s[i]
            axes.barh(d, end - start, left=start, height=0.8, color=f"C{i % 10}", edgecolor="white")
            axes.text((start + end) / 2, d, str(i), ha="center", va="center", fontsize=7)
        if at_s is not None:
            axes.axvline(at_s, color="black", lw=1, ls="--")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_yticks(range(4), [f"device {d}" for d in range(4)])
        axes.invert_yaxis()
    rows[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
