"""The base of all plans: it checks steps and arguments, and places arguments."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from shardplan import _jax
from shardplan.emit.crossings import Places, compiled_apart
from shardplan.emit.launches import in_turn, launch_of
from shardplan.errors import PlanFileError, ShardplanError
from shardplan.frontend.argnums import leaves_of, positions, tuple_of
from shardplan.frontend.keywords import Positional, ordered
from shardplan.frontend.nnx_state import apart, has_objects, together, trace_step
from shardplan.frontend.trace import Traced
from shardplan.plans.fingerprint import difference
from shardplan.plans.runner import Leaves, check_tree, structure_difference
from shardplan.shell.shrunken import Shrinkable, checked
from shardplan.verify.judge import Judged
from shardplan.verify.stand_ins import stand_ins

_log = logging.getLogger("shardplan")


class PlannedStep(ABC):
    """A step that was planned, and its trace."""

    traced: Traced
    step: Callable[..., Any]
    donate_argnums: tuple[int, ...]

    @abstractmethod
    def leaves(self, mesh: Mesh | None = None, *, weak: bool = False) -> Leaves:
        """The planned types of the arguments' leaves, and their shardings on a mesh that the plan's ``mesh`` made."""

    @property
    def donated_leaves(self) -> tuple[int, ...]:
        """Positions of the donated leaves among all leaves of the arguments."""
        return leaves_of(self.traced.in_tree, self.donate_argnums)

    def put(self, args: Sequence[Any], *, kwargs: Mapping[str, Any] | None = None, mesh: Mesh | None = None) -> Any:
        """The arguments placed on the devices. Arrays with another sharding are moved; nnx objects are returned as new objects.

        As with `jax.device_put`, an array that is already in place is returned as it is, and blocks that stay on their device may
        share memory with the given array. If the result is donated, the given array may be deleted with it: give a copy
        (`jnp.copy`) of what you still need.

        If the step takes arguments by name, they are given in ``kwargs``, and the result is ``(args, kwargs)``.

        Raises:
            ArgumentError: for an array of another shape or dtype than was planned.
            ShardplanError: for arguments of another structure, or for deleted ones.
        """
        names = self.step.names if isinstance(self.step, Positional) else ()
        if names and kwargs is None:
            raise ShardplanError(f"this plan has {', '.join(names)} by name: plan.put(args, kwargs={{...}}) gives back both")
        args = ordered(self.step, tuple(args), kwargs or {})
        leaves, tree = jax.tree.flatten(apart(args))
        check_tree(tree, self.traced, self.step)
        wanted = self.leaves(mesh)
        wanted.fit(leaves)
        placed = jax.tree.unflatten(tree, [_named(x, s) for x, s in zip(wanted.placed(leaves), wanted.shardings, strict=True)])
        placed = together(placed) if has_objects(args) else placed
        return placed if not names else (placed[: -len(names)], dict(zip(names, placed[-len(names) :], strict=True)))

    @abstractmethod
    def jit(self, step: Callable[..., Any], devices: Sequence[Any] | None = None, backend: str = "auto", **options: Any) -> Any:
        """The step, jitted with this plan's shardings."""

    @abstractmethod
    def mesh(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh on these devices."""

    def meshes(self, devices: Sequence[Any] | None = None) -> tuple[Mesh, ...]:
        """The mesh of each group of devices."""
        return (self.mesh(devices),)

    def fetch(self, tree: Any, *, devices: Sequence[Any] | None = None) -> Any:
        """The tree with whole arrays of NumPy in place of its arrays, in every process: a loss to print, or a state to save.

        Processes that share a plan must make these calls in the same order, as arrays on the plan's devices are sent to all.
        """
        return jax.tree.map(Places(self.meshes(devices)).fetch, tree)

    def init(self, init_fn: Callable[..., Any], *args: Any, argument: int = 0, devices: Sequence[Any] | None = None) -> Any:
        """The result of ``init_fn(*args)``, sharded like argument ``argument`` of the step and never whole on one device.

        ``init_fn`` returns that one argument, so each argument takes a call of its own: ``plan.init(make_model)`` and
        ``plan.init(make_optimizer, argument=1)``.

        Raises:
            ArgumentError: if ``init_fn`` makes an array of another shape or dtype than was planned.
            ShardplanError: if the argument does not exist, or if ``init_fn`` makes another structure.
        """
        trees = list(self.traced.in_tree.children())
        (place,) = positions(argument, len(trees), "argument")
        made = jax.eval_shape(lambda *a: apart(init_fn(*a)), *args)
        trees[place] = jax.tree.structure(made)
        if difference := structure_difference(tuple_of(trees), self.traced, self.step):
            raise ShardplanError(_not_alone(_jax.argument_names(self.step, len(trees)), place, difference))
        wanted = self.leaves(self.mesh(devices)).part(leaves_of(self.traced.in_tree, (place,)))
        wanted.fit(jax.tree.leaves(made))
        leaves = _made_in_place(lambda *a: jax.tree.leaves(apart(init_fn(*a))), args, jax.tree.leaves(made), wanted.shardings)
        return together(jax.tree.unflatten(trees[place], leaves))

    def check(
        self,
        args: Sequence[Any],
        *,
        kwargs: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        backend: str = "auto",
        drop: int | None = None,
    ) -> Judged:
        """Runs the step on these arguments under the plan and on one device, and compares each leaf of the results. Where one
        device lacks the memory for the whole step, a shrunken copy runs instead, with the plan's layouts and cuts: on the first
        samples and, where that is still too much, with the first layers of state that a scan runs over. ``fewer`` and ``ran``
        of the result describe the copy.

        If the results differ, the step also runs op by op on one device. If the plan's results equal those, the step compiled
        for one device is wrong: ``reference`` of the result and a warning say where.

        Equal means equal up to rounding, as for `shardplan verify`. The arguments stay as they are: both runs take copies.
        ``kwargs``, ``devices``, ``backend`` and ``drop`` are as for `put` and `jit`.

        Raises:
            CheckError: if a leaf differs.
            UncheckedError: if the check cannot run, for example because one device lacks the memory for a shrunken copy too.
            ArgumentError: for an array of another shape or dtype than was planned.
            ShardplanError: for arguments of another structure, for deleted ones, or if the step returns no array.
        """
        leaves, tree = jax.tree.flatten(apart(ordered(self.step, tuple(args), kwargs or {})))
        check_tree(tree, self.traced, self.step)
        self.leaves(self.mesh(devices)).fit(leaves)

        def jit(plan: PlannedStep) -> Any:
            return plan.jit(plan.step, devices, backend, drop=drop)

        with stand_ins(self.traced.program, devices):
            judged = checked(cast("Shrinkable", self), jit(self), jit, leaves, tree, devices)
        if judged.reference:
            _log.warning("%s", judged.reference)
        return judged

    def check_step(self, step: Callable[..., Any]) -> None:
        """Refuses a step that is not the one that was planned."""
        if self.step is step:
            return
        args = jax.tree.unflatten(self.traced.in_tree, self.traced.in_shapes)
        first_difference = difference(self.traced, trace_step(step, args, self.donate_argnums))
        if first_difference:
            raise PlanFileError(
                f"this step is not the one that was planned: they differ first at {first_difference}; plan this step again"
            )


def _not_alone(names: Sequence[str], place: int, difference: str) -> str:
    """What is wrong with an ``init_fn`` that returns something else than the argument at ``place``."""
    return (
        f"init_fn has to return {names[place]} alone, as a call of init makes one argument of the step ({', '.join(names)}): "
        f"{difference}; call init once for each argument, with its number (the first is 0) as argument="
    )


def _named(x: Any, sharding: NamedSharding) -> Any:
    """An array with its planned sharding: on one device it may have one without a mesh, which `fetch` does not recognise."""
    return jax.device_put(x, sharding) if isinstance(getattr(x, "sharding", None), SingleDeviceSharding) else x


def _made_in_place(
    make: Callable[..., list[Any]], args: Sequence[Any], shapes: Sequence[Any], shardings: Sequence[NamedSharding]
) -> list[Any]:
    """The leaves that a function makes, of these types and with these shardings. One program for each group of devices makes
    the group's leaves. A process runs the programs of groups in which it owns devices.
    """
    groups: dict[Any, list[int]] = {}
    for n, sharding in enumerate(shardings):
        groups.setdefault(sharding.mesh, []).append(n)
    found: dict[int, Any] = {}
    for mesh, numbers in groups.items():
        devices = mesh.devices.flatten().tolist()
        if any(d.process_index == jax.process_index() for d in devices):
            options, outs = compiled_apart(devices) or None, [shardings[n] for n in numbers]
            own = jax.jit(lambda *a, own=numbers: [make(*a)[n] for n in own], out_shardings=outs, compiler_options=options)
            found.update(zip(numbers, in_turn(launch_of(devices), own, *args), strict=True))
        else:
            found.update((n, _jax.absent_array(shapes[n], shardings[n])) for n in numbers)
    return [found[n] for n in range(len(shardings))]
