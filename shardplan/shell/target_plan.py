"""Plans and loads the TARGET of a command."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

from shardplan.errors import PlanFileError, ShardplanError
from shardplan.shell import interrupts, terminal
from shardplan.shell.arguments import Parser


def target_plan(
    options: argparse.Namespace, *, concrete: bool = False, simulated: bool = False, file: str | None = None
) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    """(plan, step, args) of a TARGET; with ``file``, the plan is read from it. Either flag simulates devices."""
    if file is None:
        _refuse_groups(options)
    event = "a plan that fits was found: wait longer, or give a --time-budget to get the best plan so far"
    with interrupts.before(event if file is None else f"the plan in {file} was read"):
        made, step, args = _read_or_plan(options, concrete=concrete, simulated=simulated or concrete, file=file)
        from shardplan.shell.placed_plan import PlacedPlan
    if isinstance(made, PlacedPlan) and options.command not in _TAKE_GROUPS:
        raise ShardplanError(f"{file} is a plan with groups of devices, which {options.command} does not take: use {_TAKERS}")
    if made.stopped == "interrupted" and file is None:
        if options.command != "plan":  # the work after the search takes longer than the search
            raise KeyboardInterrupt(
                f"before {options.command} began: to save the best plan so far, use shardplan plan -o FILE, "
                "with or without --time-budget"
            )
        terminal.say("shardplan: interrupted: this is the best plan so far", "warning")
    return made, step, args


def _read_or_plan(
    options: argparse.Namespace, *, concrete: bool, simulated: bool, file: str | None
) -> tuple[Any, Callable[..., Any], tuple[Any, ...]]:
    from shardplan.shell.target import load_target, read_options, simulate, use_cpu

    if file is not None:
        _refuse_planning_options(options, file)
    planning = planning_options(options)
    cluster = cluster_of(options.cluster, file)
    # before the factory makes arrays, so that it uses no accelerator of this machine
    if simulated:
        simulate(math.prod(level.size for level in cluster.levels))
    else:
        use_cpu()
    step, args = load_target(options.target, read_options(options.set), concrete=concrete)
    if file is not None:
        return _load_plan(file, step, args, cluster), step, args
    from shardplan.report import Progress
    from shardplan.shell.api import plan

    with Progress() as progress:
        made = plan(step, *args, cluster=cluster, observer=progress, **planning)
    return made, step, args


def planning_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of `shardplan.plan` that a command line gives, without the cluster and without defaults."""
    from shardplan.shell.factor_options import read_axes, read_factors
    from shardplan.shell.offload_option import read_offload
    from shardplan.shell.target import read_pins

    given = {
        "memory_limit": options.memory,
        "objective": options.objective,
        "pins": read_pins(options.pin) or None,
        "factors": read_factors(options.factors),
        "axes": read_axes(options.axes),
        "donate_argnums": tuple(options.donate),
        "replicate": tuple(options.replicate),
        "time_budget_s": options.time_budget,
        "one_choice": options.one_choice or None,
        "remat": options.remat or None,
        "offload": read_offload(options.offload),
        "backend": options.backend,
        "time_model": options.time_model or None,
        "microbatches": options.microbatches,
        "placement": options.placement or None,
    }
    defaults = {"objective": "time", "backend": "auto"}
    return {name: value for name, value in given.items() if value is not None and value != defaults.get(name)}


def may_be_on_groups(options: argparse.Namespace) -> bool:
    """Whether the options ask for a plan with groups of devices, or for a search that may choose one."""
    from shardplan.shell.factor_options import read_axes, stages_in

    return stages_in(read_axes(options.axes))[0] > 1 or options.placement not in (None, "one")


def _refuse_groups(options: argparse.Namespace) -> None:
    """Refuses options for groups of devices if the command takes only plans on all devices."""
    if may_be_on_groups(options) and options.command not in _TAKE_GROUPS:
        raise ShardplanError(
            f"{options.command} does not take a plan with groups of devices: leave out stage, --placement, or use {_TAKERS}"
        )


_TAKE_GROUPS = ("plan", "verify", "simulate")
"""The commands that take a plan with groups of devices."""

_TAKERS = f"{', '.join(_TAKE_GROUPS[:-1])} and {_TAKE_GROUPS[-1]}"


NEW_PLAN = (
    "memory",
    "pin",
    "factors",
    "axes",
    "microbatches",
    "placement",
    "donate",
    "replicate",
    "time-budget",
    "one-choice",
    "remat",
    "offload",
    "time-model",
    "objective",
)
"""The options that say how to plan; a plan read from a file has its own settings for them."""


def add_saved_plan(one: Parser) -> None:
    """Adds ``--plan``, which replaces the cluster and the `NEW_PLAN` options of a file of options."""
    one.add_argument("--plan", metavar="FILE", help="use a saved plan instead of a new one")
    one.replaces = {**one.replaces, "plan": frozenset({"cluster", *NEW_PLAN})}


def _refuse_planning_options(options: argparse.Namespace, file: str) -> None:
    """Refuses options that a plan read from a file would ignore."""
    defaults = {"objective": "time"}  # all other options are empty by default
    for option in NEW_PLAN:
        name = option.replace("-", "_")
        if getattr(options, name) and getattr(options, name) != defaults.get(name):
            raise ShardplanError(f"--{option} is for a new plan: {file} has its own setting; leave out this option or --plan")


def cluster_of(given: str | None, file: str | None) -> Any:
    """The cluster that was given, else that of the plan file."""
    from shardplan.mesh import Cluster
    from shardplan.plans.files import read_any

    if given is not None:
        cluster = Cluster.load(given)
        cluster.check_equal()
        return cluster
    if file is None:
        raise ShardplanError("--cluster is missing: give a preset (see shardplan mesh list), a file or a shape such as 2x4")
    return read_any(file).cluster


def _load_plan(file: str, step: Callable[..., Any], args: Sequence[Any], cluster: Any) -> Any:
    from shardplan.shell.loading import load

    made = load(file, step, *args)
    if cluster.fingerprint() != made.cluster.fingerprint():
        raise PlanFileError(
            f"{file}: the plan was made for the cluster {made.cluster.name}, not for {cluster.name}; plan the step again"
        )
    return made


def completed(made: Any) -> Any:
    """The data of a plan with its bound and its baselines, which may take longer than the search."""
    from shardplan.report import Progress

    with Progress() as progress:
        progress("pricing the baselines")
        progress.best(made.step_time_s, 0.0)
        return made.completed()


def simulated_devices(made: Any) -> list[Any]:
    """Simulated devices for a plan's cluster."""
    from shardplan.shell.target import simulate

    return simulate(math.prod(level.size for level in made.cluster.levels))
