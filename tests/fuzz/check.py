"""A step under a plan beside the same step under plain `jax.jit`: two steps with state fed back, leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import shardplan
from shardplan.frontend.nnx_state import trace_step
from shardplan.microbatches.accumulating import checked_microbatches, microbatched
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.verify.verify import Verified, verify
from tests.machines import machine
from tests.placed import RandomGroups
from tests.scattered import scattered

STEPS = 2
NOISES = 4
Step = Callable[..., Any]
Status = Literal["equal", "wrong", "reference", "unplanned", "crashed", "aborted", "hung", "refused", "invalid"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a program. ``communicates``: its plan sends something. ``silent``: no number of it is finite. ``folded``:
    XLA left out a collective that the plan sends, as equal to another one or not needed.

    ``reference``: the step compiled for one device differs from the step op by op; ``unplanned``: the compiled program does not
    send what the plan does, one for one (under the explicit backend); ``crashed``: an error of the planner or the compiler;
    ``aborted``: the process died; ``hung``: it took too long; ``refused``: pins or the memory limit cannot be kept; ``invalid``:
    the step fails under plain `jax.jit` too, which is the fuzzer's fault.
    """

    status: Status
    detail: str = ""
    communicates: bool = False
    silent: bool = False
    folded: bool = False

    @property
    def failed(self) -> bool:
        """Whether this says that something is broken."""
        return self.status not in ("equal", "refused")


def examine(
    step: Step,
    args: Sequence[Any],
    *,
    cluster: str,
    pins: Mapping[str, Sequence[Any]] | None = None,
    memory_part: float | None = None,
    remat: str = "none",
    objective: str = "time",
    donate: bool = False,
    layouts: int | None = None,
    backend: str = "specs",
    groups: int | None = None,
    microbatches: int = 1,
    reference: Literal["always", "unequal"] = "unequal",
    noisy: Callable[[int], Step] | None = None,
    drop: int | None = None,
) -> Finding:
    """Plans a step and compares. ``noisy`` gives the step with its floats moved by a unit, for what `verify` finds unequal.

    ``memory_part``: the memory limit, as a part of the peak of the plan without one. ``layouts`` is the seed of layouts that are
    run in place of the planned ones (`tests.scattered`), ``groups`` that of the devices of each op (`tests.placed`). ``drop``
    leaves out the exchange of that number, which should be found. With ``microbatches``, each argument that is no state is the
    batch in turn, until one can be cut. ``reference`` is that of `verify`. Errors of the planner are raised.
    """
    options: dict[str, Any] = {"cluster": machine(cluster), "objective": objective}
    options["pins"] = {path: PartitionSpec(*entries) for path, entries in (pins or {}).items()}
    options |= {"donate_argnums": (0,) if donate else ()}
    options |= {"backend": backend} if groups is None else {"placement": RandomGroups(groups)}
    try:
        if memory_part is not None:
            options["memory_limit"] = int(shardplan.plan(step, *args, **options).peak_bytes * memory_part)
        options |= {} if microbatches == 1 else _batch(step, args, microbatches)
        plan = shardplan.plan(step, *args, remat=remat, **options)
    except (shardplan.MicrobatchError, shardplan.PinError, shardplan.MemoryLimitError) as error:
        return Finding("refused", _line(error))
    except shardplan.ShardplanError as error:
        if objective == "bytes" and "objective='bytes'" in str(error):
            return Finding("refused", _line(error))
        raise
    plan = plan if layouts is None else scattered(plan, layouts) or plan
    devices = jax.devices()[: machine(cluster).size]
    try:
        found = verify(plan, step, args, steps=STEPS, backend=backend, devices=devices, drop=drop, reference=reference)
    except shardplan.CompilerDiedError as error:  # named, in place of the end of the process
        return Finding("refused", _line(error))
    sends = plan.communication_bytes > 0 or (isinstance(plan, PlacedPlan) and plan.transfer_bytes > 0)
    if reference == "always" and found.reference is not None:
        return Finding("reference", str(found.reference), communicates=sends)
    if found.unmatched and drop is None:
        return Finding("unplanned", _unplanned(found), communicates=sends)
    if found.equal or not found.compared:
        return _equal(found, sends)
    run, placed = plan.jit(step, devices, backend, drop=drop), plan.put(_copies(args), mesh=plan.mesh(devices))
    if noisy is not None and not _beyond_rounding(_run(run, placed, plan), plan, step, args, noisy):
        return Finding("equal", "differs by rounding", communicates=sends)
    return Finding("wrong", _worst(found), communicates=sends)


