# pyright: basic
"""Every primitive of the installed JAX, classified: described, opaque with a batch, or kept whole with the reason.

The list is JAX's own (`_jax.primitives` reads it off the loaded modules); the tables below only give the reason why a primitive
has no description. A primitive in none of them is reported as undescribed, and a test fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardplan import _jax
from shardplan.tdl.describe import described
from shardplan.tdl.proof import CASES, Drawn, prove
from shardplan.tdl.releases import REFUSALS, differences
from shardplan.tdl.xla_quirks import PLATFORM

PrimitiveKind = Literal["described", "opaque", "structural", "placement", "collective", "effect", "kernel", "undescribed"]

# Described along the batch dims only: TDL cannot express the rest. The values are the reasons.
OPAQUE: dict[str, str] = {
    **dict.fromkeys(
        (
            "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg householder_product lu lu_pivots_to_permutation qr schur"
            " svd tridiagonal"
        ).split(),
        "a factorisation needs its whole matrix",
    ),
    **dict.fromkeys(("triangular_solve", "tridiagonal_solve", "ormqr"), "a solve runs through its matrix; its columns are free"),
    "fft": "a transform needs its whole dims",
    **dict.fromkeys(("sort", "top_k", "approx_top_k"), "an order needs the whole sorted dim"),
    "rng_bit_generator": "its bits depend on the global shape: no dim may be cut",
}

# Opaque primitives without batch dims.
UNCUT = ("cholesky_update", "rng_bit_generator")

# Described, but some dims stay whole. The values are the reasons.
WHOLE_DIMS: dict[str, str] = {
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"),
        "a running value needs all before it along its dim; partial ones of full length would cost more to reduce than to gather",
    ),
    "reduce_xor": "no placement holds terms of an exclusive or",
    **dict.fromkeys(("reduce", "select_and_scatter"), "the user's function need not be associative across workers"),
}

_STRUCTURAL = (*_jax.CALLS, "checkpoint", "cond", "custom_linear_solve", "remat2", "scan", "shard_map", "while")
_PLACEMENT = (
    "layout_constraint preduced pvary reduced_vary_cast reduced_vary_cast_p relayout reshard sharding_constraint"
    " stage vary_unreduced_cast vary_unreduced_cast_p xla_metadata_value"
).split()
_EFFECT: dict[str, str] = {
    **dict.fromkeys("debug_callback debug_print io_callback pure_callback inspect_sharding".split(), "runs Python on the host"),
    **dict.fromkeys(
        (
            "accum_grad_in_ref addupdate box_get box_set broadcast_to create_linear empty_ref free_ref freeze get log_extend"
            " log_read new_box new_log new_ref pin swap unpin"
        ).split(),
        "reads or writes a mutable reference",
    ),
    "run_state": "runs a function on mutable references",
    **dict.fromkeys(
        "call call_hi_primitive_linearized custom_jvp_call_jaxpr custom_transpose_call".split(),
        "stands inside a differentiation alone; a traced step has none",
    ),
    **dict.fromkeys("after_all create_token dce_sink unreachable".split(), "orders or keeps effects; holds no array"),
    **dict.fromkeys(
        "check shape_assertion dim_as_value dimension_size".split(), "a check, or a symbolic dim of an exported program"
    ),
    **dict.fromkeys(("empty", "empty2"), "uninitialised memory: a cut has no value to be compared with"),
    "rng_uniform": "draws from the device's own state: two runs of the whole differ already",
    "zeros_like": "a marker of differentiation that has no implementation",
    **dict.fromkeys(("from_edtype", "to_edtype"), "a change of extended dtype; keys have random_wrap and random_unwrap"),
}
_KERNEL: dict[str, str] = {
    **dict.fromkeys("call_exported cudnn_fusion ffi_call core_map pallas_call".split(), "register a description by its name"),
    **dict.fromkeys(
        ("dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", "scaled_matmul_wrapper"),
        "described, and proven by its formula: cuDNN runs it, on GPUs alone",
    ),
    "with_memory_space_constraint": "a marker inside kernels",
}


@dataclass(frozen=True, slots=True)
class Sorted:
    """One primitive: its kind, and why it is not described, or only in part."""

    name: str
    kind: PrimitiveKind
    reason: str = ""


def sort_primitives() -> tuple[Sorted, ...]:
    """All primitives by name, each with its kind."""
    known = set(described())
    return tuple(_sorted(name, module, known) for name, (module, _) in sorted(_jax.primitives().items()))


def sort_one(name: str) -> Sorted | None:
    """One primitive by name, kernels of modules that are not loaded included; None if JAX has no such primitive."""
    result = next((entry for entry in sort_primitives() if entry.name == name), None)
    return result or (_sorted(name, "", set()) if name in _KERNEL else None)


def _sorted(name: str, module: str, known: set[str]) -> Sorted:
    if name == PLATFORM:
        return Sorted(name, "structural", "the number of the branch for the platform: the same on all devices of one kind")
    if name in _STRUCTURAL:
        return Sorted(name, "structural", "has a body that is seen through")
    if name in _PLACEMENT:
        return Sorted(name, "placement", "says where a value lies, and leaves it as it is")
    if name in _EFFECT:
        return Sorted(name, "effect", _EFFECT[name])
    if name in _KERNEL or module.startswith(_jax.KERNEL_MODULES):
        return Sorted(name, "kernel", _KERNEL.get(name, "a kernel of one device; register a description by its name"))
    if module == "jax._src.lax.parallel":
        return Sorted(name, "collective", "runs between devices, inside shard_map")
    if name in OPAQUE:
        return Sorted(name, "opaque", OPAQUE[name])
    return Sorted(name, "described", WHOLE_DIMS.get(name, "")) if name in known else Sorted(name, "undescribed")


@dataclass(frozen=True, slots=True)
class Proved:
    """The result of a description's drawn cases: how many cuts were run, and the first fault."""

    cuts: int
    fault: str | None


