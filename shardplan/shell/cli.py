"""The command line: `shardplan plan | verify | compare | score | explain | mesh | reduce | tdl | calibrate`.

With ``--json``, stdout holds one JSON object and nothing else; progress and warnings go to stderr. Exit codes: 0, done; 1, a
check failed; 2, a user's error, printed as one line (with its traceback too if SHARDPLAN_TRACEBACK=1 is set); 130, interrupted by
Ctrl-C, printed as one line.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from shardplan.errors import PlanFileError, ShardplanError, UndescribedPrimitiveError
from shardplan.report.report import Report
from shardplan.shell import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    # hides XLA's notes on its own partitioning, which are not about the user's step; errors still show
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        options = _parser().parse_args(argv)
        # a factory may print, but only the report belongs on stdout
        with contextlib.redirect_stdout(sys.stderr), interrupts.heard():
            report: Report = options.run(options)
        print(json.dumps(report.json) if options.json else report.text)
        sys.stdout.flush()
    except ShardplanError as error:
        text = str(error) if isinstance(error, UndescribedPrimitiveError) else " ".join(str(error).split())
        print(f"shardplan: {text}", file=sys.stderr)
        if os.environ.get("SHARDPLAN_TRACEBACK"):
            traceback.print_exception(error)
        return 2
    except KeyboardInterrupt as error:
        print(f"shardplan: interrupted {str(error) or 'before it finished'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return 0 if report.passed else 1


# -- commands ----------------------------------------------------------------------------------------------------------


def _plan(options: argparse.Namespace) -> Report:
    from shardplan.report.draw import picture_format
    from shardplan.report.json import plan_json
    from shardplan.report.text import plan_text

    if options.output == "":
        raise ShardplanError("-o is empty: give the name of a file")
    if options.draw is not None:
        picture_format(options.draw)  # refuses a wrong suffix before the search
        if options.output and Path(options.output).resolve() == Path(options.draw).resolve():
            raise ShardplanError(
                f"-o and --draw both name {options.draw!r}: the picture would overwrite the plan; give it another name"
            )
    made, _, _ = _target_plan(options)
    data = made.completed()
    text = plan_text(data, title=options.target)
    if options.output:
        made.save(options.output)
        text += f"\n\nsaved to {options.output}"
    if options.draw is not None:
        made.draw(options.draw, title=options.target)
        text += f"\n\ndrawn in {options.draw}"
    return Report(text, plan_json(data))


def _verify(options: argparse.Namespace) -> Report:
    from shardplan.emit.verify import verify
    from shardplan.report import Progress
    from shardplan.report.text import verified_text

    made, step, args = _target_plan(options, concrete=True, file=options.plan)
    devices = _simulated_devices(made)
    with Progress() as progress:
        result = verify(made, step, args, steps=options.steps, backend=options.backend, devices=devices, observer=progress)
    return Report(verified_text(result.json), result.json, result.passed)


def _compare(options: argparse.Namespace) -> Report:
    from shardplan.report.json import comparison_rows
    from shardplan.report.text import comparison_text

    made, step, _ = _target_plan(options, simulated=options.measure)
    rows = comparison_rows(made.completed(), _measured(made, step, options.backend) if options.measure else None)
    return Report(comparison_text(rows), {"plans": rows})


def _measured(made: Any, step: Callable[..., Any], backend: str) -> Mapping[str, tuple[float, float, int]]:
    """(wire bytes, raw wire bytes, peak bytes) of the compiled program of the plan and of each baseline, by name."""
    from shardplan.emit.verify import measured_program
    from shardplan.report import Progress

    devices = _simulated_devices(made)
    result: dict[str, tuple[float, float, int]] = {}
    plans = {"this plan": made, **made.baseline_plans()}
    with Progress() as progress:
        for n, (name, one) in enumerate(plans.items()):
            progress(f"compiling {name}", n / len(plans))
            sent, peak = measured_program(one, step, devices=devices, backend=backend)
            result[name] = (sent.wire_bytes, sent.raw_wire_bytes, peak)
    return result


def _score(options: argparse.Namespace) -> Report:
    raise ShardplanError(
        "score is not supported yet: to price your own sharding, use shardplan plan with --pin 'GLOB=SPEC' for each of its arrays"
    )


def _calibrate(options: argparse.Namespace) -> Report:
    raise ShardplanError("calibrate is not supported yet: the cost model uses the figures of the cluster's TOML file")


def _explain(options: argparse.Namespace) -> Report:
    from shardplan.plans.files import read
    from shardplan.report.explain import unknown

    known = read(options.file).explanations
    if not known:
        raise ShardplanError(f"{options.file} holds no explanations: plan the step again and save the plan")
    if options.path is None:
        hits = [""]
    else:
        hits = [options.path] if options.path in known else [p for p in known if p and fnmatch.fnmatchcase(p, options.path)]
    if not hits:
        raise ShardplanError(f"{options.file}: {unknown(options.path or '', [p for p in known if p])}")
    return Report("\n\n".join(known[p] for p in hits), {"explain": {p: known[p] for p in hits}})


def _mesh_list(options: argparse.Namespace) -> Report:
    from shardplan.report import mesh_text

    return mesh_text.mesh_list()


def _mesh_show(options: argparse.Namespace) -> Report:
    from shardplan.report import mesh_text

    return mesh_text.mesh_show(options.cluster)


def _mesh_detect(options: argparse.Namespace) -> Report:
    from shardplan.mesh.devices import detected
    from shardplan.report import mesh_text

    result = detected()
    if options.output:
        _write(options.output, mesh_text.detected_toml(result))
    return mesh_text.mesh_detect(result)


def _mesh_matrices(options: argparse.Namespace) -> Report:
    from shardplan.report import mesh_text

    return mesh_text.mesh_matrices(options.cluster, options.axes, options.over, options.bytes, options.algorithm)


def _reduce(options: argparse.Namespace) -> Report:
    from shardplan.report import mesh_text

    return mesh_text.reduce_report(
        options.cluster, options.axes, options.over, options.matrix, options.bytes, options.algorithm, options.max_size
    )


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


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShardplanError(f"cannot write {file}: {error.strerror}") from error


# -- what commands share -----------------------------------------------------------------------------------------------


def _target_plan(
    options: argparse.Namespace, *, concrete: bool = False, simulated: bool = False, file: str | None = None
) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    """(plan, step, args) of a TARGET; with ``file``, the plan is read from it. Both options simulate devices."""
    event = "a plan that fits was found: wait longer, or give a --time-budget to get the best plan so far"
    with interrupts.before(event if file is None else f"the plan in {file} was read"):
        made, step, args = _read_or_plan(options, concrete=concrete, simulated=simulated or concrete, file=file)
    if made.stopped == "interrupted" and file is None:
        if options.run is not _plan:  # the work after the search takes longer than the search
            raise KeyboardInterrupt(
                f"before {options.command} began: to save the best plan so far, use shardplan plan -o FILE, "
                "with or without --time-budget"
            )
        print("shardplan: interrupted: this is the best plan so far", file=sys.stderr)
    return made, step, args


def _read_or_plan(
    options: argparse.Namespace, *, concrete: bool, simulated: bool, file: str | None
) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    from shardplan.shell.target import load_target, read_options, read_pins, simulate, use_cpu

    if file is not None:
        _refuse_planning_options(options, file)
    pins = read_pins(options.pin)
    cluster = _cluster(options.cluster, file)
    # before the factory makes arrays, so that it uses no accelerator of this machine
    if simulated:
        simulate(math.prod(level.size for level in cluster.levels))
    else:
        use_cpu()
    step, args = load_target(options.target, read_options(options.set), concrete=concrete)
    if file is not None:
        return _load_plan(file, step, args, cluster), step, args
    from shardplan.report import Progress
    from shardplan.shell.api import plan
    from shardplan.shell.factor_options import read_axes, read_factors

    with Progress() as progress:
        made = plan(
            step,
            *args,
            cluster=cluster,
            memory_limit=options.memory,
            objective=options.objective,
            pins=pins,
            factors=read_factors(options.factors),
            axes=read_axes(options.axes),
            donate_argnums=tuple(options.donate),
            replicate=tuple(options.replicate),
            time_budget_s=options.time_budget,
            one_choice=options.one_choice or "timesteps",
            remat=options.remat or "none",
            backend=options.backend,
            observer=progress,
        )
    return made, step, args


def _refuse_planning_options(options: argparse.Namespace, file: str) -> None:
    """Refuses options that a plan read from a file would ignore."""
    defaults = {"objective": "time"}  # all other options are empty by default
    for name in ("memory", "pin", "factors", "axes", "donate", "replicate", "time_budget", "one_choice", "remat", *defaults):
        if getattr(options, name) and getattr(options, name) != defaults.get(name):
            raise ShardplanError(
                f"--{name.replace('_', '-')} is for a new plan: {file} has its own setting; leave out this option or --plan"
            )


def _cluster(given: str | None, file: str | None) -> Any:
    """The cluster that was given, else that of the plan file."""
    from shardplan.mesh import Cluster
    from shardplan.plans.files import read

    if given is not None:
        return Cluster.load(given)
    if file is None:
        raise ShardplanError("--cluster is missing: give a preset (see shardplan mesh list), a TOML file or a shape such as 2x4")
    return read(file).cluster


def _load_plan(file: str, step: Callable[..., Any], args: Sequence[Any], cluster: Any) -> Any:
    from shardplan.shell.load import load

    made = load(file, step, *args)
    if cluster.fingerprint() != made.cluster.fingerprint():
        raise PlanFileError(
            f"{file}: the plan was made for the cluster {made.cluster.name}, not for {cluster.name}; plan the step again"
        )
    return made


def _simulated_devices(made: Any) -> list[Any]:
    from shardplan.shell.target import simulate

    return simulate(math.prod(level.size for level in made.cluster.levels))


# -- arguments ---------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    from shardplan import __version__

    parser = _Parser(prog="shardplan", description="Plan the sharding of a JAX training step, and verify it.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"shardplan {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = _add_command(commands, "plan", _plan, "plan the sharding of a step on a cluster")
    _add_target_options(one)
    one.add_argument("-o", "--output", metavar="FILE", help="save the plan as JSON")
    one.add_argument("--draw", metavar="FILE", help="save a picture of how each layer is cut (.png, .svg or .pdf)")

    one = _add_command(commands, "verify", _verify, "run a plan on simulated devices, compare it with one device, and measure it")
    _add_target_options(one)
    one.add_argument("--plan", metavar="FILE", help="use a saved plan instead of a new one")
    one.add_argument("--steps", type=_count, default=3, metavar="N", help="number of steps to compare (default: 3)")

    one = _add_command(commands, "compare", _compare, "compare the plan with every baseline")
    _add_target_options(one)
    one.add_argument("--measure", action="store_true", help="compile the plan and every baseline, and measure bytes and memory")

    one = _add_command(commands, "score", _score, "price your own sharding (not supported yet)")
    _add_target_options(one, required=False)  # it answers "not supported yet" without a TARGET too
    one.add_argument("--specs", metavar="FILE")

    one = _add_command(commands, "explain", _explain, "explain the choices of a saved plan")
    one.add_argument("file", metavar="plan.json")
    one.add_argument("path", nargs="?", metavar="PATH", help="path of an argument, or a glob of paths (default: the whole plan)")

    _add_mesh_commands(commands)

    one = _add_command(commands, "tdl", _tdl, "show what the description language covers")
    one.add_argument("primitive", nargs="?", metavar="PRIMITIVE")
    one.add_argument(
        "--coverage", action="store_true", help="list all primitives of JAX, and verify each description on one random case"
    )
    one.add_argument(
        "--examples",
        type=partial(_count, least=0),
        metavar="N",
        help="number of random cases to verify per description (default: 1 with --coverage, else 0)",
    )

    one = _add_command(commands, "calibrate", _calibrate, "measure this machine for the cost model (not supported yet)")
    one.add_argument("-o", "--output", metavar="FILE")
    return parser


def _add_mesh_commands(commands: Any) -> None:
    mesh = commands.add_parser("mesh", help="show clusters and parallelism matrices").add_subparsers(
        dest="mesh", required=True, metavar="COMMAND"
    )
    _add_command(mesh, "list", _mesh_list, "list the presets")
    one = _add_command(mesh, "show", _mesh_show, "show a cluster's levels, links and device")
    one.add_argument("cluster", metavar="CLUSTER")
    one = _add_command(mesh, "detect", _mesh_detect, "detect the cluster of this machine's devices")
    one.add_argument("-o", "--output", metavar="FILE", help="save it as TOML")
    one = _add_command(
        mesh, "matrices", _mesh_matrices, "list parallelism matrices; with --over and --bytes, ranked by the time of a reduction"
    )
    _add_axes_options(one, over_required=False)
    one = _add_command(commands, "reduce", _reduce, "rank the reduction programs for one parallelism matrix")
    _add_axes_options(one, over_required=True)
    one.add_argument(
        "--matrix", required=True, metavar="ROWS", help='parallelism matrix; rows are axes, columns are levels: "1 4 / 4 4"'
    )
    one.add_argument("--max-size", type=_count, default=5, metavar="N", help="most steps of a program (default: 5)")


def _add_axes_options(one: argparse.ArgumentParser, *, over_required: bool) -> None:
    one.add_argument("--cluster", required=True, metavar="CLUSTER")
    one.add_argument("--axes", required=True, metavar="SIZES", help='sizes of the mesh axes: "4 16"')
    one.add_argument("--over", required=over_required, metavar="AXES", help='numbers of the axes to reduce over: "0"')
    one.add_argument(
        "--bytes", type=_bytes, required=over_required, metavar="SIZE", help="bytes to reduce per device: 2147483648, 2GiB, 1e9"
    )
    one.add_argument("--algorithm", default="auto", choices=["auto", "ring", "tree"])


def _add_target_options(one: argparse.ArgumentParser, *, required: bool = True) -> None:
    one.add_argument(
        "target",
        nargs=None if required else "?",
        metavar="TARGET",
        help="package.module:factory or file.py:factory; the factory returns (step, args)",
    )
    one.add_argument(
        "--cluster", metavar="CLUSTER", help='a preset with its node count ("dgx-h100:4"), a TOML file or a shape ("2x4")'
    )
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the factory; may be repeated")
    one.add_argument(
        "--memory", metavar="SIZE", help='memory limit per device, such as "70GiB" (default: what JAX\'s allocator gives)'
    )
    one.add_argument("--objective", default="time", choices=["time", "bytes"])
    one.add_argument(
        "--backend",
        default="auto",
        choices=["auto", "explicit", "specs"],
        help="what runs the plan: each device its own program (explicit), or XLA's partitioner (specs)",
    )
    _add_mesh_options(one)
    one.add_argument(
        "--donate",
        action="append",
        default=[],
        type=int,
        metavar="N",
        help="number of an argument whose buffers the step may reuse; may be repeated",
    )
    one.add_argument(
        "--replicate",
        action="append",
        default=[],
        metavar="PRIMITIVE",
        help="a primitive that may run whole on every device; may be repeated",
    )
    one.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="limit for all of planning; after it, the best plan so far is used"
    )
    one.add_argument("--one-choice", metavar="none|timesteps|layers", help="what shares one layout (default: timesteps)")
    one.add_argument("--remat", metavar="none|auto", help="auto: activations may be computed again (default: none)")


def _add_mesh_options(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="GLOB=SPEC",
        help="""the spec that matching arguments must have; may be repeated: '*kernel=P(None, "gpu")'""",
    )
    one.add_argument(
        "--factors",
        action="append",
        default=[],
        metavar="LEVEL=NxM",
        help="how a level is taken apart: gpu=2x4, or gpu=8 for whole; may be repeated (default: the search decides)",
    )
    one.add_argument(
        "--axes",
        action="append",
        default=[],
        metavar="PURPOSE=N",
        help="sizes of data, fsdp, tensor, sequence, expert or replica: data=16,tensor=4 (default: the search decides)",
    )


def _add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], Report], what: str) -> argparse.ArgumentParser:
    one = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    one.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    one.set_defaults(run=run)
    return one


def _bytes(text: str) -> int:
    from shardplan.sizes import parse_bytes

    return parse_bytes(text, what="--bytes")


def _count(text: str, *, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is not positive" if least else f"{value} is negative")
    return value


if __name__ == "__main__":
    sys.exit(main())
