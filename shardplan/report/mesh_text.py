"""Reports on clusters, parallelism matrices and reduction programs, each as text and JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from os import PathLike
from typing import Any

from shardplan.ir import Collective

from ..collectives.dsl import InsideGroup, Instruction, Master, Parallel, Reduction
from ..collectives.matrix_ranking import Request, check_over, rank_matrices
from ..collectives.ranking import entries, names_of, table
from ..cost.network import Algorithm, Network
from ..errors import ClusterError
from ..mesh.cluster import Cluster
from ..mesh.detect import Detected
from ..mesh.load import preset_names
from ..mesh.machine import Level
from ..mesh.matrix import Matrix, matrices, parse
from ..mesh.singles import SingleDevice, SingleLink
from ..mesh.topology import counts
from . import tables
from .report import Report

Spec = str | PathLike[str] | Cluster
_SHOWN = 20  # lines of a ranking in the text; JSON has all


def mesh_list() -> Report:
    """The presets."""
    clusters = [(name, Cluster.load(name)) for name in preset_names()]
    rows = [
        (name, "x".join(map(str, c.shape)), ", ".join(c.level_names), c.device.name, tables.size(c.device.memory_bytes))
        for name, c in clusters
    ]
    text = tables.table(("preset", "shape", "levels", "device", "memory"), rows)
    note = "NAME:N is N of the slowest level; `mesh show NAME` draws the links."
    return Report(f"{text}\n\n{note}", {"presets": [{"name": name, **_json(c)} for name, c in clusters]})


def mesh_show(spec: Spec) -> Report:
    """A cluster as a tree with its links."""
    cluster = Cluster.load(spec)
    return Report(_tree(cluster), {**_json(cluster), "fingerprint": cluster.fingerprint(), "toml": cluster.to_toml()})


def mesh_detect(found: Detected) -> Report:
    """The machine that `shardplan.mesh.devices.detected` found, the assumptions about it, and the TOML that describes it."""
    cluster, toml = found.cluster, detected_toml(found)
    note = "Bandwidths are those of the nearest preset: correct them in the file where this machine differs."
    assumed = [f"Assumed: {one}." for one in found.assumed]
    text = "\n".join([_tree(cluster), "", *assumed, note, "", toml.rstrip()])
    return Report(text, {**_json(cluster), "assumed": found.assumed, "fingerprint": cluster.fingerprint(), "toml": toml})


def detected_toml(found: Detected) -> str:
    """The TOML of a detected machine, with the assumptions in comments above it."""
    return "".join(f"# assumed: {one}\n" for one in found.assumed) + found.cluster.to_toml()


def mesh_matrices(
    spec: Spec,
    axes: str | Sequence[int],
    over: str | Sequence[int] | None = None,
    nbytes: float | None = None,
    algorithm: Algorithm = "auto",
) -> Report:
    """Every matrix of these axes on a cluster; with ``over``, ranked by a reduction of ``nbytes`` a device over those axes."""
    cluster, sizes = Cluster.load(spec), numbers(axes, "axes")
    cluster.check_equal()
    if over is None:
        given = [*(["bytes"] if nbytes is not None else []), *(["algorithm"] if algorithm != "auto" else [])]
        if given:
            said = " and ".join(f"--{option}" for option in given)
            raise ClusterError(f'{said}: without --over there is no reduction to rank matrices by; name its axes, --over "0"')
        found = list(matrices(cluster.shape, sizes))
        listed = [{"matrix": str(m), "rows": m.rows, "all_reduce_s": None, "best_s": None} for m in found]
        lines = [f"{m}    {_in_words(m, cluster)}" for m in found]
        return Report(
            "\n".join([_rows_note(cluster), *lines]), {"axes": sizes, "levels": cluster.level_names, "matrices": listed}
        )
    reduced = numbers(over, "over")
    check_over(reduced, len(sizes))
    request = Request(reduced, _bytes(nbytes))
    ranked = rank_matrices(cluster, sizes, [request], algorithm=algorithm)
    rows = [
        (
            str(p.matrix),
            tables.seconds(p.all_reduce_s),
            tables.seconds(p.best_s),
            p.best[0].short or "nothing",
            _in_words(p.matrix, cluster),
        )
        for p in ranked
    ]
    text = tables.table(("matrix", "all-reduce", "best", "best program", "in words"), rows, "lrrll")
    listed = [
        {
            "matrix": str(p.matrix),
            "rows": p.matrix.rows,
            "all_reduce_s": p.all_reduce_s,
            "best_s": p.best_s,
            "best": p.best[0].short,
        }
        for p in ranked
    ]
    head = f"{tables.size(request.nbytes)} a device reduced over {_axes(reduced)}, {_which(algorithm)}; the best matrix first"
    json = {"axes": sizes, "levels": cluster.level_names, "over": reduced, "bytes": request.nbytes, "algorithm": algorithm}
    return Report(f"{_rows_note(cluster)}\n{head}\n\n{text}", {**json, "matrices": listed})


def reduce_report(
    spec: Spec,
    axes: str | Sequence[int],
    over: str | Sequence[int],
    matrix: str | Matrix | None,
    nbytes: float,
    algorithm: Algorithm = "auto",
    max_size: int = 5,
) -> Report:
    """All programs of a reduction, ranked; without ``matrix``, on the best matrix."""
    cluster, sizes, reduced = Cluster.load(spec), numbers(axes, "axes"), numbers(over, "over")
    cluster.check_equal()
    amount = _bytes(nbytes)
    if matrix is None:
        matrix = rank_matrices(cluster, sizes, [Request(reduced, amount)], algorithm=algorithm, max_size=max_size)[0].matrix
    chosen = parse(matrix) if isinstance(matrix, str) else matrix
    chosen.check(cluster, sizes)
    factors, of_axes = chosen.factors(cluster)
    check_over(reduced, len(of_axes))
    network = Network(cluster, factors)
    reduced_factors = tuple(i for axis in reduced for i in of_axes[axis])
    started = time.perf_counter()
    priced = table(network, reduced_factors, algorithm=algorithm, max_size=max_size)
    synthesis_s = time.perf_counter() - started
    seconds = priced.seconds(amount)
    order = sorted(range(len(seconds)), key=lambda i: (float(seconds[i]), i))
    names = names_of(network, entries(network, reduced_factors))
    flat = float(network.seconds(Collective.ALL_REDUCE, reduced_factors, amount, algorithm=algorithm))
    ranked = [{"program": priced.programs[i].text(names), "seconds": float(seconds[i])} for i in order]
    rows = [
        (n + 1, tables.seconds(float(seconds[i])), f"{flat / seconds[i]:.2f}x" if flat else "", priced.programs[i].text(names))
        for n, i in enumerate(order[:_SHOWN])
    ]
    head = [
        f"matrix {chosen}: {_in_words(chosen, cluster)}",
        f"{tables.size(amount)} a device reduced over {_axes(reduced)}, {_which(algorithm)}",
        f"{len(order)} programs of at most {max_size} steps, synthesized and priced in {tables.seconds(synthesis_s)}",
        f"one AllReduce takes {tables.seconds(flat)}",
    ]
    more = [f"and {len(order) - _SHOWN} more"] if len(order) > _SHOWN else []
    best = priced.programs[order[0]]
    explanation = ["the best in words:", *(f"  {i + 1}. {line}" for i, line in enumerate(words(best, names)))]
    explanation += ["", *_legend([priced.programs[i] for i in order[:_SHOWN]], names)]
    body = tables.table(("rank", "time", "against AllReduce", "program"), rows)
    json = {
        "matrix": str(chosen),
        "programs": len(order),
        "synthesis_s": synthesis_s,
        "all_reduce_s": flat,
        "best_s": float(seconds[order[0]]),
        "ranked": ranked,
    }
    return Report("\n".join([*head, "", body, *more, "", *explanation]), json)


def words(program: Reduction, names: Sequence[str]) -> list[str]:
    """What each step of a program does, in words.

    >>> from ..collectives.dsl import parse
    >>> words(parse("(node, InsideGroup, ReduceScatter) (node, Parallel(root), AllReduce)", ("node", "gpu")), ("node", "gpu"))
    ['ReduceScatter among all devices of each node', 'AllReduce among the devices at the same place in every node']
    """
    lines = [f"{step.collective.p2} among {_who(step, names)}" for step in program.steps]
    return lines or ["nothing: each device is a group of its own"]


def _who(step: Instruction, names: Sequence[str]) -> str:
    """The devices of an instruction's groups."""
    match step.form:
        case InsideGroup():
            return f"all devices of {f'each {names[step.slice - 1]}' if step.slice else 'the reduction group'}"
        case Parallel(level):
            return f"the devices at the same place in every {names[step.slice - 1]}{_under(level, names)}"
        case Master(level):
            return f"the first devices of every {names[step.slice - 1]}{_under(level, names)}, the others waiting"


