"""`shardplan.reshard` moves the state of a run to the layouts of another plan of its step; `resharding` prices that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from shardplan import _jax
from shardplan.cost import Network
from shardplan.emit.state_moves import Collectives, in_pieces
from shardplan.errors import DeviceError, ReshardError
from shardplan.frontend.argnums import leaves_of, positions
from shardplan.frontend.nnx_state import abstract, apart, has_objects, together
from shardplan.frontend.trace import path_words
from shardplan.ir import Layout
from shardplan.plans.fingerprint import difference
from shardplan.plans.movements import Leaf, Resharding, Side, movements
from shardplan.plans.runner import leaf_paths
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.plan_of_step import Plan

AnyPlan = Plan | PlacedPlan

_HOST = "pinned_host"


def reshard(
    state: Any,
    old: AnyPlan,
    new: AnyPlan,
    *,
    devices: Sequence[Any] | None = None,
    argument: int | None = None,
    lost: Collection[Any] = (),
) -> Any:
    """The state of a run under the plan ``old``, in the layouts of ``new``, another plan of the same step.

    Arrays move one by one. Where both plans run on the same devices in the same order, an array in its ``old`` layout moves by
    the cheapest program of collectives between its two layouts, in a jitted program. All other arrays of this process move in
    pieces from device to device; where several hold a piece, one of the new plan sends it. So no device, and no host, ever
    holds more of an array than its blocks before and after, and pieces of these. (An array that spans several processes moves
    by `jax.device_put`, without that promise, where one of them lacks pieces that its devices need.) An array that is already
    in place is returned as it is, and blocks that stay in place may share memory with the old array: do not use the old state
    after a step that donates the new one.

    Args:
        state: All arguments of the step as a tuple, or the tree of one of them, such as the state that a step returned. nnx
            objects are returned as new objects.
        old: The plan under which the state was made.
        new: The plan to go on with. Its cluster may have another number of devices, some, all or none of the old ones.
        devices: Where ``new`` runs, as for `Plan.mesh`.
        argument: Which argument ``state`` is, where several have the same tree.
        lost: Devices that can no longer be read.

    Raises:
        ReshardError: for plans of different steps, a state that is not an argument of the step (or may be several of them), a
            leaf that is not an array on devices, or one that only lost devices hold.
        ArgumentError: for a leaf of another shape or dtype.
        DeviceError: if there are fewer devices than the new cluster has.
    """
    _check_plans(old, new)
    split = apart(state)
    leaves, tree = jax.tree.flatten(split)
    numbers = _leaf_numbers(split, old, new, argument)
    mesh = new.mesh(devices)
    wanted = new.leaves(mesh).part(numbers)
    wanted.fit(leaves)
    move = _mover(old, new, mesh.devices.ravel().tolist(), numbers, frozenset(lost))
    moved: list[Any] = []
    for n, x, sharding in zip(numbers, leaves, wanted.shardings, strict=True):
        moved.append(jax.block_until_ready(move(n, x, sharding)))
    result = jax.tree.unflatten(tree, moved)
    return together(result) if has_objects(state) else result


def resharding(old: AnyPlan, new: AnyPlan, *, argument: int | None = None, devices: Sequence[int] | None = None) -> Resharding:
    """What `reshard` sends between two plans of a step: ``bytes_per_device``, ``seconds``, and the movement of each array.

    The cost model prices ``seconds``, one array after the other, on the network of the new cluster, or of the old one where
    only that has the devices of both; they are None where neither has. No devices are needed.

    Args:
        old: The plan under which the state was made.
        new: The plan to go on with.
        argument: The argument that moves; by default all do.
        devices: For each device of the new cluster, its number in the old one (numbers from ``old.cluster.size`` on are new
            devices); by default, devices have the same number in both.

    Raises:
        ReshardError: for plans of different steps.
        DeviceError: for ``devices`` that are too few, or named twice.
    """
    _check_plans(old, new)
    count = len(new.traced.in_tree.children())
    some = range(count) if argument is None else positions(argument, count, "argument")
    return _movements(old, new, leaves_of(new.traced.in_tree, some), _numbered(devices, new.cluster.size))


def _numbered(devices: Sequence[int] | None, size: int) -> tuple[int, ...]:
    own = tuple(range(size) if devices is None else devices)
    if len(own) != size or len(set(own)) < size:
        raise DeviceError(f"devices={devices!r}: give a number for each of the {size} devices of the new cluster, each once")
    return own


def _movements(old: AnyPlan, new: AnyPlan, numbers: Sequence[int], devices: Sequence[int]) -> Resharding:
    """The movements of these leaves, where the new plan runs on these devices of the old one."""
    before, after = _places(old, range(old.cluster.size)), _places(new, devices)
    program = new.traced.program
    tensors = [program.tensors[program.inputs[n]] for n in numbers]
    leaves = [
        Leaf(program.input_paths[n], t.shape, t.dtype, t.nbytes, before[n], after[n])
        for n, t in zip(numbers, tensors, strict=True)
    ]
    return movements(leaves, ((new.cluster, devices), (old.cluster, range(old.cluster.size))))


def _places(plan: AnyPlan, devices: Sequence[int]) -> list[tuple[Side, Layout | None]]:
    """Where each leaf of the arguments lies under a plan on these devices, and in which layout."""
    if isinstance(plan, Plan):
        side = Side(plan.cluster, plan.factors, tuple(devices))
        return [(side, a.layout) for a in plan.data.arguments]
    groups, layers = plan.placed.graph.groups, plan.placed.layers
    sides = [Side(own.cluster, own.factors, tuple(devices[d] for d in own.devices)) for own in groups]
    own = [(sides[g], groups[g].layouts.get(key[0])) for g, key in plan.placed.graph.inputs]
    if layers is None:
        return own
    everywhere = replace(sides[0], devices=tuple(d for side in sides for d in side.devices), stages=len(sides))
    return [own[n[0]] if len(n) == 1 else (everywhere, own[n[0]][1]) for n in layers.inputs]


def _mover(
    old: AnyPlan, new: AnyPlan, devices: Sequence[Any], numbers: Sequence[int], lost: frozenset[Any]
) -> Callable[[int, Any, NamedSharding], Any]:
    """A function that moves leaf n of the arguments to its new sharding on these devices."""
    alike = isinstance(old, Plan) and isinstance(new, Plan) and old.cluster.size == new.cluster.size and not lost
    known = _movements(old, new, numbers, range(len(devices))).movements if alike else ()
    plans = dict(zip(numbers, known, strict=True)) if alike else {}
    lies = [s.with_memory_kind("device") for s in old.leaves(old.mesh(devices)).shardings] if alike else []
    runs: dict[object, Collectives] = {}

    def moved(n: int, x: Any, sharding: NamedSharding) -> Any:
        """Leaf ``n`` of a state in its new sharding."""
        if not isinstance(x, jax.Array):
            raise ReshardError(f"{new.traced.program.input_paths[n]} is a {type(x).__name__}: place it with plan.put")
        if x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        if _HOST in (x.sharding.memory_kind, sharding.memory_kind):  # moves are between device memories alone
            there = NamedSharding(sharding.mesh, sharding.spec, memory_kind="device")
            return jax.device_put(moved(n, jax.device_put(x, x.sharding.with_memory_kind("device")), there), sharding)
        plan = plans.get(n)
        if plan is not None and plan.move is not None and x.sharding.is_equivalent_to(lies[n], x.ndim):
            if plan.factors not in runs:
                runs[plan.factors] = Collectives(Network(new.cluster, plan.factors), devices)
            return runs[plan.factors].moved(x, plan.move, sharding)
        if (result := in_pieces(x, sharding, lost)) is not None:
            return result
        if lost:
            raise ReshardError(
                f"{new.traced.program.input_paths[n]} lies in part on lost devices alone: restore it from a checkpoint, in the "
                "shardings of plan.in_shardings(plan.mesh())"
            )
        return jax.device_put(x, sharding)

    return moved


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_plans(old: AnyPlan, new: AnyPlan) -> None:
    for name, plan in (("old", old), ("new", new)):
        if not isinstance(plan, Plan | PlacedPlan):
            raise ReshardError(f"{name} is a {type(plan).__name__}: give the plan that shardplan.plan or shardplan.load returned")
    if old.traced is not new.traced and (where := difference(old.traced, new.traced)):
        raise ReshardError(
            f"the plans are of different steps: they differ first at {where}; plan the same step, as shardplan.replan does"
        )


def _leaf_numbers(state: Any, old: AnyPlan, new: AnyPlan, argument: int | None) -> tuple[int, ...]:
    """The positions of a state's leaves among those of all arguments: the state is all arguments, or one.

    Raises:
        ReshardError: if it is neither, or may be several arguments that lie differently.
    """
    tree, step = new.traced.in_tree, new.step
    children, own = tree.children(), jax.tree.structure(state)
    if argument is None and type(state) is tuple and leaf_paths(own, step) == leaf_paths(tree, step):
        return tuple(range(tree.num_leaves))
    some = range(len(children)) if argument is None else positions(argument, len(children), "argument")
    names = _jax.argument_names(step, len(children))
    fitting = [n for n in some if _paths(own) == _paths(children[n])]
    if not fitting:
        raise ReshardError(_unknown_tree(own, [(names[n], children[n]) for n in some]))
    types = [(shape.shape, shape.dtype) for shape in map(abstract, jax.tree.leaves(state)) if shape is not None]
    shapes = new.traced.in_shapes
    same = [n for n in fitting if types == [(shapes[k].shape, shapes[k].dtype) for k in leaves_of(tree, (n,))]] or fitting
    places = [_places(plan, range(plan.cluster.size)) for plan in (old, new)]
    if any(
        [own[k] for k in leaves_of(tree, (n,))] != [own[k] for k in leaves_of(tree, (same[0],))] for n in same for own in places
    ):
        which = " or ".join(f"{names[n]} (argument={n})" for n in same)
        raise ReshardError(f"the state may be {which}, which lie differently: say which with argument=, or give all arguments")
    return leaves_of(tree, (same[0],))


def _paths(tree: Any) -> list[tuple[str, ...]]:
    """The path of every leaf of a tree, as plans name them below their arguments."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.tree.unflatten(tree, range(tree.num_leaves)))
    return [tuple(path_words(path)) for path, _ in leaves]


def _unknown_tree(own: Any, known: Sequence[tuple[str, Any]]) -> str:
    """The error text for a state whose tree no argument has; it shows the state's and the arguments'."""
    arguments = "; ".join(f"{name} has {_tree_text(tree)}" for name, tree in known)
    return (
        f"the state has {_tree_text(own)}, which is the tree of no argument of the step ({arguments}): give one argument, "
        "or all of them as a tuple"
    )


def _tree_text(tree: Any, most: int = 3) -> str:
    paths = ["/".join(path) or "itself" for path in _paths(tree)]
    shown = ", ".join(paths[:most]) + (", ..." if len(paths) > most else "")
    return f"{len(paths)} {'leaf' if len(paths) == 1 else 'leaves'} ({shown})" if paths else "no leaves"
