"""Files that say how the arguments of a step are sharded: specs by path, rules over paths, rules for logical axes."""

from __future__ import annotations

import ast
import glob
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shardplan.errors import PinError, ShardplanError
from shardplan.mesh import Cluster
from shardplan.report.maxtext_file import between_nodes
from shardplan.shell.score import NumberedMesh


@dataclass(frozen=True, slots=True)
class ShardingFile:
    """The content of a file: rules as `shardplan.score` takes them, and their mesh (None: the cluster's levels)."""

    rules: list[tuple[Any, Any]]
    mesh: Mapping[str, int] | NumberedMesh | None


def read_sharding(file: Path, cluster: Cluster, mesh: Mapping[str, int] | None, *, paths: bool) -> ShardingFile:
    """A file's rules for a cluster; ``mesh`` has the axes that the user names. With ``paths``, keys are paths, not globs.

    Raises:
        ShardplanError: for a file that cannot be read or has another form; it names the file and the key.
    """
    match file.suffix:
        case ".py":
            found = _python(file, paths=paths)
        case ".yml" | ".yaml":
            found = _yaml(file, cluster, mesh, paths=paths)
        case _:
            found = _object(file, paths=paths)
    return found if mesh is None else ShardingFile(found.rules, _with_idle(mesh, found.mesh))


def _with_idle(mesh: Mapping[str, int], own: Mapping[str, int] | NumberedMesh | None) -> Mapping[str, int]:
    """The axes that the user names, and the other axes of the file with size 1."""
    known = own.sizes if isinstance(own, NumberedMesh) else own or {}
    return {**mesh, **{name: 1 for name in known if name not in mesh}}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ShardplanError(f"{file}: cannot be read ({error.strerror}): give a file of specs") from error
    except UnicodeDecodeError as error:
        raise ShardplanError(f"{file}: is no text: give a JSON file of specs") from error


# -- JSON and TOML -----------------------------------------------------------------------------------------------------


def _object(file: Path, *, paths: bool) -> ShardingFile:
    value = _parsed(file)
    axes = None
    if paths and isinstance(value, Mapping) and isinstance(value.get("in_specs"), Mapping):  # what plan --json prints
        axes, value = value.get("axes"), value["in_specs"]
        if axes is not None and not isinstance(axes, Mapping):
            raise ShardplanError(f'{file}: axes: {axes!r} has no sizes by name: write {{"data": 4, "tensor": 2}}')
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list) or not all(
        isinstance(p, tuple | list) and len(p) == 2 and isinstance(p[0], str) for p in pairs
    ):
        what = "path" if paths else "glob of paths"
        raise ShardplanError(f'{file}: this is no object of specs: write {{{what}: spec}}, such as {{"params/w": "P(\'gpu\')"}}')
    if not pairs:
        raise ShardplanError(f'{file}: it has no specs: write {{"params/w": "P(\'gpu\')"}}')
    rules = [(glob.escape(key) if paths else key, _spec(file, key, text, logical=not paths)) for key, text in pairs]
    return ShardingFile(rules, axes)


def _parsed(file: Path) -> Any:
    text = _text(file)
    if not text.strip():
        raise ShardplanError(f'{file}: the file is empty: write {{"params/w": "P(\'gpu\')"}}')
    try:
        return tomllib.loads(text) if file.suffix == ".toml" else json.loads(text, object_pairs_hook=_once)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ShardplanError(f"{file}: is not {'TOML' if file.suffix == '.toml' else 'JSON'}: {error}") from error
    except _TwiceError as error:
        raise ShardplanError(f"{file}: {error}: has two specs; keep one of them") from None


class _TwiceError(Exception):
    """A key that an object has twice."""


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    keys = [key for key, _ in pairs]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise _TwiceError(twice)
    return dict(pairs)


def _spec(file: Path, key: str, value: Any, *, logical: bool) -> Any:
    """The PartitionSpec of a key: ``"P('node', None)"`` or ``["node", null]``. With ``logical``, the key may name a logical axis:
    null, a name and a list of names then are its mesh axes.
    """
    from jax.sharding import PartitionSpec

    from shardplan.frontend.given_shardings import RuleOfFile
    from shardplan.shell.target import read_spec

    if logical and value is None:
        return RuleOfFile(PartitionSpec(), None)
    if logical and isinstance(value, str) and value.isidentifier():
        return RuleOfFile(PartitionSpec(value), value)
    if logical and isinstance(value, list) and all(isinstance(axis, str) for axis in value):
        return RuleOfFile(PartitionSpec(*value), tuple(value) or None)
    try:
        if isinstance(value, str):
            return read_spec(value)
        if isinstance(value, list):
            return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in value))
    except PinError as error:
        raise PinError(f"{file}: {key}: {error}") from None
    raise PinError(f'{file}: {key}: {value!r} is no spec: write "P(\'node\', None)" or ["node", null]')


# -- Python ------------------------------------------------------------------------------------------------------------


