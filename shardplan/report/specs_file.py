"""A plan's PartitionSpecs as a Python file that imports JAX alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardplan.mesh.factoring import device_order
from shardplan.plans.data import PlanData
from shardplan.report.tables import seconds, size

BY_PATH = '''\


def _by_path(tree, specs, names=None):
    """The tree with the spec of its path in place of each leaf."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    seen, found = set(), []
    for path, _ in leaves:
        # the attribute in which a variable keeps its value is no part of a path
        keys = path[:-1] if path and getattr(path[-1], "name", None) in ("value", "raw_value") else path
        words = [jax.tree_util.keystr((key,), simple=True) for key in keys]
        if names is not None:
            words[0] = names[path[0].idx]
        name = base = "/".join(words) or "result"
        count = 1
        while name in seen:  # a second leaf of the same path
            count += 1
            name = f"{base}#{count}"
        seen.add(name)
        if name not in specs:
            raise KeyError(f"{name!r} is not a path of the planned step: it has {', '.join(list(specs)[:8])} ...")
        found.append(specs[name])
    return jax.tree_util.tree_unflatten(structure, found)
'''
"""A function in exported files: it replaces each leaf of a tree by the table's entry for its path."""

_FILE = '''\
"""The PartitionSpecs of a step, planned on {cluster}: {figures}.

    on = mesh()
    run = jax.jit(
        step,
        in_shardings=shardings(in_specs(args), on),
        out_shardings=shardings(out_specs(jax.eval_shape(step, *args)), on),
    )
    result = run(*jax.device_put(args, shardings(in_specs(args), on)))

These are the layouts of the arguments and results. XLA's partitioner chooses all others; under `plan.jit`, they are the plan's.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

MESH_AXES = {axes}
MESH_SHAPE = {shape}
DEVICE_ORDER = {order}  # the number of each device of the mesh, last axis fastest

ARGUMENTS = {arguments}  # the names of the step's arguments, with which the paths of their leaves begin

IN_SPECS = {{
{in_specs}}}

OUT_SPECS = {{
{out_specs}}}


def mesh(devices=None):
    """The mesh on these devices, by default `jax.devices()`."""
    found = list(jax.devices() if devices is None else devices)
    if len(found) < len(DEVICE_ORDER):
        raise ValueError(f"the mesh has {{len(DEVICE_ORDER)}} devices, here are {{len(found)}}")
    rows = [found[i] for i in DEVICE_ORDER]
    for n in reversed(MESH_SHAPE):
        rows = [rows[i : i + n] for i in range(0, len(rows), n)]
    return Mesh(rows[0], MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def in_specs(args):
    """A tree of PartitionSpecs like ``args``, the tuple of the step's arguments."""
    return _by_path(tuple(args), IN_SPECS, ARGUMENTS)


def out_specs(result):
    """A tree of PartitionSpecs like the step's result (arrays or shapes)."""
    return _by_path(result, OUT_SPECS)


def shardings(specs, on):
    """A tree of NamedShardings on a mesh, from one of PartitionSpecs."""
    return jax.tree.map(lambda spec: NamedSharding(on, spec), specs, is_leaf=lambda x: isinstance(x, P))
'''


def specs_file(plan: PlanData, order: Sequence[int] | None = None) -> str:
    """The text of the file. ``order`` has the device numbers of the mesh, by default in the cluster's order."""
    names, axes = tuple(plan.axes), plan.axes
    groups = [(i,) for i in range(len(plan.factors))]
    numbers = device_order(plan.cluster, plan.factors, groups).ravel().tolist() if order is None else list(order)
    consecutive = numbers == list(range(len(numbers)))
    layouts = plan.result_layouts
    text = _FILE.format(
        cluster=comment(plan.cluster.name),
        figures=f"{seconds(plan.step_time_s)} a step and {size(plan.peak_bytes)} a device",
        axes=repr(names),
        shape=repr(tuple(axes.values())),
        order=f"range({len(numbers)})" if consecutive else repr(numbers),
        arguments=repr(plan.argument_names),
        in_specs=_rows((a.path for a in plan.arguments), (a.layout.entries(names) if a.layout else () for a in plan.arguments)),
        out_specs=_rows(plan.result_paths, (layout.entries(names) if layout else () for layout in layouts)),
    )
    return text + BY_PATH


def _rows(paths: Iterable[str], specs: Iterable[Sequence[object]]) -> str:
    return "".join(f"    {path!r}: P({', '.join(map(repr, spec))}),\n" for path, spec in zip(paths, specs, strict=True))


def comment(text: str) -> str:
    """The text without characters that would end a docstring."""
    return text.replace("\\", "/").replace('"', "'")
