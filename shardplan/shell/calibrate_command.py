"""The command `shardplan calibrate`: measures the machine at hand and writes its profile."""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

from shardplan.calibrate.defaults import BOUND, ROUNDS
from shardplan.errors import ShardplanError
from shardplan.report.report import Report
from shardplan.shell import interrupts
from shardplan.shell.arguments import add_command, check_outputs, count


def add_calibrate_command(commands: Any) -> None:
    """Adds `calibrate`."""
    one = add_command(commands, "calibrate", _calibrate, "measure this machine's devices and write a profile for --cluster")
    one.add_argument("-o", "--output", metavar="FILE", help="save the profile (.json)")
    one.add_argument("--devices", type=count, metavar="N", help="simulate N CPU devices, and measure these")
    one.add_argument(
        "--cluster",
        metavar="CLUSTER",
        help="a cluster with the levels of this machine, where JAX does not tell them; its figures are not used",
    )
    one.add_argument(
        "--repeats", type=partial(count, least=3), default=ROUNDS, metavar="N", help=f"rounds of repeats (default: {ROUNDS})"
    )
    one.add_argument(
        "--spread", type=_bound, default=BOUND, metavar="PART",
        help=f"the largest spread of repeats to accept: quartiles' distance over median, median of all (default: {BOUND:g})",
    )  # fmt: skip
    one.add_argument("--cache", metavar="DIR", help="folder of measurements (default: the user's cache folder)")
    one.add_argument("--fresh", action="store_true", help="measure again what the cache has")


def _bound(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a part above 0, such as 0.5")
    return value


def _calibrate(options: argparse.Namespace) -> Report:
    if options.output is not None:
        _check_output(options.output, options)
    with interrupts.before("the machine was measured: no profile is written, the cache keeps what was complete"):
        return _measure(options)


def _check_output(file: str, options: argparse.Namespace) -> None:
    """Refuses a file that could not be written after minutes of measuring, or that ``--cluster`` could not read."""
    path = Path(file)
    if path.suffix != ".json":
        raise ShardplanError(f"-o {file!r}: a profile is a .json file, by which --cluster knows it: name it profile.json")
    check_outputs({"-o": file}, options)


def _measure(options: argparse.Namespace) -> Report:
    from shardplan.calibrate.cache import default_folder
    from shardplan.calibrate.profiling import calibrate
    from shardplan.mesh import Cluster
    from shardplan.plans.files import write_whole
    from shardplan.report import Progress
    from shardplan.report.calibration_text import calibration_json, calibration_text
    from shardplan.shell.target import simulate

    shape = Cluster.load(options.cluster) if options.cluster is not None else None
    if shape is not None:
        shape.check_equal()
    devices = simulate(options.devices) if options.devices is not None else None
    with Progress() as progress, interrupts.heard() as check_interrupts:

        def observer(what: str, part: float) -> None:
            check_interrupts()
            progress(what, part)

        result = calibrate(
            devices=devices,
            shape=shape,
            cache=default_folder(os.environ) if options.cache is None else Path(options.cache),
            fresh=options.fresh,
            rounds=options.repeats,
            bound=options.spread,
            observer=observer,
        )
    text = calibration_text(result.profile, measured=result.measured, cached=result.cached)
    if options.output is not None:
        write_whole(Path(options.output), result.profile.to_json())
        text += f"\n\nsaved to {options.output}; use it as --cluster {options.output}"
        if result.profile.measured:
            text += f", or over more or fewer of its levels' children as --cluster SHAPE@{options.output}"
    json = calibration_json(result.profile, measured=result.measured, cached=result.cached, file=options.output)
    return Report(text, json)
