"""Shardings of arguments as a user writes them: trees as for `jax.jit`, rules over paths, names that the model carries."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import linen as nn
from flax import nnx
from flax.linen.spmd import logical_to_mesh_axes
from jax.sharding import NamedSharding, PartitionSpec

from shardplan import _jax
from shardplan.errors import PinError, nearest
from shardplan.frontend.nnx_state import apart
from shardplan.frontend.trace import numbered, path_words
from shardplan.sizes import counted

Words = tuple[str, ...]
Pattern = str | re.Pattern[str]
"""What a rule says of paths: a glob, or a regular expression that is searched in them."""


@dataclass(frozen=True, slots=True)
class GivenShardings:
    """The PartitionSpec entries of every leaf of the arguments, by path, and where each comes from.

    ``replicated`` are the leaves for which there is nothing: they are whole on every device, as under `jax.jit` with ``P()``.
    ``meshes`` are those of the NamedShardings, each once.
    """

    entries: Mapping[str, tuple[Any, ...]]
    origins: Mapping[str, str]
    replicated: tuple[str, ...]
    meshes: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RuleOfFile:
    """What a file's rule says under a key that is a glob of paths (``spec``), and under the name of a logical axis (``axes``)."""

    spec: PartitionSpec
    axes: Any


def spec_entries(what: str, spec: Any) -> tuple[Any, ...]:
    """The entries of a PartitionSpec of an argument; ``what`` names it in errors.

    Raises:
        PinError: for what is no PartitionSpec, or one that no argument can have.
    """
    if not isinstance(spec, PartitionSpec):
        raise PinError(f"{what} is {spec!r}: give a jax.sharding.PartitionSpec over the plan's axes")
    if spec.unreduced or spec.reduced:
        raise PinError(f"{what} = {spec} has reduced or unreduced axes: an argument is never partial, give axes alone")
    invalid = [e for e in spec if not (e is None or all(isinstance(a, str) for a in (e if isinstance(e, tuple) else (e,))))]
    if invalid:
        raise PinError(f"{what} = {spec} has the entry {invalid[0]}: each entry is None, an axis or a tuple of axes")
    return tuple(spec)


def from_tree(in_shardings: Any, step: Any, args: Sequence[Any]) -> GivenShardings:
    """The shardings of a tree, or a prefix of it, of PartitionSpec, NamedSharding or None, as `jax.jit` takes ``in_shardings``.

    Where keys differ, their names are compared, so a tree of an nnx object's state fits the object.

    Raises:
        PinError: for a leaf of another type, a leaf without a counterpart, and an argument that the tree leaves out.
    """
    names = _jax.argument_names(step, len(args))
    if not _is_spec(in_shardings):
        if not isinstance(in_shardings, tuple | list):
            kind = type(in_shardings).__name__
            raise PinError(f"in_shardings is a {kind}: give one PartitionSpec, or a tuple with an entry for each argument")
        if len(in_shardings) != len(args):
            raise PinError(
                f"in_shardings has {len(in_shardings)} entries, and the step takes {len(args)} arguments: give one each"
            )
        in_shardings = tuple(in_shardings)
    flat, _ = jax.tree_util.tree_flatten_with_path(in_shardings, is_leaf=_is_spec)
    given = [(_words(key, names), spec) for key, spec in flat]
    of_keys = {key: [n] for n, (key, _) in enumerate(flat)}
    of_words: dict[Words, list[int]] = {}
    for n, (words, _) in enumerate(given):
        of_words.setdefault(words, []).append(n)
    keys = [key for key, _ in jax.tree_util.tree_flatten_with_path(apart(tuple(args)))[0]]
    leaves = [_words(key, names) for key in keys]
    paths = numbered(map("/".join, leaves))
    found: dict[str, Any] = {}
    used: set[int] = set()
    for path, key, words in zip(paths, keys, leaves, strict=True):
        own = _innermost(of_keys, key) or _innermost(of_words, words)
        found[path] = _one_spec(path, [given[n][1] for n in own])
        used.update(own)
    every = {_words(key, names) for key, _ in jax.tree_util.tree_flatten_with_path(args, is_leaf=_is_empty)[0]}
    other = every.difference(leaves)  # empty trees, and objects that stand in another argument too
    for n, (words, spec) in enumerate(given):
        if spec is not None and n not in used and not any(own[: len(words)] == words for own in other):
            raise PinError(f"in_shardings has {'/'.join(words)}, which is no argument{nearest('/'.join(words), paths)}")
    return _collected({path: (f"in_shardings: {path}", spec) for path, spec in found.items()})


