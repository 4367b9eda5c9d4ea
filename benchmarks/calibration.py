"""Predicted beside measured steps on the devices of this machine, after calibrating them in the same run.

``python benchmarks/calibration.py [--devices 8] [--cache DIR] [--spread PART] [--rounds N] [--json FILE] [orders] [steps]``

``orders``: ten plans of one model (the plan, its baselines, plans for given sizes of purposes) on eight devices, in predicted and
in measured order, and Kendall's tau between the two. ``steps``: the step of six models on one device. Without a word both run.
On a machine without accelerators CPU devices are simulated. All plans of a model run in turn, so that a disturbance meets all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

PLANS = 10
MODEL = ("mlp", {"layers": 4, "width": 1024, "batch": 128})
AXES: tuple[dict[str, int], ...] = (
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 4, "tensor": 2},
    {"data": 2, "tensor": 4},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 2, "tensor": 4},
    {"replica": 2, "data": 4},
    {"replica": 2, "tensor": 4},
    {"replica": 4, "tensor": 2},
)
STEPS: Mapping[str, dict[str, Any]] = {
    "mlp": {"layers": 4, "width": 1024, "batch": 256},
    "gpt": {"layers": 2, "width": 256, "sequence": 128, "batch": 8},
    "llama": {"layers": 2},
    "rnn": {},
    "vit": {},
    "wresnet": {"batch": 4},
}
Step = tuple[Callable[..., Any], Sequence[Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["orders", "steps", []], metavar="PART")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices, where there are no accelerators")
    parser.add_argument("--cache", type=Path, help="folder of measurements that are used again (default: measure everything)")
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    logging.disable(logging.WARNING)
    jax.config.update("jax_num_cpu_devices", given.devices)
    devices = jax.devices()
    print(f"{len(devices)} devices: {devices[0].device_kind} ({devices[0].platform})\n")
    result: dict[str, Any] = {"device": devices[0].device_kind, "devices": len(devices)}
    for part in given.parts or ("orders", "steps"):
        result[part] = (orders if part == "orders" else steps)(devices, given)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))
    return 0


def measured_cluster(devices: Sequence[Any], given: argparse.Namespace) -> Any:
    """The cluster of these devices, calibrated."""
    from shardplan.calibrate.profiling import calibrate
    from shardplan.mesh.cluster import cluster_of

    done = calibrate(devices=devices, cache=given.cache, bound=given.spread)
    middle, worst, name = done.spread
    errors = ", ".join(f"{one.family} {one.median:.0%}" for one in done.residuals)
    print(
        f"calibrated: repeats spread by {middle:.0%} (median; largest {worst:.0%}, {name}); median errors: {errors}\n", flush=True
    )
    return cluster_of(done.profile.cluster)


def model_step(name: str, options: Mapping[str, Any]) -> Step:
    """(step, args) of a model."""
    return importlib.import_module(f"models.{name}").train_step(concrete=True, **options)


def orders(devices: Sequence[Any], given: argparse.Namespace) -> dict[str, Any]:
    """Ten plans of one model in predicted and in measured order."""
    from scipy.stats import kendalltau

    from shardplan.calibrate.steps import step_seconds

    name, options = MODEL
    cluster, (step, args) = measured_cluster(devices, given), model_step(name, options)
    plans = evenly(distinct(candidates(cluster, step, args)), PLANS)
    times = step_seconds(plans, step, args, devices=devices, rounds=given.rounds)
    by_time = sorted(plans, key=lambda p: times[p].seconds)
    print(f"{name} {options} on {cluster.name}, {len(devices)} devices")
    print("| plan | predicted ms | measured ms | spread | predicted order | measured order |")
    print("|---|---:|---:|---:|---:|---:|")
    rows: list[dict[str, Any]] = []
    for place, plan in enumerate(plans):
        predicted, time = plans[plan].step_time_s, times[plan]
        cells = (
            plan,
            f"{predicted * 1e3:.1f}",
            f"{time.seconds * 1e3:.1f}",
            f"{time.spread:.0%}",
            place + 1,
            by_time.index(plan) + 1,
        )
        print(f"| {' | '.join(map(str, cells))} |")
        rows.append({"plan": plan, "predicted_s": predicted, "measured_s": time.seconds, "spread": time.spread})
    tau = float(kendalltau([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]).statistic)
    print(f"Kendall's tau {tau:.2f} over {len(rows)} plans\n", flush=True)
    return {"model": name, "options": options, "rows": rows, "tau": tau}


def candidates(cluster: Any, step: Callable[..., Any], args: Sequence[Any]) -> dict[str, Any]:
    """The plan, its baselines, and plans for given sizes of purposes where the step has a use for them."""
    import shardplan

    best = shardplan.plan(step, *args, cluster=cluster)
    found = {"the plan": best, **best.baseline_plans()}
    for axes in AXES:
        if math.prod(axes.values()) != cluster.size:
            continue
        try:
            one = shardplan.plan(step, *args, cluster=cluster, axes=axes)
        except shardplan.ShardplanError as error:
            print(f"no plan for {axes}: {error}")
            continue
        found[", ".join(f"{purpose}={n}" for purpose, n in axes.items())] = one
    return found


def distinct(plans: Mapping[str, Any]) -> dict[str, Any]:
    """The plans in predicted order, one of each with the same seconds, bytes and memory."""
    first: dict[tuple[float, float, int], str] = {}
    for name, plan in plans.items():
        first.setdefault((plan.step_time_s, plan.communication_bytes, plan.peak_bytes), name)
    return {name: plans[name] for name in sorted(first.values(), key=lambda n: (plans[n].step_time_s, n))}


def evenly(plans: Mapping[str, Any], count: int) -> dict[str, Any]:
    """So many of the plans, evenly spaced in their order, the first and the last among them."""
    names = list(plans)
    if len(names) <= count:
        return dict(plans)
    chosen = [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]
    return {name: plans[name] for name in chosen}


def steps(devices: Sequence[Any], given: argparse.Namespace) -> list[dict[str, Any]]:
    """The steps of six models on one device."""
    import shardplan
    from shardplan.calibrate.steps import step_seconds

    cluster = measured_cluster(devices[:1], given)
    print("| model, one device | predicted ms | measured ms | spread | predicted / measured |")
    print("|---|---:|---:|---:|---:|", flush=True)
    rows: list[dict[str, Any]] = []
    for name, options in STEPS.items():
        step, args = model_step(name, options)
        plan = shardplan.plan(step, *args, cluster=cluster)
        time = step_seconds({name: plan}, step, args, devices=devices[:1], rounds=given.rounds)[name]
        ratio = plan.step_time_s / time.seconds
        said = " ".join(f"{k}={v}" for k, v in options.items())
        print(
            f"| {name} {said} | {plan.step_time_s * 1e3:.2f} | {time.seconds * 1e3:.2f} | {time.spread:.0%} | {ratio:.2f} |",
            flush=True,
        )
        rows.append({"model": name, "predicted_s": plan.step_time_s, "measured_s": time.seconds, "spread": time.spread})
    off = [max(r["predicted_s"] / r["measured_s"], r["measured_s"] / r["predicted_s"]) for r in rows]
    print(f"off by a factor of {statistics.median(off):.2f} (median), {max(off):.2f} at most\n")
    return rows


if __name__ == "__main__":
    sys.exit(main())
