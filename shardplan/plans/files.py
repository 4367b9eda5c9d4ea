"""Plan files: a `PlanData`, or a `PlacedData` with one for each group, written as JSON, and checked when it is read."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import Any, cast

from shardplan.cost.overlap import POOLS
from shardplan.errors import ClusterError, PlanFileError
from shardplan.ir import Layout, Use, spec_text
from shardplan.mesh import Cluster
from shardplan.mesh.factoring import check_cover
from shardplan.mesh.groups import group_cluster
from shardplan.plans.codec import Reader, Writer, plain
from shardplan.plans.data import PlanData
from shardplan.plans.placed_data import PlacedData

FORMAT = 26
"""Version of the plan file."""

_TABLES: dict[type, str] = {Layout: "layouts", Use: "uses"}
"""The types whose values are written once, because many tensors and ops share them; a table may refer to those before it."""

_LATE = ("fingerprint", "marks", "bound_s", "baselines", "explanations")
"""The fields that are filled before a plan is saved; a plan of a group goes without them."""

_PLACED_LATE = ("fingerprint", "marks", "explanations")
"""The same for a plan with groups of devices."""

AnyData = PlanData | PlacedData


def plan_file(data: AnyData) -> dict[str, Any]:
    """A plan as JSON values, which `read_any` accepts. The fields that are filled late must be set."""
    assert all(getattr(data, name) is not None for name in _late(data))
    return {"format": FORMAT, **(_plan_values(data) if isinstance(data, PlanData) else _placed_values(data))}


def _late(data: AnyData) -> tuple[str, ...]:
    return _LATE if isinstance(data, PlanData) else _PLACED_LATE


def _plan_values(data: PlanData) -> dict[str, Any]:
    writer = Writer({Cluster: Cluster.to_toml}, _TABLES)
    return {
        "cluster_fingerprint": data.cluster.fingerprint(),
        "in_specs": {path: spec_text(entries) for path, entries in data.entries.items()},
        **writer.fields(data),
        **{name: writer.rows[kind] for kind, name in _TABLES.items()},
    }


def _placed_values(data: PlacedData) -> dict[str, Any]:
    writer = Writer({Cluster: Cluster.to_toml, PlanData: _plan_values})
    return {"cluster_fingerprint": data.cluster.fingerprint(), **writer.fields(data)}


def save(data: AnyData, file: str | PathLike[str]) -> None:
    """Writes a plan as JSON; an existing file is replaced only once the new one is complete."""
    write_whole(Path(file), json.dumps(plan_file(data), allow_nan=False))


def write_whole(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes to a temporary file, then renames it; content that comes in parts is never held whole.

    A link is followed. Nothing remains of a write that fails.

    Raises:
        PlanFileError: if the file cannot be written, or if ``path`` is not a file but a folder, a device or a pipe.
    """
    check_writable(path)
    target = Path(os.path.realpath(path))
    name = ""
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
        with os.fdopen(handle, "wb") as out:
            out.writelines(
                [content.encode()] if isinstance(content, str) else [content] if isinstance(content, bytes) else content
            )
        os.chmod(name, 0o644)
        os.replace(name, target)
        name = ""
    except OSError as error:
        raise PlanFileError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if name:
            Path(name).unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Refuses a path that `write_whole` could not write.

    Raises:
        PlanFileError: if its folder does not exist or may not be written, or if it is not a file.
    """
    target = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device or a pipe"
        raise PlanFileError(f"cannot write {path}: it is {kind}; give the name of a file")
    if not target.parent.is_dir():
        raise PlanFileError(f"cannot write {path}: there is no folder {target.parent}")
    if not os.access(target.parent, os.W_OK):
        raise PlanFileError(f"cannot write {path}: the folder {target.parent} may not be written")


def read(file: str | PathLike[str]) -> PlanData:
    """Reads a plan on all devices from its file and checks every field.

    Raises:
        PlanFileError: if the file cannot be read, is not a plan, or lacks a field, and for a plan with groups of devices.
        ClusterError: if its cluster is invalid.
    """
    return _on_all_devices(str(Path(file)), read_any(file))


def read_any(file: str | PathLike[str]) -> AnyData:
    """Reads a plan from its file and checks every field. It raises what `read` raises, but takes groups of devices."""
    path = Path(file)
    try:
        return parse(str(path), path.read_bytes())
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror or error}") from error


def _on_all_devices(name: str, data: AnyData) -> PlanData:
    if isinstance(data, PlacedData):
        raise PlanFileError(
            f"{name}: a plan on {len(data.groups)} groups of devices, and a plan on all devices is needed here: give one that "
            "was made with placement='one'"
        )
    return data


def parse(name: str, text: str | bytes) -> AnyData:
    """The plan in the text of a plan file; ``name`` says in errors where it comes from. It raises what `read_any` raises."""
    try:
        content = json.loads(text.decode("utf-8") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long to read
        raise PlanFileError(f"{name}: not a plan file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        if not isinstance(content, dict) or "format" not in content:
            raise PlanFileError(f"{name}: not a plan file: it has no key 'format'; give a file that a plan was saved to")
        actual = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PlanFileError(f"{name}: plan format {actual!r}, this version reads format {FORMAT}; plan the step again")
    try:
        data = _placed(name, content) if "groups" in content else _plan(name, content)
        for late in _late(data):
            if getattr(data, late) is None:
                raise KeyError(late)
        return data
    except KeyError as error:
        raise PlanFileError(f"{name}: incomplete plan: {error} is missing; plan the step again") from error
    except ValueError as error:
        raise PlanFileError(f"{name}: not a plan: {error}; plan the step again") from error


def _reads_cluster(name: str) -> Callable[[Any, str], Cluster]:
    """The function that reads the cluster in the file ``name``."""

    def cluster(text: Any, place: str) -> Cluster:
        return Cluster.from_toml(plain(str, text, place), source=f"{name}: {place}")

    return cluster


def _plan(name: str, content: dict[str, Any]) -> PlanData:
    reader = Reader({Cluster: _reads_cluster(name)})
    tables = {kind: reader.table(kind, content[table], table) for kind, table in _TABLES.items()}
    data: PlanData = reader.fields(PlanData, content)
    try:
        check_cover(data.cluster, data.factors)
    except ClusterError as error:
        raise ValueError(f"factors: {error}") from error
    _check_tables(tables[Layout], tables[Use], len(data.factors))
    _check(data, content["cluster_fingerprint"])
    return data


def _placed(name: str, content: dict[str, Any]) -> PlacedData:
    def group(value: Any, place: str) -> PlanData:
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not an object")
        try:
            return _plan(f"{name}: {place}", cast("dict[str, Any]", value))
        except KeyError as error:
            raise KeyError(f"{place}.{error.args[0]}") from error
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    data: PlacedData = Reader({Cluster: _reads_cluster(name), PlanData: group}).fields(PlacedData, content)
    _check_cluster(data.cluster, content["cluster_fingerprint"])
    _check_groups(data)
    return data


def _check_tables(layouts: list[Layout], uses: list[Use], factors: int) -> None:
    """Refuses layouts that use a factor that does not exist, or a factor twice, and uses that are for other factors."""
    for layout in layouts:
        used = [*(f for dim in layout.dims for f in dim), *layout.partial]
        if len(set(used)) < len(used) or not set(used) <= set(range(factors)):
            raise ValueError(f"a layout uses the factors {used}: each must be below {factors} and occur once")
    for use in uses:
        if len(use.loops) != factors:
            raise ValueError(f"a use cuts loops for {len(use.loops)} factors, the plan has {factors}")


_ROUNDING = 1e-6
"""The part by which sums of a plan's seconds may differ."""


