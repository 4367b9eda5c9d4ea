"""A plan's PartitionSpecs as ordered rules on paths, as YAML in which each rule is a line of JSON.

A rule is a pattern and a spec. Patterns are regular expressions for whole paths, with ``^`` and ``$``, so that `re.search`
(which flax-style helpers use), `re.match` and `re.fullmatch` agree. The first pattern that matches a leaf's path gives its
spec. A spec has an entry for each dim: null, the name of an axis, or a list of names; trailing whole dims are left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from shardplan.plans.data import PlanData

Spec = tuple[object, ...]
_NUMBER = re.compile(r"(\d+)")
_COPY = re.compile(r"#\d+$")
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")  # JSON allows these, YAML does not


def rules_file(plan: PlanData) -> str:
    """The text of the file."""
    names = tuple(plan.axes)
    specs: dict[str, dict[Spec, None]] = {}
    paths = {a.path for a in plan.arguments}
    copied: set[str] = set()
    for a in plan.arguments:
        first = _COPY.sub("", a.path)  # as the step has it
        copied.update({first} & paths - {a.path})
        specs.setdefault(first if first in paths else a.path, {})[a.layout.entries(names) if a.layout else ()] = None
    rules = folded({path: next(iter(own)) for path, own in specs.items() if len(own) == 1})
    rules = [(_with_copies(pattern, copied), spec) for pattern, spec in rules]
    lines = [
        f"# Rules for the {len(plan.arguments)} argument arrays of a step, planned on {one_line(plan.cluster.name)}.",
        "# The first pattern (a regular expression) that matches a path, words joined by /, has its spec: an entry for each dim.",
        f"mesh: {flow(plan.axes)}",
        "rules:",
        *(f"- {flow([pattern, spec])}" for pattern, spec in rules),
    ]
    for path, own in specs.items():
        found = next((spec for pattern, spec in rules if re.search(pattern, path)), None)
        if {found: None} != own:
            lines.append(f"# not said: {flow(path)} is the path of arrays with the specs {', '.join(map(flow, own))}")
    return "\n".join(lines) + "\n"


def _with_copies(pattern: str, copied: Iterable[str]) -> str:
    """The pattern, for the numbered paths too if it matches a path that several arrays have."""
    return pattern.removesuffix("$") + r"(#\d+)?$" if any(re.search(pattern, path) for path in copied) else pattern


def folded(specs: Mapping[str, Spec]) -> list[tuple[str, Spec]]:
    r"""Patterns in path order, each with its spec; paths that differ only in numbers share a pattern where that is exact.

    >>> folded({"w/0/k": ("gpu",), "w/1/k": ("gpu",), "w/0/b": (), "w/1/b": ("gpu",)})
    [('^w/\\d+/k$', ('gpu',)), ('^w/0/b$', ()), ('^w/1/b$', ('gpu',))]
    """
    groups: dict[tuple[tuple[str, ...], Spec], list[tuple[str, ...]]] = {}
    for path, spec in specs.items():
        parts = tuple(_NUMBER.split(path))
        groups.setdefault((parts[::2], spec), []).append(parts[1::2])
    return [(pattern, spec) for (words, spec), numbers in groups.items() for pattern in _patterns(words, spec, numbers, specs)]


def _patterns(words: Sequence[str], spec: Spec, numbers: Sequence[tuple[str, ...]], specs: Mapping[str, Spec]) -> list[str]:
    """The fewest patterns for paths with these ``words`` and ``numbers`` between them: one for any numbers, one for the given
    numbers, or one for each path.
    """
    columns = [sorted(set(column), key=lambda n: (int(n), n)) for column in zip(*numbers, strict=True)]
    anything = _pattern(words, [r"\d+" if len(column) > 1 else column[0] for column in columns])
    if all(own == spec for path, own in specs.items() if re.search(anything, path)):
        return [anything]
    if len(numbers) == math.prod(map(len, columns)):
        return [_pattern(words, [f"({'|'.join(column)})" if len(column) > 1 else column[0] for column in columns])]
    return [_pattern(words, own) for own in numbers]


def _pattern(words: Sequence[str], numbers: Sequence[str]) -> str:
    between = [*numbers, ""]
    return "^" + "".join(_SPECIAL.sub(r"\\\g<0>", word) + number for word, number in zip(words, between, strict=True)) + "$"


def flow(value: object) -> str:
    """A value in YAML's flow style, which is JSON too."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def one_line(text: str) -> str:
    """Text on one line, for a comment."""
    return " ".join(text.split())