def _innermost(leaves: Mapping[tuple[Any, ...], list[int]], at: tuple[Any, ...]) -> list[int]:
    """The leaves of a tree at a path, or else at its longest prefix that has some."""
    return next((leaves[at[:n]] for n in range(len(at), -1, -1) if at[:n] in leaves), [])


def _one_spec(path: str, specs: Sequence[Any]) -> Any:
    """The spec of the argument at ``path``, for which ``in_shardings`` has these.

    Raises:
        PinError: for none, and for several that differ.
    """
    if not specs:
        raise PinError(f"in_shardings has nothing for {path}: give it a PartitionSpec, or None to replicate it")
    if any(spec != specs[0] for spec in specs):
        said = ", ".join(map(str, specs))
        raise PinError(f"in_shardings has several entries named {path}, {said}: give a tree of the argument's own types")
    return specs[0]


def from_rules(rules: Any, step: Any, args: Sequence[Any]) -> GivenShardings:
    """The shardings by rules, for each leaf the first that matches: (glob of paths, or compiled regular expression,
    PartitionSpec); else by names that the model carries, through (logical axis name, mesh axis or axes or None) as flax has them;
    else by the array's own NamedSharding.

    ``rules`` are a mapping or pairs, in their order. None under a glob replicates. A `RuleOfFile` is one over paths if its key
    has a ``/`` or ``*`` or matches an argument, else one for the axis of that name. flax's `nn.with_partitioning` and nnx's
    metadata name mesh axes, and `nn.with_logical_partitioning` logical ones, which ``rules`` turn into mesh axes as
    `flax.linen.logical_to_mesh_axes` does.

    Raises:
        PinError: for a malformed rule, one over paths or of a file that matches nothing, logical rules for a model that names no
            axes, and no sharding at all.
    """
    leaves = _leaves(step, args)
    pairs = [(p, _resolved(p, value, leaves)) for p, value in _pairs(rules)]
    paths = [(p, spec_entries(f"the rule {_text(p)!r}", spec)) for p, spec in pairs if isinstance(spec, PartitionSpec)]
    logical = [(_text(name), axes) for name, axes in pairs if not isinstance(axes, PartitionSpec)]
    carried = {leaf.path: _carried(leaf, logical, [p for p, _ in paths]) for leaf in leaves}
    _check_used(paths, list(carried))
    if all(origin == "" for origin, _ in carried.values()) and (logical or not paths):
        what = (
            f"the rule {logical[0][0]!r} = {logical[0][1]!r} is for logical axes, but" if logical else "nothing shards the step:"
        )
        raise PinError(
            f"{what} no argument carries axis names (nn.with_partitioning, nnx's sharding metadata) or has a NamedSharding: "
            "give in_shardings=, or rules= as {glob of paths: PartitionSpec}"
        )
    found = {
        path: next(((f"the rule {_text(p)!r}", PartitionSpec(*e)) for p, e in paths if _matches(p, path)), own)
        for path, own in carried.items()
    }
    return _collected(found)


def _check_used(rules: Sequence[tuple[Pattern, tuple[Any, ...]]], paths: Sequence[str]) -> None:
    """Refuses a rule over paths that matches none, comes after a wider one, or stands twice."""
    found = [{path for path in paths if _matches(pattern, path)} for pattern, _ in rules]
    for n, ((pattern, entries), matched) in enumerate(zip(rules, found, strict=True)):
        text = _text(pattern)
        what = f"the rule {text!r} = {PartitionSpec(*entries)}"
        if not matched:
            others = sum(not own for own in found) - 1
            more = counted(others, "other rule matches", "other rules match")
            whole = f"; {more} none either: are they for another step?" if others else ""
            raise PinError(f"{what} matches no argument{nearest(text, paths)}{whole}", pins=(text,))
        before = [p for p, _ in rules[:n]]
        if pattern in before:
            raise PinError(f"{what} never applies: {text!r} stands before it too; keep one of them", pins=(text,))
        wider = next(
            (p for p, own in zip(before, found, strict=False) if matched < own or (matched == own and _has(p, pattern))), None
        )
        if wider is not None:
            first = _text(wider)
            raise PinError(f"{what} never applies: {first!r} before it matches all of its arguments; put it first", pins=(text,))


