"""Clusters from presets, files and shapes, and back to TOML.

One reader serves the presets (``presets/*.toml``) and the user's files. Every error names the file and the key.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import MISSING, asdict, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from ..errors import ClusterError, nearest
from .machine import Device, Interconnect, Level, Machine
from .singles import SingleDevice, SingleLink

PRESETS = Path(__file__).parent / "presets"
_SHAPE = re.compile(r"[0-9]+(x[0-9]+)*")
_PRESET = re.compile(r"(?P<name>[A-Za-z][\w.\-]*?)(:(?P<count>[^:/\\]*))?")
_FORMS = (
    "a preset (NAME or NAME:NODES), the path of a TOML file or of a profile (.json), a shape like 2x4, "
    "or one of these on the devices of a profile (2x4@profile.json)"
)
_SHAPE_NAMES = ("pod", "rack", "node", "gpu")


def preset_names() -> tuple[str, ...]:
    """The presets, sorted."""
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load(spec: str | PathLike[str]) -> Machine:
    """See `Cluster.load`."""
    if not isinstance(spec, str):
        if not isinstance(spec, PathLike):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ClusterError(f"no cluster {spec!r}; a cluster is {_FORMS}")
        return _load_file(Path(spec))
    if _SHAPE.fullmatch(spec):
        return from_shape(tuple(int(n) for n in spec.split("x")))
    if spec.endswith(".toml") or "/" in spec or "\\" in spec:
        return _load_file(Path(spec))
    if spec.split(":")[0] not in preset_names() and Path(spec).is_file():
        return _load_file(Path(spec))
    return _load_preset(spec)


def from_shape(shape: tuple[int, ...]) -> Machine:
    """H100s in this shape, slowest level first: NVSwitch in the last level, InfiniBand above it, one NIC a GPU."""
    text = "x".join(map(str, shape))
    if not shape or 0 in shape:
        raise ClusterError(f"every level of a shape needs at least one child, got {text!r}")
    preset = _load_preset("dgx-h100")
    node, gpu = preset.levels
    nic = node.bandwidth_bytes_per_s / node.rails
    levels: list[Level] = [replace(gpu, name="gpu", size=shape[-1])]
    below = shape[-1]
    for depth, size in enumerate(reversed(shape[:-1]), start=1):
        name = _SHAPE_NAMES[-1 - depth] if depth < len(_SHAPE_NAMES) else f"tier{depth}"
        # a fat tree of full bisection: a rack has as many NICs as GPUs, and each tier of switches adds latency
        levels.append(
            replace(node, name=name, size=size, bandwidth_bytes_per_s=nic * below, rails=below, latency_s=node.latency_s * depth)
        )
        below *= size
    return Machine(text, tuple(reversed(levels)), preset.device, source=text)


def from_toml(text: str, *, source: str) -> Machine:
    """See `Cluster.from_toml`."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except (ValueError, RecursionError) as err:  # a number may be too long to read
        raise ClusterError(f"not TOML: {err}", where=source) from err
    return from_table(table, source=source)


def from_table(table: dict[str, Any], *, source: str) -> Machine:
    """The machine that a table of a TOML or JSON file describes; ``source`` names the file in messages."""
    required = {"name", "device", "levels"}
    check_keys(table, required | {"single_devices", "single_links"}, required, source, "")
    if not isinstance(table["name"], str):
        raise ClusterError(f"must be a string, got {table['name']!r}", where=f"{source}: name")
    levels: Any = table["levels"]
    if not isinstance(levels, list) or not levels:
        raise ClusterError("must be a list of [[levels]] tables, slowest first", where=f"{source}: levels")
    parsed = tuple(_level(item, source, f"levels[{i}]") for i, item in enumerate(cast("list[Any]", levels)))
    device = cast(Device, _build(Device, table["device"], source, "device"))
    if not table["name"]:
        raise ClusterError("is empty: plans and messages name the cluster by it", where=f"{source}: name")
    shape = tuple(level.size for level in parsed)
    devices = tuple(_single_device(t, shape, source, key) for key, t in _tables(table, "single_devices", source))
    links = tuple(_single_link(t, shape, source, key) for key, t in _tables(table, "single_links", source))
    try:
        return Machine(table["name"], parsed, device, source, devices, links)
    except ClusterError as err:
        raise ClusterError(str(err), where=source) from err


def to_table(cluster: Machine) -> dict[str, Any]:
    """The table from which `from_table` builds an equal machine: the keys of the TOML file that are given."""

    def given(value: Any) -> dict[str, Any]:
        items = asdict(value).items()
        listed = {name: list(cast("tuple[int, ...]", item)) for name, item in items if isinstance(item, tuple)}
        return {name: listed.get(name, item) for name, item in items if item is not None}

    levels = [{**given(level), **({"also": given(level.also)} if level.also is not None else {})} for level in cluster.levels]
    singles = {"single_devices": cluster.single_devices, "single_links": cluster.single_links}
    differing = {key: [given(item) for item in own] for key, own in singles.items() if own}
    return {"name": cluster.name, "device": given(cluster.device), "levels": levels, **differing}


