"""The command `shardplan score`: prices a sharding that the user wrote, from a file of specs or of rules."""

from __future__ import annotations

import argparse
import glob
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
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
    one.add_argument("--specs", metavar="FILE", help="{path: spec} of arguments as JSON, or what plan --json prints")
    one.add_argument("--rules", metavar="FILE", help="{glob of paths: spec} as JSON or TOML; of several rules the first holds")
    one.add_argument(
        "--mesh", metavar="AXIS=N", help="the axes of the specs, slowest first: data=4,tensor=2 (default: the levels)"
    )
    one.add_argument("--html", metavar="FILE", help="save the plan as one HTML page, with your sharding beside it")
    one.add_argument("--measure", action="store_true", help="compile it for simulated devices, and count what XLA sends")


def _score(options: argparse.Namespace) -> Report:
    from shardplan.mesh import Cluster
    from shardplan.report import Progress
    from shardplan.report.score_text import score_text
    from shardplan.shell.factor_options import read_axes
    from shardplan.shell.score import scored
    from shardplan.shell.target import load_target, read_options, simulate, use_cpu

    _check(options)
    check_outputs({"--html": options.html}, options)
    mesh = None if options.mesh is None else read_axes([options.mesh], "--mesh")
    file = Path(options.specs or options.rules)
    rules, axes = _read(file, paths=options.specs is not None)
    cluster = Cluster.load(options.cluster)
    cluster.check_equal()
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
                rules=rules,
                mesh=axes if mesh is None else mesh,
                measure=options.measure,
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


# -- files -------------------------------------------------------------------------------------------------------------


def _read(file: Path, *, paths: bool) -> tuple[list[tuple[str, Any]], Mapping[str, int] | None]:
    """(the rules in a file, the axes that it names, if it does). With ``paths``, keys are paths, not globs.

    Raises:
        ShardplanError: for a file that cannot be read or has another form; it names the file and the key.
    """
    value = _parsed(file)
    axes = None
    if paths and isinstance(value, Mapping) and isinstance(value.get("in_specs"), Mapping):  # what plan --json prints
        axes, value = value.get("axes"), value["in_specs"]
        if axes is not None and not isinstance(axes, Mapping):
            raise ShardplanError(f'{file}: axes: {axes!r} has no sizes by name: write {{"data": 4, "tensor": 2}}')
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(
        isinstance(p, tuple | list) and len(p) == 2 and isinstance(p[0], str) for p in pairs
    ):
        what = "path" if paths else "glob of paths"
        raise ShardplanError(f'{file}: this is no object of specs: write {{{what}: spec}}, such as {{"params/w": "P(\'gpu\')"}}')
    if not pairs:
        raise ShardplanError(f'{file}: it has no specs: write {{"params/w": "P(\'gpu\')"}}')
    return [(glob.escape(key) if paths else key, _spec(file, key, text, logical=not paths)) for key, text in pairs], axes


def _parsed(file: Path) -> Any:
    if file.suffix in (".yml", ".yaml"):
        raise ShardplanError(
            f"{file}: YAML is not read: the rules that export writes have regular expressions, those of --rules globs; give "
            "--specs the plan as plan --json prints it, or write globs in JSON or TOML"
        )
    try:
        text = file.read_text(encoding="utf-8")
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
    except OSError as error:
        raise ShardplanError(f"{file}: cannot be read ({error.strerror}): give a file of specs") from error
    except UnicodeDecodeError as error:
        raise ShardplanError(f"{file}: is no text: give a JSON file of specs") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShardplanError(f"{file}: is not {'TOML' if file.suffix == '.toml' else 'JSON'}: {error}") from error
    except _TwiceError as error:
        raise ShardplanError(f"{file}: {error}: has two specs; keep one of them") from None


class _TwiceError(Exception):
    """A key that an object has twice."""


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise _TwiceError(twice)
    return dict(pairs)


def _spec(file: Path, key: str, value: Any, *, logical: bool) -> Any:
    """The PartitionSpec of a key: ``"P('node', None)"`` or ``["node", null]``; for a logical axis, the name of a mesh axis."""
    from jax.sharding import PartitionSpec

    from shardplan.shell.target import read_spec

    if logical and (value is None or (isinstance(value, str) and value.isidentifier())):
        return value
    try:
        if isinstance(value, str):
            return read_spec(value)
        if isinstance(value, list):
            return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in value))
    except PinError as error:
        raise PinError(f"{file}: {key}: {error}") from None
    raise PinError(f'{file}: {key}: {value!r} is no spec: write "P(\'node\', None)" or ["node", null]')
