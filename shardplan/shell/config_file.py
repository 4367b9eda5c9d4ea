"""Options of commands from a file: ``--config run.toml``, else ``[tool.shardplan]`` of ./pyproject.toml.

A key is an option's name without its leading dashes. Keys at the top level apply to every command that takes the option. Keys
in a table named after a command apply to that command alone, and take precedence. A list repeats its option, a table gives
``NAME=VALUE`` pairs, and true sets a switch.

The command line overrides the file. It also overrides options that it replaces: ``--plan`` replaces those of planning, and
``--vary`` replaces fixed values. ``NAME=VALUE`` options are overridden name by name; other options that may be repeated add to
those of the file.
"""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardplan.errors import ShardplanError, nearest
from shardplan.shell.arguments import CONFIG, Parser

PROJECT = "pyproject.toml"


_LISTS = ("axes", "factors")
"""Options that take several pairs in one word, separated by commas."""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a command line; ``own`` are those that come from the ``file`` of options."""

    words: tuple[str, ...]
    file: Path | None = None
    own: tuple[str, ...] = ()

    def remark(self, text: str) -> str:
        """For an error that names options of the file or their values, a remark that the file sets them."""
        pairs = [word.removeprefix("--").partition("=")[::2] for word in self.own]
        named = dict.fromkeys(key for key, value in pairs if _is_named(key, value, text))
        return f" ({self.file} sets {', '.join(named)})" if named and str(self.file) not in text else ""


def _is_named(key: str, value: str, text: str) -> bool:
    """Whether a text names an option, its value, or the name in a ``NAME=VALUE``."""
    said = [
        rf"(--|\b){re.escape(key)}[=:]",
        rf"--{re.escape(key)}\b",
        *(re.escape(repr(part)) for part in (value, value.partition("=")[0]) if part),
    ]
    return any(re.search(pattern, text) for pattern in said)


def with_config(argv: Sequence[str], parsers: Mapping[str, Parser], folder: Path) -> Words:
    """The words of a command line, with those of its file of options after the command. ``folder`` has the project's file.

    Raises:
        ShardplanError: for a file that cannot be read, and for a key or a value that no command takes; it names file and key.
    """
    words = tuple(argv)
    at = next((n for n, word in enumerate(words) if word in parsers), None)
    if at is None:
        return Words(words)
    command, parser, behind = words[at], parsers[words[at]], at + 1
    if parser.commands and behind < len(words) and words[behind] in parser.commands:
        parser, behind = parser.commands[words[behind]], behind + 1
    file = _source(words[behind:], folder)
    if file is None:
        return Words(words)
    given = _given(words[behind:], parser)
    taken = _options(file, _read(file), command, parser, parsers, given)
    own = tuple(w for key, value in taken.items() for w in _words(file, key, value, parser, _names(key, given, parser)))
    return Words((*words[:behind], *own, *words[behind:]), file, own)


_FREE = ""
"""The key of `_given` for positional words."""


def _given(words: Sequence[str], parser: Parser) -> dict[str, list[str]]:
    """The values that the command line gives each option of a command, and its positional words."""
    found: dict[str, list[str]] = {_FREE: []}
    left = iter(words)
    for word in left:
        if word == "--":
            found[_FREE] += left
            break
        name, equals, value = word.removeprefix("--").partition("=")
        action = parser.long_options.get(name) if word.startswith("--") else None
        if action is not None:
            found.setdefault(name, []).append(value if equals else "" if action.nargs == 0 else next(left, ""))
        elif word in parser.short_options:
            next(left, "")  # its value
        elif word.startswith("-") and word != "-":  # a short option with its value attached
            continue
        else:
            found[_FREE].append(word)
    return found


def _replaced(options: Iterable[str], parser: Parser) -> set[str]:
    """The options that these replace."""
    return {name for option in options for name in parser.replaces.get(option, ())}


def _varied(given: Mapping[str, Sequence[str]]) -> set[str]:
    """The names that the command line varies."""
    return _names_in(given.get("vary", ()))


def _names(key: str, given: Mapping[str, Sequence[str]], parser: Parser) -> set[str]:
    """The names that the command line sets, or varies, for an option ``key`` with values ``NAME=VALUE``."""
    if key not in parser.repeated or "=" not in str(parser.long_options[key].metavar):
        return set()
    return _names_in(_pairs(key, given.get(key, ()))) | (_varied(given) if key == "set" else set())


def _pairs(key: str, texts: Sequence[str]) -> Sequence[str]:
    return ",".join(texts).split(",") if key in _LISTS else texts


def _names_in(pairs: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].strip() for text in pairs if "=" in text}


def _source(words: Sequence[str], folder: Path) -> Path | None:
    """The file of options: the last one that the user names, else the project's."""
    named: list[str] = []
    for n, word in enumerate(words):
        if word == CONFIG and n + 1 < len(words):
            named.append(words[n + 1])
        elif word.startswith(f"{CONFIG}="):
            named.append(word.partition("=")[2])
    project = folder / PROJECT
    return Path(named[-1]) if named else project if project.is_file() else None


