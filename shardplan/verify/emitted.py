"""The collectives of a step as it is handed to XLA, counted in its jaxpr by named scope."""

# pyright: basic
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardplan import _jax
from shardplan.ir import Collective

_KINDS: Mapping[str, Collective] = {
    "psum": Collective.ALL_REDUCE,
    "pmax": Collective.ALL_REDUCE,
    "pmin": Collective.ALL_REDUCE,
    "all_gather": Collective.ALL_GATHER,
    "reduce_scatter": Collective.REDUCE_SCATTER,
    "all_to_all": Collective.ALL_TO_ALL,
    "ppermute": Collective.PERMUTE,
}


Call = tuple[str, Collective, int, int]
"""A collective's scope, kind, members of a group (0 for a permute), and bytes of an operand."""


def emitted(jaxpr: Any) -> Counter[Call]:
    """How often each call occurs in a jaxpr."""
    return Counter(_found(jaxpr, {}))


def _found(jaxpr: Any, sizes: Mapping[str, int]) -> Iterator[Call]:
    for eqn in jaxpr.eqns:
        kind = _KINDS.get(eqn.primitive.name)
        if kind is not None:
            scope = str(eqn.source_info.name_stack)
            for x in eqn.invars:
                yield scope, kind, _members(eqn.params, kind, sizes), x.aval.size * x.aval.dtype.itemsize
        mesh = eqn.params.get("mesh")
        inside = sizes if mesh is None else dict(mesh.shape)
        for body in _jax.bodies(eqn):
            yield from _found(body, inside)


def _members(params: Mapping[str, Any], kind: Collective, sizes: Mapping[str, int]) -> int:
    if kind == Collective.PERMUTE:
        return 0
    groups = params.get("axis_index_groups")
    if groups is not None:
        return len(groups[0])
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
