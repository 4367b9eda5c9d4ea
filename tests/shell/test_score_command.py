"""`shardplan score`: files of specs and rules, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from shardplan.shell.cli import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_the_score_as_json(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "rules.json").write_text(json.dumps({"batch/*": "P(('node', 'gpu'))", "*kernel": ["gpu", None]}))
    argv = ["score", "models.mlp:train_step", "--cluster", "2x4", "--rules", "rules.json", "--measure", "--json"]
    assert main(argv) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.keys() >= {"step_time_s", "plan_s", "communication_bytes", "peak_bytes", "fits", "losses", "unasked"}
    assert all(row.keys() >= {"path", "source", "seconds", "bytes", "instead"} for row in found["losses"])
    assert all(row.keys() >= {"kind", "bytes", "source"} for row in found["unasked"])
    measured = found["measured"]
    assert measured["communication_bytes"] > 0
    assert measured["communication_bytes"] == pytest.approx(sum(row["measured"] for row in measured["collectives"].values()))
    assert found["communication_bytes"] == pytest.approx(sum(row["predicted"] for row in measured["collectives"].values()))


def test_what_plan_prints_is_a_file_of_specs(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["models.mlp:train_step", "--cluster", "2x4", "--set", "width=512", "--set", "batch=512"]
    assert main(["plan", *target, "--factors", "gpu=2x2", "--json"]) == 0
    printed = capsys.readouterr().out
    (files / "plan.json").write_text(printed)
    assert main(["score", *target, "--specs", "plan.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best_s"] == pytest.approx(json.loads(printed)["step_time_s"])
    assert found["step_time_s"] == pytest.approx(found["best_s"], rel=0.05)
    assert found["axes"] == {"node": 2, "gpu0": 2, "gpu1": 2}


def test_the_score_is_saved_as_a_page(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "rules.json").write_text(json.dumps({"*kernel": "P('gpu')"}))
    argv = ["score", "models.mlp:train_step", "--cluster", "2x2", "--set", "width=512", "--rules", "rules.json", "--html"]
    assert main([*argv, "plan.html"]) == 0
    assert capsys.readouterr().out.endswith("page in plan.html\n")
    page = (files / "plan.html").read_text()
    own = json.loads(page.partition('type="application/json">')[2].partition("</script>")[0])["own"]
    assert own["specs"]
    assert set(own["specs"].values()) <= {"P('gpu')", "P()"}
    assert main([*argv, "rules.json"]) == 2
    assert "which --rules reads" in capsys.readouterr().err


def test_the_report_names_the_losses(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (files / "rules.toml").write_text('"batch/*" = "P(\'data\')"\n"*kernel" = "P(None, \'tensor\')"\n')
    argv = ["score", "models.mlp:train_step", "--cluster", "2x4", "--rules", "rules.toml", "--mesh", "data=2,tensor=4"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "over data=2, tensor=4" in out
    assert "times as long as under the plan" in out
    assert "What a step gains if only these arguments are sharded differently" in out
    assert "Collectives that the plan does not have" in out
    assert "without a spec are replicated: state/optimizer/0/count" in out


FILES = [
    ("s.json", "{", "s.json: is not JSON"),
    ("s.json", " \n", "s.json: the file is empty"),
    ("s.json", "[1]", "s.json: this is no object of specs"),
    ("s.json", "{}", "s.json: it has no specs"),
    ("s.json", '{"batch/inputs": 3}', "s.json: batch/inputs: 3 is no spec"),
    ("s.json", '{"batch/inputs": "P(3)"}', "s.json: batch/inputs: 'P(3)' is not a PartitionSpec"),
    ("s.json", '{"batch/inputs": "P(\'gpux\')"}', "s.json: the rule 'batch/inputs' = P('gpux') names an unknown axis 'gpux'"),
    (
        "s.json",
        '{"batch/input": "P()"}',
        "s.json: the rule 'batch/input' = PartitionSpec() matches no argument (nearest: batch/inputs",
    ),
    ("s.json", '{"batch/inputs": "P()", "batch/inputs": "P()"}', "s.json: batch/inputs: has two specs"),
    ("s.json", '{"in_specs": {"batch/inputs": "P()"}, "axes": 3}', "s.json: axes: 3"),
    ("s.toml", "a = ", "s.toml: is not TOML"),
    ("none.json", None, "none.json: cannot be read"),
]


@pytest.mark.parametrize(("name", "text", "part"), FILES, ids=[part for _, _, part in FILES])
def test_a_malformed_file_is_one_line_and_exit_two(
    files: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, part: str
) -> None:
    if text is not None:
        (files / name).write_text(text)
    assert main(["score", "models.mlp:train_step", "--cluster", "2x4", "--specs", name]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert part.replace("PartitionSpec()", str(P())) in err[0]


# -- files of rules ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_exported_files_score_like_the_plan(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["models.mlp:train_step", "--cluster", "2x4", "--set", "width=1024", "--set", "batch=2048"]
    assert main(["plan", *target, "-o", "plan.json"]) == 0
    for name in ("specs.py", "rules.yml"):
        assert main(["export", "plan.json", "-o", name]) == 0
    found: list[Any] = []
    for option, name in (("--specs", "specs.py"), ("--rules", "rules.yml")):
        capsys.readouterr()
        assert main(["score", *target, option, name, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["in_specs"] == found[1]["in_specs"]
    assert found[0]["step_time_s"] == found[1]["step_time_s"]
    assert found[0]["best_s"] == pytest.approx(found[0]["plan_s"], rel=1e-3)  # the plan has the best layouts inside
    assert main(["score", *target, "--specs", "rules.yml"]) == 2
    assert "give it with --rules, not --specs" in capsys.readouterr().err
    assert main(["score", *target, "--rules", "specs.py"]) == 2
    assert "give it with --specs, not --rules" in capsys.readouterr().err


MAXTEXT = """
mesh_axes: ['data', 'stage', 'fsdp', 'fsdp_transpose', 'sequence', 'tensor']
logical_axis_rules: [['mlp', ['fsdp_transpose', 'tensor']], ['embed', ['fsdp', 'sequence']], ['norm', 'tensor'], ['kv', []]]
data_sharding: [['data', 'stage', 'fsdp']]
dcn_data_parallelism: -1
ici_fsdp_parallelism: 2
ici_tensor_parallelism: 2
"""
LINEN = """
from tests.shell.test_score import linen_step

