"""The command `shardplan place`: searches by simulation on which devices each operator runs, and how it is cut."""

from __future__ import annotations

import argparse
from typing import Any

from shardplan.report.report import Report
from shardplan.shell.arguments import add_command, add_step_options, check_outputs, count


def add_place_command(commands: Any) -> None:
    """Adds `place`."""
    one = add_command(commands, "place", _place, "search which devices each operator of a step runs on")
    one.add_argument(
        "target", metavar="TARGET", help="package.module:factory or file.py:factory; the factory returns (step, args)"
    )
    one.add_argument(
        "--cluster", required=True, metavar="CLUSTER", help='a preset with its node count ("flexflow-p100:4"), a file or a shape'
    )
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the factory; may be repeated")
    one.add_argument(
        "--memory",
        metavar="auto|SIZE",
        help="memory limit per device, such as \"70GiB\"; auto: what JAX's allocator gives (default: all of the device's memory)",
    )
    add_step_options(one)
    one.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="the most seconds to search (default: 60)")
    one.add_argument("--chains", type=count, metavar="N", help="chains, which begin at the starts in turn (default: one each)")
    one.add_argument("--proposals", type=count, metavar="N", help="the most proposals of each chain (default: no limit)")
    one.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all draws (default: 0)")
    one.add_argument(
        "--start",
        default="dp,expert,random,plan",
        metavar="LIST",
        help="some of dp, expert, random and plan, and files that -o wrote, with commas between (default: the four)",
    )
    one.add_argument("--method", default="mcmc", metavar="mcmc|regions|fd-dps|heft", help="how to search (default: mcmc)")
    one.add_argument("-o", "--output", metavar="FILE", help="save the strategy as JSON")
    one.add_argument("--timeline", metavar="FILE", help="save the timeline as trace events, which Perfetto opens")
    one.add_argument(
        "--draw", "--png", dest="draw", metavar="FILE", help="draw a Gantt chart of devices and connections (.png, .svg or .pdf)"
    )


def _place(options: argparse.Namespace) -> Report:
    from shardplan.report import Progress
    from shardplan.report.draw import picture_format
    from shardplan.shell.place import place
    from shardplan.shell.target import load_target, read_options, use_cpu

    outputs = {"-o": options.output, "--timeline": options.timeline, "--draw": options.draw}
    check_outputs(outputs, options)
    if options.draw is not None:
        picture_format(options.draw)
    use_cpu()
    step, args = load_target(options.target, read_options(options.set))
    with Progress() as progress:
        placed = place(
            step,
            *args,
            cluster=options.cluster,
            budget_s=options.budget,
            chains=options.chains,
            seed=options.seed,
            start=tuple(name.strip() for name in options.start.split(",")),
            method=options.method,
            proposals=options.proposals,
            memory_limit=options.memory,
            donate_argnums=tuple(options.donate),
            replicate=tuple(options.replicate),
            observer=progress,
        )
    text = placed.text(options.target)
    if options.output is not None:
        placed.save(options.output)
        text += f"\n\nsaved to {options.output}"
    if options.timeline is not None:
        placed.timeline.save(options.timeline)
        text += f"\n\ntimeline saved to {options.timeline}: open it in https://ui.perfetto.dev"
    if options.draw is not None:
        placed.timeline.draw(options.draw, title=f"{options.target} on {placed.problem.machine.cluster.name}")
        text += f"\n\ndrawn in {options.draw}"
    return Report(text, placed.json)
