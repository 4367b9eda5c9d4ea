"""Timelines: trace events as Chrome's format says, figures that add up, pictures, and the command."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardplan
from models import gpt
from shardplan.errors import PlanFileError, ShardplanError
from shardplan.report.gantt import busy_fraction
from shardplan.report.timeline import Timeline, priced_of, timeline
from shardplan.report.timeline_text import timeline_text
from shardplan.shell import cli
from shardplan.simulate.figures import timeline_json, top_exposed
from shardplan.simulate.simulated_step import simulated

OPTIONS = {"layers": 2, "width": 512, "sequence": 128, "batch": 32, "heads": 4}


@pytest.fixture(scope="module")
def plan() -> Any:
    step, args = gpt.train_step(**OPTIONS)
    return shardplan.plan(step, *args, cluster="2x4", donate_argnums=(0,))


@pytest.fixture(scope="module")
def shown(plan: Any) -> Timeline:
    return plan.simulate()


@pytest.fixture(scope="module")
def events(shown: Timeline, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("timeline") / "timeline.json"
    shown.save(file)
    return json.loads(file.read_text())["traceEvents"]


REQUIRED = {
    "M": {"pid", "name", "args"},
    "X": {"pid", "tid", "ts", "dur", "name", "cat", "args"},
    "C": {"pid", "ts", "name", "args"},
    **{phase: {"pid", "tid", "ts", "id", "name", "cat"} for phase in "stf"},
}


def threads(events: list[dict[str, Any]], phases: str) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] in phases:
            found[e["pid"], e["tid"]].append(e)
    return found


def ns(event: dict[str, Any], key: str = "ts") -> int:
    return round(event[key] * 1000)


def test_every_event_has_the_fields_of_its_phase(events: list[dict[str, Any]]) -> None:
    assert {e["ph"] for e in events} == set(REQUIRED)
    for e in events:
        assert REQUIRED[e["ph"]] <= set(e), e
        assert all(isinstance(e[k], (int, float)) and e[k] >= 0 for k in ("ts", "dur") if k in e)


def test_processes_and_threads_have_names(events: list[dict[str, Any]], shown: Timeline) -> None:
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in ("process_name", "thread_name")}
    assert names[1, None] == "each of 8 devices"
    assert [names[1, 1 + n] for n in range(len(shown.streams))] == ["compute", "node links", "gpu links"]
    assert set(threads(events, "Xstf")) <= set(names)


def test_times_of_a_thread_never_go_back_and_its_slices_never_overlap(events: list[dict[str, Any]]) -> None:
    for own in threads(events, "Xstf").values():
        assert all(ns(a) <= ns(b) for a, b in itertools.pairwise(own))
    for own in threads(events, "X").values():
        assert all(ns(a) + ns(a, "dur") <= ns(b) for a, b in itertools.pairwise(own))
    held = [e for e in events if e["ph"] == "C"]
    assert all(ns(a) < ns(b) for a, b in itertools.pairwise(held))


def test_the_critical_path_is_one_flow_through_slices(events: list[dict[str, Any]], shown: Timeline) -> None:
    flow = sorted((e for e in events if e["ph"] in "stf"), key=ns)
    assert len(flow) == len(shown.critical_path)
    assert {e["id"] for e in flow} == {1}
    assert [e["ph"] for e in flow] == ["s", *"t" * (len(flow) - 2), "f"]
    slices = threads(events, "X")
    for e in flow:
        assert any(ns(x) <= ns(e) <= ns(x) + ns(x, "dur") for x in slices[e["pid"], e["tid"]])


def test_slices_are_the_tasks(events: list[dict[str, Any]], shown: Timeline) -> None:
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == (shown.stream >= 0).sum()
    for stream, name in enumerate(shown.streams):
        total = sum(ns(e, "dur") for e in slices if e["tid"] == 1 + stream)
        assert total * 1e-9 == pytest.approx(shown.busy_s[name], abs=1e-9 * (1 + len(slices)))
    sent = [e for e in slices if e["cat"] == "communication"]
    assert sent
    assert all(e["args"]["bytes"] > 0 and e["args"]["axes"] and "models/" in e["args"]["source"] for e in sent)


def test_memory_counts_from_the_arguments_to_the_results(events: list[dict[str, Any]], shown: Timeline, plan: Any) -> None:
    held = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    sizes = [f.size for f in plan.factors]
    arguments = sum(a.nbytes / math.prod(sizes[f] for f in a.layout.used) for a in plan.arguments if a.layout)
    assert arguments <= held[0] < max(held)  # what the first op and the first gathers make is there, too
    assert max(held) == pytest.approx(shown.peak_bytes, abs=1)
    assert held[-1] == 0  # nothing is counted after the end
    assert 0.7 < max(held) / plan.peak_bytes < 1.4


def test_the_difference_to_the_priced_step_is_explained(plan: Any) -> None:
    for shown in (plan.simulate(), plan.simulate(overlap=False), plan.simulate(contention=(1.5, 1.0))):
        figures = timeline_json(shown)
        explained = sum(figures["difference"].values())
        assert shown.step_time_s - plan.step_time_s == pytest.approx(explained, abs=1e-11)
        path = figures["critical_path"]
        assert path["compute_s"] + path["communication_s"] == pytest.approx(shown.step_time_s, rel=1e-9)


def test_communication_is_hidden_beside_compute_and_exposed_elsewhere(shown: Timeline) -> None:
    """Counted between each two instants at which a task starts or ends."""
    instants = np.unique([*shown.start_s, *shown.end_s])
    middle, lengths = (instants[1:] + instants[:-1]) / 2, np.diff(instants)
    runs = (shown.start_s[:, None] < middle) & (middle < shown.end_s[:, None])  # [tasks, intervals]
    sent, computes = shown.communicates, (shown.stream >= 0) & ~shown.communicates
    computing = runs[computes].any(axis=0)
    assert shown.hidden_s[sent] == pytest.approx((runs[sent] & computing) @ lengths, abs=1e-12)
    assert shown.exposed_s == pytest.approx((runs[sent].any(axis=0) & ~computing) @ lengths, abs=1e-11)
    assert shown.hidden_s[sent].sum() > 0
    assert shown.hidden_s[~sent].sum() == 0


def test_the_longest_exposed_come_first(shown: Timeline) -> None:
    rows = top_exposed(shown, count=len(shown.labels))
    seconds = [exposed_s for _, exposed_s, _ in rows]
    assert seconds
    assert seconds == sorted(seconds, reverse=True)
    sent = shown.communicates
    assert sum(seconds) == pytest.approx((shown.end_s - shown.start_s - shown.hidden_s)[sent].sum(), abs=1e-9 * len(shown.labels))


def test_the_columns_of_a_picture_are_as_full_as_the_streams_are_busy(shown: Timeline) -> None:
    edges = np.linspace(0.0, shown.step_time_s, 98)
    computes = (shown.stream >= 0) & ~shown.communicates
    for stream, name in enumerate(shown.streams):
        own = shown.stream == stream
        assert busy_fraction(shown, own, edges) @ np.diff(edges) == pytest.approx(shown.busy_s[name], rel=1e-9)
        hidden = busy_fraction(shown, own & shown.communicates, edges, beside=computes)
        assert hidden.min() >= 0
        assert hidden.max() <= 1 + 1e-9
        assert hidden @ np.diff(edges) == pytest.approx(shown.hidden_s[own].sum(), abs=1e-12)


def test_a_slice_says_how_many_iterations_it_stands_for(tmp_path: Path) -> None:
    def step(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, u: (jnp.tanh(h @ u), None), x, w)[0]

    args = jax.ShapeDtypeStruct((40, 256, 256), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    made = shardplan.plan(step, *args, cluster="4")
    few = timeline(simulated(made.schedule, made.planned, priced_of(made.data), iterations=4))
    few.save(tmp_path / "few.json")
    slices = [e for e in json.loads((tmp_path / "few.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(e["args"].get("times", 1) for e in slices) == 37  # of 40 iterations, three more are written out
    assert sum(e["args"].get("times", 1) for e in slices) == (made.simulate().stream >= 0).sum()


def test_the_text_says_what_the_json_says(shown: Timeline) -> None:
    text = timeline_text(shown, title="gpt")
    assert text.startswith("gpt: ")
    for words in ("compute", "node links", "gpu links", "exposed", "critical path", "streams that run at once"):
        assert words in text


def test_a_picture_is_the_same_each_time(shown: Timeline, tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.svg"):
        shown.draw(tmp_path / name, title="gpt")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert b"node links" in (tmp_path / "c.svg").read_bytes() or (tmp_path / "c.svg").stat().st_size > 10_000
    with pytest.raises(ShardplanError, match=r"end the file's name"):
        shown.draw(tmp_path / "a.bmp")


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(shown: Timeline, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot write .*nowhere"):
        shown.save(tmp_path / "nowhere" / "timeline.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_prints_one_object_and_writes_both_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [f"--set={name}={value}" for name, value in {**OPTIONS, "layers": 1, "width": 64}.items()]
    files = {"-o": tmp_path / "t.json", "--png": tmp_path / "t.png"}
    given = [str(x) for pair in files.items() for x in pair]
    assert cli.main(["simulate", "models.gpt:train_step", "--cluster", "2x4", "--json", *options, *given]) == 0
    figures = json.loads(capsys.readouterr().out)
    trace = json.loads(files["-o"].read_text())
    assert trace["otherData"] == figures
    assert files["--png"].read_bytes().startswith(b"\x89PNG")
    assert cli.main(["simulate", "models.gpt:train_step", "--cluster", "2x4", "--no-overlap", *options]) == 0
    assert "one task after the other" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--contention", "0.5"], "contention of compute is 0.5"),
        (["--png", "a.bmp"], "'a.bmp'"),
        (["-o", ""], "-o is empty"),
        (["-o", "a.png", "--png", "./a.png"], "give one of them another name"),
    ],
)
def test_mistakes_are_told_in_one_line_before_the_search(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "nothing:here", "--cluster", "2x4", *given]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert said in err
