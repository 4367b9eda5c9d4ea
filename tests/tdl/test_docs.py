"""docs/tdl.md runs."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from shardplan.tdl.describe import described, forget


@pytest.fixture(autouse=True)
def _forgotten() -> object:
    before = set(described())
    yield
    for name in sorted(set(described()) - before):
        forget(name)


def test_every_example_of_the_page_runs() -> None:
    page = Path(__file__).parents[2] / "docs" / "tdl.md"
    failed, ran = doctest.testfile(str(page), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert ran > 20
    assert failed == 0
