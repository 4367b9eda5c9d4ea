"""The tables of `benchmarks/by_hand.py`, from figures that are made up, and what its options refuse."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import pytest

from benchmarks import by_hand
from benchmarks.by_hand import KEPT, PLAN, ROWS, SHOWN, fsdp, judge, main, modelled_s, ours, planned, programs_of
from shardplan.cost.overlap import contended
from shardplan.report.peak_range import OF_PREDICTED

FIRST, SECOND = list(ROWS)[:2]


def figures(seconds: float, *, exposed_s: float = 0.0, peak: int = 1, **more: Any) -> dict[str, Any]:
    """The figures of a compiled program on a device of 10 bytes."""
    made = {"seconds": seconds, "compute_s": seconds, "exposed_s": exposed_s, "communication_s": 0.0, "xla_seconds": seconds}
    return {**made, "bytes": 100, "temporary": 4, "peak": peak, "memory": 10, "flags": "default", **more}


def cells(line: str) -> list[str]:
    """The cells of a row of a table."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_judge_is_the_fastest_program_by_hand_that_fits() -> None:
    kept = {
        FIRST: {PLAN: figures(9.0), "data parallel": figures(5.0, peak=11), "FSDP": figures(10.0), "hybrid FSDP": figures(12.0)},
        SECOND: {PLAN: figures(8.0), "FSDP": figures(5.0, exposed_s=1.0), "data parallel": {"failed": "a | b"}},
    }
    lines = judge(kept)
    row = cells(lines[2])
    assert (row[0], row[5], row[9]) == (FIRST, "FSDP, default flags", "0.900")
    assert lines[-3:] == [
        "2 rows: median 1.250, largest 1.600, 1 over 1.01.",
        "2 rows by XLA's model: median 1.250, largest 1.600, 1 over 1.01.",
        "Where the best by hand exposes over a tenth of its time (1 rows): median 1.600.",
    ]


def test_a_row_whose_plan_failed_says_why_and_counts_nowhere() -> None:
    lines = judge({FIRST: {PLAN: {"failed": "over 900 s | killed"}, "FSDP": figures(1.0)}})
    assert cells(lines[2])[2] == "over 900 s / killed"
    assert lines[3:] == ["", "1 rows have no plan, or no program by hand, that fits."]


def test_a_plan_that_does_not_fit_is_no_winner() -> None:
    lines = judge({FIRST: {PLAN: figures(5.0, peak=11), "FSDP": figures(10.0)}})
    assert cells(lines[2])[2] == "it does not fit"
    assert lines[3:] == ["", "1 rows have no plan, or no program by hand, that fits."]


def test_the_short_table_has_fsdp_and_the_fastest_by_hand_and_counts_the_rows_it_leaves_out() -> None:
    shown = {
        PLAN: figures(9e-3),
        "FSDP": figures(0.012),
        "data parallel": figures(0.01),
        "FSDP x tensor 2": figures(1e-3, peak=11),
    }
    lines = fsdp({SHOWN[0]: shown, FIRST: {PLAN: figures(9.0), "FSDP": figures(10.0)}, SECOND: {PLAN: figures(1.0)}})
    assert [cells(line)[2:] for line in lines[2:-2]] == [["12.0 ms", "10.0 ms", "9.0 ms"]]
    gains = "17.5% below FSDP (10.0% to 25.0%) and 10.0% below the fastest (10.0% to 10.0%)"
    assert lines[-1] == f"Over 2 steps, the plan's time is a median of {gains}."


def test_the_short_table_does_not_show_the_best_rows() -> None:
    kept = json.loads(KEPT.read_text())
    gains = {
        name: 1 - found[PLAN]["seconds"] / min(r["seconds"] for p, r in found.items() if p in by_hand.HANDS and "seconds" in r)
        for name, found in kept.items()
    }
    shown = [gains[name] for name in SHOWN]
    assert median(shown) <= median(gains.values())
    assert sum(gain < 0.01 for gain in shown) >= 2


def test_our_program_of_a_sharding_is_divided_by_the_one_by_hand() -> None:
    kept = {FIRST: {"our FSDP": figures(9.0, bytes=50), "FSDP": figures(10.0), "our data parallel": figures(1.0)}}
    lines = ours(kept)
    assert cells(lines[2])[:3] == [FIRST, "data parallel", "not written by hand"]
    assert cells(lines[3]) == [FIRST, "FSDP", "0.900", "0.900", "0.500", "1.000"]
    assert cells(lines[-1])[2:] == ["0.900", "0.900", "0.500", "1.000"]


