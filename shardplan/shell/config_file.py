"""Options of commands from a file: ``--config run.toml``, else ``[tool.shardplan]`` of ./pyproject.toml.

A key is an option's name without dashes in front. Keys at the top go to every command that has such an option; those of a table
with a command's name go to that command alone, and win. A list repeats its option, a table writes ``NAME=VALUE``, true sets a
switch. What the command line gives wins; options that may be repeated add to those of the file.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardplan.errors import ShardplanError, nearest
from shardplan.shell.arguments import CONFIG, Parser

PROJECT = "pyproject.toml"


def with_config(argv: Sequence[str], parsers: Mapping[str, Parser], folder: Path) -> list[str]:
    """The words of a command line, those of its file of options behind the command. ``folder`` has the project's file.

    Raises:
        ShardplanError: for a file that cannot be read, and for a key or a value that no command takes; it names file and key.
    """
    words = list(argv)
    at = next((n for n, word in enumerate(words) if word in parsers), None)
    if at is None:
        return words
    command, parser, behind = words[at], parsers[words[at]], at + 1
    if parser.commands and behind < len(words) and words[behind] in parser.commands:
        parser, behind = parser.commands[words[behind]], behind + 1
    file = _source(words[behind:], folder)
    if file is None:
        return words
    own = _options(file, _read(file), command, parser, parsers)
    return [*words[:behind], *(word for key, value in own.items() for word in _words(file, key, value, parser)), *words[behind:]]


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


def _options(file: Path, table: Mapping[str, Any], command: str, parser: Parser, parsers: Mapping[str, Parser]) -> dict[str, Any]:
    """The options that a table has for a command. A table with a command's name is that command's."""
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
    return {key: value for key, value in {**top, **own}.items() if key in parser.long_options}


def _known(parser: Parser) -> set[str]:
    """The options of a command and of its own commands that a file may have."""
    own = set(parser.long_options).union(*(own.long_options for own in parser.commands.values()))
    return own - {"help", CONFIG.removeprefix("--")}


def _words(file: Path, key: str, value: Any, parser: Parser) -> list[str]:
    """An option as words of a command line."""
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
    return [f"--{key}={text}" for text in values]


def _text(file: Path, key: str, value: Any) -> str:
    """A value as the command line has it: lists as Python literals."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int | float | str):
        return str(value)
    if isinstance(value, list) and all(isinstance(item, int | float | str) for item in value):
        return repr(tuple(value))
    raise ShardplanError(f"{file}: {key} has {json.dumps(value, default=str)}: give a number, a text, or a list of them")
