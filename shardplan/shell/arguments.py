"""Shared parts of the commands' parsers: one-line errors, options with units and counts, and the options of a TARGET."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from shardplan.errors import ShardplanError
from shardplan.report.report import Report
from shardplan.shell import terminal

CONFIG = "--config"


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line. ``long_options`` has each option by its name without dashes,
    ``repeated`` the names of those that may be repeated, and ``commands`` the parsers of subcommands.

    All commands share one file of options (`shardplan.shell.config_file`). ``refused`` are options at its top level that this
    command does not take. ``replaces`` maps an option of the command line to the options of the file that it replaces.
    ``needs`` has the number of positional words that an option of the file needs to apply.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.long_options: dict[str, argparse.Action] = {}
        self.short_options: set[str] = set()
        self._intermixed = False
        self.repeated: set[str] = set()
        self.commands: Mapping[str, Parser] = {}
        self.refused: frozenset[str] = frozenset()
        self.replaces: Mapping[str, frozenset[str]] = {}
        self.needs: Mapping[str, int] = {}
        super().__init__(*args, **options)

    @property
    def shown_options(self) -> dict[str, argparse.Action]:
        """`long_options` without those that the command refuses."""
        return {name: action for name, action in self.long_options.items() if name not in self.refused}

    def refuse(self, names: Iterable[str]) -> None:
        """Hides from the help the options that this command does not take. At the top of a file of options they are allowed."""
        self.refused = frozenset(names)
        for name in self.refused:
            self.long_options[name].help = argparse.SUPPRESS

    def add_subparsers(self, **options: Any) -> Any:
        """Adds subcommands, and records their parsers."""
        action = super().add_subparsers(**options)
        self.commands = action.choices
        return action

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Adds an argument, and records its long names."""
        action = super().add_argument(*names, **options)
        long = [name[2:] for name in action.option_strings if name.startswith("--")]
        self.short_options.update(name for name in action.option_strings if not name.startswith("--"))
        self.long_options.update(dict.fromkeys(long, action))
        self.repeated.update(long if options.get("action") == "append" else [])
        return action

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses the words of a command. Positional words may stand on both sides of options, or all behind ``--``."""
        # of a "--", argparse's second pass over the positional words knows nothing
        if self.commands or self._intermixed or "--" in (args or ()):
            return super().parse_known_args(args, namespace)
        self._intermixed = True  # argparse comes back here
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._intermixed = False

    def error(self, message: str) -> NoReturn:
        """Prints one line and exits with code 2."""
        terminal.say(f"{self.prog}: {message} (see {self.prog} --help)", "bad")
        raise SystemExit(2)


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], Report], what: str) -> Parser:
    """Adds a command with ``--json`` and ``--config``; ``what`` is its help text."""
    one = commands.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False)
    one.add_argument("--json", action="store_true", help="print one JSON object to stdout")
    one.add_argument(CONFIG, metavar="FILE", help="a TOML file of options (default: [tool.shardplan] of ./pyproject.toml)")
    one.set_defaults(run=run)
    return one


def size(text: str) -> int:
    """The value of ``--bytes`` as a number of bytes."""
    from shardplan.sizes import parse_bytes

    return parse_bytes(text, what="--bytes")


def count(text: str, *, least: int = 1) -> int:
    """A whole number of at least ``least``."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is less than {least}")
    return value