def train_step():
    return linen_step(logical=True)
"""


def test_the_rules_of_maxtext_are_read(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Axes of size one cut nothing; an axis has its part between nodes before that inside a node."""
    (files / "base.yml").write_text(MAXTEXT)
    (files / "own.py").write_text(LINEN)
    target = ["score", "own.py:train_step", "--cluster", "2x4", "--rules"]
    assert main([*target, "base.yml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: n for name, n in found["axes"].items() if n > 1} == {"data": 2, "fsdp": 2, "tensor": 2}
    assert found["in_specs"]["params/params/Dense_0/kernel"] == "P(('fsdp', 'sequence'), ('fsdp_transpose', 'tensor'))"
    assert main([*target, "base.yml", "--mesh", "fsdp=2,tensor=4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes"]["data"] == 1
    (files / "base.yml").write_text(MAXTEXT.replace("ici_tensor_parallelism: 2", "ici_tensor_parallelism: 3"))
    assert main([*target, "base.yml"]) == 2
    assert "ici_fsdp_parallelism=2, ici_tensor_parallelism=3 do not multiply to 4" in capsys.readouterr().err


RULES = [
    ({"params/params/Dense_0/kernel": None, "embed": "node", "mlp": "gpu"}, "P()", "P('gpu', 'node')"),
    ({"*Dense_0/kernel": ["gpu", None], "embed": ["node", "gpu"]}, "P('gpu', None)", "P(None, ('node', 'gpu'))"),
    ({"*Dense_0/kernel": ["node", "gpu"], "embed": None, "mlp": []}, "P('node', 'gpu')", "P(None, None)"),
    ({"*/kernel": "gpu", "x": "node"}, "P('gpu')", "P('gpu')"),
]


@pytest.mark.parametrize(("rules", "first", "second"), RULES)
def test_a_key_is_a_glob_or_the_name_of_an_axis(
    files: Path, capsys: pytest.CaptureFixture[str], rules: dict[str, Any], first: str, second: str
) -> None:
    (files / "rules.json").write_text(json.dumps(rules))
    (files / "own.py").write_text(LINEN)
    assert main(["score", "own.py:train_step", "--cluster", "2x4", "--rules", "rules.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["in_specs"]
    assert (found["params/params/Dense_0/kernel"], found["params/params/Dense_1/kernel"]) == (first, second)


@pytest.mark.parametrize(("key", "near"), [("embd", " (nearest: embed)"), ("*/kernl", "")])
def test_a_rule_of_a_file_that_matches_nothing_is_refused(
    files: Path, capsys: pytest.CaptureFixture[str], key: str, near: str
) -> None:
    (files / "rules.json").write_text(json.dumps({key: None, "mlp": "gpu"}))
    (files / "own.py").write_text(LINEN)
    assert main(["score", "own.py:train_step", "--cluster", "2x4", "--rules", "rules.json"]) == 2
    err = capsys.readouterr().err
    assert f"rules.json: the rule {key!r}" in err
    assert "matches no argument" in err
    assert near in err


YAML = [
    ("a: [", "is not YAML"),
    ("a: 1", "has neither rules:"),
    ("rules: 3\nmesh: {gpu: 8}", "rules is no list of rules"),
    ("rules: [['(', ['gpu']]]\nmesh: {gpu: 8}", "'(' is no regular expression"),
    ("rules: [['w', ['gpu']]]", "mesh: None has no sizes by name"),
    ("rules: [['^w$', ['gpu']]]\nmesh: {gpu: 8}", "the rule '^w$' = P('gpu',) matches no argument"),
    ("logical_axis_rules: [['embed', 3]]", "embed: 3 is no mesh axis"),
    ("logical_axis_rules: [['embed', fsdp]]\nmesh_axes: [fsdp]\nici_fsdp_parallelism: 0", "ici_fsdp_parallelism is no number"),
]


@pytest.mark.parametrize(("text", "part"), YAML, ids=[part for _, part in YAML])
def test_a_mistake_in_yaml_is_one_line_and_exit_two(
    files: Path, capsys: pytest.CaptureFixture[str], text: str, part: str
) -> None:
    (files / "rules.yml").write_text(text)
    assert main(["score", "models.mlp:train_step", "--cluster", "8", "--rules", "rules.yml"]) == 2
    err = capsys.readouterr().err.strip().splitlines()
    assert len(err) == 1
    assert err[0].startswith("shardplan: rules.yml: ")
    assert part.replace("P('gpu',)", str(P("gpu"))) in err[0] or part in err[0]
