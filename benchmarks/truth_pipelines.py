"""Published step times of pipelines beside predicted ones: Megatron-DeepSpeed and Megatron-LM on A100s, Alpa on V100s.

``python benchmarks/truth_pipelines.py [--only GLOB] [--json FILE] [--brief] [--dropout FRACTION] [--whole]``

The rows of ``measured_steps.csv`` with pipelines, which `truth.py` leaves out. Parts of each row's model are priced on the
devices of a stage, its sharding fixed as it was written, and scheduled in the order that it ran (`truth_stages.py`). Rates are
those of the presets. The launch of a kernel from the host is fitted to every tenth row on one node, as `truth_fit.py` does for
rows without pipelines; these rows are named and left out of all figures. ``--whole`` plans three rows whole, by `shardplan.plan`
with the same axes, and prints both steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import shardplan
from benchmarks.truth import of_pairs, ordered, print_left_out
from benchmarks.truth_fit import launch_rows
from benchmarks.truth_price import UnpricedError
from benchmarks.truth_rows import LeftOut, PipelineRow, Row, pipeline_rows
from benchmarks.truth_stages import Parts, Step, parts_of, step_of

WHOLE = ("vtrain-single-130", "vtrain-single-424", "vtrain-single-173")
"""Rows that are planned whole: two stages; two with data and tensor parallelism; four."""


Priced = tuple[PipelineRow, Parts]


@dataclass(frozen=True, slots=True)
class Result:
    """A row, as the number of microbatches made it that is fastest of those it is known for, with its step."""

    pipeline: PipelineRow
    step: Step

    @property
    def row(self) -> Row:
        """What is published of it."""
        return self.pipeline.stage

    @property
    def predicted_s(self) -> float:
        """The prediction."""
        return self.step.seconds

    @property
    def error(self) -> float:
        """The relative error."""
        return self.predicted_s / (self.row.measured_s or float("nan")) - 1


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows, the figures of each framework, and what is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="GLOB", help="rows by id")
    parser.add_argument("--brief", action="store_true", help="the figures and what is left out, without the rows")
    parser.add_argument("--json", type=Path, help="write rows and what is left out")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="FRACTION", help="of Megatron's rows (default: 0)")
    parser.add_argument("--whole", action="store_true", help="three rows planned whole beside their parts, and nothing else")
    given = parser.parse_args(argv)
    found, left = pipeline_rows()
    if given.whole:
        print_whole([r for r in found if r.stage.id in WHOLE])
        return 0
    found = [r for r in found if fnmatch.fnmatchcase(r.stage.id, given.only)]
    left = [r for r in left if fnmatch.fnmatchcase(r.id, given.only)]
    if not found and not left:
        parser.error(f"--only {given.only}: no row with a pipeline has such an id")
    every, _ = pipeline_rows()
    launched = {row.id for row in launch_rows([r.stage for r in every])}
    priced: list[Priced] = []
    for row in [*found, *(r for r in every if r.stage.id in launched and r not in found)]:
        try:
            made = dropping(row, given.dropout) if row.stage.eager else row
            priced += [(one, parts_of(one.stage)) for one in map(made.of, row.counts)]
        except UnpricedError as error:
            left.append(LeftOut(row.stage.id, row.stage.framework, str(error)))
    fitted = [p for p in priced if p[0].stage.id in launched]
    launch_s = fit(fitted)
    results = predicted([p for p in priced if p not in fitted], launch_s)
    if not given.brief:
        print("\n".join([_HEAD, *map(_line, [*results, *predicted(fitted, launch_s)])]))
    print(f"\nfitted to {', '.join(p[0].stage.id for p in fitted)}: in a pipeline, PyTorch launches a kernel in", end=" ")
    print(f"{launch_s * 1e6:.0f} us; these rows are in no figure below")
    print_figures(results)
    print_left_out(left)
    if given.json is not None:
        written = [
            {"id": r.row.id, "measured_s": r.row.measured_s, "predicted_s": r.predicted_s, **asdict(r.step)} for r in results
        ]
        given.json.write_text(json.dumps({"rows": written, "left_out": [asdict(r) for r in left]}, indent=1))
    return 0


def dropping(row: PipelineRow, dropout: float) -> PipelineRow:
    """A row with dropout of attention's weights and of what is added to the residual stream."""
    return replace(row, stage=replace(row.stage, options={**row.stage.options, "dropout": dropout}))


def fit(fitted: Sequence[Priced]) -> float:
    """The seconds of a launch from the host, in whole microseconds, with the least mean error over these rows."""

    def error(launch_s: float) -> float:
        return statistics.mean(abs(r.error) for r in predicted(fitted, launch_s))

    return min((n * 1e-6 for n in range(100)), key=error)