def add_target_options(one: Parser) -> None:
    """Adds a TARGET and the options of planning it."""
    one.replaces = {"axes": frozenset({"factors"}), "factors": frozenset({"axes"})}
    one.add_argument(
        "target",
        metavar="TARGET",
        help="package.module:factory or file.py:factory; the factory returns (step, args)",
    )
    one.add_argument(
        "--cluster", metavar="CLUSTER", help='a preset with its node count ("dgx-h100:4"), a TOML file or a shape ("2x4")'
    )
    one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of the factory; may be repeated")
    one.add_argument(
        "--memory",
        metavar="auto|SIZE",
        help='memory limit per device, such as "70GiB" (default: auto, what JAX\'s allocator gives)',
    )
    one.add_argument("--objective", default="time", choices=["time", "bytes"], help="what the plan has least of (default: time)")
    one.add_argument(
        "--backend",
        default="auto",
        choices=["auto", "explicit", "specs"],
        help="what runs the plan: each device its own program (explicit), or XLA's partitioner (specs)",
    )
    _add_mesh_options(one)
    add_step_options(one)
    one.add_argument(
        "--time-budget", type=float, metavar="SECONDS", help="limit for all of planning; after it, the best plan so far is used"
    )
    one.add_argument("--one-choice", metavar="auto|none|timesteps|layers", help="what shares one layout (default: auto)")
    one.add_argument(
        "--time-model",
        metavar="overlap|sum",
        help="how seconds add up: communication hides behind compute, or everything takes its turn (default: overlap)",
    )
    _add_memory_options(one)


def add_step_options(one: argparse.ArgumentParser) -> None:
    """Adds what a step allows: ``--donate`` and ``--replicate``."""
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


def _add_memory_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("--remat", metavar="none|auto", help="auto: activations may be computed again (default: none)")
    one.add_argument(
        "--offload",
        action="append",
        default=[],
        metavar="none|auto|GLOB",
        help="arguments that stay in host memory between steps, such as '*/mu/*'; may be repeated. auto: as few as the memory "
        "limit asks for, and activations where that is not enough (default: none)",
    )


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
        help="sizes of data, fsdp, tensor, sequence, expert or replica: data=16,tensor=4 (default: the search decides); "
        "stage=4 makes a pipeline, stage=4,chunk=2 one of two chunks of layers a stage",
    )
    one.add_argument("--microbatches", type=int, metavar="N", help="parts of the batch that run one after the other (default: 1)")
    one.add_argument(
        "--placement",
        metavar="one|auto|FILE",
        help="one: every op on all devices; auto: pipelines and branches too, where they are faster; or a strategy that place "
        "saved: ops run on its devices (default: one)",
    )


def check_outputs(files: Mapping[str, str | None], options: argparse.Namespace) -> None:
    """Refuses output files, by option, that could not be written when the work is done, or that the command reads.

    Raises:
        ShardplanError: for an empty name, a folder that does not exist or may not be written, a path that is not a file, and a
            file that two of ``files``, or another of the ``options``, name.
    """
    from shardplan.plans.files import check_writable

    seen: dict[Path, str] = {}
    for option, file in files.items():
        if file == "":
            raise ShardplanError(f"{option} is empty: give the name of a file")
        if file is not None:
            check_writable(Path(file))
            other = seen.setdefault(Path(file).resolve(), option)
            if other != option:
                raise ShardplanError(f"{other} and {option} both name {file!r}: give one of them another name")
            for read, names in _files_read(options).items():
                if any(Path(name).resolve() == Path(file).resolve() for name in names):
                    raise ShardplanError(f"{option} names {file!r}, which {read} reads: give it another name")


def _files_read(options: argparse.Namespace) -> dict[str, list[str]]:
    """The files that the options of a command may name, by option."""
    module = (getattr(options, "target", None) or "").partition(":")[0]
    varied = [word for text in getattr(options, "vary", ()) for word in text.partition("=")[2].split(",")]
    clusters = [*(getattr(options, "cluster", None) or "").split(), *varied]
    plan = getattr(options, "plan", None)
    starts = getattr(options, "start", None) or ""
    price = getattr(options, "price", None)
    return {
        "TARGET": [module, module.replace(".", "/") + ".py"] if module else [],
        "--cluster": [word for part in clusters for word in (part, *part.split("@")) if word],
        "--plan": [plan] if plan else [],
        "--price": [price] if price else [],
        **{f"--{name}": [file] for name in ("specs", "rules") if (file := getattr(options, name, None))},
        "--start": [name.strip() for name in starts.split(",") if name.strip()],
    }
