"""Tofu's Figure 10 in this cost model: seconds of a step and the share of communication, for each algorithm.

``python benchmarks/tofu.py [--models rnn-4-8k wresnet-152-10] [--factors 2x2x2] [--json FILE]``

The cluster is Tofu's, 8 K80s on PCIe (ec2-p2.8xlarge), with a batch of 512 for RNN-4-8K and of 8 for WResNet-152-10 (section
7.3), over three factors of two workers, as Tofu's recursion takes them (``--factors 8``: the level whole). Nothing is counted as
hidden: the figure's bars are compute and the overhead of communication. *ours* minimises seconds; *Tofu* minimises bytes under
Tofu's premise, as its algorithm does. "No" under fits: beyond a K80's memory.
Exits with 1 where *Tofu* sends more bytes than AllRow-Greedy, EqualChop or ICML18 (the paper's order).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CLUSTER = "ec2-p2.8xlarge"
MODELS = ("rnn-4-8k", "wresnet-152-10")
STEPS = (2, 2, 2)
"""The steps of Tofu's recursion over eight workers."""
BEATEN = ("AllRow-Greedy", "EqualChop", "ICML18")
ALGORITHMS = ("data parallel", "FSDP", "AllRow-Greedy", "Spartan", "EqualChop", "ICML18")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--factors", default="2x2x2", help="the parts of the level of eight, as 2x2x2 or 8")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    found: dict[str, list[dict[str, Any]]] = {}
    parts = tuple(map(int, given.factors.split("x")))
    for model in given.models:
        found[model] = rows(model, parts)
        print(f"| {model} | step s | communication s | share | GiB sent | peak GiB | fits |\n|---|---:|---:|---:|---:|---:|---|")
        for r in found[model]:
            times = f"{r['step_time_s']:.3f} | {r['communication_s']:.3f} | {r['share']:.1%}"
            held = f"{r['communication_bytes'] / 2**30:.2f} | {r['peak_bytes'] / 2**30:.2f} | {'yes' if r['fits'] else 'no'}"
            print(f"| {r['name']} | {times} | {held} |")
        print()
    if given.json:
        given.json.write_text(json.dumps({"cluster": CLUSTER, "models": found}, indent=1))
    return int(any(_out_of_order(of) for of in found.values()))


def _out_of_order(of: Sequence[dict[str, Any]]) -> bool:
    sent = {row["name"]: row["communication_bytes"] for row in of}
    return any(sent["Tofu"] > sent[name] * (1 + 1e-9) for name in BEATEN if name in sent)


def planned(model: str, parts: tuple[int, ...] = STEPS, *, objective: str = "time") -> Any:
    """The plan of one of Tofu's two models, its level of eight in these parts."""
    import shardplan
    from models import rnn, wresnet

    if model == "rnn-4-8k":
        step, args = rnn.train_step(layers=4, hidden=8192, batch=512, optimizer="sgd")
    else:
        step, args = wresnet.train_step(depth=152, width=10, image=224, batch=8, classes=1000)
    cluster = shardplan.Cluster.load(CLUSTER)
    limit = cluster.device.memory_bytes
    return shardplan.plan(
        step,
        *args,
        cluster=cluster,
        donate_argnums=0,
        objective=objective,
        memory_limit=limit,
        factors={"gpu": parts},
        time_model="sum",
    )


def rows(model: str, parts: tuple[int, ...] = STEPS) -> list[dict[str, Any]]:
    """Seconds, share of communication, bytes on the wire and peak bytes of each algorithm."""
    ours, tofu = planned(model, parts), planned(model, parts, objective="bytes")
    baselines = ours.baseline_plans()
    plans = {name: baselines[name] for name in ALGORITHMS if name in baselines} | {"Tofu": tofu, "ours": ours}
    return [
        {
            "name": name,
            "step_time_s": plan.step_time_s,
            "compute_s": plan.compute_s,
            "communication_s": plan.communication_s,
            "share": plan.communication_s / plan.step_time_s,
            "communication_bytes": plan.communication_bytes,
            "peak_bytes": plan.peak_bytes,
            "fits": plan.peak_bytes <= plan.memory_limit,
        }
        for name, plan in plans.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
