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
    local command="${{COMP_WORDS[1]}}"
    case "$command" in
        {nested})
            if [ "$COMP_CWORD" -gt 2 ]; then command="$command ${{COMP_WORDS[2]}}"; fi ;;
    esac
    case "$command ${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
    esac
    if [ -z "$words" ]; then
        case "$command" in
{commands_of}
        esac
    fi
    if [ -z "$words" ] && [[ "$current" == -* ]]; then
        case "$command" in
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
    return Report(script, {"shell": options.shell, "script": script}, for_people=False)


def script_of(shell: str, parsers: Mapping[str, Parser]) -> str:
    """The script for one of `SHELLS`."""
    if shell == "fish":
        return "\n".join(_fish(parsers))
    bash = _bash(parsers)
    return bash if shell == "bash" else f"autoload -Uz bashcompinit && bashcompinit\n{bash}"


def _flat(parsers: Mapping[str, Parser]) -> dict[str, Parser]:
    """The parser of each command, and of each subcommand under both words."""
    own = {f"{name} {inner}": p for name, parser in parsers.items() for inner, p in parser.commands.items()}
    return {**parsers, **own}


def _bash(parsers: Mapping[str, Parser]) -> str:
    options, choices = list[str](), list[str]()
    nested = {name: parser.commands for name, parser in parsers.items() if parser.commands}
    for name, parser in _flat(parsers).items():
        known = parser.shown_options
        options.append(f'            "{name}") words="{" ".join(f"--{option}" for option in known)}" ;;')
        choices += [
            f'        "{name} --{option}") words="{" ".join(map(str, action.choices))}" ;;'
            for option, action in known.items()
            if action.choices
        ]
    return _BASH.format(
        commands=" ".join(parsers),
        nested="|".join(nested),
        commands_of="\n".join(f'            {name}) words="{" ".join(own)}" ;;' for name, own in nested.items()),
        choices="\n".join(choices),
        options="\n".join(options),
    )


def _fish(parsers: Mapping[str, Parser]) -> list[str]:
    lines = [f"complete -c shardplan -n __fish_use_subcommand -a {name}" for name in parsers]
    for name, parser in parsers.items():
        lines += [f"complete -c shardplan -n '__fish_seen_subcommand_from {name}' -a {inner}" for inner in parser.commands]
    for name, parser in _flat(parsers).items():
        seen = " && ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for option, action in parser.shown_options.items():
            values = f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else "" if action.nargs == 0 else " -r"
            lines.append(f"complete -c shardplan -n '{seen}' -l {option}{values}")
    return lines
