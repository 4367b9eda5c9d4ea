"""What the command line says of clusters and reductions, as text and as JSON that says the same."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from shardplan.collectives import parse
from shardplan.errors import ClusterError
from shardplan.mesh import Cluster, preset_names
from shardplan.mesh.detect import Detected
from shardplan.report.mesh_text import (
    mesh_detect,
    mesh_list,
    mesh_matrices,
    mesh_show,
    reduce_report,
    words,
)


def test_list_names_every_preset():
    report = mesh_list()
    assert [p["name"] for p in report.json["presets"]] == list(preset_names())
    assert all(name in report.text for name in preset_names())
    json.dumps(report.json)


@pytest.mark.parametrize("name", ["dgx-h100:4", "gcp-v100:2", "2x2x4"])
def test_show_draws_the_links(name: str, golden: Callable[[str, str], None]):
    report = mesh_show(name)
    golden(f"mesh/show-{name.replace(':', '-')}.txt", report.text + "\n")
    assert Cluster.from_toml(report.json["toml"]) == Cluster.load(name)
    json.dumps(report.json)


def test_detect_gives_a_file_to_correct():
    report = mesh_detect(Detected(Cluster.load("2x4"), ("eight processes are one host",)))
    assert Cluster.from_toml(report.json["toml"]) == Cluster.load("2x4")
    assert "[[levels]]" in report.text
    assert "Assumed: eight processes are one host." in report.text
    assert report.json["assumed"] == ("eight processes are one host",)


def test_matrices_are_ranked(golden: Callable[[str, str], None]):
    report = mesh_matrices("gcp-a100:4", "4 16", "0", 2.0**31, "tree")
    golden("mesh/matrices.txt", report.text + "\n")
    found = report.json["matrices"]
    assert [m["matrix"] for m in found] == ["1 4 / 4 4", "2 2 / 2 8", "4 1 / 1 16"]
    assert [m["best_s"] for m in found] == sorted(m["best_s"] for m in found)
    assert all(m["best_s"] <= m["all_reduce_s"] for m in found)
    json.dumps(report.json)
    plain = mesh_matrices("gcp-a100:4", (4, 16))
    assert {m["matrix"] for m in plain.json["matrices"]} == {m["matrix"] for m in found}
    assert plain.json["matrices"][0]["best_s"] is None


def test_reduce_ranks_programs():
    report = reduce_report("gcp-a100:4", "4 16", "1", "1 4 / 4 4", 2.0**31, "ring")
    found = report.json
    assert found["programs"] == len(found["ranked"]) == 93
    assert [r["seconds"] for r in found["ranked"]] == sorted(r["seconds"] for r in found["ranked"])
    assert found["best_s"] == found["ranked"][0]["seconds"]
    flat = next(r["seconds"] for r in found["ranked"] if r["program"] == "(root, InsideGroup, AllReduce)")
    assert flat == found["all_reduce_s"]
    for ranked in found["ranked"]:
        parse(ranked["program"], ("node", "gpu"))
    assert "ReduceScatter among all devices of each node" in report.text
    assert "and 73 more" in report.text
    json.dumps(found)
    assert reduce_report("gcp-a100:4", "4 16", "1", None, 2.0**31).json["matrix"] == "4 1 / 1 16"
    assert reduce_report("gcp-a100:4", "4 16", "1", "1 4 / 4 4", 1e9, max_size=1).json["programs"] == 1


def test_a_ranking_needs_a_reduction():
    for given, message in (
        ((10.0, "auto"), "--bytes: without --over"),
        ((None, "tree"), "--algorithm: without --over"),
        ((10.0, "ring"), "--bytes and"),
    ):
        with pytest.raises(ClusterError, match=message):
            mesh_matrices("2x4", "2 4", None, *given)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ClusterError, match="no axis 2 to reduce over"):
        mesh_matrices("2x4", "2 4", "2")
    with pytest.raises(ClusterError, match="--bytes N"):
        mesh_matrices("2x4", "2 4", "1")


def test_one_device_and_its_article():
    assert mesh_show("1").text.startswith("1: 1 device\n")
    assert "each gpu is an H100-SXM5-80GB:" in mesh_show("1").text
    assert "each gpu is an A100-SXM4-80GB:" in mesh_show("dgx-a100").text
    assert "each gpu is a V100-SXM2-16GB:" in mesh_show("gcp-v100").text
    assert "each gpu is a GB200:" in mesh_show("gb200-nvl72").text


def test_large_clusters_are_shown_at_once():
    assert mesh_show("100000x8").text.endswith("1800000 links in 900001 places")


def test_steps_in_words():
    text = "(node, InsideGroup, Reduce) (node, Master(root), AllReduce) (root, InsideGroup, Broadcast)"
    text += " (gpu, Parallel(node), AllReduce)"
    assert words(parse(text, ("node", "gpu")), ("node", "gpu")) == [
        "Reduce among all devices of each node",
        "AllReduce among the first devices of every node, the others waiting",
        "Broadcast among all devices of the reduction group",
        "AllReduce among the devices at the same place in every gpu of each node",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gcp-a100:4", "4 8", "0", None, 1.0), r"the axes 4 \* 8 make 32 devices, the levels 4 \* 16 make 64"),
        (("gcp-a100:4", "4 sixteen", "0", None, 1.0), "axes are whole numbers like '4 16', got '4 sixteen'"),
        (("gcp-a100:4", "4 16", "", None, 1.0), "over are whole numbers"),
        (("gcp-a100:4", "4 16", "2", None, 1.0), "no axis 2 to reduce over: there are 2, counted from 0"),
        (("gcp-a100:4", "4 16", "2", "1 4 / 4 4", 1.0), "no axis 2 to reduce over: there are 2, counted from 0"),
        (("gcp-a100:4", "4 16", "0 0", "1 4 / 4 4", 1.0), "axis 0 is named twice among the axes to reduce over, 0 0"),
        (("gcp-a100:4", "4 16", "0", "1 4 / 4 8", 1.0), "column 'gpu' of the matrix 1 4 / 4 8 breaks equation 1"),
        (("gcp-a100:4", "16 4", "0", "1 4 / 4 4", 1.0), "row 0 of the matrix 1 4 / 4 4 breaks equation 2"),
        (
            ("gcp-a100:4", "4 16", "0", None, float("nan")),
            "bytes that each device reduces must be a number of at least 0, got nan",
        ),
        (("gcp-a101", "4 16", "0", None, 1.0), "nearest: gcp-a100"),
    ],
)
def test_bad_input_is_refused(arguments: tuple, message: str):
    with pytest.raises(ClusterError, match=message):
        reduce_report(*arguments)