def _read(file: Path) -> Mapping[str, Any]:
    """The table of options in a file; empty for a project without one."""
    try:
        content: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShardplanError(f"{file}: cannot be read ({error.strerror}): give a TOML file of options") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShardplanError(f"{file}: is not TOML: {error}") from error
    if file.name != PROJECT:
        return content
    tools = content.get("tool", {})
    own = tools.get("shardplan", {}) if isinstance(tools, dict) else {}
    if not isinstance(own, dict):
        raise ShardplanError(f'{file}: [tool.shardplan] is no table: write options below it, such as cluster = "2x4"')
    return own


def _options(
    file: Path,
    table: Mapping[str, Any],
    command: str,
    parser: Parser,
    parsers: Mapping[str, Parser],
    given: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """A table's options for a command, without those that ``given`` overrides. A subtable is for the command of its name."""
    known = {name: _known(own) for name, own in parsers.items()}
    every = set[str]().union(*known.values())
    top = {key: value for key, value in table.items() if not (key in parsers and isinstance(value, dict))}
    for key in top:
        if key not in every:
            raise ShardplanError(f"{file}: {key} is no option of any command{nearest(key, sorted(every))}")
    for name in table.keys() - top.keys():
        for option in table[name]:
            if option not in known[name]:
                raise ShardplanError(f"{file}: [{name}] {option} is no option of {name}{nearest(option, sorted(known[name]))}")
    own = table[command] if command in table.keys() - top.keys() else {}
    idle = {name.replace("_", "-") for name in _varied(given)} | _replaced(given, parser)
    idle |= given.keys() - parser.repeated
    idle |= {name for name, count in parser.needs.items() if len(given[_FREE]) < count}
    shared = {key: value for key, value in top.items() if key not in parser.refused | _replaced(own, parser)}
    return {key: value for key, value in (shared | own).items() if key in parser.long_options and key not in idle}


def _known(parser: Parser) -> set[str]:
    """The options of a command and its subcommands that a file may set."""
    own = set(parser.long_options).union(*(own.long_options for own in parser.commands.values()))
    return own - {"help", CONFIG.removeprefix("--")}


def _words(file: Path, key: str, value: Any, parser: Parser, but: set[str]) -> list[str]:
    """An option as words of a command line, without its values for the names ``but``."""
    action = parser.long_options[key]
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ShardplanError(f"{file}: {key} = {value!r}: it is a switch, write true or false")
        return [f"--{key}"] if value else []
    repeated = key in parser.repeated
    if isinstance(value, dict) and repeated:
        values = [f"{name}={_text(file, key, item)}" for name, item in value.items()]
    else:
        values = [_text(file, key, item) for item in (value if isinstance(value, list) else [value])]
    if len(values) != 1 and not repeated:
        raise ShardplanError(f"{file}: {key} = {value!r}: it takes one value")
    for text in values:
        _check(file, key, text, action)
    if but:
        values = [text for text in _pairs(key, values) if text.partition("=")[0].strip() not in but]
    return [f"--{key}={text}" for text in values]


def _check(file: Path, key: str, text: str, action: argparse.Action) -> None:
    """Refuses a value that the option does not take."""
    if action.choices is not None and text not in action.choices:
        raise ShardplanError(f"{file}: {key} = {text!r}: use one of {', '.join(map(str, action.choices))}")
    if callable(action.type):
        try:
            action.type(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ShardplanError(f"{file}: {key} = {text!r}: {error}") from error


def _text(file: Path, key: str, value: Any) -> str:
    """A value as text for the command line; a list becomes a Python literal."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float | str):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, int | float | str) for item in value):
        return repr(tuple(value))
    raise ShardplanError(f"{file}: {key} has {json.dumps(value, default=str)}: give a number, a text, or a list of them")
