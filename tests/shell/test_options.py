"""An option means the same in every command: docs/cli.md lists which commands have it, and what a command has beside."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import shardplan
from models import mlp
from shardplan.shell.arguments import Parser
from shardplan.shell.cli import _parser, main

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
COMMANDS = _parser()[1]
EVERYWHERE = {"help", "json", "config"}
ALIAS = {"png"}


def _rows(head: str) -> list[list[str]]:
    """The rows of the table of docs/cli.md whose header begins so."""
    lines = TEXT[TEXT.index(head) :].splitlines()[2:]
    rows = [line.strip("| ").split("|") for line in lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]]
    return [[cell.strip() for cell in row] for row in rows]


def _names(cell: str) -> set[str]:
    return set(re.findall(r"`--([\w-]+)", cell))


COMMON = {name for row in _rows("| option | meaning |") for name in _names(row[0])}
LACKS = {row[0].strip("`"): row[1] for row in _rows("| command | of these")}
OWN = {row[0].strip("`"): _names(row[2]) for row in _rows("| command | of these")}


def _shown(parser: Parser) -> set[str]:
    return set(parser.shown_options) - EVERYWHERE - ALIAS


@pytest.mark.parametrize("command", LACKS)
def test_the_table_of_options_is_that_of_the_parsers(command: str) -> None:
    text = LACKS[command]
    lacks = COMMON - _names(text) if text.startswith("all but") else _names(text)
    assert _shown(COMMANDS[command]) == (COMMON - lacks) | OWN[command]


def test_the_table_has_every_command_with_a_target() -> None:
    assert set(LACKS) == {name for name, own in COMMANDS.items() if "cluster" in own.long_options} - {"calibrate", "reduce"}


@pytest.mark.parametrize("command", ["plan", "simulate", "sweep", "place"])
def test_pictures_have_one_option(command: str) -> None:
    options = COMMANDS[command].long_options
    assert options["draw"] is options["png"]


def test_auto_is_the_default_memory_limit_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    step, args = mlp.train_step(layers=2)
    default, auto = (shardplan.plan(step, *args, cluster="2x2", memory_limit=given) for given in (None, "auto"))
    assert (auto.memory_limit, auto.memory_limit_origin) == (default.memory_limit, default.memory_limit_origin)
    assert auto.memory_limit_origin
    swept = shardplan.sweep(mlp.train_step, vary={"memory": ["auto", "1MiB"]}, cluster="2x2")
    assert [p.limit_bytes for p in swept.points] == [default.memory_limit, 2**20]
    assert main(["plan", "models.mlp:train_step", "--cluster", "2x2", "--memory", "auto"]) == 0
    assert default.memory_limit_origin in capsys.readouterr().out


def test_a_command_hides_the_options_that_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["score", "--help"])
    assert "--pin" not in capsys.readouterr().out
    assert main(["completion", "bash"]) == 0
    score = next(line for line in capsys.readouterr().out.splitlines() if '"score") words' in line)
    assert "--specs" in score
    assert "--pin" not in score


def test_a_saved_plan_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "plan.json")
    target = ["models.mlp:train_step", "--set", "layers=2"]
    assert main(["plan", *target, "--cluster", "2x2", "-o", file]) == 0
    assert main(["compare", *target, "--cluster", "2x2"]) == 0
    planned = capsys.readouterr().out.rpartition("saved to")[2].partition("\n")[2]
    assert main(["compare", *target, "--plan", file]) == 0
    assert capsys.readouterr().out == planned
    assert main(["compare", *target, "--plan", file, "--memory", "1GiB"]) == 2
    assert "--memory is for a new plan" in capsys.readouterr().err
