"""The command line: `shardplan COMMAND`; `shardplan --help` lists the commands.

With ``--json``, stdout holds one JSON object and nothing else; progress and warnings go to stderr. Exit codes: 0, done; 1, a
check failed; 2, a user's error, printed as one line (with its traceback too if SHARDPLAN_TRACEBACK=1 is set); 130, interrupted by
Ctrl-C, printed as one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardplan.errors import ShardplanError, UndescribedPrimitiveError
from shardplan.report.report import Report
from shardplan.shell import interrupts, terminal
from shardplan.shell.arguments import Parser, add_command, add_target_options, check_outputs, count
from shardplan.shell.calibrate_command import add_calibrate_command
from shardplan.shell.compare_command import add_compare_command
from shardplan.shell.completion import add_completion_command
from shardplan.shell.config_file import Words, with_config
from shardplan.shell.diff_command import add_diff_command
from shardplan.shell.export_command import add_export_command
from shardplan.shell.mesh_commands import add_mesh_commands
from shardplan.shell.place_command import add_place_command
from shardplan.shell.score_command import add_score_command
from shardplan.shell.simulate_command import add_simulate_command
from shardplan.shell.sweep_command import add_sweep_command
from shardplan.shell.target_plan import add_saved_plan, completed, simulated_devices, target_plan


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    # hides XLA's notes on its own partitioning, which are not about the user's step; errors still show
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    given = Words(tuple(sys.argv[1:] if argv is None else argv))
    try:
        parser, commands = _parser()
        given = with_config(given.words, commands, Path.cwd())
        options = parser.parse_args(given.words)
        # a factory may print, but only the report belongs on stdout
        with contextlib.redirect_stdout(sys.stderr), interrupts.heard():
            report: Report = options.run(options)
        if options.json:
            print(json.dumps(report.json))
        else:
            terminal.show(report)
        sys.stdout.flush()
    except ShardplanError as error:
        text = str(error) if isinstance(error, UndescribedPrimitiveError) else " ".join(str(error).split())
        terminal.say(f"shardplan: {text}{given.remark(text)}", "bad")
        if os.environ.get("SHARDPLAN_TRACEBACK"):
            traceback.print_exception(error)
        return 2
    except KeyboardInterrupt as error:
        terminal.say(f"shardplan: interrupted {str(error) or 'before it finished'}", "warning")
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0 if report.passed else 1


# -- commands ----------------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> Report:
    from shardplan.report.draw import picture_format
    from shardplan.report.json import plan_json
    from shardplan.report.placed_text import placed_json, placed_text
    from shardplan.report.plan_text import plan_text
    from shardplan.shell.placed_plan import PlacedPlan

    check_outputs({"-o": options.output, "--draw": options.draw, "--html": options.html}, options)
    if options.draw is not None:
        picture_format(options.draw)  # refuses a wrong suffix before the search
    made, _, _ = target_plan(options)
    if isinstance(made, PlacedPlan):
        figures = made.figures(options.target)
        text, shown = placed_text(figures), placed_json(figures)
    else:
        data = completed(made)
        text, shown = plan_text(data, title=options.target), plan_json(data)
    if options.output:
        made.save(options.output)
        text += f"\n\nsaved to {options.output}"
    if options.draw is not None:
        made.draw(options.draw, title=options.target)
        text += f"\n\ndrawn in {options.draw}"
    if options.html is not None:
        made.html(options.html, title=options.target)
        text += f"\n\npage in {options.html}"
    return Report(text, shown)


def _verify(options: argparse.Namespace) -> Report:
    from shardplan.report import Progress
    from shardplan.report.verified_text import verified_text
    from shardplan.verify.verify import verify

    made, step, args = target_plan(options, concrete=True, file=options.plan)
    devices = simulated_devices(made)
    how = {"steps": options.steps, "backend": options.backend, "reference": options.reference}
    with Progress() as progress:
        result = verify(made, step, args, **how, devices=devices, observer=progress)
    return Report(verified_text(result.json), result.json, result.passed)


def _add_verify_command(commands: Any) -> None:
    one = add_command(commands, "verify", _verify, "run a plan on simulated devices, compare it with one device, and measure it")
    add_target_options(one)
    add_saved_plan(one)
    one.add_argument("--steps", type=count, default=3, metavar="N", help="number of steps to compare (default: 3)")
    one.add_argument(
        "--reference",
        choices=("always", "unequal"),
        default="always",
        help="check the step compiled for one device op by op: always (default), or if the sharded step differs from it",
    )


def _explain(options: argparse.Namespace) -> Report:
    from shardplan.plans.files import read_any
    from shardplan.report.placed_explain import explanations_of, placed_remarks

    plan = read_any(options.file)
    if not plan.explanations:
        raise ShardplanError(f"{options.file} holds no explanations: plan the step again and save the plan")
    try:
        found = explanations_of(plan, options.path)
    except ShardplanError as error:
        raise ShardplanError(f"{options.file}: {error}") from error
    return Report("\n\n".join([*found.values(), *placed_remarks(plan)]), {"explain": found})


def _doctor(options: argparse.Namespace) -> Report:
    from shardplan.report.doctor_text import doctor_text
    from shardplan.shell.doctor import examine

    found = examine(os.environ)
    return Report(doctor_text(found), found, found["ok"])


def _tdl(options: argparse.Namespace) -> Report:
    from shardplan.errors import nearest
    from shardplan.report import Progress
    from shardplan.report.tdl_text import coverage_text, primitive_text
    from shardplan.tdl.coverage import coverage, sort_one, sort_primitives
    from shardplan.tdl.describe import describe
    from shardplan.tdl.pretty import register_lines, words
    from shardplan.tdl.proof import CASES, Drawn

    if options.primitive is None:
        examples = int(options.coverage) if options.examples is None else options.examples
        with Progress() as progress:
            result = coverage(examples=examples, observer=progress)
        return Report(coverage_text(result), result, not result["undescribed"] and not result["faults"])
    entry = sort_one(options.primitive)
    if entry is None:
        known = [entry.name for entry in sort_primitives()]
        raise ShardplanError(f"the installed JAX has no primitive {options.primitive!r}{nearest(options.primitive, known)}")
    made: dict[str, Any] = {"primitive": entry.name, "kind": entry.kind, "reason": entry.reason}
    if entry.name in CASES:
        description = describe(CASES[entry.name](Drawn(0)).call)
        made |= words(description) if description is not None else {}
    if entry.kind == "kernel":
        made["register"] = register_lines(entry.name)
    return Report(primitive_text(made), made)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, Parser]]:
    """The parser of the command line, and that of each command by name."""
    from shardplan import __version__

    parser = Parser(prog="shardplan", description="Plan the sharding of a JAX training step, and verify it.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"shardplan {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = add_command(commands, "plan", _plan, "plan the sharding of a step on a cluster")
    add_target_options(one)
    one.add_argument("-o", "--output", metavar="FILE", help="save the plan as JSON")
    one.add_argument(
        "--draw", "--png", dest="draw", metavar="FILE",
        help="save a picture: how layers are cut, or when groups run (.png, .svg, .pdf)",
    )  # fmt: skip
    one.add_argument("--html", metavar="FILE", help="save the whole plan as one HTML page, which needs no network")

    _add_verify_command(commands)
    for add in (add_compare_command, add_score_command, add_simulate_command, add_sweep_command, add_place_command):
        add(commands)

    one = add_command(commands, "explain", _explain, "explain the choices of a saved plan")
    one.add_argument("file", metavar="plan.json")
    one.add_argument("path", nargs="?", metavar="PATH", help="path of an argument, or a glob of paths (default: the whole plan)")

    for add in (add_export_command, add_diff_command, add_mesh_commands):
        add(commands)

    one = add_command(commands, "tdl", _tdl, "show what the description language covers")
    one.add_argument("primitive", nargs="?", metavar="PRIMITIVE")
    one.add_argument(
        "--coverage",
        action="store_true",
        help="sort all primitives of JAX, name those that are new, gone or changed against the tested release, and verify each "
        "description on one random case (about a minute)",
    )
    one.add_argument(
        "--examples",
        type=partial(count, least=0),
        metavar="N",
        help="number of random cases to verify per description (default: 1 with --coverage, else 0)",
    )

    for add in (add_calibrate_command, add_completion_command):
        add(commands)
    add_command(commands, "doctor", _doctor, "show versions, devices and flags, and how to install what is missing")
    return parser, commands.choices


if __name__ == "__main__":
    sys.exit(main())
