"""Profiles: clusters whose figures were measured (`shardplan calibrate`), as versioned JSON files.

A profile is a cluster of its own (``profile.json``), or gives its device to another cluster (``CLUSTER@profile.json``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

from ..errors import ClusterError
from . import load
from .machine import Level, Machine

FORMAT = 1
_MARK = "shardplan_profile"
_EVIDENCE = ("software", "kept", "spread", "fit", "samples")
_AGAIN = "measure the machine again (`shardplan calibrate -o FILE`)"
_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*")


@dataclass(frozen=True, slots=True)
class Profile:
    """A cluster with measured figures.

    ``device_kind`` is the driver's name for the devices, ``measured`` has the names of the levels whose links were measured. The
    other levels have the figures of a preset. ``evidence`` holds JSON values on how the figures were measured and fitted
    (`docs/calibration.md` lists its fields). ``source`` is the file.
    """

    cluster: Machine
    device_kind: str
    measured: tuple[str, ...]
    evidence: Mapping[str, Any]
    source: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON values, from which `read_profile` reads it back."""
        return {
            _MARK: FORMAT,
            "device_kind": self.device_kind,
            "measured_levels": list(self.measured),
            "cluster": load.to_table(self.cluster),
            **self.evidence,
        }

    def to_json(self) -> str:
        """The text of the profile's file."""
        return json.dumps(self.to_dict(), indent=1) + "\n"


def read_profile(file: str | PathLike[str]) -> Profile:
    """Reads a profile and checks every figure.

    Raises:
        ClusterError: if the file cannot be read, is no profile, has another version, or holds an invalid figure. It names the
            file and the key.
    """
    source = fspath(file)
    try:
        content: Any = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ClusterError(f"cannot be read: {error.strerror}", where=source) from error
    except UnicodeDecodeError as error:
        raise ClusterError(f"is not UTF-8 text: {error.reason} at byte {error.start}", where=source) from error
    except (ValueError, RecursionError) as error:  # a number may be too long to read
        raise ClusterError(f"not JSON (truncated?): {error}; {_AGAIN}", where=source) from error
    if not isinstance(content, dict) or _MARK not in content:
        raise ClusterError(f"not a profile: it has no key {_MARK!r}; {_AGAIN}", where=source)
    table = cast("dict[str, Any]", content)
    if table[_MARK] != FORMAT or isinstance(table[_MARK], bool):
        message = f"profile version {table[_MARK]!r}, this version of shardplan reads version {FORMAT}; {_AGAIN}"
        raise ClusterError(message, where=f"{source}: {_MARK}")
    return _parsed(table, source)


def _parsed(table: dict[str, Any], source: str) -> Profile:
    required = {_MARK, "device_kind", "measured_levels", "cluster"}
    load.check_keys(table, required | set(_EVIDENCE), required, source, "")
    if not isinstance(table["cluster"], dict):
        raise ClusterError(f"must be a table, got {table['cluster']!r}", where=f"{source}: cluster")
    cluster = load.from_table(cast("dict[str, Any]", table["cluster"]), source=f"{source}: cluster")
    kind, measured = table["device_kind"], table["measured_levels"]
    if not isinstance(kind, str) or not kind:
        raise ClusterError(f"must be the driver's name for the devices, got {kind!r}", where=f"{source}: device_kind")
    names = cast("list[Any]", measured) if isinstance(measured, list) else [measured]
    for name in names:
        if name not in cluster.level_names:
            known = ", ".join(cluster.level_names)
            raise ClusterError(f"names no level: {name!r}; the cluster has {known}", where=f"{source}: measured_levels")
    evidence = {key: table[key] for key in _EVIDENCE if key in table}
    return Profile(replace(cluster, source=source), kind, tuple(str(name) for name in names), evidence, source)


def is_profile(spec: str | PathLike[str]) -> bool:
    """Whether a cluster's name is the path of a profile."""
    return fspath(spec).endswith(".json") and "@" not in Path(spec).name


def parts(spec: str | PathLike[str]) -> tuple[str, str] | None:
    """(cluster, profile) of ``CLUSTER@PROFILE``; None for any other text."""
    text = fspath(spec)
    cluster, at, profile = text.rpartition("@")
    return (cluster, profile) if at and not Path(text).is_file() else None


def load_machine(spec: str | PathLike[str]) -> Machine:
    """The machine that ``spec`` names; it may be a profile, or a cluster on a profile's devices (see `Cluster.load`).

    Raises:
        ClusterError: if there is no such machine, or a figure of it is invalid.
    """
    if not isinstance(spec, str | PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
        return load.load(spec)
    pair = parts(spec)
    if pair is not None:
        return placed(*pair)
    return read_profile(spec).cluster if is_profile(spec) else load.load(spec)


def placed(cluster: str, file: str) -> Machine:
    """A cluster with the device of a profile, and with the profile's measured links at levels of the same name.

    A bare shape (``4x8``) takes the last levels of the profile; their links must have been measured.

    Raises:
        ClusterError: if the profile is of another kind of device than the cluster, or measured no link for a level of a shape.
    """
    if not cluster or not file:
        raise ClusterError(f"{cluster}@{file} lacks a side: write CLUSTER@PROFILE, such as 2x4@profile.json")
    profile = read_profile(file)
    if _SHAPE.fullmatch(cluster):
        return _shaped(tuple(int(n) for n in cluster.split("x")), profile, cluster)
    base = load.load(cluster)
    own, other = profile.cluster.device, base.device
    if (own.name, own.platform) != (other.name, other.platform):
        raise ClusterError(
            f"the profile is of {own.name} devices ({own.platform}), the cluster {cluster!r} of {other.name} ({other.platform}): "
            "measure such a device, or give a cluster of the profile's devices, such as a shape (2x4@profile.json)",
            where=f"{file}: cluster.device.name",
        )
    measured = {level.name: level for level in profile.cluster.levels if level.name in profile.measured}
    levels = tuple(measured[level.name].resized(level.size) if level.name in measured else level for level in base.levels)
    singles = base.single_devices, base.single_links
    return Machine(f"{base.name}@{profile.cluster.name}", levels, own, f"{cluster}@{file}", *singles)


def _shaped(shape: tuple[int, ...], profile: Profile, text: str) -> Machine:
    """A shape of a profile's devices, slowest level first."""
    if 0 in shape:
        raise ClusterError(f"every level of a shape needs at least one child, got {text!r}")
    known = profile.cluster.levels
    if len(shape) > len(known):
        names = ", ".join(profile.cluster.level_names)
        raise ClusterError(
            f"the shape {text} has {len(shape)} levels, the profile {len(known)} ({names}): take the links of the others from a "
            f"preset or a TOML file (PRESET@{profile.source})",
            where=f"{profile.source}: cluster.levels",
        )
    levels: list[Level] = []
    for size, level in zip(shape, known[len(known) - len(shape) :], strict=True):
        if size > 1 and level.name not in profile.measured:
            raise ClusterError(
                f"the profile measured no link of the level {level.name!r}, which has {size} children in {text}: calibrate "
                f"where there are several, or take it from a preset or a TOML file (PRESET@{profile.source})",
                where=f"{profile.source}: measured_levels",
            )
        levels.append(level.resized(size))
    return Machine(f"{text}@{profile.cluster.name}", tuple(levels), profile.cluster.device, source=f"{text}@{profile.source}")