def _equal(found: Verified, sends: bool) -> Finding:
    silent = not found.compared and found.numbers > 0
    return Finding("equal", communicates=sends, silent=silent, folded=bool(found.folded))


def _batch(step: Step, args: Sequence[Any], count: int) -> dict[str, Any]:
    """Options that cut an argument into microbatches: the first that can be cut.

    Raises:
        MicrobatchError: if none can.
    """
    traced = trace_step(step, args)
    for n in range(len(args)):
        try:
            microbatched(traced.program, checked_microbatches(traced, count, (n,)))
        except shardplan.MicrobatchError:
            continue
        return {"microbatches": count, "batch_argnums": (n,)}
    raise shardplan.MicrobatchError("no argument can be cut")


def _worst(found: Verified) -> str:
    worst = found.worst
    where = f"leaf {worst.path} after step {worst.step}: off by {worst.error:.2g}, {worst.tolerance:.2g} allowed"
    return f"{where}; {len(found.unequal)} unequal"


def _unplanned(found: Verified) -> str:
    first = found.unmatched[0]
    what = f"{first.kind} of {first.nbytes} bytes in {first.scope or 'no scope'}, {first.times:g} times"
    return f"{what}: planned {first.planned}, compiled {first.compiled}; {len(found.unmatched)} unmatched; {first.line}"


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]


# -- rounding inside the step ------------------------------------------------------------------------------------------


def _beyond_rounding(
    found: Sequence[np.ndarray], plan: Any, step: Step, args: Sequence[Any], noisy: Callable[[int], Step]
) -> bool:
    """Whether a leaf differs by more than ten times what moving every float inside the step by one unit does, and is ten times as
    far from the results in double precision.
    """
    wanted = _run(jax.jit(step), _copies(args), plan)
    others = [_run(jax.jit(noisy(n)), _copies(args), plan) for n in range(NOISES)]
    leaves = zip(wanted, found, *others, strict=True)
    if not any(_gap(a, b) > 10 * max(_gap(a, c) for c in moved) + _floor(a) for a, b, *moved in leaves):
        return False
    doubles = _in_doubles(step, args, plan)
    return doubles is None or any(
        _gap(b, exact) > 10 * _gap(a, exact) + _floor(a) for a, b, exact in zip(wanted, found, doubles, strict=True)
    )


def _in_doubles(step: Step, args: Sequence[Any], plan: Any) -> list[np.ndarray] | None:
    """The results as they are without rounding, nearly: where a step cancels most of its digits, single precision is as far from
    them on one device as on many. None for a step that cannot be traced so.
    """
    with jax.enable_x64(True):
        try:
            return _run(jax.jit(step), tuple(jax.tree.map(_double, tuple(args))), plan)
        except (TypeError, ValueError):
            return None


def _double(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.asarray(np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64))


def _copies(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments again, for a step that takes their memory."""
    return tuple(jax.tree.map(lambda x: x.copy(), tuple(args)))


def _run(step: Step, args: Sequence[Any], plan: Any) -> list[np.ndarray]:
    """All leaves after each step, with the state fed back that the plan knows."""
    feedback = plan.traced.program.feedback
    leaves, tree = jax.tree.flatten(tuple(args))
    after: list[np.ndarray] = []
    for _ in range(STEPS):
        outs = jax.tree.leaves(step(*jax.tree.unflatten(tree, leaves)))
        after += [_host(x) for x in outs]
        for x, i in zip(outs, feedback, strict=True):
            if i is not None:
                leaves[i] = x
    return after


def _host(x: Any) -> np.ndarray:
    return np.array(jax.random.key_data(x)) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x)


def _gap(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; of numbers that only one has finite, infinite."""
    x, y = (v.astype(np.complex128 if np.iscomplexobj(v) else np.float64) for v in (a, b))
    with np.errstate(invalid="ignore"):
        gap = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
    return float(np.nan_to_num(gap, nan=np.inf).max(initial=0.0))


def _floor(a: np.ndarray) -> float:
    """What a leaf may differ by in any case: a millionth of its maximum, of narrow floats one unit of theirs."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        return 0.0
    part = max(1e-6, float(jnp.finfo(a.dtype).eps)) if a.dtype.itemsize < 4 else 1e-6
    sizes = np.abs(a.astype(np.complex128))
    return part * float(np.max(sizes, initial=0.0, where=np.isfinite(sizes)))
