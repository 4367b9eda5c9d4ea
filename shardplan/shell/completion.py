"""The command `shardplan completion`: a script with which a shell completes commands, options and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from shardplan.report.report import Report
from shardplan.shell.arguments import Parser, add_command

SHELLS = {
    "bash": 'eval "$(shardplan completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(shardplan completion zsh)" in ~/.zshrc',
    "fish": "shardplan completion fish > ~/.config/fish/completions/shardplan.fish",
}
"""Where each script belongs."""

_BASH = """_shardplan() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{commands}" -- "$current"))
        return
    fi
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    esac
    if [ -z "$words" ] && [[ "$current" == -* ]]; then
        case "${{COMP_WORDS[1]}}" in
{options}
        esac
    fi
    if [ -n "$words" ]; then
        COMPREPLY=($(compgen -W "$words" -- "$current"))
    else
        COMPREPLY=($(compgen -f -- "$current"))
    fi
}}
complete -o filenames -F _shardplan shardplan"""


def add_completion_command(commands: Any) -> None:
    """Adds `completion`."""
    one = add_command(commands, "completion", partial(_completion, commands.choices), "print the completion script of a shell")
    one.add_argument("shell", choices=list(SHELLS), help="; ".join(SHELLS.values()).replace("%", "%%"))


def _completion(parsers: Mapping[str, Parser], options: argparse.Namespace) -> Report:
    script = script_of(options.shell, parsers)
    return Report(script, {"shell": options.shell, "script": script})


def script_of(shell: str, parsers: Mapping[str, Parser]) -> str:
    """The script for one of `SHELLS`."""
    if shell == "fish":
        return "\n".join(_fish(parsers))
    bash = _bash(parsers)
    return bash if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{bash}"


def _known(parser: Any) -> dict[str, argparse.Action]:
    """The options of a command; none for one with commands of its own."""
    return parser.long_options if isinstance(parser, Parser) else {}


def _bash(parsers: Mapping[str, Parser]) -> str:
    options, choices = list[str](), list[str]()
    for name, parser in parsers.items():
        known = _known(parser)
        options.append(f'            {name}) words="{" ".join(f"--{option}" for option in known)}" ;;')
        choices += [
            f'        "{name} --{option}") words="{" ".join(map(str, action.choices))}" ;;'
            for option, action in known.items()
            if action.choices
        ]
    return _BASH.format(commands=" ".join(parsers), choices="\n".join(choices), options="\n".join(options))


def _fish(parsers: Mapping[str, Parser]) -> list[str]:
    lines = [f"complete -c shardplan -n __fish_use_subcommand -a {name}" for name in parsers]
    for name, parser in parsers.items():
        for option, action in _known(parser).items():
            values = f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else "" if action.nargs == 0 else " -r"
            lines.append(f"complete -c shardplan -n '__fish_seen_subcommand_from {name}' -l {option}{values}")
    return lines
