"""Paths that differ in a number or a name and are otherwise alike share one pattern: ``blocks/{0..11}/mlp/up/kernel``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

_NAMES = 3
"""The most names in one brace."""

_NUMBER, _NAME = re.compile(r"(.*?)(0|[1-9]\d*)"), re.compile(r"()([^\W\d]\w*)")
"""Words of a path that may share a pattern: what they have in common, and what varies."""


@dataclass(frozen=True, slots=True)
class PathGroup:
    """Paths under one pattern; all of them have equal ``attributes``."""

    pattern: str
    paths: tuple[str, ...]


def grouped(attributes: Mapping[str, Hashable]) -> tuple[PathGroup, ...]:
    """Groups of paths with equal attributes that differ in numbers, then in names; in the order of their first paths.

    A number is a word of a path, or the end of one.

    >>> same = {f"blocks/{i}/{n}": "P()" for i in range(3) for n in ("bias", "scale")}
    >>> [g.pattern for g in grouped(same | {"blocks/1/kernel": "P('gpu')"})]
    ['blocks/{0..2}/{bias,scale}', 'blocks/1/kernel']
    >>> [g.pattern for g in grouped(dict.fromkeys([f"params/Dense_{i}/kernel" for i in range(4)], "P()"))]
    ['params/Dense_{0..3}/kernel']
    """
    place = {path: i for i, path in enumerate(attributes)}
    groups: list[tuple[tuple[str, ...], tuple[str, ...]]] = [(tuple(path.split("/")), (path,)) for path in attributes]
    depth = max((len(parts) for parts, _ in groups), default=0)
    for numbers in (True, False):
        for at in range(depth):
            groups = _merged(groups, at, attributes, numbers=numbers)
    groups.sort(key=lambda g: min(place[p] for p in g[1]))
    return tuple(PathGroup("/".join(parts), tuple(sorted(paths, key=place.__getitem__))) for parts, paths in groups)


def _merged(
    groups: Sequence[tuple[tuple[str, ...], tuple[str, ...]]], at: int, attributes: Mapping[str, Hashable], *, numbers: bool
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    by_common: dict[Hashable, list[tuple[tuple[str, ...], tuple[str, ...], str]]] = {}
    for parts, paths in groups:
        word = (_NUMBER if numbers else _NAME).fullmatch(parts[at]) if at < len(parts) else None
        stem, varying = word.groups() if word else ("", "")
        common: Hashable = (parts[:at], stem, parts[at + 1 :], attributes[paths[0]]) if word else paths
        by_common.setdefault(common, []).append((parts, paths, varying))
    result: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for members in by_common.values():
        parts, paths, varying = members[0]
        if len(members) == 1 or (not numbers and len(members) > _NAMES):
            result += [(parts, paths) for parts, paths, _ in members]
            continue
        values = [v for *_, v in members]
        brace = _numbers([int(v) for v in values]) if numbers else ",".join(values)
        joined = f"{parts[at].removesuffix(varying)}{{{brace}}}"
        result.append(((*parts[:at], joined, *parts[at + 1 :]), tuple(p for _, paths, _ in members for p in paths)))
    return result


def _numbers(values: Sequence[int]) -> str:
    """Numbers as ranges, like ``0..3,5``."""
    runs: list[list[int]] = []
    for n in sorted(values):
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(f"{r[0]}..{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)
