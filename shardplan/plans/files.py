"""Plan files: a `PlanData` written as JSON, and checked when it is read."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any

from shardplan.collectives.issued import PlannedCollective
from shardplan.cost.overlap import POOLS, Weights
from shardplan.errors import ClusterError, PlanFileError
from shardplan.ir import Collective, Entry, Factor, spec_text
from shardplan.mesh import Cluster
from shardplan.mesh.factoring import check_cover
from shardplan.plans.choices_json import Layouts, choices_from, choices_json
from shardplan.plans.data import Argument, Baseline, PlanData
from shardplan.remat import Part, Policy, Remat, Without
from shardplan.search.coarsening.variables import one_choice_of
from shardplan.search.inference.anytime import Stopped
from shardplan.search.problem.solution import Tried
from shardplan.search.strategy.purposes import Shares, purpose_of

FORMAT = 12
"""Version of the plan file."""


def plan_file(data: PlanData) -> dict[str, Any]:
    """A plan as JSON values, which `read` accepts. The fields that are filled late must be set."""
    assert data.fingerprint is not None
    assert data.baselines is not None
    assert data.explanations is not None
    layouts = Layouts.empty()
    arguments = [{**asdict(a), "layout": layouts.number(a.layout)} for a in data.arguments]
    results = [layouts.number(layout) for layout in data.result_layouts]
    return {
        "format": FORMAT,
        "name": data.name,
        "fingerprint": data.fingerprint,
        "cluster": data.cluster.to_toml(),
        "cluster_fingerprint": data.cluster.fingerprint(),
        "factors": _factors_json(data.factors),
        "step_time_s": data.step_time_s,
        "searched_s": data.searched_s,
        "time_model": data.time_model,
        "weights": asdict(data.weights),
        "company": None if data.company is None else dict(data.company),
        "compute_s": data.compute_s,
        "peak_bytes": data.peak_bytes,
        "memory_limit": data.memory_limit,
        "limit_origin": data.limit_origin,
        "bound_s": data.bound_s,
        "unlimited_s": data.unlimited_s,
        **_found(data),
        "operators": data.operators,
        "objective": data.objective,
        "limited": data.limited,
        "regather": data.regather,
        "one_choice": data.one_choice,
        "backend": [data.backend, data.backend_reason],
        "remat": {**asdict(data.remat), "parts": [asdict(part) for part in data.remat.parts]},
        "donate_argnums": list(data.donate_argnums),
        "replicate": list(data.replicate),
        "pins": {glob: [list(e) if isinstance(e, tuple) else e for e in spec] for glob, spec in data.pins.items()},
        "idle_axes": dict(data.idle_axes),
        "unknown_trips": list(data.unknown_trips),
        "whole_ops": list(data.whole_ops),
        "baselines": [asdict(b) for b in data.baselines],
        "left_out": [list(row) for row in data.left_out],
        "explanations": dict(data.explanations),
        "collectives": [asdict(c) for c in data.collectives],
        "in_specs": {path: spec_text(entries) for path, entries in data.entries.items()},
        "arguments": arguments,
        "result_layouts": results,
        "choices": choices_json(data.choices, layouts),
        "layouts": layouts.json,
    }


def _found(data: PlanData) -> dict[str, Any]:
    """How the search found the plan."""
    tried = [{**asdict(t), "factors": _factors_json(t.factors)} for t in data.tried]
    return {
        "exact": data.exact,
        "stopped": data.stopped,
        "time_budget_s": data.time_budget_s,
        "trace_s": data.trace_s,
        "search_s": data.search_s,
        "purposes": [[list(row) for row in shares] for shares in data.purposes],
        "tried": tried,
        "fixed_axes": dict(data.fixed_axes),
    }


def _factors_json(factors: Sequence[Factor]) -> list[list[Any]]:
    return [[f.name, f.size, f.level, f.stride] for f in factors]


def save(data: PlanData, file: str | PathLike[str]) -> None:
    """Writes a plan as JSON; an existing file is replaced only once the new one is complete."""
    write_whole(Path(file), json.dumps(plan_file(data)))


def write_whole(path: Path, content: str | bytes | Iterable[bytes]) -> None:
    """Writes to a temporary file, then renames it; content that comes in parts is never held whole.

    A link is followed. Nothing remains of a write that fails.

    Raises:
        PlanFileError: if the file cannot be written, or if ``path`` is anything but a file: a folder, a device, a pipe.
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
        PlanFileError: if its folder does not exist or may not be written, or if it is anything but a file.
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
    """Reads a plan from its file and checks every field.

    Raises:
        PlanFileError: if the file cannot be read, is not a plan, or lacks a field.
        ClusterError: if its cluster is invalid.
    """
    path = Path(file)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanFileError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long to read
        raise PlanFileError(f"{path}: not a plan file: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        if not isinstance(content, dict) or "format" not in content:
            raise PlanFileError(f"{path}: not a plan file: it has no key 'format'; give a file that a plan was saved to")
        actual = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise PlanFileError(f"{path}: plan format {actual!r}, this version reads format {FORMAT}; plan the step again")
    try:
        _check_finite(content)
        data = _parsed(str(path), content)
        _check_sums(data)
        return data
    except ClusterError:
        raise
    except KeyError as error:
        raise PlanFileError(f"{path}: incomplete plan: {error} is missing; plan the step again") from error
    except ValueError as error:
        raise PlanFileError(f"{path}: not a plan: {error}; plan the step again") from error
    except (TypeError, AttributeError, IndexError) as error:
        raise PlanFileError(f"{path}: not a plan: {type(error).__name__}: {error}; plan the step again") from error


_ROUNDING = 1e-6
"""The part by which sums of a plan's seconds may differ."""


def _check_finite(content: dict[str, Any]) -> None:
    """Refuses numbers that are infinite or none at all, which JSON's readers accept, wherever they stand."""
    left: list[tuple[str, Any]] = list(content.items())
    while left:
        place, value = left.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{place} is {value}, not a finite number")
        if isinstance(value, dict):
            left += [(f"{place}.{key}", one) for key, one in value.items()]
        elif isinstance(value, list):
            left += [(f"{place}[{n}]", one) for n, one in enumerate(value)]


def _check_sums(data: PlanData) -> None:
    """Refuses a step that takes less time than its parts do at once, or more than they do one after the other."""
    least, most = data.hidden_s * (1 - _ROUNDING), data.serial_s * (1 + _ROUNDING)
    if not least <= data.step_time_s <= most:
        parts = f"compute_s and collectives take {data.hidden_s!r} s at once and {data.serial_s!r} s in turn"
        raise ValueError(f"step_time_s={data.step_time_s!r} does not fit: {parts}")


def _parsed(name: str, content: dict[str, Any]) -> PlanData:
    cluster = Cluster.from_toml(content["cluster"], source=f"{name}: cluster")
    if content["cluster_fingerprint"] != cluster.fingerprint():
        raise ValueError(f"cluster_fingerprint={content['cluster_fingerprint']!r} does not match the cluster in the file")
    mesh_factors = _factors(content["factors"])
    check_cover(cluster, mesh_factors)
    layouts = Layouts.parsed(content["layouts"], len(mesh_factors))
    return PlanData(
        name=str(content["name"]),
        cluster=cluster,
        factors=mesh_factors,
        arguments=tuple(_argument(row, layouts) for row in content["arguments"]),
        result_layouts=tuple(layouts.of(n) for n in content["result_layouts"]),
        operators=int(content["operators"]),
        choices=choices_from(content["choices"], layouts, len(mesh_factors)),
        collectives=tuple(_collective(row) for row in content["collectives"]),
        step_time_s=_not_negative(content, "step_time_s"),
        searched_s=_not_negative(content, "searched_s"),
        **_overlap(content),
        compute_s=_not_negative(content, "compute_s"),
        peak_bytes=_whole(content, "peak_bytes"),
        memory_limit=_whole(content, "memory_limit"),
        limit_origin=str(content["limit_origin"]),
        objective=_one_of(content, "objective", ("time", "bytes")),
        exact=_boolean(content, "exact"),
        unlimited_s=_optional(content["unlimited_s"]),
        stopped=_stopped(content["stopped"]),
        limited=_boolean(content, "limited"),
        regather=_boolean(content, "regather"),
        remat=_remat(content["remat"]),
        **_backend(content["backend"]),
        one_choice=one_choice_of(content["one_choice"]),
        donate_argnums=_positions(content["donate_argnums"]),
        replicate=_names(content["replicate"], "replicate"),
        pins={str(glob): _entries(entries) for glob, entries in content["pins"].items()},
        time_budget_s=_optional(content["time_budget_s"]),
        idle_axes={str(axis): str(text) for axis, text in content["idle_axes"].items()},
        unknown_trips=_names(content["unknown_trips"], "unknown_trips"),
        whole_ops=_names(content["whole_ops"], "whole_ops"),
        purposes=_purposes(content["purposes"], len(mesh_factors)),
        tried=tuple(_tried(row) for row in content["tried"]),
        fixed_axes={purpose_of(name): int(n) for name, n in content["fixed_axes"].items()},
        trace_s=_not_negative(content, "trace_s"),
        search_s=_not_negative(content, "search_s"),
        fingerprint=str(content["fingerprint"]),
        bound_s=_not_negative(content, "bound_s"),
        baselines=tuple(Baseline(**b) for b in content["baselines"]),
        left_out=tuple((str(name), str(reason)) for name, reason in content["left_out"]),
        explanations={str(path): str(text) for path, text in content["explanations"].items()},
    )


def _overlap(content: dict[str, Any]) -> dict[str, Any]:
    """How seconds add up, the weights at which the search ended, and the company in which it priced moves."""
    name, weights, company = content["time_model"], content["weights"], content["company"]
    if name not in ("overlap", "sum"):
        raise ValueError(f"time_model={name!r}")
    return {
        "time_model": name,
        "weights": Weights(float(weights["compute"]), float(weights["hideable"])),
        "company": None if company is None else {pool: float(company[pool]) for pool in POOLS},
    }


def _factors(rows: Any) -> tuple[Factor, ...]:
    return tuple(Factor(str(n), int(s), int(level), int(stride)) for n, s, level, stride in rows)


def _purposes(rows: Any, count: int) -> tuple[Shares, ...]:
    """The purposes of each factor, as they were written."""
    found: tuple[Shares, ...] = tuple(tuple((purpose_of(name), float(part)) for name, part in shares) for shares in rows)
    if len(found) != count or not all(found):
        raise ValueError(f"purposes={rows!r} says nothing of some of the {count} factors")
    return found


def _tried(row: Mapping[str, Any]) -> Tried:
    seconds, bound_s = _optional(row["seconds"]), _optional(row["bound_s"])
    return Tried(_factors(row["factors"]), seconds, _boolean(row, "fits"), bound_s, str(row["why"]))


def _argument(row: Mapping[str, Any], layouts: Layouts) -> Argument:
    shape = tuple(int(n) for n in row["shape"])
    return Argument(str(row["path"]), shape, str(row["dtype"]), int(row["nbytes"]), layouts.of(row["layout"]))


def _collective(row: Mapping[str, Any]) -> PlannedCollective:
    return PlannedCollective(**{**row, "kind": Collective(row["kind"]), "axes": tuple(map(str, row["axes"]))})


def _boolean(content: Mapping[str, Any], key: str) -> bool:
    if not isinstance(content[key], bool):
        raise ValueError(f"{key}={content[key]!r} is neither true nor false")
    return content[key]


def _one_of(content: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    if content[key] not in known:
        raise ValueError(f"unsupported {key}={content[key]!r}")
    return content[key]


def _not_negative(content: Mapping[str, Any], key: str) -> float:
    if not (value := float(content[key])) >= 0:
        raise ValueError(f"{key}={value!r} is negative")
    return value


def _whole(content: Mapping[str, Any], key: str) -> int:
    value = content[key]
    if type(value) is not int or value < 0:
        raise ValueError(f"{key}={value!r} is not a whole number of bytes")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _positions(numbers: Any) -> tuple[int, ...]:
    if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"donate_argnums={numbers!r} is not a list of argument numbers")
    return tuple(numbers)


def _names(names: Any, key: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{key}={names!r} is not a list of strings")
    return tuple(names)


def _remat(fields: Mapping[str, Any]) -> Remat:
    without = None if fields["without"] is None else Without(**fields["without"])
    return Remat(tuple(_part(p) for p in fields["parts"]), _policy(fields["policy"]), without, str(fields["note"]))


def _part(row: Mapping[str, Any]) -> Part:
    where = tuple((int(op), int(body)) for op, body in row["where"])
    loop = None if row["loop"] is None else (int(row["loop"][0]), int(row["loop"][1]))
    return Part(where, tuple(int(op) for op in row["ops"]), loop, int(row["saved_bytes"]))


def _policy(text: Any) -> Policy:
    match text:
        case "all" | "light":
            return text
        case _:
            raise ValueError(f"unsupported policy={text!r}")


def _backend(row: Any) -> dict[str, Any]:
    """What runs the plan, and the reason."""
    name, reason = row
    if name not in ("explicit", "specs"):
        raise ValueError(f"unsupported backend={name!r}")
    return {"backend": name, "backend_reason": str(reason)}


def _stopped(text: Any) -> Stopped:
    match text:
        case "" | "time budget" | "interrupted":
            return text
        case _:
            raise ValueError(f"unsupported stopped={text!r}")


def _entries(entries: Any) -> tuple[Entry, ...]:
    return tuple(tuple(e) if isinstance(e, list) else e for e in entries)
