"""The command `shardplan score`: prices a sharding that the user wrote, from a file of specs or of rules."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from shardplan.errors import ClusterError, PinError, ShardplanError
from shardplan.report.report import Report
from shardplan.shell.arguments import add_command, add_target_options, check_outputs

_PLAN_ALONE = {"pin": "--specs or --rules say how arguments lie", "axes": "--mesh names axes", "factors": "--mesh names axes"}
_UNSUPPORTED = ("microbatches", "placement")


def add_score_command(commands: Any) -> None:
    """Adds `score`."""
    one = add_command(commands, "score", _score, "price your own sharding beside the plan, and say where it loses")
    add_target_options(one)
    one.refuse([*_PLAN_ALONE, *_UNSUPPORTED, "remat", "offload", "objective"])
    one.replaces = {"specs": frozenset({"rules"}), "rules": frozenset({"specs"})}
    one.add_argument(
        "--specs", metavar="FILE", help="{path: spec} of arguments as JSON, what plan --json prints, or an exported specs.py"
    )
    one.add_argument(
        "--rules",
        metavar="FILE",
        help="{glob of paths: spec} as JSON or TOML (of several rules the first holds), an exported rules.yml, or the YAML of "
        "MaxText's logical axis rules",
    )
    one.add_argument(
        "--mesh", metavar="AXIS=N", help="the axes of the specs, slowest first: data=4,tensor=2 (default: the levels)"
    )
    one.add_argument("--html", metavar="FILE", help="save the plan as one HTML page, with your sharding beside it")
    one.add_argument("--measure", action="store_true", help="compile it for simulated devices, and count what XLA sends")
    one.add_argument(
        "--constraints",
        choices=("keep", "ignore"),
        default="keep",
        help="the step's own sharding constraints: hold to them (the default), or leave them out",
    )


def _score(options: argparse.Namespace) -> Report:
    from shardplan.mesh import Cluster
    from shardplan.report import Progress
    from shardplan.report.score_text import score_text
    from shardplan.shell.factor_options import read_axes
    from shardplan.shell.score import scored
    from shardplan.shell.sharding_files import read_sharding
    from shardplan.shell.target import load_target, read_options, simulate, use_cpu

    _check(options)
    check_outputs({"--html": options.html}, options)
    mesh = None if options.mesh is None else read_axes([options.mesh], "--mesh")
    file = Path(options.specs or options.rules)
    cluster = Cluster.load(options.cluster)
    cluster.check_equal()
    read = read_sharding(file, cluster, mesh, paths=options.specs is not None)
    if options.measure:
        simulate(math.prod(level.size for level in cluster.levels))
    else:
        use_cpu()
    step, args = load_target(options.target, read_options(options.set))
    with Progress() as progress:
        try:
            found, plan = scored(
                step,
                *args,
                cluster=cluster,
                rules=read.rules,
                mesh=read.mesh,
                measure=options.measure,
                constraints=options.constraints,
                memory_limit=options.memory,
                donate_argnums=tuple(options.donate),
                replicate=tuple(options.replicate),
                time_budget_s=options.time_budget,
                one_choice=options.one_choice or "auto",
                backend=options.backend,
                time_model=options.time_model or "overlap",
                observer=progress,
            )
        except PinError as error:
            raise PinError(f"{file}: {error}", pins=error.pins) from error
    text = score_text(found, title=options.target)
    if options.html is not None:
        plan.html(options.html, title=options.target, score=found)
        text += f"\n\npage in {options.html}"
    return Report(text, found.to_json())


def _check(options: argparse.Namespace) -> None:
    """Refuses options that a score does not have."""
    if (options.specs is None) == (options.rules is None):
        raise ShardplanError("give your sharding: --specs FILE, or --rules FILE (one of the two)")
    if options.cluster is None:
        raise ClusterError("--cluster is missing: give a preset (see shardplan mesh list), a file or a shape such as 2x4")
    for name, why in _PLAN_ALONE.items():
        if getattr(options, name):
            raise ShardplanError(f"--{name} is not for score: {why}")
    named = [name for name in _UNSUPPORTED if getattr(options, name) is not None]
    named += ["remat"] if options.remat not in (None, "none") else []
    named += ["offload"] if options.offload else []
    named += ["objective"] if options.objective != "time" else []
    if named:
        raise ShardplanError(f"--{named[0]} is not for score, which prices the step as it is, in seconds: leave it out")