def to_toml(cluster: Machine) -> str:
    """See `Cluster.to_toml`."""
    lines = [f"name = {_quoted(cluster.name)}", "", "[device]", *_fields_toml(cluster.device, skip=("flops_per_s",))]
    lines += [
        "",
        "[device.flops_per_s]",
        *(f"{_quoted(k)} = {_value(float(v))}" for k, v in cluster.device.flops_per_s.items()),
    ]
    for level in cluster.levels:
        lines += ["", "[[levels]]", *_fields_toml(level, skip=("also",))]
        if level.also is not None:
            lines += ["", "[levels.also]", *_fields_toml(level.also)]
    for key, own in (("single_devices", cluster.single_devices), ("single_links", cluster.single_links)):
        for item in own:
            lines += ["", f"[[{key}]]", *_fields_toml(item)]
    return "\n".join(lines) + "\n"


def _load_file(path: Path) -> Machine:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as err:
        raise ClusterError(f"cannot be read: {err.strerror}", where=str(path)) from err
    except UnicodeDecodeError as err:
        raise ClusterError(f"is not UTF-8 text: {err.reason} at byte {err.start}", where=str(path)) from err
    return from_toml(text, source=str(path))


def _load_preset(spec: str) -> Machine:
    match = _PRESET.fullmatch(spec)
    known = preset_names()
    if match is None or match["name"] not in known:
        name = match["name"] if match else spec
        hint = nearest(name, known) or f" (presets: {', '.join(known)})"
        raise ClusterError(f"no cluster {spec!r}{hint}; a cluster is {_FORMS}")
    path = PRESETS / f"{match['name']}.toml"
    cluster = from_toml(path.read_text(encoding="utf-8"), source=path.name)
    if match["count"] is None:
        return replace(cluster, source=spec)
    if not match["count"].isdecimal() or int(match["count"]) < 1:
        raise ClusterError(f"the number of nodes must be a whole number above 0, got {match['count']!r} in {spec!r}")
    return replace(cluster.resized(int(match["count"])), source=spec)


def _level(item: Any, source: str, key: str) -> Level:
    also = None
    if isinstance(item, dict) and "also" in item:
        table = dict(cast("dict[str, Any]", item))
        also = cast(Interconnect, _build(Interconnect, table.pop("also"), source, f"{key}.also"))
        item = table
    level = cast(Level, _build(Level, item, source, key))
    try:
        return level if also is None else replace(level, also=also)
    except ClusterError as err:
        raise _at(err, source, key) from err


def _tables(table: dict[str, Any], name: str, source: str) -> list[tuple[str, dict[str, Any]]]:
    """The tables of a list that may be missing, each with its key."""
    own: Any = table.get(name, [])
    if not isinstance(own, list):
        raise ClusterError(f"must be a list of [[{name}]] tables, got {own!r}", where=f"{source}: {name}")
    items = cast("list[Any]", own)
    for i, item in enumerate(items):
        if not isinstance(item, dict):
            raise ClusterError(f"must be a table, got {item!r}", where=f"{source}: {name}[{i}]")
    return [(f"{name}[{i}]", dict(item)) for i, item in enumerate(items)]


def _single_device(table: dict[str, Any], shape: tuple[int, ...], source: str, key: str) -> SingleDevice:
    """A device by its ``index`` or its ``place``, and at least one figure of its own."""
    if ("index" in table) == ("place" in table):
        raise ClusterError("give one of index = 3 and place = [0, 3]", where=f"{source}: {key}.index")
    given = "index" if "index" in table else "place"
    table["index"] = _number(table.pop(given), shape, f"{source}: {key}.{given}")
    if len(table) == 1:
        raise ClusterError("needs one of speed, memory_bytes and absent", where=f"{source}: {key}")
    return cast(SingleDevice, _build(SingleDevice, table, source, key))


def _single_link(table: dict[str, Any], shape: tuple[int, ...], source: str, key: str) -> SingleLink:
    """A link ``between`` two devices, each a number or a place."""
    where = f"{source}: {key}.between"
    two: Any = table.pop("between", None)
    if not isinstance(two, list) or len(cast("list[Any]", two)) != 2:
        raise ClusterError(f"must be two devices, such as [0, 3] or [[0, 0], [0, 3]], got {two!r}", where=where)
    first, second = (_number(item, shape, where) for item in cast("list[Any]", two))
    check_keys(table, {"between", "bandwidth_bytes_per_s", "latency_s"}, set(), source, f"{key}.")
    figures = {name: _figure(value, f"{source}: {key}.{name}") for name, value in table.items()}
    try:
        return SingleLink((first, second), **figures)
    except ClusterError as err:
        raise _at(err, source, key) from err