def _has(pattern: Pattern, other: Pattern) -> bool:
    """Whether a glob matches whatever another one does, as ``layers/*`` has ``layers/0/*``."""
    return isinstance(pattern, str) and isinstance(other, str) and _matches(pattern, other)


def _text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def _matches(pattern: Pattern, path: str) -> bool:
    return fnmatch.fnmatchcase(path, pattern) if isinstance(pattern, str) else pattern.search(path) is not None


def _pairs(rules: Any) -> list[tuple[Pattern, Any]]:
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    if isinstance(pairs, str) or not isinstance(pairs, Sequence):
        raise PinError(f"rules={rules!r}: give {{glob of paths: PartitionSpec}}, or pairs of a logical axis and a mesh axis")
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str | re.Pattern):
            raise PinError(f"the rule {pair!r} is no pair of a glob and a PartitionSpec, or of a logical axis and a mesh axis")
        axes = pair[1] if isinstance(pair[1], tuple | list) else (pair[1],)
        if not isinstance(pair[1], PartitionSpec | RuleOfFile) and not all(a is None or isinstance(a, str) for a in axes):
            raise PinError(f"the rule {pair[0]!r} = {pair[1]!r}: give a PartitionSpec for a glob, axis names for a logical axis")
    return [(name, tuple(axes) if isinstance(axes, list) else axes) for name, axes in pairs]


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of the arguments: its path, its value, and what flax stores it in, if it names axes."""

    path: str
    value: Any
    box: Any | None

    @property
    def names(self) -> frozenset[str]:
        """The axes that the model names for it."""
        own = None if self.box is None else _box_names(self.box)
        return frozenset(
            a for entry in own or () for a in (entry if isinstance(entry, tuple) else (entry,)) if isinstance(a, str)
        )


def _leaves(step: Any, args: Sequence[Any]) -> list[_Leaf]:
    names = _jax.argument_names(step, len(args))
    flat, _ = jax.tree_util.tree_flatten_with_path(apart(tuple(args)), is_leaf=_is_box)
    rows = [((*path, *inner), leaf, box) for path, box in flat for inner, leaf in jax.tree_util.tree_flatten_with_path(box)[0]]
    paths = numbered("/".join(_words(path, names)) for path, _, _ in rows)
    return [_Leaf(path, leaf, box if _is_box(box) else None) for path, (_, leaf, box) in zip(paths, rows, strict=True)]


def _resolved(pattern: Pattern, value: Any, leaves: Sequence[_Leaf]) -> Any:
    """A rule's value as that of a glob of paths, a PartitionSpec, or as that of a logical axis.

    Raises:
        PinError: for a rule of a file that is neither, and for axes under a glob.
    """
    if isinstance(value, PartitionSpec):
        return value
    text, known = _text(pattern), {name for leaf in leaves for name in leaf.names}
    spelled, found = "/" in text or "*" in text, any(_matches(pattern, leaf.path) for leaf in leaves)
    if isinstance(value, RuleOfFile):
        if not spelled and not found and text not in known:
            near = nearest(text, [*(leaf.path for leaf in leaves), *sorted(known)])
            raise PinError(f"the rule {text!r} matches no argument, and no axis that the model names{near}", pins=(text,))
        return value.spec if spelled or found else value.axes
    if value is None and (spelled or (found and text not in known)):
        return PartitionSpec()
    if spelled:
        raise PinError(
            f"the rule {text!r} = {value!r}: give a PartitionSpec for a glob, axis names for a logical axis", pins=(text,)
        )
    return value


def _carried(leaf: _Leaf, rules: Sequence[tuple[str, Any]], patterns: Sequence[Pattern]) -> tuple[str, Any]:
    """(where a leaf's sharding comes from, the sharding); ("", None) where the leaf has none.

    Names of axes do not go through the rules where one of the ``patterns`` matches, which decides there.
    """
    own: tuple[str, Any] = "", None
    if leaf.box is not None:
        decided = any(_matches(pattern, leaf.path) for pattern in patterns)
        own = "metadata", _box_names(leaf.box) if decided else _box_spec(leaf.path, leaf.box, rules)
    sharding = getattr(leaf.value, "sharding", None)
    if not own[1] and isinstance(sharding, NamedSharding):
        own = "its own sharding", sharding
    return (f"{own[0]} of {leaf.path}", own[1]) if own[1] else ("", None)


def _is_box(value: Any) -> bool:
    return isinstance(value, nn.meta.AxisMetadata | nnx.Variable)


def _box_spec(place: str, box: Any, rules: Sequence[tuple[str, Any]]) -> PartitionSpec | None:
    """The axes that a variable or a box of flax names, through the rules; None where it names none. ``place`` is its path.

    Raises:
        PinError: if it gives one name to two dims.
    """
    if isinstance(box, nn.LogicallyPartitioned) and (rules or box.rules):
        return _mesh_axes(place, box.names, tuple(rules) or box.rules)
    names = _box_names(box)
    if names is None or not any(name in dict(rules) for name in names if isinstance(name, str)):
        return names
    own = [(name, name) for name in names if isinstance(name, str) and name not in dict(rules)]  # axes of the mesh
    return _mesh_axes(place, tuple(names), (*rules, *own))


def _box_names(box: Any) -> PartitionSpec | None:
    """The axes that a variable or a box of flax names, as they stand there; None where it names none."""
    specs = jax.tree.leaves(
        (nnx if isinstance(box, nnx.Variable) else nn).get_partition_spec(box), is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return specs[0] if specs and isinstance(specs[0], PartitionSpec) else None


def _mesh_axes(place: str, names: Sequence[Any], rules: Any) -> PartitionSpec | None:
    """The mesh axes of an array whose dims have these logical names.

    Raises:
        PinError: for a name that two dims have: a mesh axis cuts one dim alone.
    """
    twice = sorted({name for name in names if isinstance(name, str) and list(names).count(name) > 1})
    if twice:
        raise PinError(
            f"metadata of {place} names its dims {tuple(names)}, {twice[0]!r} twice: give each dim its own name in the model, or "
            f"{place} a rule of its own, which comes first",
            pins=(place,),
        )
    return logical_to_mesh_axes(tuple(names), rules)


def _collected(found: Mapping[str, tuple[str, Any]]) -> GivenShardings:
    """The shardings by path, with where each comes from."""
    entries: dict[str, tuple[Any, ...]] = {}
    meshes: dict[Any, None] = {}
    for path, (origin, given) in found.items():
        if isinstance(given, NamedSharding):
            meshes[given.mesh] = None
        elif given is not None and not isinstance(given, PartitionSpec):
            raise PinError(
                f"{origin} is a {type(given).__name__}: give a PartitionSpec, a NamedSharding, or None to replicate it"
            )
        spec = given.spec if isinstance(given, NamedSharding) else PartitionSpec() if given is None else given
        entries[path] = spec_entries(origin or path, spec)
    origins = {path: origin for path, (origin, _) in found.items()}
    return GivenShardings(entries, origins, tuple(path for path, (_, given) in found.items() if given is None), tuple(meshes))


def _is_spec(value: Any) -> bool:
    return value is None or isinstance(value, PartitionSpec | jax.sharding.Sharding)


def _is_empty(value: Any) -> bool:
    return not jax.tree.leaves(value)


def _words(path: Sequence[Any], names: Sequence[str]) -> Words:
    """The words of a path of the arguments, the argument's name first; none for all arguments together."""
    words = path_words(path)
    return (names[int(words[0])], *words[1:]) if words else ()