def _check(data: PlanData, cluster_fingerprint: Any) -> None:
    """Refuses fields that contradict each other.

    A step takes at least the time of its parts at once, and at most their time one after the other.
    """
    _check_cluster(data.cluster, cluster_fingerprint)
    if len(data.purposes) != len(data.factors) or not all(data.purposes):
        raise ValueError(f"purposes={data.purposes!r} says nothing of some of the {len(data.factors)} factors")
    if len(data.result_paths) != len(data.result_layouts):
        raise ValueError(f"{len(data.result_paths)} results have paths, {len(data.result_layouts)} have layouts")
    if data.company is not None and set(data.company) != set(POOLS):
        raise ValueError(f"company={data.company!r} is not of the pools {', '.join(POOLS)}")
    copies = data.choices.copies
    named = [c.source for c in copies if c.source is not None]
    named += [n for body in data.choices.bodies.values() for n in body.reads.values()]
    for number in named:
        if not 0 <= number < len(copies):
            raise ValueError(f"no copy {number}: the file has {len(copies)}")
    least, most = data.hidden_s * (1 - _ROUNDING), data.serial_s * (1 + _ROUNDING)
    if not least <= data.step_time_s <= most:
        parts = f"compute_s, host_s and collectives take {data.hidden_s!r} s at once and {data.serial_s!r} s in turn"
        raise ValueError(f"step_time_s={data.step_time_s!r} does not fit: {parts}")


def _check_cluster(cluster: Cluster, fingerprint: Any) -> None:
    if fingerprint != cluster.fingerprint():
        raise ValueError(f"cluster_fingerprint={fingerprint!r} does not match the cluster in the file")


def _check_groups(data: PlacedData) -> None:
    """Refuses groups that are not parts of the cluster, or that do not exist, and arguments that no group holds."""
    count = len(data.groups)
    if not count or len(data.devices) != count:
        raise ValueError(f"devices has {len(data.devices)} groups, groups has {count}")
    for n, (devices, plan) in enumerate(zip(data.devices, data.groups, strict=True)):
        try:
            own = group_cluster(data.cluster, devices)
        except ClusterError as error:
            raise ValueError(f"devices[{n}]: {error}") from error
        if own.fingerprint() != plan.cluster.fingerprint():
            raise ValueError(f"groups[{n}] is a plan for {plan.cluster.name}, not for its devices, {own.name}")
    for name, groups in (("outer", data.outer.values()), ("chunks", data.chunks), ("group_of", data.group_of.values())):
        if strange := sorted({g for g in groups if g >= count}):
            raise ValueError(f"{name} names the group {strange[0]}, there are {count}")
    if strange := sorted({c for c in (data.inner or {}).values() if c >= len(data.chunks)}):
        raise ValueError(f"inner names the chunk {strange[0]}, there are {len(data.chunks)}")
    known = [{a.path for a in plan.arguments} for plan in data.groups]
    for path, n in data.group_of.items():
        if path not in known[n]:
            raise ValueError(f"group_of: group {n} does not have {path}")
    for n, row in enumerate(data.issues):
        if row.end_s < row.start_s:
            raise ValueError(f"issues[{n}] ends at {row.end_s!r} s, before it begins")
