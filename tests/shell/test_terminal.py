"""Colours are for terminals alone, and change no character of the text."""

from __future__ import annotations

import importlib.util
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shardplan.report.report import Report
from shardplan.shell import terminal
from shardplan.shell.cli import main

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
ROOT = Path(__file__).parents[2]


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def shown(*words: str, **environment: str) -> str:
    """What a terminal of 40 columns gets of a command: stdout and stderr."""
    master, slave = pty.openpty()
    kept = {n: v for n, v in os.environ.items() if n not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    env = {**kept, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment}
    command = [sys.executable, "-m", "shardplan", *words]
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, cwd=ROOT)
    os.close(slave)
    found = b""
    try:
        while more := os.read(master, 4096):
            found += more
    except OSError:  # the process has closed it
        pass
    finally:
        process.wait()
        os.close(master)
    return found.decode().replace("\r\n", "\n")


def test_a_terminal_has_colours_and_the_same_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "list"]) == 0
    plain = capsys.readouterr().out
    assert not ESCAPE.search(plain)
    coloured = shown("mesh", "list")
    assert ESCAPE.search(coloured)
    assert ESCAPE.sub("", coloured) == plain


def test_errors_are_red() -> None:
    said = shown("mesh", "show", "nowhere")
    assert said.startswith("\x1b[31mshardplan: no cluster 'nowhere'")
    assert said.endswith("\x1b[0m\n")
    assert shown("mesh", "show").startswith("\x1b[31mshardplan mesh show: ")


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}])
def test_who_wants_no_colours_gets_none(environment: dict[str, str]) -> None:
    assert not ESCAPE.search(shown("mesh", "list", **environment))


@pytest.mark.parametrize(
    ("environment", "stream", "wanted"),
    [
        ({}, Terminal(), True),
        ({}, io.StringIO(), False),
        ({"FORCE_COLOR": "1"}, io.StringIO(), True),
        ({"FORCE_COLOR": "1", "TERM": "dumb"}, io.StringIO(), True),
        ({"FORCE_COLOR": ""}, io.StringIO(), False),
        ({"NO_COLOR": ""}, Terminal(), True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
    ],
)
def test_the_environment_decides(environment: dict[str, str], stream: io.StringIO, wanted: bool) -> None:
    assert terminal.coloured(stream, environment) is wanted


def test_without_rich_all_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not terminal.coloured(Terminal(), {"FORCE_COLOR": "1"})


def test_long_lines_markup_and_tabs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = f"a title\n  [bold]{'x' * 500} :smile: 127.0.0.1\n  a\ttab\n  {{'a': 1}} \\[x] \u00d7\n  trailing  \n\nend"
    stream = io.StringIO()
    terminal.show(Report(text, None), stream)
    assert ESCAPE.search(stream.getvalue())
    assert ESCAPE.sub("", stream.getvalue()) == f"{text}\n"


def test_json_and_scripts_have_no_colours(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["mesh", "list", "--json"]) == main(["completion", "bash"]) == 0
    assert not ESCAPE.search(capsys.readouterr().out)
    assert main(["mesh", "list"]) == 0
    assert ESCAPE.search(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, {"NO_COLOR": "1"}])
def test_a_long_search_shows_its_best_plan_and_leaves_the_report_alone(environment: dict[str, str]) -> None:
    words = ["plan", "models.gpt:train_step", "--cluster", "2x2x2", "--set", "layers=4", "--set", "batch=64"]
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(*words, **environment))
    bar, title, report = text.partition("step        models.gpt:train_step")
    assert re.search(r"best \d+ us, gap \d+\.\d%", bar)
    assert "pricing the baselines" in bar
    piped = subprocess.run([sys.executable, "-m", "shardplan", *words], capture_output=True, text=True, cwd=ROOT, check=True)
    assert piped.stderr == ""
    own, other = ([line for line in lines.splitlines() if "planned in" not in line] for lines in (title + report, piped.stdout))
    assert own == other