_MEANS = {
    Collective.ALL_REDUCE: "everyone has the sum",
    Collective.REDUCE_SCATTER: "everyone has a part of the sum",
    Collective.ALL_GATHER: "everyone has everyone's parts",
    Collective.REDUCE: "the first device has the sum, the others nothing",
    Collective.BROADCAST: "everyone has what the first device has",
}


def _legend(programs: Sequence[Reduction], names: Sequence[str]) -> list[str]:
    """The meaning of the patterns and collectives of these programs, a line each."""
    steps = [step for program in programs for step in program.steps]
    if not steps:
        return []
    among = {step.text(names).rsplit(",", 1)[0] + ")": _who(step, names) for step in steps}
    after = {c: means for c, means in _MEANS.items() if any(step.collective == c for step in steps)}
    lines = ["a step runs at once in all groups of", *(f"  {pattern}: {who}" for pattern, who in sorted(among.items()))]
    return [*lines, "after it, in each group,", *(f"  {collective.p2}: {means}" for collective, means in after.items())]


def numbers(text: str | Sequence[int], what: str) -> tuple[int, ...]:
    """The whole numbers in text like ``4 16``; ``what`` names them in errors."""
    if not isinstance(text, str):
        return tuple(text)
    parts = text.replace(",", " ").split()
    if not parts or not all(part.isdecimal() for part in parts):
        raise ClusterError(f"{what} are whole numbers like '4 16', got {text!r}")
    return tuple(int(part) for part in parts)


