"""Every number that decides a result says where it comes from."""

from __future__ import annotations

from benchmarks.constants import constants, of_file


def test_every_constant_says_where_it_comes_from() -> None:
    silent = [f"{c.file}: {c.name} = {c.value}" for c in constants() if not c.why]
    assert silent == []


def test_docstrings_and_comments_count_and_names_do_not() -> None:
    text = 'A = 1\n"""Said below."""\nB = 2.0**3  # said behind\nC = 4\nD = A\nE = ("x",)\n'
    assert [(c.name, c.value, c.why) for c in of_file("x.py", text)] == [
        ("A", "1", "Said below."),
        ("B", "2.0 ** 3", "said behind"),
        ("C", "4", ""),
    ]
