"""The PartitionSpecs of a plan with groups of devices as a Python file that imports JAX alone."""

from __future__ import annotations

from collections.abc import Iterator

from shardplan.ir import spec_text
from shardplan.mesh.factoring import device_order
from shardplan.plans.data import PlanData
from shardplan.plans.placed_data import PlacedData
from shardplan.regions.layer_parts import whole_entries
from shardplan.report.specs_file import BY_PATH, comment
from shardplan.report.tables import seconds

_FILE = '''\
"""The PartitionSpecs of a step, planned on {count} groups of devices of {cluster}: {figures}.

    on = meshes()
    args = jax.device_put(args, in_shardings(args, on))

Each argument lies on the devices of one group, where ops read or replace it. A result that replaces it lies there too. Under
`plan.jit`, each group runs its own programs.
"""

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# For each group: the mesh axes, their sizes, and the number of each device of the mesh, last axis fastest.
GROUPS = (
{groups})

DEVICES = {devices}  # of the cluster

ARGUMENTS = {arguments}  # the names of the step's arguments, with which the paths of their leaves begin

# The group and the spec of each leaf; None for an array of layers, of which each group holds a part.
IN_SPECS = {{
{in_specs}}}


def meshes(devices=None):
    """The mesh of each group on these devices, by default `jax.devices()`."""
    found = list(jax.devices() if devices is None else devices)
    if len(found) < DEVICES:
        raise ValueError(f"the groups are parts of {{DEVICES}} devices, here are {{len(found)}}")
    return [_mesh(found, *group) for group in GROUPS]


def in_shardings(args, on):
    """A tree of NamedShardings like ``args``, the tuple of the step's arguments, on the meshes of the groups."""
    every = {every}
    placed = {{path: NamedSharding(every if group is None else on[group], spec) for path, (group, spec) in IN_SPECS.items()}}
    return _by_path(tuple(args), placed, ARGUMENTS)


def _mesh(found, axes, shape, order):
    rows = [found[i] for i in order]
    for n in reversed(shape):
        rows = [rows[i : i + n] for i in range(0, len(rows), n)]
    return Mesh(rows[0], axes, axis_types=(AxisType.Auto,) * len(axes))
'''
_EVERY = (
    'Mesh([mesh.devices for mesh in on], ("stage", *on[0].axis_names), axis_types=(AxisType.Auto,) * (1 + on[0].devices.ndim))'
)


def placed_specs_file(plan: PlacedData) -> str:
    """The text of the file."""
    text = _FILE.format(
        count=len(plan.groups),
        cluster=comment(plan.cluster.name),
        figures=f"{seconds(max((row.end_s for row in plan.issues), default=0.0))} a step",
        groups="".join(map(_group, range(len(plan.groups)), plan.groups, plan.devices)),
        devices=plan.cluster.size,
        arguments=repr(plan.groups[0].argument_names),
        in_specs="".join(_arguments(plan)),
        every=_EVERY if plan.array_of else "None",
    )
    return text + BY_PATH


def _group(number: int, plan: PlanData, devices: tuple[int, ...]) -> str:
    order = device_order(plan.cluster, plan.factors, [(i,) for i in range(len(plan.factors))]).ravel().tolist()
    return f"    ({tuple(plan.axes)!r}, {tuple(plan.axes.values())!r}, {[devices[i] for i in order]!r}),  # group {number}\n"


def _arguments(plan: PlacedData) -> Iterator[str]:
    entries = [own.entries for own in plan.groups]
    seen: set[str] = set()
    for path, group in plan.group_of.items():
        array = plan.array_of.get(path)
        if array is None:
            yield f"    {path!r}: ({group}, P({', '.join(map(repr, entries[group][path]))})),\n"
        elif array not in seen:
            seen.add(array)
            yield f"    {array!r}: (None, {spec_text(whole_entries(entries[group][path]))}),\n"