def _under(level: int, names: Sequence[str]) -> str:
    return f" of each {names[level - 1]}" if level else ""


def _bytes(nbytes: float | None) -> float:
    if nbytes is None:
        raise ClusterError("to rank by a reduction, say how many bytes each device reduces: --bytes N")
    if not math.isfinite(nbytes) or nbytes < 0:
        raise ClusterError(f"the bytes that each device reduces must be a number of at least 0, got {nbytes}")
    return float(nbytes)


def _axes(over: Sequence[int]) -> str:
    return f"ax{'i' if len(over) == 1 else 'e'}s {' and '.join(map(str, over))}"


def _which(algorithm: Algorithm) -> str:
    return {"auto": "ring or tree, whichever is faster", "ring": "by rings", "tree": "by trees"}.get(algorithm, "as emitted")


def _rows_note(cluster: Cluster) -> str:
    return f"rows are axes, columns the levels {', '.join(cluster.level_names)} of {cluster.name}"


def _in_words(matrix: Matrix, cluster: Cluster) -> str:
    """The levels that each axis covers: ``axis 0 over 2 node x 4 gpu``."""
    said: list[str] = []
    for axis, row in enumerate(matrix.rows):
        parts = [f"{n} {name}" for n, name in zip(row, cluster.level_names, strict=True) if n > 1]
        said.append(f"axis {axis} over {' x '.join(parts)}" if parts else f"axis {axis} over nothing")
    return "; ".join(said)


