"""The command `shardplan sweep`: a plan for each combination of settings, as a table with its Pareto front."""

from __future__ import annotations

import argparse
import inspect
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.errors import ShardplanError
from shardplan.report.report import Report
from shardplan.shell import interrupts, terminal
from shardplan.shell.arguments import add_command, add_target_options, check_outputs
from shardplan.shell.target_plan import planning_options

_PART = re.compile(r"""(?:[^,()\[\]{}'"]|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\}|'[^']*'|"[^"]*")+""")
"""One value of a list with commas between: a comma inside brackets or quotes belongs to the value."""


def add_sweep_command(commands: Any) -> None:
    """Adds `sweep`."""
    one = add_command(commands, "sweep", _sweep, "plan a step for each combination of settings, and compare the plans")
    add_target_options(one)
    one.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="NAME=V1,V2,...",
        help="values of a setting: cluster, memory, microbatches, axes, placement, remat, offload, objective, backend, "
        "one-choice, time-model, or a parameter of the factory; may be repeated, for all combinations",
    )
    one.add_argument(
        "--price", metavar="FILE", help="a TOML file with dollars for an hour of one device, by the device's or cluster's name"
    )
    one.add_argument("-o", "--output", metavar="FILE", help="save the points as JSON")
    one.add_argument(
        "--workers", type=int, metavar="N", help="processes that plan points (default: as many as this process may use cores)"
    )
    one.add_argument(
        "--draw", "--png", dest="draw", metavar="FILE", help="draw the points and their Pareto front (.png, .svg or .pdf)"
    )


def _sweep(options: argparse.Namespace) -> Report:
    from shardplan.placement.chains import cores
    from shardplan.report import Progress
    from shardplan.report.draw import picture_format
    from shardplan.report.sweep_text import sweep_text
    from shardplan.shell.sweep import sweep
    from shardplan.shell.target import read_options, use_cpu

    check_outputs({"-o": options.output, "--draw": options.draw}, options)
    if options.draw is not None:
        picture_format(options.draw)
    vary, price = read_vary(options.vary), None if options.price is None else read_prices(options.price)
    use_cpu()
    with Progress() as progress, interrupts.before("the first point was planned"):
        swept = sweep(
            _Named(options.target),
            vary=vary,
            options=read_options(options.set),
            price=price,
            name=options.target,
            observer=progress,
            workers=cores() if options.workers is None else options.workers,
            cluster=options.cluster,
            **planning_options(options),
        )
    if len(swept.points) < swept.total:
        terminal.say(f"shardplan: interrupted: {len(swept.points)} of {swept.total} points are done", "warning")
    text = sweep_text(swept)
    if options.output is not None:
        swept.save(options.output)
        text += f"\n\nsaved to {options.output}"
    if options.draw is not None:
        swept.draw(options.draw)
        text += f"\n\ndrawn in {options.draw}"
    return Report(text, swept.json, passed=any(p.error is None for p in swept.points))


@dataclass(frozen=True, slots=True)
class _Named:
    """The factory that a TARGET names, in each process.

    Raises:
        TargetError: if it does not exist.
    """

    target: str

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._factory)

    def __call__(self, **own: Any) -> Any:
        return self._factory(**own)

    @property
    def _factory(self) -> Callable[..., Any]:
        from shardplan.shell.target import load_factory

        return load_factory(self.target)


def read_vary(texts: Sequence[str]) -> dict[str, list[Any]]:
    """The settings that vary, with their values: Python literals, else strings, as ``--set`` has them.

    >>> read_vary(["batch=32,64", "dims=(1, 2),(3, 4)", "cluster=2x4,dgx-h100:2"])
    {'batch': [32, 64], 'dims': [(1, 2), (3, 4)], 'cluster': ['2x4', 'dgx-h100:2']}
    >>> read_vary(["axes=data=8,[data=4,tensor=2]"])
    {'axes': [{'data': 8}, {'data': 4, 'tensor': 2}]}
    """
    from shardplan.shell.factor_options import read_axes
    from shardplan.shell.offload_option import read_offload
    from shardplan.shell.target import literal

    found: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        parts = [part.strip() for part in _PART.findall(values)]
        if not equals or not name.isidentifier() or not all(parts) or ",".join(_PART.findall(values)) != values or not parts:
            raise ShardplanError(f"--vary {text}: write it as NAME=VALUE,VALUE, for example batch=32,64")
        if name in found:
            raise ShardplanError(f"--vary gives {name!r} twice: give all of its values at once")
        match name:
            case "cluster" | "memory":
                found[name] = parts
            case "axes":
                found[name] = [read_axes([_inner(part)], "--vary axes") for part in parts]
            case "offload":
                found[name] = [read_offload(_globs(part)) for part in parts]
            case _:
                found[name] = [literal(part) for part in parts]
    return found


def _globs(text: str) -> list[str]:
    """The globs of one value: one, or several in brackets.

    >>> _globs("auto"), _globs("[*/mu/*, '*/nu/*']")
    (['auto'], ['*/mu/*', '*/nu/*'])
    """
    inner = _inner(text)
    return [text] if inner == text else [one.strip(" '\"") for one in inner.split(",")]


def _inner(text: str) -> str:
    """The text between brackets, or the whole text if it has none."""
    return text[1:-1] if text.startswith("[") and text.endswith("]") else text


def read_prices(file: str) -> dict[str, float]:
    """A price file: dollars for an hour of one device, by the name of the device or of the cluster.

    Raises:
        ShardplanError: if the file cannot be read, or if a price is no positive number.
    """
    try:
        table: dict[str, Any] = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ShardplanError(f"--price {file}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ShardplanError(f"--price {file}: not TOML: {error}") from error
    for name, dollars in table.items():
        if isinstance(dollars, dict):
            raise ShardplanError(f"--price {file}: {name} is a table: put names with dots or colons in quotes")
        if isinstance(dollars, bool) or not isinstance(dollars, int | float) or not 0 < dollars < float("inf"):
            raise ShardplanError(f"--price {file}: {name} = {dollars!r}: give dollars for an hour of one device, above 0")
    return {name: float(dollars) for name, dollars in table.items()}
