"""What stands out in a report is found by its shape, and its text stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardplan.report.colours import Style, spans
from shardplan.report.tables import table

GOLDEN = sorted((Path(__file__).parents[1] / "golden").rglob("*.txt"))
TABLE = table(["plan", "step", "fits"], [["this plan", "1 ms", "yes"], ["FSDP", "2 ms", "no"], ["no", "2 ms", "yes"]])


def marked(text: str, style: Style, *, passed: bool = True) -> list[str]:
    """The parts of a text with a style."""
    return [text[one.start : one.end] for one in spans(text, passed=passed) if one.style == style]


def test_a_table_has_a_header_the_row_of_the_plan_and_what_does_not_fit() -> None:
    header, rule, plan, *_ = TABLE.split("\n")
    assert marked(TABLE, "header") == [header, rule]
    assert marked(TABLE, "plan") == [plan]
    assert marked(TABLE, "bad") == ["no"]
    assert spans(TABLE)[-1].start == TABLE.index("no")


def test_a_table_ends_at_an_empty_line() -> None:
    assert marked(f"{TABLE}\n\nthis plan  no  no", "plan") == [TABLE.split("\n")[2]]


def test_what_a_machine_lacks_stands_out() -> None:
    text = table(["extra", "state"], [["draw", "present"], ["docs", "lacks sphinx: pip"], ["jax", "missing"]])
    text += "\n\nMISSING: jax: not installed\nnote: GPUs are not seen\nnotes are text"
    assert marked(text, "good") == ["present"]
    assert marked(text, "warning") == ["lacks sphinx: pip", "note: GPUs are not seen"]
    assert marked(text, "bad") == ["missing", "MISSING: jax: not installed"]


def test_facts_have_names_and_notes_are_warnings() -> None:
    facts = ["step        it", "step time   3 ms: compute", "            at most", "note        the search was interrupted"]
    text = "\n".join([*facts, "", "Arguments", "", "  w"])
    assert marked(text, "name") == ["step", "step time"]
    assert marked(text, "plan") == ["3 ms: compute"]
    assert marked(text, "warning") == ["note        the search was interrupted"]
    assert marked(text, "title") == ["Arguments"]


def test_sentences_are_no_titles() -> None:
    text = f"equal to one device\n  no number differs\n\nA sentence ends here.\n\nTotals:\n\n{TABLE}"
    assert marked(text, "title") == ["equal to one device", "Totals:"]
    assert marked(text, "title", passed=False) == ["Totals:"]
    assert marked(text, "bad", passed=False)[0] == "equal to one device"


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.stem)
def test_spans_lie_inside_lines(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    found = spans(text)
    assert all(0 <= one.start < one.end <= len(text) and "\n" not in text[one.start : one.end] for one in found)
    assert found