def _tree(cluster: Cluster) -> str:
    device, size = cluster.device, counts(cluster)
    lines = [f"{cluster.name}: {cluster.size} device{'s' if cluster.size > 1 else ''}"]
    for depth, level in enumerate(cluster.levels):
        lines.append(f"{'   ' * depth}`- {level.size} x {level.name}: {_link(level)}")
        if level.also is not None:
            speed, latency = tables.rate(level.also.bandwidth_bytes_per_s), tables.seconds(level.also.latency_s)
            lines.append(f"{'   ' * depth}   (also {level.also.name}: {level.also.domain} share {speed} each way, {latency})")
    memory = f"{tables.size(device.memory_bytes)} at {tables.rate(device.memory_bytes_per_s)}"
    lines.append(f"each {cluster.levels[-1].name} is {_article(device.name)} {device.name}: {memory}")
    lines += [f"   {peak / 1e12:g} TFLOP/s {dtype}" for dtype, peak in device.flops_per_s.items()]
    lines.append(f"   {tables.seconds(device.launch_s)} to launch a kernel, {tables.seconds(device.instruction_s)} a collective")
    lines += [f"device {d.index}: {_single(d)}" for d in cluster.single_devices]
    lines += [f"link {link.between[0]}-{link.between[1]}: {_single_link(link)}" for link in cluster.single_links]
    lines.append(f"{size.links} links in {size.places} places")
    return "\n".join(lines)


def _single(device: SingleDevice) -> str:
    """The figures in which a device differs: ``0.5x the speed, 16.0 GiB``."""
    if device.absent:
        return "absent"
    memory = [] if device.memory_bytes is None else [tables.size(device.memory_bytes)]
    return ", ".join([f"{device.speed:g}x the speed", *memory])


def _single_link(link: SingleLink) -> str:
    speed = [] if link.bandwidth_bytes_per_s is None else [f"{tables.rate(link.bandwidth_bytes_per_s)} each way"]
    return ", ".join([*speed, *([] if link.latency_s is None else [tables.seconds(link.latency_s)])])


def _article(name: str) -> str:
    """The article as spoken: an A100, an H200, a V100."""
    return "an" if name[:1].upper() in "AEFHILMNORSX" and (name[1:2].isdigit() or name[0].upper() in "AEIO") else "a"


def _link(level: Level) -> str:
    speed = tables.rate(level.bandwidth_bytes_per_s)
    kind = {
        "switch": f"a switch, {speed} each way into each {level.name}",
        "ring": f"a ring, {speed} each way between neighbours",
        "bus": f"a bus, {speed} each way shared by all",
    }[level.kind]
    rails = f" in {level.rails} rails" if level.rails > 1 else ""
    reached = f", rings reach {level.ring_efficiency:.0%}, trees {level.tree_efficiency:.0%}"
    return f"{kind}{rails}, {tables.seconds(level.latency_s)}" + (
        reached if (level.ring_efficiency, level.tree_efficiency) != (1, 1) else ""
    )


def _json(cluster: Cluster) -> dict[str, Any]:
    levels = [
        {
            "name": v.name,
            "size": v.size,
            "bandwidth_bytes_per_s": v.bandwidth_bytes_per_s,
            "latency_s": v.latency_s,
            "kind": v.kind,
            "rails": v.rails,
            "ring_efficiency": v.ring_efficiency,
            "tree_efficiency": v.tree_efficiency,
            "also": asdict(v.also) if v.also is not None else None,
        }
        for v in cluster.levels
    ]
    return {
        "cluster": cluster.name,
        "devices": cluster.size,
        "shape": cluster.shape,
        "levels": levels,
        "device": cluster.device.name,
        "launch_s": cluster.device.launch_s,
        "collective_launch_s": cluster.device.instruction_s,
        "single_devices": [asdict(d) for d in cluster.single_devices],
        "single_links": [asdict(link) for link in cluster.single_links],
    }
