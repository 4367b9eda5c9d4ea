"""FlexFlow's evaluation (`benchmarks/flexflow.py`) on models of toy size."""

from __future__ import annotations

import csv
import itertools
import json
import math
from functools import cache
from pathlib import Path

import pytest

from benchmarks.flexflow import main
from benchmarks.flexflow_cases import PAPER_NAMES, Case, problem
from benchmarks.flexflow_figures import splits, totals
from benchmarks.flexflow_rows import TABLE_5, Row
from shardplan.placement import mcmc
from shardplan.placement.configurations import single
from shardplan.placement.starts import data_parallel

TINY = ["--small", "--steps", "2", "--budget", "0.2", "--clusters", "flexflow-p100:1", "--devices", "4", "--proposals", "12"]


@cache
def case(model: str) -> Case:
    return Case(model, "flexflow-p100:1", steps=2, small=True)


@pytest.mark.slow
def test_every_part_is_printed_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcmc, "least_proposals", lambda operators: 30)  # the stop rule ends chains of toys sooner
    assert main([*TINY, "--models", "alexnet", "nmt", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["model"] for row in figures["steps"]] == ["alexnet", "nmt"]
    assert [row["unrolled"] for row in figures["steps"]] == [None, 2]
    assert [(row["search"], row["model"]) for row in figures["restrictions"]] == [("OptCNN", "nmt"), ("ColocRL", "nmt")]
    assert [(row["model"], row["paper"]) for row in figures["timings"]] == [("alexnet", 2.9)] * 2 + [("nmt", 2.5)] * 2
    starts = [(row["model"], row["start"]) for row in figures["stop_rule"]]
    assert starts == [(model, start) for model in ("alexnet", "nmt") for start in ("data parallel", "the plan")]
    assert all(row["longer_s"] <= row["rule_s"] for row in figures["stop_rule"])  # chains, gone on with
    found = figures["figure_11"]
    assert [m["best_s"] for m in found] == sorted((m["best_s"] for m in found), reverse=True)
    assert all(a["full_s"] < b["full_s"] and a["delta_s"] <= b["delta_s"] for a, b in itertools.pairwise(found))
    for row in figures["steps"]:
        assert row["best_s"] <= min(row["data_parallel_s"], row["expert_s"], row["plan_s"])
    out = capsys.readouterr().out
    for heading in (
        "over data parallel",
        "restricted ms",
        "Figure 7",
        "layer of nmt",
        "full / delta",
        "by the rule",
        "seconds by full",
    ):
        assert heading in out


def test_a_search_slower_than_a_baseline_is_told() -> None:
    row = Row("nmt", "flexflow-p100:1", 2, 10, 16, 2.0, 3.0, 1.0, 1.5, 0.9, 100)
    assert row.slower
    assert row.over_baselines == pytest.approx(2.0 / 1.5)


def test_data_parallelism_reduces_every_weight_among_all_devices() -> None:
    here = problem(case("alexnet"))
    own = totals(here, data_parallel(here))
    weights = sum(w.itemsize * math.prod(w.shape) for w in here.graph.weights)
    assert own.reduced_bytes == 2 * 3 * weights


def test_one_device_sends_nothing() -> None:
    here = problem(case("nmt"))
    own = totals(here, tuple(single(o, 0) for o in here.graph.operators))
    assert own.sent_bytes == 0
    assert own.compute_s == pytest.approx(here.seconds(tuple(single(o, 0) for o in here.graph.operators)))


def test_a_split_counts_the_operators_of_its_layer() -> None:
    here = problem(case("nmt"))
    layers = splits(here, data_parallel(here))
    assert {x.layer for x in layers} >= {"source", "target", "head", "attention/score", "decoder/1/recurrent"}
    assert all(x.have_it <= x.operators and x.devices_each <= x.devices <= 4 for x in layers)
    assert next(x for x in layers if x.layer == "head").operators == 2


def test_the_published_table_is_whole() -> None:
    with TABLE_5.open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["model"], int(r["num_gpus"])) for r in rows} == {(m, n) for m in PAPER_NAMES.values() for n in (4, 8, 16, 32, 64)}
    for r in rows:
        assert float(r["full_s"]) / float(r["delta_s"]) == pytest.approx(float(r["speedup"]), rel=0.11)