_EXTRA_CASES = 30
"""At most this many further cases are drawn until one has a cut to run."""


def prove_one(name: str, examples: int) -> Proved:
    """Runs ``examples`` drawn cases of a description, and further ones until one of them has a cut."""
    cuts = 0
    for seed in range(examples + _EXTRA_CASES):
        if seed >= examples and cuts:
            break
        try:
            result = prove(name, Drawn(seed))
        except REFUSALS as error:
            return Proved(cuts, f"the installed JAX refuses the case: {type(error).__name__}: {error}")
        cuts += result.cuts
        if result.faults:
            return Proved(cuts, str(result.faults[0]))
    return Proved(cuts, None)


def coverage(*, examples: int = 0, observer: Callable[[str, float], None] | None = None) -> dict[str, Any]:
    """The table of all primitives as JSON-ready values; ``examples`` > 0 runs that many proof cases of each description.

    ``differences`` are those from the tested release of JAX that the installed one is like (`shardplan.tdl.releases`).
    ``verified`` counts the described primitives for which at least one cut was run and every cut gave the uncut result.
    ``opaque_verified`` counts the opaque ones in the same way; those without batch dims (`UNCUT`) need no cut. Without examples
    nothing is run, and both are 0. ``observer`` gets each name and the share that is done before the name's cases run.
    """
    table = sort_primitives()
    names: dict[str, list[str]] = {}
    for entry in table:
        names.setdefault(entry.kind, []).append(entry.name)
    claims = [entry for entry in table if entry.kind in ("described", "opaque")]
    proved: dict[str, Proved] = {}
    for n, entry in enumerate(claims if examples else ()):
        if entry.name in CASES:
            (observer or _silent)(f"proving {entry.name}", n / len(claims))
            proved[entry.name] = prove_one(entry.name, examples)
    passed = {n for n, result in proved.items() if result.fault is None and (result.cuts or n in UNCUT)}
    return {
        "primitives": len(table),
        "described": len(names.get("described", [])),
        "opaque": len(names.get("opaque", [])),
        "undescribed": names.get("undescribed", []),
        "verified": sum(entry.kind == "described" and entry.name in passed for entry in claims),
        "opaque_verified": sum(entry.kind == "opaque" and entry.name in passed for entry in claims),
        "unverified": [entry.name for entry in claims if entry.name not in passed],
        "faults": {n: result.fault for n, result in proved.items() if result.fault is not None},
        "cuts": sum(result.cuts for result in proved.values()),
        "examples": examples,
        "kinds": {kind: len(result) for kind, result in sorted(names.items())},
        "differences": asdict(differences()),
        "table": [{"name": e.name, "kind": e.kind, "reason": e.reason} for e in table],
    }


def _silent(_what: str, _part: float) -> None:
    return None