def _python(file: Path, *, paths: bool) -> ShardingFile:
    """The tables of an exported ``specs.py``; the file is not run."""
    if not paths:
        raise ShardplanError(f"{file}: has a spec for each path: give it with --specs, not --rules")
    try:
        tree = ast.parse(_text(file))
    except (SyntaxError, ValueError) as error:
        raise ShardplanError(f"{file}: is not Python: {error}") from error
    assigned = [(node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign)]
    tables = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}
    specs = tables.get("IN_SPECS")
    if not isinstance(specs, ast.Dict) or not all(isinstance(key, ast.Constant) for key in specs.keys):
        raise ShardplanError(f"{file}: has no IN_SPECS = {{path: P(...)}}: give a file that export -o specs.py wrote, or JSON")
    pairs = [(str(ast.literal_eval(key)), ast.unparse(value)) for key, value in zip(specs.keys, specs.values, strict=True) if key]
    rules = [(glob.escape(path), _spec(file, path, text, logical=False)) for path, text in pairs]
    try:
        names, sizes = (ast.literal_eval(tables[name]) for name in ("MESH_AXES", "MESH_SHAPE"))
        order = tables["DEVICE_ORDER"]
        numbers = range(math.prod(sizes)) if isinstance(order, ast.Call) else ast.literal_eval(order)
        mesh = NumberedMesh(dict(zip(names, sizes, strict=True)), np.array(numbers).reshape(sizes))
    except (KeyError, ValueError, TypeError) as error:
        raise ShardplanError(
            f"{file}: MESH_AXES, MESH_SHAPE and DEVICE_ORDER are not those of an exported specs.py: write it again with export"
        ) from error
    return ShardingFile(rules, mesh)


# -- YAML --------------------------------------------------------------------------------------------------------------


def _yaml(file: Path, cluster: Cluster, mesh: Mapping[str, int] | None, *, paths: bool) -> ShardingFile:
    """An exported ``rules.yml``, or rules for logical axes as MaxText writes them."""
    if paths:
        raise ShardplanError(f"{file}: YAML has rules, not a spec for each path: give it with --rules, not --specs")
    try:
        value = yaml.safe_load(_text(file))
    except yaml.YAMLError as error:
        raise ShardplanError(f"{file}: is not YAML: {' '.join(str(error).split())}") from error
    if isinstance(value, Mapping) and "logical_axis_rules" in value:
        rules = _pairs(file, "logical_axis_rules", value["logical_axis_rules"])
        return ShardingFile([(name, _axes(file, name, axes)) for name, axes in rules], _maxtext_mesh(file, value, cluster, mesh))
    if isinstance(value, Mapping) and "rules" in value:
        pairs = [
            (_pattern(file, key), _spec(file, key, spec, logical=False)) for key, spec in _pairs(file, "rules", value["rules"])
        ]
        sizes = value.get("mesh")
        if not isinstance(sizes, Mapping) and mesh is None:
            raise ShardplanError(f"{file}: mesh: {sizes!r} has no sizes by name: write mesh: {{data: 4, tensor: 2}}")
        return ShardingFile(pairs, sizes if isinstance(sizes, Mapping) else None)
    raise ShardplanError(
        f"{file}: has neither rules: (what export -o rules.yml writes) nor logical_axis_rules: (MaxText's): "
        "write one of them, or globs in JSON or TOML"
    )


def _pairs(file: Path, key: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, list) or not value:
        raise ShardplanError(f"{file}: {key} is no list of rules: write - [name, spec] on each line")
    for rule in value:
        if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str):
            raise ShardplanError(f"{file}: {key}: {rule!r} is no rule: write [name, spec]")
    return [(rule[0], rule[1]) for rule in value]


def _pattern(file: Path, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ShardplanError(f"{file}: {text!r} is no regular expression: {error}") from error


def _axes(file: Path, name: str, value: Any) -> Any:
    """The mesh axes of a logical axis: one, several or none."""
    axes = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(axis, str) for axis in axes):
        raise ShardplanError(
            f"{file}: logical_axis_rules: {name}: {value!r} is no mesh axis: write a name, a list of names or null"
        )
    return tuple(axes) or None


def _maxtext_mesh(file: Path, value: Mapping[str, Any], cluster: Cluster, mesh: Mapping[str, int] | None) -> Any:
    """The mesh of MaxText's settings: each axis has a slow part between nodes (``dcn_``) and one inside (``ici_``)."""
    listed = value.get("mesh_axes")
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    if mesh is not None:
        return dict.fromkeys(names, 1)
    sizes = [level.size for level in cluster.levels]
    nodes = math.prod(sizes[: between_nodes(cluster.level_names)])
    outer, inner = (
        list(_filled(file, value, names, part, count)) for part, count in (("dcn", nodes), ("ici", cluster.size // nodes))
    )
    numbers = np.arange(cluster.size).reshape((*outer, *inner))
    turned = numbers.transpose([i for n in range(len(names)) for i in (n, n + len(names))])
    shape = [a * b for a, b in zip(outer, inner, strict=True)]
    return NumberedMesh(dict(zip(names, shape, strict=True)), turned.reshape(shape))


def _filled(file: Path, value: Mapping[str, Any], names: Sequence[str], part: str, count: int) -> Iterator[int]:
    """The sizes of one part of the axes; one -1 stands for the rest of ``count`` devices."""
    sizes = [value.get(f"{part}_{name}_parallelism", 1) for name in names]
    wrong = next((name for name, n in zip(names, sizes, strict=True) if type(n) is not int or n < -1 or n == 0), None)
    if wrong is not None:
        raise ShardplanError(f"{file}: {part}_{wrong}_parallelism is no number of devices: write 1, 2, ... or -1 for the rest")
    rest, modulo = divmod(count, math.prod(n for n in sizes if n > 0))
    if modulo or sizes.count(-1) > 1 or (sizes.count(-1) == 0 and rest != 1):
        said = ", ".join(f"{part}_{name}_parallelism={n}" for name, n in zip(names, sizes, strict=True) if n != 1) or "all 1"
        where = "there are nodes" if part == "dcn" else "a node has devices"
        raise ShardplanError(f"{file}: {said} do not multiply to {count}, as many as {where}: correct them, or give --mesh")
    return (rest if n == -1 else n for n in sizes)