def test_what_takes_more_than_by_hand_is_bold() -> None:
    kept = {FIRST: {"our FSDP": figures(10.3, compute_s=10.1, bytes=102, temporary=5), "FSDP": figures(10.0)}}
    assert cells(ours(kept)[2])[2:] == ["**1.030**", "1.010", "1.020", "**1.250**"]


def test_predictions_are_compared_with_what_is_compiled() -> None:
    predicted = {"predicted_bytes": 80, "predicted_compute_s": 10.0, "predicted_s": 9.0, "predicted_peak": 2}
    lines = planned({FIRST: {PLAN: figures(9.0, communication_s=1.0, **predicted)}})
    assert cells(lines[2])[2::2] == ["1.250", "0.900", "1.000", "0.500"]
    assert cells(lines[3])[2::2] == ["25.0%", "10.0%", "0.0%", "50.0%"]
    share = 1 / (1 - contended(ROWS[FIRST].cluster().device.contention))
    assert lines[-1].startswith(f"Compiled plans save a median of {share:.0%} of the time that full overlap would save")


def test_every_row_has_programs_that_people_write() -> None:
    for row in ROWS.values():
        names = programs_of(row)
        assert {PLAN, "our FSDP", "data parallel", "FSDP"} <= set(names), row.name
        assert any("tensor" in name for name in names) == (row.name not in ("wresnet", "unet")), row.name
        assert ("hybrid FSDP" in names) == (row.sizes[0] > 1), row.name
        assert ("experts" in names) == (row.name == "moe"), row.name
    assert len(ROWS) >= 20


def test_kernels_with_products_have_no_seconds_of_xlas_model() -> None:
    cost = '"reification_cost":[{"exec_time_us":2.5,"name":""}],"device_type":"D"'
    text = f"""HloModule m

%sum (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {{
  %a = f32[8,8]{{1,0}} parameter(0)
  %b = f32[8,8]{{1,0}} parameter(1)
  ROOT %s = f32[8,8]{{1,0}} add(%a, %b)
}}

%product (c: f32[8,8], d: f32[8,8]) -> f32[8,8] {{
  %c = f32[8,8]{{1,0}} parameter(0)
  %d = f32[8,8]{{1,0}} parameter(1)
  ROOT %p = f32[8,8]{{1,0}} dot(%c, %d), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (x: f32[8,8], y: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %y = f32[8,8]{{1,0}} parameter(1)
  %added = f32[8,8]{{1,0}} fusion(%x, %y), kind=kLoop, calls=%sum, backend_config={{{cost}}}
  ROOT %multiplied = f32[8,8]{{1,0}} fusion(%added, %y), kind=kOutput, calls=%product, backend_config={{{cost}}}
}}
"""
    assert modelled_s(text) == {("main", "added"): pytest.approx(2.5e-6)}


def test_a_table_of_kept_figures_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_hand, "fresh", lambda *_: pytest.fail("a program was compiled"))
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({FIRST: {PLAN: figures(9.0), "FSDP": figures(10.0)}, "gone": {}}))
    assert main(["--json", str(kept), "--table", "judge"]) == 0
    assert "1 rows: median 0.900, largest 0.900, 0 over 1.01." in capsys.readouterr().out


def test_only_what_is_not_kept_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fresh(name: str, programs: list[str], _: Any) -> dict[str, Any]:
        asked.extend(programs)
        return {program: figures(2.0) for program in programs}

    monkeypatch.setattr(by_hand, "fresh", fresh)
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({FIRST: {"FSDP": figures(1.0), PLAN: {"failed": "killed"}}}))
    assert main([FIRST, "--json", str(kept), "--only", PLAN, "FSDP"]) == 0
    assert asked == [PLAN]
    found = json.loads(kept.read_text())[FIRST]
    assert (found["FSDP"]["seconds"], found[PLAN]["seconds"]) == (1.0, 2.0)
    assert main([FIRST, "--json", str(kept), "--only", "FSDP", "--again"]) == 0
    assert asked == [PLAN, "FSDP"]


@pytest.mark.parametrize(
    ("options", "said"), [(["nothing"], "no row 'nothing'"), ([FIRST, "--only", "magic"], "no program 'magic'")]
)
def test_unknown_names_are_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_likely_peak_is_that_of_the_compiled_plans() -> None:
    kept = json.loads(KEPT.read_text())
    ratios = [row[PLAN]["peak"] / row[PLAN]["predicted_peak"] for row in kept.values()]
    tenths = quantiles(ratios, n=10)
    assert len(ratios) == 27
    assert (round(tenths[0], 2), round(tenths[-1], 2)) == OF_PREDICTED
