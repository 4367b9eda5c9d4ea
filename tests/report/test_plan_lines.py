"""A plan in ten lines and as a piece of HTML: what `repr` and notebooks show."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from models import gpt
from shardplan.report.plan_lines import plan_lines
from shardplan.report.tables import seconds, size
from shardplan.shell.plan_of_step import Plan
from tests.machines import machine

NAMES = ["plan", "mesh", "parallelism", "step time", "memory", "traffic", "dearest", "arguments", "bound", "baselines"]


@pytest.fixture(scope="module")
def plan() -> Plan:
    step, args = gpt.train_step(layers=2, width=64, batch=16)
    return shardplan.plan(step, *args, cluster=machine("2x2:slow"), donate_argnums=0)


def names(text: str) -> list[str]:
    return [line[:11].strip() for line in text.splitlines()]


def test_a_plan_prints_as_ten_lines_and_searches_nothing(plan: Plan) -> None:
    text = repr(plan)
    assert names(text) == NAMES
    assert plan.data.bound_s is None
    assert plan.data.baselines is None
    assert all(len(line) <= 130 for line in text.splitlines())
    for figure in ("node=2 x gpu=2", seconds(plan.step_time_s), size(plan.peak_bytes), size(plan.communication_bytes)):
        assert figure in text
    known = plan_lines(plan.completed())
    assert names(known) == NAMES
    assert f"the best that fits is {min(plan.baselines, key=lambda b: (not b.fits, b.step_time_s)).name}" in known
    assert "known once" not in known


@pytest.mark.parametrize("step", [lambda: jnp.zeros(3), lambda x: x, lambda x: jnp.sin(x).sum()])
def test_any_plan_prints_as_ten_lines(step: Any) -> None:
    args = [jax.ShapeDtypeStruct((64,), jnp.float32)] * step.__code__.co_argcount
    assert names(repr(shardplan.plan(step, *args, cluster="1"))) == NAMES


class _Text(HTMLParser):
    """The elements of a fragment and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.cells: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & set(dict(attrs))
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] != "style":
            self.cells.append(data)


def test_notebooks_show_the_summary_the_matrix_collectives_and_baselines(plan: Plan) -> None:
    html = plan._repr_html_()
    shown = _Text(html)
    assert shown.open == []
    assert "script" not in shown.tags
    assert len(html) < 20_000
    text = "\n".join(shown.cells)
    for heading in ("Parallelism matrix", "Dearest collectives of a step", "Baselines"):
        assert heading in text
    dearest = max(plan.collectives, key=lambda c: c.seconds * c.times)
    assert dearest.kind.value in text
    assert {"this plan", *(b.name for b in plan.baselines)} <= set(shown.cells)
    assert {seconds(b.step_time_s) for b in plan.baselines} <= set(shown.cells)
    assert {*plan.matrix["axes"], *plan.matrix["levels"]} <= set(shown.cells)


def test_a_step_without_collectives_is_shown_too() -> None:
    plan = shardplan.plan(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), cluster="1")
    assert "every device works on its own" in plan._repr_html_()
