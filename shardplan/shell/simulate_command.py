"""The command `shardplan simulate`: when each task of a step runs, as a timeline."""

from __future__ import annotations

import argparse
from typing import Any

from shardplan.errors import ShardplanError
from shardplan.report.report import Report
from shardplan.shell.arguments import add_command, add_target_options, check_outputs
from shardplan.shell.target_plan import add_saved_plan, may_be_on_groups, target_plan


def add_simulate_command(commands: Any) -> None:
    """Adds `simulate`."""
    one = add_command(commands, "simulate", _simulate, "simulate a step of a plan, with compute and communication at once")
    add_target_options(one)
    add_saved_plan(one)
    one.add_argument("-o", "--output", metavar="FILE", help="save the timeline as trace events, which Perfetto opens")
    one.add_argument(
        "--draw",
        "--png",
        dest="draw",
        metavar="FILE",
        help="draw streams and memory, or the runs of groups of devices (.png, .svg or .pdf)",
    )
    one.add_argument("--no-overlap", action="store_true", help="run all tasks one after the other, as the sum of their times")
    one.add_argument(
        "--contention",
        type=float,
        metavar="FACTOR",
        help="how many times as long compute and communication take while both run (1 for none; default: the device's)",
    )


def _simulate(options: argparse.Namespace) -> Report:
    from shardplan.report import Progress
    from shardplan.report.draw import picture_format
    from shardplan.report.placed_timeline import PlacedTimeline, placed_timeline_json, placed_timeline_text
    from shardplan.report.timeline_text import timeline_text
    from shardplan.shell.placed_plan import ONE_PROGRAM
    from shardplan.simulate.engine import Contention
    from shardplan.simulate.figures import timeline_json

    # mistakes are reported before the search
    check_outputs({"-o": options.output, "--draw": options.draw}, options)
    if options.draw is not None:
        picture_format(options.draw)
    if options.contention is not None and options.no_overlap:
        raise ShardplanError("--contention has no effect with --no-overlap, where nothing runs at once: give one of them")
    if options.contention is not None:
        Contention(options.contention, options.contention)
    if may_be_on_groups(options) and (options.no_overlap or options.contention is not None):
        raise ShardplanError(ONE_PROGRAM)
    made, _, _ = target_plan(options, file=options.plan)
    with Progress() as progress:
        progress("simulating")
        shown = made.simulate(overlap=not options.no_overlap, contention=options.contention)
    if isinstance(shown, PlacedTimeline):
        text, figures = placed_timeline_text(shown, title=options.target), placed_timeline_json(shown)
    else:
        text, figures = timeline_text(shown, title=options.target), timeline_json(shown)
    if options.output is not None:
        shown.save(options.output)
        text += f"\n\nsaved to {options.output}: open it in https://ui.perfetto.dev"
    if options.draw is not None:
        shown.draw(options.draw, title=f"{options.target} on {made.cluster.name}")
        text += f"\n\ndrawn in {options.draw}"
    return Report(text, figures)