def predicted(priced: Sequence[Priced], launch_s: float) -> list[Result]:
    """The prediction of each row, with the fastest of its numbers of microbatches."""
    found: dict[str, Result] = {}
    for row, parts in priced:
        own = Result(row, step_of(row, parts, launch_s if row.stage.eager else 0.0))
        known = found.get(row.stage.id, own)
        found[row.stage.id] = min(known, own, key=lambda r: r.predicted_s)
    return list(found.values())


_HEAD = (
    f"{'row':<38} {'stages':>6} {'chunks':>6} {'tensor':>6} {'data':>4} {'microbatches':>12} {'measured':>9} {'predicted':>9} "
    f"{'error':>7} {'compute':>8} {'tensor':>7} {'bubble':>7} {'data':>7} {'update':>7}"
)


def _line(r: Result) -> str:
    row, s = r.row, r.step
    return (
        f"{row.id:<38} {r.pipeline.stages:6} {r.pipeline.chunks:6} {row.sharding.tensor:6} {row.sharding.batch_ways:4} "
        f"{row.microbatches:12} {row.measured_s:9.4f} {r.predicted_s:9.4f} {r.error:+7.1%} "
        f"{s.compute_s:8.4f} {s.tensor_s:7.4f} {s.bubble_s:7.4f} {s.data_s:7.4f} {s.update_s:7.4f}"
    )


def print_figures(results: Sequence[Result]) -> None:
    """Prints the errors, and the pairs in the right order, of each machine and framework."""
    parts = ("compute", "tensor", "bubble", "data", "update")
    head = f"{'framework':<20} {'machine':<22} {'rows':>4} {'median':>7} {'signed':>7} {'worst':>7} {'order of steps':>17}"
    print(f"\n{head}  {' '.join(f'{p:>7}' for p in parts)}")
    key: Callable[[Result], tuple[str, str]] = lambda r: (r.row.framework, r.pipeline.machine)  # noqa: E731
    groups = [(group, list(own)) for group, own in itertools.groupby(sorted(results, key=key), key=key)]
    for group, of in [*groups, (("all", ""), results)]:
        errors = [r.error for r in of]
        shares = [statistics.median(getattr(r.step, f"{p}_s") / r.predicted_s for r in of) for p in parts]
        worst = max(of, key=lambda r: abs(r.error))
        median, signed = statistics.median(map(abs, errors)), statistics.median(errors)
        order, spent = of_pairs(*ordered(of, each=False)), " ".join(f"{share:7.1%}" for share in shares)
        print(
            f"{group[0]:<20} {group[1]:<22} {len(of):4} {median:7.1%} {signed:+7.1%} {worst.error:+7.1%} {order:>17}  {spent}  "
            f"worst: {worst.row.id}"
        )
    print(
        "(median and signed: of absolute errors and of errors; order: pairs of one model on one machine that differ by over 5%;"
    )
    print(" compute to update: the median part of the predicted step)")


# -- planned whole -----------------------------------------------------------------------------------------------------


def print_whole(found: Sequence[PipelineRow]) -> None:
    """Prints the steps of rows that `shardplan.plan` plans whole beside those of their parts, both as XLA compiles a loop over
    layers.
    """
    print(f"{'row':<38} {'whole':>9} {'parts':>9} {'ratio':>6} {'idle, whole':>11} {'parts':>6}")
    for row in found:
        compiled = replace(row, stage=replace(row.stage, framework="XLA"))
        step = step_of(compiled, parts_of(compiled.stage), 0.0)
        plan = planned(row)
        idle = step.bubble_s / step.seconds
        print(
            f"{row.stage.id:<38} {plan.step_time_s:9.4f} {step.seconds:9.4f} {plan.step_time_s / step.seconds:6.3f} "
            f"{plan.idle_share:11.1%} {idle:6.1%}",
            flush=True,
        )


def planned(row: PipelineRow) -> Any:
    """The plan of a row's whole model with its axes."""
    options = {k: v for k, v in row.stage.options.items() if k != "fused"}
    options |= {"batch": row.stage.samples, "scan": True}
    step, args = importlib.import_module(f"models.{row.stage.model}").train_step(**options)
    sharding = row.stage.sharding
    axes = {"stage": row.stages, "chunk": row.chunks // row.stages, "data": sharding.batch_ways, "tensor": sharding.tensor}
    axes = {name: ways for name, ways in axes.items() if ways > 1 or name == "chunk"}
    return shardplan.plan(step, *args, cluster=row.whole, donate_argnums=0, axes=axes, microbatches=row.stage.microbatches)


if __name__ == "__main__":
    sys.exit(main())
