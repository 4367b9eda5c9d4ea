# pyright: basic
"""The primitives of each tested release of JAX with the names of their parameters, and how the installed JAX differs.

`releases.json` beside this file holds a record of each release in `shardplan.versions.TESTED`. A test compares the record of the
installed release with the installed JAX, and writes it anew with ``pytest --update-golden``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import linear_call
from jax.experimental.custom_partitioning import custom_partitioning

from shardplan import _jax
from shardplan.tdl.proof import CASES, Drawn, UnboundCaseError, cudnn_reference
from shardplan.versions import TESTED, jax_version, nearest_tested

RECORDS = Path(__file__).with_name("releases.json")
REFUSED = "(its case is refused)"
REFUSALS = (AttributeError, TypeError, UnboundCaseError)
"""The errors of a proof case if JAX has renamed a function, changed its parameters, or no longer binds the primitive."""
Primitives = Mapping[str, tuple[str, ...]]
"""Each primitive with the sorted names of its parameters; empty for a primitive that neither a proof case nor a sample applies.
"""


@dataclass(frozen=True, slots=True)
class Differences:
    """How the installed JAX differs from the tested ``release``: primitives that are new or gone, and changed parameters.

    ``changed`` maps a primitive to its new parameters (``+name``) and those that are gone (``-name``).
    """

    release: str
    new: tuple[str, ...]
    gone: tuple[str, ...]
    changed: Mapping[str, tuple[str, ...]]


def differences() -> Differences:
    """How the installed JAX differs from the tested release that is nearest to it."""
    release = nearest_tested(jax_version())
    return compared(release, records()[release], installed())


def compared(release: str, before: Primitives, now: Primitives) -> Differences:
    """How the primitives of ``now`` differ from those of a release, ``before``."""
    changed: dict[str, tuple[str, ...]] = {}
    for name in sorted(before.keys() & now.keys()):
        plus, minus = sorted({*now[name]} - {*before[name]}), sorted({*before[name]} - {*now[name]})
        if plus or minus:
            changed[name] = (*(f"+{p}" for p in plus), *(f"-{p}" for p in minus))
    return Differences(release, tuple(sorted(now.keys() - before.keys())), tuple(sorted(before.keys() - now.keys())), changed)


def records() -> Mapping[str, Primitives]:
    """The record of each tested release."""
    return {
        release: {name: tuple(params) for name, params in own.items()}
        for release, own in json.loads(RECORDS.read_text(encoding="utf-8")).items()
    }


@cache
def installed() -> Primitives:
    """The record of the installed JAX: parameters are read from proof cases and from samples of ops with bodies.

    Modules of kernels count only where a description is proven: which of them are loaded depends on the process.
    """
    known: dict[str, set[str]] = {
        name: set()
        for name, (module, _) in _jax.primitives().items()
        if name in CASES or not module.startswith(_jax.KERNEL_MODULES)
    }
    for name in known.keys() & CASES.keys():
        known[name] = set(_parameters_of_case(name))
    for function in SAMPLES:
        for eqn in _jax.equations(jax.make_jaxpr(function)(jnp.ones((2, 2))).jaxpr):
            if eqn.primitive.name in known.keys() - CASES.keys():
                known[eqn.primitive.name].update(eqn.params)
    return {name: tuple(sorted(params)) for name, params in sorted(known.items())}


def _parameters_of_case(name: str) -> tuple[str, ...]:
    """The names of the parameters in a drawn case, without our own; `REFUSED` where the installed JAX cannot apply it."""
    try:
        with _jax.run_on_cpu(cudnn_reference.FUNCTIONS):
            return tuple(key for key in CASES[name](Drawn(0)).call.params if key not in _jax.OWN_PARAMS)
    except REFUSALS:
        return (REFUSED,)


def _doubled(x: Any) -> Any:
    return 2.0 * x


def _doubled_from(factor: Any, x: Any) -> Any:
    return factor * x


def _with_jvp(x: Any) -> Any:
    function = jax.custom_jvp(_doubled)
    function.defjvp(lambda primals, tangents: (_doubled(*primals), _doubled(*tangents)))
    return function(x)


def _with_vjp(x: Any) -> Any:
    function = jax.custom_vjp(_doubled)
    function.defvjp(lambda x: (_doubled(x), None), lambda _, gradient: (_doubled(gradient),))
    return function(x)


def _with_vmap(x: Any) -> Any:
    function = jax.custom_batching.custom_vmap(_doubled)
    function.def_vmap(lambda _, batched, x: (_doubled(x), batched[0]))
    return function(x)


def _with_partitioning(x: Any) -> Any:
    function = custom_partitioning(_doubled)
    nothing: dict[str, Any] = {"partition": lambda *_: None, "infer_sharding_from_operands": lambda *_: None}
    function.def_partition(**nothing, sharding_rule="i j -> i j")
    return function(x)


SAMPLES: tuple[Callable[[Any], Any], ...] = (
    lambda x: lax.scan(lambda carry, row: (carry + row, carry), x[0], x),
    lambda x: lax.while_loop(lambda carry: jnp.sum(carry) < 9.0, _doubled, x),
    lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    jax.checkpoint(jnp.sin),
    jax.jit(_doubled),
    _with_jvp,
    _with_vjp,
    _with_vmap,
    lax.composite(_doubled, "shardplan.doubled"),
    partial(linear_call, _doubled_from, _doubled_from, 2.0),
    _with_partitioning,
    partial(lax.custom_linear_solve, _doubled, solve=lambda _, b: b / 2, symmetric=True),
)
"""Applications of the primitives with bodies, which have no proof case."""


def recorded_text(own: Primitives) -> str:
    """`RECORDS` with the record of the installed release replaced: JSON, one line a primitive."""
    every = {**(dict(records()) if RECORDS.exists() else {}), jax_version(): own}
    blocks = [
        f"{json.dumps(release)}: {{\n"
        + ",\n".join(f"{json.dumps(n)}: {json.dumps(p)}" for n, p in every[release].items())
        + "\n}"
        for release in TESTED
        if release in every
    ]
    return "{\n" + ",\n".join(blocks) + "\n}\n"
