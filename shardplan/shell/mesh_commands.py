"""The commands about clusters and reductions: `shardplan mesh ...`, `shardplan reduce`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from shardplan.report import mesh_text
from shardplan.report.report import Report
from shardplan.shell.arguments import add_command, count, size


def add_mesh_commands(commands: Any) -> None:
    """Adds `mesh` and `reduce`."""
    mesh = commands.add_parser("mesh", help="show clusters and parallelism matrices").add_subparsers(
        dest="mesh", required=True, metavar="COMMAND"
    )
    add_command(mesh, "list", _mesh_list, "list the presets")
    one = add_command(mesh, "show", _mesh_show, "show a cluster's levels, links and device")
    one.add_argument("cluster", metavar="CLUSTER")
    one = add_command(mesh, "detect", _mesh_detect, "detect the cluster of this machine's devices")
    one.add_argument("-o", "--output", metavar="FILE", help="save it as TOML")
    one = add_command(
        mesh, "matrices", _mesh_matrices, "list parallelism matrices; with --over and --bytes, ranked by the time of a reduction"
    )
    _add_axes_options(one, over_required=False)
    one = add_command(commands, "reduce", _reduce, "rank the reduction programs for one parallelism matrix")
    _add_axes_options(one, over_required=True)
    one.add_argument(
        "--matrix", required=True, metavar="ROWS", help='parallelism matrix; rows are axes, columns are levels: "1 4 / 4 4"'
    )
    one.add_argument("--max-size", type=count, default=5, metavar="N", help="most steps of a program (default: 5)")


def _add_axes_options(one: argparse.ArgumentParser, *, over_required: bool) -> None:
    one.add_argument("--cluster", required=True, metavar="CLUSTER")
    one.add_argument("--axes", required=True, metavar="SIZES", help='sizes of the mesh axes: "4 16"')
    one.add_argument("--over", required=over_required, metavar="AXES", help='numbers of the axes to reduce over: "0"')
    one.add_argument(
        "--bytes", type=size, required=over_required, metavar="SIZE", help="bytes to reduce per device: 2147483648, 2GiB, 1e9"
    )
    one.add_argument("--algorithm", default="auto", choices=["auto", "ring", "tree"])


def _mesh_list(options: argparse.Namespace) -> Report:
    return mesh_text.mesh_list()


def _mesh_show(options: argparse.Namespace) -> Report:
    return mesh_text.mesh_show(options.cluster)


def _mesh_detect(options: argparse.Namespace) -> Report:
    from shardplan.mesh.devices import detected
    from shardplan.plans.files import write_whole

    result = detected()
    if options.output:
        write_whole(Path(options.output), mesh_text.detected_toml(result))
    return mesh_text.mesh_detect(result)


def _mesh_matrices(options: argparse.Namespace) -> Report:
    return mesh_text.mesh_matrices(options.cluster, options.axes, options.over, options.bytes, options.algorithm)


def _reduce(options: argparse.Namespace) -> Report:
    return mesh_text.reduce_report(
        options.cluster, options.axes, options.over, options.matrix, options.bytes, options.algorithm, options.max_size
    )
