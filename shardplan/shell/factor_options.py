"""The options ``factors=``, which splits levels, and ``axes=``, which gives sizes by purpose: as values and as text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral

from shardplan.cost import TIME, Objective
from shardplan.errors import ClusterError, ShardplanError, nearest
from shardplan.ir import Factor
from shardplan.mesh import Cluster, factors
from shardplan.search.strategy.purposes import PURPOSES, Purpose, purpose_of

_DIGITS = 9
"""More digits than the size of any cluster has."""

FactorsLike = Mapping[str, int | Sequence[int]]
"""For each level, by name: its size, where it stays whole, or the sizes of its parts, major first."""


def checked_factors(given: FactorsLike | None, cluster: Cluster) -> tuple[Factor, ...] | None:
    """The factoring that the user asks for; levels that are not named stay whole. None where the search may choose.

    Raises:
        ClusterError: for a level that the cluster lacks, and for parts that do not multiply to its size.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ClusterError(f'factors={given!r} is not a mapping: give parts by level, for example {{"gpu": (2, 2, 2)}}')
    parts: dict[str, tuple[int, ...]] = {}
    for level, sizes in given.items():
        own = (sizes,) if isinstance(sizes, Integral) else sizes
        if isinstance(own, str) or not isinstance(own, Sequence) or not all(map(_is_size, own)):
            raise ClusterError(f"factors[{level!r}]={sizes!r}: give the sizes of the level's parts, for example (2, 2, 2), or 8")
        if math.prod(own) != 1 and 1 in own:
            raise ClusterError(f"factors[{level!r}]={sizes!r}: a part of 1 cuts nothing: leave it out")
        parts[level] = tuple(map(int, own))
    return factors(cluster, parts)


def _is_size(n: object) -> bool:
    """Whether this is a whole number above 0."""
    return isinstance(n, Integral) and not isinstance(n, bool) and int(n) > 0


def read_factors(texts: Sequence[str]) -> dict[str, tuple[int, ...]] | None:
    """The value of ``--factors``: ``gpu=2x2x2``; several levels in several options, or with commas between them.

    >>> read_factors(["node=4,gpu=2x4"])
    {'node': (4,), 'gpu': (2, 4)}
    """
    pairs = _pairs("--factors", "gpu=2x2x2", texts)
    found: dict[str, tuple[int, ...]] = {}
    for level, text in pairs:
        sizes = text.split("x")
        if not all(n.isdecimal() and len(n) <= _DIGITS and int(n) > 0 for n in sizes):
            raise ShardplanError(f"--factors {level}={text}: write sizes with an x between them, for example gpu=2x2x2")
        found[level] = tuple(map(int, sizes))
    return found or None


def checked_axes(
    given: Mapping[str, int] | None, cluster: Cluster, factors: FactorsLike | None = None, objective: Objective = TIME
) -> dict[Purpose, int] | None:
    """The sizes of purposes that the user asks for. None where the search may choose.

    Raises:
        ClusterError: for an unknown purpose, sizes that do not multiply to the number of devices, axes beside ``factors``, and
            an ``objective`` whose premise says what every op cuts.
    """
    if given is None:
        return None
    if factors is not None:
        raise ClusterError("axes= and factors= cannot be given together: axes= chooses the factors by their purposes")
    if objective.everything_split:
        name = objective.name
        raise ClusterError(f"axes= and objective={name!r} cannot be given together: its premise says what every op cuts")
    if not isinstance(given, Mapping) or not given or not all(map(_is_size, given.values())):
        raise ClusterError(f'axes={given!r}: give the size of each purpose, for example {{"data": 16, "tensor": 4}}')
    sizes: dict[Purpose, int] = {}
    for name, size in given.items():
        try:
            sizes[purpose_of(name)] = int(size)
        except ValueError as error:
            raise ClusterError(f"axes: {error}{nearest(str(name), PURPOSES)}") from None
    if math.prod(sizes.values()) != cluster.size:
        product = " * ".join(f"{name}={n}" for name, n in sizes.items()) or "()"
        raise ClusterError(f"axes: {product} make {math.prod(sizes.values())} devices, {cluster.name!r} has {cluster.size}")
    return sizes


def stages_in(axes: Mapping[str, int] | None) -> tuple[int, Mapping[str, int] | None]:
    """(the number of stages that the user asks for, the axes inside each; None where the search may choose).

    Raises:
        ClusterError: for a value that is not a whole number above 0.
    """
    if not isinstance(axes, Mapping) or "stage" not in axes:
        return 1, axes
    if not _is_size(axes["stage"]):
        raise ClusterError(f"axes: stage={axes['stage']!r} is no number of stages: give a whole number, such as 2")
    others = {name: size for name, size in axes.items() if name not in ("stage", "chunk")}
    return int(axes["stage"]), others or None


def chunks_in(axes: Mapping[str, int] | None) -> int | None:
    """The number of chunks of layers in each stage that the user asks for; None where the planner may choose.

    Raises:
        ClusterError: for a value that is not a whole number above 0, and for chunks without stages.
    """
    if not isinstance(axes, Mapping) or "chunk" not in axes:
        return None
    if "stage" not in axes:
        raise ClusterError(
            f"axes: chunk={axes['chunk']!r} is the number of chunks of layers in each stage of a pipeline: give 'stage' too, or "
            "leave it out"
        )
    if not _is_size(axes["chunk"]):
        raise ClusterError(f"axes: chunk={axes['chunk']!r} is no number of chunks: give 1, 2 or more, or leave it out")
    return int(axes["chunk"])


def read_axes(texts: Sequence[str], option: str = "--axes") -> dict[str, int] | None:
    """The value of ``--axes``, or of another option with sizes by name: ``data=16,tensor=4``.

    >>> read_axes(["data=16", "tensor=4"])
    {'data': 16, 'tensor': 4}
    """
    found: dict[str, int] = {}
    for name, text in _pairs(option, "data=16,tensor=4", texts):
        if not text.isdecimal() or len(text) > _DIGITS or int(text) < 1:
            raise ShardplanError(f"{option} {name}={text}: give a whole number above 0, for example data=16")
        found[name] = int(text)
    return found or None


def _pairs(option: str, example: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """The (name, value) pairs of an option that may be repeated.

    Raises:
        ShardplanError: for text of another form, and for a name that is given twice.
    """
    found: list[tuple[str, str]] = []
    for part in ",".join(texts).split(",") if texts else []:
        name, equals, value = part.strip().partition("=")
        if not name or not equals or not value:
            raise ShardplanError(f"{option} {part!r}: write it like {example}")
        if name in dict(found):
            raise ShardplanError(f"{option} gives {name!r} twice: once is enough")
        found.append((name, value))
    return found
