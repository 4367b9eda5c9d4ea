"""Options from a file, and completion: both know the options of every command."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from shardplan.errors import ShardplanError
from shardplan.shell.cli import _parser, main
from shardplan.shell.completion import SHELLS, script_of
from shardplan.shell.config_file import with_config

_, COMMANDS = _parser()
TARGET = "models.mlp:train_step"


def words(folder: Path, text: str, *argv: str, name: str = "run.toml") -> list[str]:
    (folder / name).write_text(text)
    return list(with_config(argv, COMMANDS, folder).words)


def test_keys_become_options_behind_the_command(tmp_path: Path) -> None:
    text = """
cluster = "2x4"
donate = [0, 1]
set = { layers = 2, dims = [1, 2] }
axes = { data = 4, tensor = 2 }
time-budget = 2.5
json = true
draw = "of plan alone.png"
[pin]
"*/kernel" = "None, gpu"
[verify]
steps = 5
cluster = "4"
"""
    given = ["verify", TARGET, "--config", str(tmp_path / "run.toml"), "--set", "width=64"]
    found = words(tmp_path, text, *given)
    assert found[0] == "verify"
    assert found[-5:] == given[1:]
    assert sorted(found[1:-5]) == [
        "--axes=data=4",
        "--axes=tensor=2",
        "--cluster=4",
        "--donate=0",
        "--donate=1",
        "--json",
        "--pin=*/kernel=None, gpu",
        "--set=dims=(1, 2)",
        "--set=layers=2",
        "--steps=5",
        "--time-budget=2.5",
    ]


def test_the_project_has_a_table_and_a_named_file_takes_its_place(tmp_path: Path) -> None:
    project = '[tool.shardplan]\ncluster = "2x4"\n'
    assert words(tmp_path, project, "plan", TARGET, name="pyproject.toml") == ["plan", "--cluster=2x4", TARGET]
    named = words(tmp_path, 'memory = "1GiB"', "plan", TARGET, f"--config={tmp_path / 'run.toml'}")
    assert named == ["plan", "--memory=1GiB", TARGET, f"--config={tmp_path / 'run.toml'}"]
    (tmp_path / "pyproject.toml").write_text("[tool.other]\ncluster = 3\n")
    assert with_config(["plan", TARGET], COMMANDS, tmp_path).words == ("plan", TARGET)
    for plain in (["--version"], ["doctor"], ["plan", TARGET, "--config"]):
        assert with_config(plain, COMMANDS, tmp_path).words == tuple(plain)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("clustr = 1", r"run.toml: clustr is no option of any command \(nearest: cluster"),
        ("[plan]\nstep = 1", r"run.toml: \[plan\] step is no option of plan"),
        ("json = 3", "json = 3: it is a switch, write true or false"),
        ("cluster = [1, 2]", r"cluster = \[1, 2\]: it takes one value"),
        ("cluster = [[[1]]]", r"cluster has \[\[1\]\]: give a number"),
        ("cluster = []", r"cluster = \[\]: it takes one value"),
        ("memory = { a = 1 }", 'memory has {"a": 1}: give a number'),
        ('objective = "speed"', "objective = 'speed': use one of time, bytes"),
        ('donate = ["x"]', "donate = 'x': invalid literal"),
        ("help = true", "help is no option of any command"),
        ("cluster = ", "run.toml: is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ShardplanError, match=said):
        words(tmp_path, text, "plan", TARGET, "--config", str(tmp_path / "run.toml"))


def test_a_table_with_a_commands_name_is_that_commands(tmp_path: Path) -> None:
    text = '[plan]\nobjective = "bytes"\n[mesh]\ncluster = "2x4"\naxes = "8"\n'
    given = ["--config", str(tmp_path / "run.toml")]
    assert words(tmp_path, text, "verify", TARGET, *given) == ["verify", TARGET, *given], "verify has an option --plan"
    assert words(tmp_path, text, "plan", TARGET, *given) == ["plan", "--objective=bytes", TARGET, *given]
    assert words(tmp_path, text, "mesh", "matrices", *given) == ["mesh", "matrices", "--cluster=2x4", "--axes=8", *given]
    assert words(tmp_path, text, "mesh", "list", *given) == ["mesh", "list", *given]


def test_the_last_file_counts(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('cluster = "4"')
    given = ["--config", str(tmp_path / "run.toml"), "--config", str(tmp_path / "other.toml")]
    assert words(tmp_path, 'cluster = "2x4"', "plan", *given) == ["plan", "--cluster=4", *given]


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", TARGET, "--config", "nowhere.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardplan: nowhere.toml: cannot be read")
    assert said.count("\n") == 1


def test_the_command_line_wins(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.shardplan]\ncluster = "nothing"\njson = true\n[tool.shardplan.set]\nlayers = 2\n'
    )
    assert main(["plan", TARGET, "--cluster", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axes"] == {"gpu": 2}
    assert not any("layer_2" in path for path in found["in_specs"])


@pytest.mark.parametrize(
    ("text", "given", "own"),
    [
        ('cluster = "4"\nmemory = "1GiB"\ndonate = [0]', "verify TARGET --plan plan.json", []),
        ('cluster = "4"\nset = { layers = 2 }', "simulate TARGET --plan=plan.json", ["--set=layers=2"]),
        ('memory = "1GiB"\n[verify]\nplan = "plan.json"', "verify TARGET", ["--plan=plan.json"]),
        ('cluster = "4"\nmemory = "1GiB"', "sweep TARGET --vary cluster=2,4", ["--memory=1GiB"]),
        (
            'one-choice = "none"\nset = { batch = 8, width = 4 }',
            "sweep TARGET --vary one-choice=layers --vary batch=1,2",
            ["--set=width=4"],
        ),
        (
            'cluster = "8"\nremat = "auto"\naxes = { data = 8 }\nplacement = "auto"',
            "score TARGET --specs s.json",
            ["--cluster=8"],
        ),
        ('[score]\nrules = "rules.json"', "score TARGET --specs s.json", []),
        ("[score]\naxes = { data = 8 }", "score TARGET", ["--axes=data=8"]),
        ("axes = { data = 8 }", "plan TARGET --axes data=4,tensor=2", []),
        ('axes = "data=8,tensor=2"', "plan TARGET --axes data=4", ["--axes=tensor=2"]),
        ("axes = { data = 8 }", "plan TARGET --factors gpu=2x4", []),
        ('factors = { gpu = "2x4", node = 2 }', "plan TARGET --factors=gpu=8", ["--factors=node=2"]),
        ("set = { layers = 2, width = 4 }", "plan TARGET --set layers=3", ["--set=width=4"]),
        ("pin = { 'a/*' = 'gpu', b = 'gpu' }", "plan TARGET --pin a/*=None", ["--pin=b=gpu"]),
        ("donate = [0]", "plan TARGET --donate 1", ["--donate=0"]),
        ('placement = "auto"', "compare TARGET", []),
        ("set = { layers = 2 }", "export plan.json -o rules.yml", []),
        ("set = { layers = 2 }", "export -o step.stablehlo plan.json TARGET", ["--set=layers=2"]),
    ],
)
def test_what_the_command_line_replaces_and_what_a_command_refuses_is_left_out(
    tmp_path: Path, text: str, given: str, own: list[str]
) -> None:
    command, *others = given.split()
    found = words(
        tmp_path, f"[tool.shardplan]\n{text}".replace("\n[", "\n[tool.shardplan."), *given.split(), name="pyproject.toml"
    )
    assert found == [command, *own, *others]


def test_an_error_that_names_an_option_names_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.shardplan]\ncluster = "4"\naxes = { data = 3 }\nmemory = "1GiB"\n')
    assert main(["plan", TARGET]) == 2
    assert capsys.readouterr().err.endswith("/pyproject.toml sets cluster, axes)\n")
    assert main(["plan", TARGET, "--cluster=nothing"]) == 2
    assert "pyproject.toml" not in capsys.readouterr().err


# -- completion --------------------------------------------------------------------------------------------------------


def completed(*line: str) -> set[str]:
    """What bash offers for the last of these words."""
    script = script_of("bash", COMMANDS) + f"\nCOMP_WORDS=({' '.join(map(repr, line))}); COMP_CWORD={len(line) - 1}; _shardplan\n"
    done = subprocess.run(["bash", "-c", script + 'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes_commands_options_and_choices() -> None:
    assert completed("shardplan", "sc") == {"score"}
    assert {"--cluster", "--config", "--placement"} <= completed("shardplan", "plan", "--")
    assert "--steps" not in completed("shardplan", "plan", "--")
    assert completed("shardplan", "plan", "x:y", "--objective", "b") == {"bytes"}
    assert {"list", "show", "matrices"} <= completed("shardplan", "mesh", "")
    assert {"--axes", "--over"} <= completed("shardplan", "mesh", "matrices", "--")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)


def test_a_value_may_be_attached_to_a_short_option(tmp_path: Path) -> None:
    """The file's ``memory`` is for planning, which a given plan leaves out."""
    for output in (["-ot.json"], ["-o", "t.json"]):
        given = ["simulate", TARGET, *output, "--plan", "p.json"]
        assert words(tmp_path, '[tool.shardplan]\nmemory = "1GiB"', *given, name="pyproject.toml") == given


def test_positional_words_may_stand_on_both_sides_of_options() -> None:
    parser, _ = _parser()
    for argv in (["explain", "p.json", "--json", "w"], ["explain", "--json", "p.json", "w"]):
        options = parser.parse_args(argv)
        assert (options.file, options.path, options.json) == ("p.json", "w", True)
    for argv in (["explain", "--json", "--", "p.json", "-w"], ["explain", "--json", "p.json", "--", "-w"]):
        options = parser.parse_args(argv)
        assert (options.file, options.path, options.json) == ("p.json", "-w", True)
