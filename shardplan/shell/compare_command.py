"""The command `shardplan compare`: the plan beside every baseline, predicted, compiled, and timed where the devices are here."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardplan.errors import DeviceError, ShardplanError
from shardplan.report.report import Report
from shardplan.shell.arguments import add_command, add_target_options, count
from shardplan.shell.target_plan import add_saved_plan, cluster_of, completed, simulated_devices, target_plan

_WHERE = ("auto", "real", "simulated")
_REPEATS = 5


def add_compare_command(commands: Any) -> None:
    """Adds `compare`."""
    one = add_command(commands, "compare", _compare, "compare the plan with every baseline")
    add_target_options(one)
    add_saved_plan(one)
    one.refuse(["placement"])
    one.add_argument(
        "--measure",
        action="store_true",
        help="compile the plan and every baseline, and measure bytes and memory; run them too where the devices are here",
    )
    one.add_argument(
        "--devices",
        choices=_WHERE,
        default="auto",
        help="with --measure: run plans on the cluster's devices if they are here (auto), or insist (real), or never (simulated)",
    )
    one.add_argument("--repeats", type=count, metavar="N", help=f"with --measure: timed steps of each plan (default: {_REPEATS})")


@dataclass(frozen=True, slots=True)
class _Place:
    """The devices on which plans are timed (None if they are not here), and a sentence that describes them."""

    devices: Sequence[Any] | None
    note: str


def _compare(options: argparse.Namespace) -> Report:
    from shardplan.report.json import comparison_rows
    from shardplan.report.plan_text import comparison_text, measured_order

    if not options.measure:
        if options.devices != "auto":
            raise ShardplanError(f"--devices {options.devices} is for --measure: add it, or leave --devices out")
        if options.repeats is not None:
            raise ShardplanError(f"--repeats {options.repeats} is for --measure: add it, or leave --repeats out")
        made, _, _ = target_plan(options, file=options.plan)
        rows = comparison_rows(completed(made))
        return Report(comparison_text(rows), {"plans": rows})
    place = _place(options)
    timed = place.devices is not None
    with _on_host() if timed else contextlib.nullcontext():
        made, step, args = target_plan(options, concrete=timed, simulated=True, file=options.plan)
    sent = _measured(made, step, options.backend)
    seconds = _timed(made, step, args, place.devices, options) if place.devices is not None else None
    rows = comparison_rows(completed(made), sent, seconds)
    text = [comparison_text(rows), "", place.note, *measured_order(rows)]
    return Report("\n".join(text), {"plans": rows, "timed_on": place.note if timed else None})


def _place(options: argparse.Namespace) -> _Place:
    """The devices that time plans: simulated ones for a CPU cluster; for a GPU cluster, GPUs of its kind on this machine.

    Raises:
        DeviceError: if ``--devices real`` asks for devices that are not here.
    """
    import jax

    from shardplan.errors import ClusterError
    from shardplan.mesh.devices import detected
    from shardplan.shell.target import simulate

    cluster = cluster_of(options.cluster, options.plan)
    device = cluster.device
    if options.devices == "simulated":
        return _Place(None, "--devices simulated: no plan is timed.")
    if device.platform == "cpu":
        return _Place(simulate(cluster.size), f"Timed on {cluster.size} CPU devices of this machine.")
    with contextlib.suppress(RuntimeError):  # JAX is running already: its devices are kept
        jax.config.update("jax_num_cpu_devices", cluster.size)  # the accelerators stay the default
    present = list(jax.devices())
    kind = str(present[0].device_kind)
    try:
        name = detected(present).cluster.device.name
    except ClusterError:
        name = kind
    if present[0].platform == device.platform and len(present) >= cluster.size and name == device.name:
        return _Place(present[: cluster.size], f"Timed on {cluster.size} devices of this machine ({kind}).")
    here = f"{len(present)} of {name} ({present[0].platform})"
    wanted = f"{cluster.size} of {device.name} ({device.platform})"
    if options.devices == "real":
        raise DeviceError(
            f"--devices real: {cluster.name} has {wanted}, this machine {here}: give the cluster of these devices "
            "(shardplan mesh detect, or a profile from shardplan calibrate), or leave --devices out to measure bytes and memory"
        )
    return _Place(None, f"No plan is timed: {cluster.name} has {wanted}, this machine {here}.")


def _on_host() -> contextlib.AbstractContextManager[Any]:
    """Makes whole arguments on the host: an accelerator may have memory only for its part of them."""
    import jax

    return jax.default_device(jax.devices("cpu")[0])


def _measured(made: Any, step: Callable[..., Any], backend: str) -> Mapping[str, tuple[float, float, int]]:
    """(wire bytes, raw wire bytes, peak bytes) of the compiled program of the plan and of each baseline, by name."""
    from shardplan.report import Progress
    from shardplan.verify.verify import measured_program

    devices = simulated_devices(made)
    result: dict[str, tuple[float, float, int]] = {}
    plans = {"this plan": made, **made.baseline_plans()}
    with Progress() as progress:
        for n, (name, one) in enumerate(plans.items()):
            progress(f"compiling {name}", n / len(plans))
            sent, peak = measured_program(one, step, devices=devices, backend=backend)
            result[name] = (sent.wire_bytes, sent.raw_wire_bytes, peak)
    return result


def _timed(
    made: Any, step: Callable[..., Any], args: Sequence[Any], devices: Sequence[Any], options: argparse.Namespace
) -> Mapping[str, tuple[float, float]]:
    """(seconds, spread) of a step under the plan and each baseline that fits, by name."""
    from shardplan.calibrate.steps import step_seconds
    from shardplan.report import Progress

    fitting = {b.name for b in made.baselines if b.fits}
    plans = {"this plan": made, **{name: plan for name, plan in made.baseline_plans().items() if name in fitting}}
    with Progress() as progress:
        found = step_seconds(
            plans, step, args, devices=devices, backend=options.backend, rounds=options.repeats or _REPEATS, observer=progress
        )
    return {name: (one.seconds, one.spread) for name, one in found.items()}
