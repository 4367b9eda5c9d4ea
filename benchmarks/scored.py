"""Shardings by hand as `shardplan.score` predicts them, beside what XLA's partitioner compiles of them.

``python benchmarks/scored.py [NAME ...] [--json FILE]``

A row is a model under FSDP by hand over a 2x4 cluster (`benchmarks.hand_shardings`): the largest dim of each weight that
divides is split over all devices, as is the batch. It is scored once so, and once with one array pinned badly: its last dim over
the nodes, the one before over the devices of a node. Each is compiled for 8 simulated CPU devices; nothing is run. Bytes are
those that a device sends in a step, without what only the CPU compiler adds (`shardplan.hlo.measure`). The last column says at
which place of the losses the array is named that was pinned.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.hand_shardings import HANDS, path_text

CLUSTER, SIZES = "2x4", {"data": 8}
BOTH = ("node", "gpu")
TRANSFORMER = {"layers": 4, "width": 256, "heads": 8, "vocabulary": 4096, "sequence": 128, "batch": 64}
ROWS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "mlp": ("mlp", {"width": 1024, "batch": 2048, "inputs": 1024}, "params/layer_1/kernel"),
    "gpt": ("gpt", TRANSFORMER, "blocks/1/mlp/up/kernel"),
    "gpt, scan": ("gpt", {**TRANSFORMER, "scan": True, "remat": True}, "head/kernel"),
    "llama": ("llama", {"layers": 2, "sequence": 128, "batch": 64}, "blocks/1/mlp/up/kernel"),
    "moe": ("moe", {"layers": 2, "width": 256, "heads": 8, "vocabulary": 4096, "sequence": 128, "batch": 64}, "head/kernel"),
    "vit": ("vit", {"layers": 2, "width": 256, "heads": 8, "image": 64, "batch": 64}, "block_0/up/kernel"),
    "wresnet": ("wresnet", {"depth": 50, "width": 1, "image": 32, "batch": 64}, "head/kernel"),
    "unet": ("unet", {"channels": 32, "image": 32, "batch": 64}, "up_1_0/conv_in/kernel"),
}
"""For each row the model, its options, and the end of the path of the array that is pinned badly."""


def sharded(args: Any, bad: str = "") -> tuple[Any, str]:
    """(FSDP by hand of a state and a batch, the path of the array whose path ends with ``bad``, which is pinned badly)."""
    import jax
    from jax.sharding import PartitionSpec as P

    hand, pinned = HANDS["FSDP"], [""]

    def spec(path: Any, x: Any) -> Any:
        text = path_text(path)
        if bad and not pinned[0] and text.removesuffix("/value").endswith(bad):
            pinned[0] = text.removesuffix("/value")
            return P(*[None] * (x.ndim - 2), "gpu", "node")
        own = hand.weight(text, tuple(x.shape), SIZES)
        return P(*(BOTH if entry else None for entry in own))

    state = jax.tree_util.tree_map_with_path(spec, args[0])
    assert bool(bad) == bool(pinned[0]), f"no array ends with {bad}"
    return (state, jax.tree.map(lambda _: P(BOTH), args[1])), pinned[0]


def row(name: str) -> dict[str, Any]:
    """The figures of a row."""
    import shardplan

    model, options, bad = ROWS[name]
    step, args = importlib.import_module(f"models.{model}").train_step(**options)
    result: dict[str, Any] = {}
    for case, at in (("by hand", ""), ("pinned badly", bad)):
        specs, path = sharded(args, at)
        found = shardplan.score(step, *args, cluster=CLUSTER, in_shardings=specs, measure=True, donate_argnums=0)
        measured: Any = found.measured
        places = [n for n, loss in enumerate(found.losses, 1) if any(p.endswith(path) for p in loss.together)]
        result[case] = {
            "predicted": found.communication_bytes,
            "compiled": measured.communication_bytes,
            "step_time_s": found.step_time_s,
            "plan_s": found.plan_s,
            "added": sum(one.bytes for one in measured.added),
            "place": places[0] if at and places else None,
            "source": found.losses[places[0] - 1].source if at and places else None,
        }
    return result


def table(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The rows as a Markdown table."""
    lines = [
        "| model | predicted MB | compiled MB | ratio | badly pinned: predicted MB | compiled MB | ratio | its place |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name, cases in found.items():
        cells = [name]
        for case in cases.values():
            cells += [
                f"{case['predicted'] / 1e6:.3f}",
                f"{case['compiled'] / 1e6:.3f}",
                f"{case['compiled'] / case['predicted']:.3f}",
            ]
        lines.append(f"| {' | '.join([*cells, str(cases['pinned badly']['place'] or '-')])} |")
    return lines


def main() -> int:
    """Scores the rows that are named, or all, and prints the table."""
    import jax

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--json", metavar="FILE", help="save all figures")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}: the rows are {', '.join(ROWS)}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    found: dict[str, Any] = {}
    for name in options.names or ROWS:
        found[name] = row(name)
        print(table({name: found[name]})[-1], file=sys.stderr, flush=True)
    print("\n".join(table(found)))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
