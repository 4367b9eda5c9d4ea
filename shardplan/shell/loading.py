"""Loads a saved plan for a step, without planning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from os import PathLike, fspath
from typing import Any, overload

from jax.sharding import Mesh

from shardplan.errors import DeviceError, PlanFileError, ShardplanError
from shardplan.frontend.argnums import positions
from shardplan.frontend.keywords import as_positional
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import flatten
from shardplan.mesh.devices import auto
from shardplan.plans import files
from shardplan.plans.data import PlanData
from shardplan.plans.fingerprint import arguments, different_arguments, fingerprint, first_difference, marks
from shardplan.plans.fitted import fitted, program_of
from shardplan.plans.placed_data import PlacedData, conditions
from shardplan.shell.placed_loading import placed_for_step
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.plan_of_step import Plan


def load(
    file: str | PathLike[str],
    step: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    kwargs: Mapping[str, Any] | None = None,
    warm_start: bool = False,
) -> Plan | Any:
    """Reads a saved plan for this step and these arguments; ``kwargs`` has those by name. If the plan was made on your own
    `Mesh`, pass that again as ``mesh``. A plan with groups of devices is a `PlacedPlan` (typed ``Any``, as only the file tells
    which it is).

    With ``warm_start``, a step of the same ops with other shapes (another batch or sequence length) is planned by one search
    over the file's factors that begins at its layouts. That is faster than `shardplan.plan`, but compares no other factorings
    and may miss a faster plan.

    Raises:
        PlanFileError: if the file is not a plan, or was made for another model, other shapes or another version.
        DeviceError: if the mesh has other axes, or for a mesh beside a plan with groups of devices.
    """
    data = files.read_any(file)
    step, args = as_positional(step, args, kwargs)
    traced = trace_step(step, args, conditions(data).donate_argnums)
    if warm_start and fingerprint(traced, numbers=False) != data.fingerprint:
        if isinstance(data, PlacedData):
            raise PlanFileError(
                f"{fspath(file)}: a plan with groups of devices is no warm start for other shapes: plan the step anew, with its "
                "axes, microbatches or placement"
            )
        return _warm_started(fspath(file), data, step, traced, mesh)
    return for_step(fspath(file), data, step, traced, mesh)


@overload
def for_step(name: str, data: PlanData, step: Callable[..., Any], traced: Traced, mesh: Mesh | None) -> Plan: ...


@overload
def for_step(
    name: str, data: files.AnyData, step: Callable[..., Any], traced: Traced, mesh: Mesh | None
) -> Plan | PlacedPlan: ...


def for_step(name: str, data: files.AnyData, step: Callable[..., Any], traced: Traced, mesh: Mesh | None) -> Plan | PlacedPlan:
    """The plan of data read from the file ``name``, for a step that was traced with the plan's ``donate_argnums``."""
    _check_step(name, data, traced)
    if isinstance(data, PlacedData):
        _check_donated(name, data, traced)
        return placed_for_step(name, data, step, traced, mesh)
    program, graph = fitted(name, data, traced)
    _check_donated(name, data, traced)
    return Plan(data, traced=traced, program=program, graph=graph, step=step, user_mesh=_mesh(name, data, mesh))


def _warm_started(name: str, data: PlanData, step: Callable[..., Any], traced: Traced, mesh: Mesh | None) -> Plan:
    """A plan that starts from the layouts of a saved one, which has the same ops and arguments with other shapes."""
    from shardplan.shell.replanning import warm_started

    planned, found = [mark.partition(" ")[0] for mark in data.marks or ()], [mark.partition(" ")[0] for mark in marks(traced)]
    shapes = {a.path: len(a.shape) for a in data.arguments}
    ranks = {path: len(traced.program.tensors[t].shape) for path, t in _inputs(traced)}
    if planned != found or shapes != ranks:
        n = next((n for n, pair in enumerate(zip(planned, found, strict=False)) if pair[0] != pair[1]), None)
        ops = f"op {n} was {planned[n]} and is {found[n]}" if n is not None else f"it had {len(planned)} ops and has {len(found)}"
        what = ops if planned != found else "its arguments have other paths or ranks"
        raise PlanFileError(f"{name}: another model: for a warm start only shapes may differ, and {what}; plan this step anew")
    _check_donated(name, data, traced)
    program = program_of(name, data, traced)
    graph = flatten(program, replicate=data.replicate, backend=data.backend)
    old = Plan(data, traced=traced, program=program, graph=graph, step=step, user_mesh=_mesh(name, data, mesh))
    return warm_started(old, mesh)


def _inputs(traced: Traced) -> Iterator[tuple[str, int]]:
    """(path, tensor) of each argument."""
    return zip(traced.program.input_paths, traced.program.inputs, strict=True)


def _check_step(name: str, data: files.AnyData, traced: Traced) -> None:
    """Refuses a step that is not the one that was planned. Its single floats may differ: no plan depends on them."""
    if fingerprint(traced, numbers=False) == data.fingerprint:
        return
    then, now = conditions(data).operators, traced.program.count_ops()
    different = different_arguments(data.argument_types, arguments(traced))
    counts = f"{then} operators then, {now} now, " if now != then else ""
    first = first_difference(data.marks or (), traced) or "an array that it closes over, or its results, are others"
    raise PlanFileError(
        f"{name}: the plan was made for another model or other shapes: "
        f"{different or f'the arguments agree, the program does not ({counts}{first})'}; plan this step again"
    )


def _check_donated(name: str, data: files.AnyData, traced: Traced) -> None:
    try:
        positions(conditions(data).donate_argnums, len(traced.in_tree.children()), "donate_argnums")
    except ShardplanError as error:
        raise PlanFileError(f"{name}: {error}; plan this step again") from error


def _mesh(name: str, data: PlanData, mesh: Mesh | None) -> Mesh | None:
    if mesh is None:
        return None
    plan_axes, mesh_axes = data.axes, {str(n): int(k) for n, k in mesh.shape.items() if k > 1}
    if plan_axes != mesh_axes:
        raise DeviceError(f"{name}: the plan is for the mesh axes {plan_axes}, but the given mesh has {mesh_axes}")
    return auto(mesh)
