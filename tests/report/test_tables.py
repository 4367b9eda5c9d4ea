"""Numbers are read back as what they were; tables line up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.report.tables import rate, seconds, size, table

TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
RATES = {"B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
SCALES = TIMES | SIZES | RATES


def read(text: str) -> float:
    words = text.split()
    return sum(float(number) * SCALES[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


@given(st.floats(1e-9, 1e6))
def test_a_duration_is_read_back_within_its_digits(duration_s: float) -> None:
    assert read(seconds(duration_s)) == pytest.approx(duration_s, rel=0.009)


@given(st.integers(0, 2**59))
def test_a_size_is_read_back_within_its_digits(nbytes: int) -> None:
    assert read(size(nbytes)) == pytest.approx(nbytes, rel=0.0051)


@given(st.floats(1, 1e14))
def test_a_rate_is_read_back_within_its_digits(bytes_per_s: float) -> None:
    assert read(rate(bytes_per_s)) == pytest.approx(bytes_per_s, rel=0.0051)


@given(st.floats(1e-9, 59.9))
def test_a_duration_has_three_digits_and_the_unit_that_leaves_them(duration_s: float) -> None:
    number = seconds(duration_s).split()[0]
    assert sum(c.isdigit() for c in number) == 3
    assert 1 <= float(number) < 1000


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"),
        (1e-9, "1.00 ns"),
        (0.0009996, "1.00 ms"),
        (0.00123456, "1.23 ms"),
        (0.0999, "99.9 ms"),
        (59.9, "59.9 s"),
        (59.96, "1 min 0 s"),
        (3599.6, "1 h 0 min"),
        (-0.5, "-500 ms"),
        (float("inf"), "inf s"),
    ],
)
def test_durations_at_the_borders(duration_s: float, text: str) -> None:
    assert seconds(duration_s) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1000 * 1024, "1000 KiB"),
        (1023.9 * 1024, "1.00 MiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_sizes_at_the_borders(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_numbers_go_right_and_words_left() -> None:
    text = table(["name", "bytes", "share", "note"], [["a", "1.50 GiB", "4%", None], ["longer", "12 B", "100%", "x"]])
    assert text.splitlines() == [
        "name       bytes  share  note",
        "------  --------  -----  ----",
        "a       1.50 GiB     4%",
        "longer      12 B   100%  x",
    ]


def test_alignment_can_be_said() -> None:
    assert table(["a", "b"], [["x", "y"], ["long", "wide"]], "rl").splitlines()[2:] == ["   x  y", "long  wide"]


def test_a_table_without_rows_is_its_head() -> None:
    assert table(["one", "two"], []) == "one  two\n---  ---"


@given(st.lists(st.tuples(st.text("ab ", max_size=6), st.integers()), max_size=5))
def test_every_column_is_as_wide_as_its_widest_cell(rows: list[tuple[str, int]]) -> None:
    lines = table(["h", "n"], rows, "lr").splitlines()
    ends = {len(line) for line in lines}
    assert len(lines) == len(rows) + 2
    assert len(ends) == 1
