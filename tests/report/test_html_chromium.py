"""The HTML page in a browser: its script runs without a fault at both widths, and it can be used by keyboard alone."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardplan
from models import gpt
from shardplan.report.tables import seconds, size
from shardplan.shell.plan_of_step import Plan
from tests.machines import machine
from tests.report.pages import NEEDS_CHROMIUM, WIDE, Probe

pytestmark = NEEDS_CHROMIUM

HOSTILE = "<img src=x onerror=document.body.dataset.hacked=1>"


@pytest.fixture(scope="module")
def plan() -> Plan:
    step, args = gpt.train_step(layers=2, width=64, batch=16)
    return shardplan.plan(step, *args, cluster=machine("2x2:slow"), donate_argnums=0)


@pytest.fixture(scope="module")
def text(plan: Plan) -> str:
    return plan.html(title="gpt")


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_draws_all_sections_and_never_scrolls_sideways(probe: Probe, text: str, width: int) -> None:
    said = probe(text, WIDE, width)
    assert said["ready"] == "yes"
    assert said["width"] == width
    assert said["scroll"] <= width
    assert said["wide"] == []
    names = [name for name, _ in said["sections"]]
    assert names == ["summary", "cluster", "arrays", "seconds", "memory", "collectives", "baselines", "timeline"]
    assert all(height > 80 for _, height in said["sections"])


def test_the_page_says_the_plans_numbers(probe: Probe, plan: Plan, text: str) -> None:
    said = probe(text, "return [...document.querySelectorAll('.card b')].map((b) => b.textContent)")
    assert said[:3] == [seconds(plan.step_time_s), size(plan.communication_bytes), size(plan.peak_bytes)]


def test_words_of_numbers_are_those_of_the_command_line(probe: Probe, text: str) -> None:
    times = [0.0, 4.5e-6, 9.9996e-4, 0.0123, 0.9999, 1.0, 12.345, 59.94, 59.96, 75.04, 7325.0, 3599.6, 1e-10, -2e-3, 0.99951]
    sizes = [
        0,
        1,
        512,
        1023,
        1024,
        1536,
        1048575,
        1610612736,
        5.5e13,
        1e16,
        333.2,
        1.125 * 2**30,
        1.115 * 2**30,
        1.375 * 2**20,
        2.5 * 1024 * 45,
        1020 * 1024,
        -4096,
    ]
    said = probe(text, f"return [{json.dumps(times)}.map(seconds), {json.dumps(sizes)}.map(size)]")
    assert said == [[seconds(t) for t in times], [size(n) for n in sizes]]


def test_the_search_finds_rows_and_fades_the_rest(probe: Probe, text: str) -> None:
    script = """
      const box = document.getElementById("search");
      const visible = () => [...document.querySelectorAll("#arrays tbody tr")].filter((r) => r.offsetHeight).length;
      const type = (words) => { box.value = words; box.dispatchEvent(new Event("input")); };
      const all = visible();
      document.body.dispatchEvent(new KeyboardEvent("keydown", {key: "/", bubbles: true}));
      const focused = document.activeElement === box;
      type("mlp UP kernel");
      const some = visible(), found = document.getElementById("found").textContent;
      const faded = document.querySelectorAll("g.tile.dim").length, tiles = document.querySelectorAll("g.tile").length;
      box.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
      return {all, focused, some, found, faded, tiles, after: visible()};
    """
    said = probe(text, script)
    assert said["focused"]
    assert 0 < said["some"] < said["all"] == said["after"]
    assert said["found"].startswith(f"{said['some']} of {said['all']} arrays, ")
    assert 0 < said["faded"] <= said["tiles"]


def test_tables_sort_by_their_headings(probe: Probe, plan: Plan, text: str) -> None:
    script = """
      const button = [...document.querySelectorAll("#baselines th button")].find((b) => b.textContent === "step time");
      const names = () => [...document.querySelectorAll("#baselines tbody")][0].querySelectorAll("tr");
      const column = () => [...names()].map((r) => r.cells[0].textContent);
      button.focus();
      const focused = document.activeElement === button;
      button.click();
      const falling = column(), said = button.parentElement.getAttribute("aria-sort");
      button.click();
      return {focused, falling, said, rising: column()};
    """
    said = probe(text, script)
    rows = [("this plan", plan.step_time_s), *((b.name, b.step_time_s) for b in plan.baselines)]
    times = dict(rows)
    assert said["focused"]
    assert said["said"] == "descending"
    assert [times[n] for n in said["falling"]] == sorted(times.values(), reverse=True)
    assert [times[n] for n in said["rising"]] == sorted(times.values())


def test_charts_are_walked_by_arrow_keys(probe: Probe, text: str) -> None:
    script = """
      const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
      const stops = [...document.querySelectorAll("g.tile[tabindex='0']")];
      stops[0].focus();
      press(stops[0], "ArrowRight");
      const second = document.activeElement.getAttribute("aria-label"), tiles = document.querySelectorAll("g.tile");
      const memory = document.querySelector("#memory svg[role=slider]");
      press(memory, "Home");
      const first = memory.getAttribute("aria-valuetext");
      press(memory, "ArrowRight");
      const time = document.querySelector("#timeline .chart");
      const before = time.querySelectorAll("rect.bar").length;
      press(time.firstElementChild, "+");
      press(time.firstElementChild, "+");
      const read = document.querySelector("#seconds .readout").textContent, next = memory.getAttribute("aria-valuenow");
      const same = tiles[1].getAttribute("aria-label"), after = time.querySelectorAll("rect.bar").length;
      return {stops: stops.length, second, same, first, next, read, before, after};
    """
    said = probe(text, script)
    assert said["stops"] == 1
    assert said["second"] == said["same"] == said["read"]
    assert " at op 0: " in said["first"]
    assert said["next"] == "1"
    assert 0 < said["after"] < said["before"]


def test_everything_that_can_be_used_has_a_name(probe: Probe, text: str) -> None:
    script = """
      const used = [...document.querySelectorAll("button, input, summary, a, [tabindex], svg[role], [role=slider]")];
      const named = (e) => (e.getAttribute("aria-label") ?? "") + e.textContent + (e.labels?.[0]?.textContent ?? "");
      const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
      return {unnamed: used.filter((e) => !named(e).trim()).map((e) => e.outerHTML.slice(0, 80)), used: used.length,
        links: [...document.querySelectorAll("a[href]")].filter((a) => !document.querySelector(a.getAttribute("href"))).length,
        twice: ids.filter((id, i) => ids.indexOf(id) !== i)};
    """
    said = probe(text, script)
    assert said["used"] > 20
    assert said["unnamed"] == []
    assert said["links"] == 0
    assert said["twice"] == []


def test_names_of_the_user_are_shown_as_they_are(probe: Probe) -> None:
    def step(weights: dict[str, Any], x: Any) -> Any:
        return {name: w - x.sum() for name, w in weights.items()}

    args = ({HOSTILE: jax.ShapeDtypeStruct((64, 64), jnp.float32)}, jax.ShapeDtypeStruct((64,), jnp.float32))
    page = shardplan.plan(step, *args, cluster="2").html(title=HOSTILE)
    script = "return {images: document.images.length, hacked: document.body.dataset.hacked ?? '', title: document.title, " + (
        "head: document.getElementById('title').textContent, row: document.querySelector('#arrays tbody').textContent}"
    )
    said = probe(page, script)
    assert (said["images"], said["hacked"]) == (0, "")
    assert said["head"].startswith(HOSTILE)
    assert said["title"].startswith(HOSTILE)
    assert HOSTILE in said["row"]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_step_with_nothing_to_show_has_a_page_too(probe: Probe, width: int) -> None:
    page = shardplan.plan(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), cluster="1").html()
    said = probe(page, WIDE, width)
    assert said["ready"] == "yes"
    assert said["scroll"] <= width
