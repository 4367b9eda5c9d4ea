"""Predicted compute beside that of the compiled program, on H100s that are not there (needs the extra ``gpu-aot``).

``python benchmarks/compute.py [NAME ...] [--plans N] [--json FILE]``

A NAME is one of `STEPS`, on each of its clusters, or ``STEP@CLUSTER``; without names all are run. Each step is planned and
its plan compiled ahead of time. The compiled seconds are the sum over the kernels of the text, each as often as it runs, of a
roofline on its operand and result bytes and the flops of its products, with the rates of the plan's device and its launches.
The predicted seconds include the copies beside collectives, which a plan counts as communication.
With ``--plans N``, N baselines are compiled too, and Kendall's tau says how well the predicted steps order the compiled ones;
both take the same seconds for communication. Each row runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_bytes import DEEP, STEPS, TARGET, TEXT, Step, cluster_of, rows_of, step_of

ROOT = Path(__file__).parent.parent
MODELS = {
    **{name: step for name, step in STEPS.items() if step.model and name != "llama-70b"},
    "gpt-4-remat": Step(
        "gpt", {**DEEP, "layers": 4, "batch": 32, "sequence": 1024, "dtype": "bfloat16", "heads": TEXT["heads"]}, ("2x4",)
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--plans", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.one:
        print(json.dumps(measured(given.one, given.plans)))
        return 0
    rows: list[dict[str, Any]] = []
    print("| step | cluster | predicted ms | compiled ms | ratio | of it products | kernels predicted | compiled | tau |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for name in given.names or MODELS:
        for row in rows_of(parser, name, MODELS):
            rows.append(fresh(row, given.plans))
            print(line(rows[-1]), flush=True)
            if given.json:
                given.json.write_text(json.dumps({"rows": rows}, indent=1))
    off = [abs(row["plans"][0]["predicted_s"] / row["plans"][0]["compiled_s"] - 1) for row in rows]
    print(f"median error {statistics.median(off):.1%}, largest {max(off):.1%}")
    return 0


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    step, _, cluster = row["row"].partition("@")
    one = row["plans"][0]
    tau = "" if row["tau"] is None else f"{row['tau']:.2f} of {len(row['plans'])}"
    return (
        f"| {step} | {cluster} | {one['predicted_s'] * 1e3:.3f} | {one['compiled_s'] * 1e3:.3f} "
        f"| {one['predicted_s'] / one['compiled_s']:.3f} | {one['products_s'] * 1e3:.3f} | {one['launches']:.0f} "
        f"| {one['kernels']:.0f} | {tau} |"
    )


def fresh(row: str, plans: int) -> dict[str, Any]:
    """One row from a new process: the compiler's flags are read when its backend starts."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, str(Path(__file__)), "--one", row, "--plans", str(plans)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(row: str, plans: int) -> dict[str, Any]:
    """The plan of a row and some baselines: predicted and compiled seconds of compute, and seconds of communication."""
    import shardplan

    name, _, place = row.partition("@")
    step, args, pins = step_of(MODELS[name])
    plan = shardplan.plan(step, *args, cluster=cluster_of(place), donate_argnums=0, pins=pins)
    others = list(plan.baseline_plans().values())[:plans] if plans else []
    found = [_compiled(one, step, args) for one in (plan, *others)]
    tau = None
    if others:
        from scipy.stats import kendalltau

        totals = [[one[key] + one["communication_s"] for one in found] for key in ("predicted_s", "compiled_s")]
        tau = float(kendalltau(*totals).statistic)
    return {"row": row, "plans": found, "tau": tau}


def _compiled(plan: Any, step: Any, args: Any) -> dict[str, float]:
    """The compute of a plan, predicted and compiled."""
    from jax.experimental import topologies

    from shardplan.emit.hlo_kernels import kernels
    from shardplan.plans.summary import scheduled

    device, per_node = plan.cluster.device, plan.cluster.levels[-1].size
    shape = f"1x{plan.cluster.size // per_node}x{per_node}"
    machine = topologies.get_topology_desc("h100", "cuda", target_config=TARGET.read_text(), topology=shape)
    text = plan.jit(step, machine.devices, "explicit", xla_flags=False).lower(*args).compile().as_text()
    total = products = count = 0.0
    for kernel in kernels(text):
        seconds = kernel.seconds(device)
        total += kernel.times * seconds
        count += kernel.times
        products += kernel.times * seconds if kernel.flops else 0.0
    graph = plan.session.graph
    copied_s = sum(i.copied_s * i.times for i in scheduled(plan.session).issued)
    return {
        "predicted_s": plan.compute_s + copied_s,
        "compiled_s": total,
        "products_s": products,
        "communication_s": plan.communication_s - copied_s,
        "launches": sum(node.costed.traffic.launches * node.weight for node in graph.nodes if node.costed.traffic),
        "kernels": count,
    }


if __name__ == "__main__":
    sys.exit(main())