def _number(value: Any, shape: tuple[int, ...], where: str) -> int:
    """The number of the device that a number or a place names."""
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    if any(isinstance(n, bool) or not isinstance(n, int) for n in items):
        raise ClusterError(f"must be whole numbers, got {value!r}", where=where)
    sizes = shape if isinstance(value, list) else (math.prod(shape),)
    if len(items) != len(sizes):
        raise ClusterError(f"must have a number for each of the {len(sizes)} levels, got {value!r}", where=where)
    if not all(0 <= n < size for n, size in zip(items, sizes, strict=True)):
        raise ClusterError(f"there is no device {value!r}: the levels have the sizes {list(shape)}, counted from 0", where=where)
    number = 0
    for n, size in zip(items, sizes, strict=True):
        number = number * size + n
    return number


def _figure(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ClusterError(f"must be a number, got {value!r}", where=where)
    return _real(value, where)


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "LinkKind": (str,),
    "Platform": (str,),
    "int": (int,),
    "int | None": (int,),
    "float": (int, float),
    "float | None": (int, float),
    "bool": (bool,),
}


def _build(kind: type[Any], item: Any, source: str, key: str) -> object:
    """A level, interconnect or device from a TOML table, every key checked."""
    if not isinstance(item, dict):
        raise ClusterError(f"must be a table, got {item!r}", where=f"{source}: {key}")
    table = cast("dict[str, Any]", item)
    known = {f.name: f for f in fields(kind) if f.name != "also"}
    required = {name for name, f in known.items() if f.default is MISSING}
    check_keys(table, set(known), required, source, f"{key}.")
    values: dict[str, Any] = {}
    for name, value in table.items():
        where = f"{source}: {key}.{name}"
        if name == "flops_per_s":
            values[name] = _peaks(value, where)
            continue
        expected = _TYPES[str(known[name].type)]
        if isinstance(value, float) and expected == (int,) and value.is_integer():
            value = int(value)  # sizes written as 80e9
        if isinstance(value, bool) != (expected == (bool,)) or not isinstance(value, expected):
            words = (
                "true or false"
                if expected == (bool,)
                else "a string"
                if expected == (str,)
                else "a whole number"
                if expected == (int,)
                else "a number"
            )
            raise ClusterError(f"must be {words}, got {value!r}", where=where)
        values[name] = _real(value, where) if expected == (int, float) else value
    try:
        return kind(**values)
    except ClusterError as err:
        raise _at(err, source, key) from err


def _peaks(value: Any, where: str) -> dict[str, float]:
    if not isinstance(value, dict):
        raise ClusterError(f"must be a table of dtype = peak, got {value!r}", where=where)
    for dtype, peak in cast("dict[str, Any]", value).items():
        if isinstance(peak, bool) or not isinstance(peak, int | float):
            raise ClusterError(f"must be a number, got {peak!r}", where=f"{where}.{dtype}")
    return {k: _real(v, f"{where}.{k}") for k, v in cast("dict[str, Any]", value).items()}


def _real(value: Any, where: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ClusterError("must be a finite number, got one of over 300 digits", where=where) from None


def _at(err: ClusterError, source: str, key: str) -> ClusterError:
    """The same error, with its place as file and key: ``level 'x': size`` becomes ``file: levels[0].size``."""
    last = (err.where or "").rsplit(": ", 1)[-1]
    message = str(err).removeprefix(f"{err.where}: ") if err.where else str(err)
    return ClusterError(message, where=f"{source}: {key}.{last}")


def check_keys(table: dict[str, Any], known: set[str], required: set[str], source: str, prefix: str) -> None:
    """Refuses a table with other keys than the known ones, or without a required one."""
    for key in table:
        if key not in known:
            hint = nearest(key, sorted(known)) or f" (known: {', '.join(sorted(known))})"
            raise ClusterError(f"unknown key{hint}", where=f"{source}: {prefix}{key}")
    for key in sorted(required - table.keys()):
        raise ClusterError("missing", where=f"{source}: {prefix}{key}")


def _fields_toml(value: Any, *, skip: tuple[str, ...] = ()) -> list[str]:
    given = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name not in skip]
    return [f"{name} = {_value(x)}" for name, x in given if x is not None]


def _value(value: str | int | float | tuple[int, ...]) -> str:
    match value:
        case str():
            return _quoted(value)
        case bool():
            return "true" if value else "false"
        case tuple():
            return str(list(value))
        case _:
            return repr(value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON admits it unescaped, TOML does not
