"""The command `shardplan export`: writes a saved plan in forms that other programs read."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from shardplan.errors import ShardplanError
from shardplan.report.report import Report
from shardplan.shell.arguments import add_command, check_outputs

_PLATFORMS = {"gpu": "cuda"}
"""JAX's names of platforms, where those of clusters differ."""


def add_export_command(commands: Any) -> None:
    """Adds `export`."""
    one = add_command(commands, "export", _export, "write a saved plan as PartitionSpecs, rules, MaxText's settings or StableHLO")
    one.add_argument("plan", metavar="plan.json")
    one.add_argument(
        "target", nargs="?", metavar="TARGET", help="the planned step, for StableHLO: package.module:factory or file.py:factory"
    )
    one.needs = {"set": 2}  # the plan and its TARGET
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the factory; may be repeated")
    one.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="FILE",
        help="a name that ends in specs.py, rules.yml, maxtext.yml or step.stablehlo",
    )


def _export(options: argparse.Namespace) -> Report:
    from shardplan.plans.data import PlanData
    from shardplan.plans.files import read_any
    from shardplan.report.maxtext_file import replicas
    from shardplan.shell.exporting import STEP, form_of, write_text

    check_outputs({"-o": options.output}, options)
    form = form_of(options.output)
    if options.set and options.target is None:
        raise ShardplanError(f"--set {options.set[0]} is an option of a TARGET, and none is given: give both, or leave out --set")
    if form != STEP and options.target is None:
        data = read_any(options.plan)
        write_text(data, options.output)
        if form == "maxtext.yml" and isinstance(data, PlanData):
            sys.stderr.writelines(f"shardplan: {options.output}: {text}\n" for text in replicas(data))
    elif options.target is None:
        raise ShardplanError(f"{options.output} needs the step: shardplan export {options.plan} TARGET -o {options.output}")
    else:
        made = _with_step(options)
        made.export(options.output, platform=_PLATFORMS.get(made.cluster.device.platform, made.cluster.device.platform))
    return Report(f"exported to {options.output}", {"file": options.output, "form": form})


def _with_step(options: argparse.Namespace) -> Any:
    """The plan loaded for its TARGET, on simulated devices."""
    from shardplan.plans.files import read_any
    from shardplan.shell.loading import load
    from shardplan.shell.target import load_target, read_options, simulate

    simulate(read_any(options.plan).cluster.size)
    step, args = load_target(options.target, read_options(options.set))
    return load(options.plan, step, *args)
