"""Pipeline schedules of the literature beside ours: bubbles by their papers' formulas, as simulated, and ours at equal memory.

    python benchmarks/stages.py [--devices S] [--microbatches M]

Layers are cut into two equal parts for each device. Seconds are those of one device and microbatch: F of the forward pass, B of
the gradients that the stage before waits for, W of the gradients of weights. A device *holds* a microbatch, or the half that
belongs to one part, from its forward pass to its gradients of weights. The step is from the first task to the end of the last.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from shardplan.dag.pipeline_orders import KNOWN
from shardplan.dag.pipeline_search import best_pipeline
from shardplan.dag.pipelines import Pipeline, Seconds, run

SECONDS = (Seconds(1.0, 1.0, 1.0), Seconds(1.0, 1.3, 0.7))
"""The papers' assumption, and a transformer block: attention has no weights, so its backward pass is all gradients of values."""

# The bubble of S devices, and the most microbatches that a device holds of M: by the papers named in `pipeline_orders`. That of
# ZB-V is for tasks that take equally long. DualPipe-V's passes that run at once take F + B here.
FORMULAS: dict[str, tuple[str, Callable[[int, Seconds], float], str, Callable[[int, int], float]]] = {
    "GPipe": ("(S-1)(F+B+W)", lambda S, t: (S - 1) * sum(t), "M", lambda S, M: M),
    "1F1B": ("(S-1)(F+B+W)", lambda S, t: (S - 1) * sum(t), "S", lambda S, M: S),
    "ZB-H1": ("(S-1)(F+B-W)", lambda S, t: (S - 1) * (t.forward + t.backward - t.weight), "S", lambda S, M: S),
    "interleaved 1F1B": ("(S-1)(F+B+W)/2", lambda S, t: (S - 1) * sum(t) / 2, "S+(S-1)/2", lambda S, M: S + (S - 1) / 2),
    "ZB-V": ("0", lambda S, t: 0.0, "S", lambda S, M: S),
    "DualPipe-V": (
        "(S-1)(F+2B-W)/2", lambda S, t: (S - 1) * (t.forward + 2 * t.backward - t.weight) / 2, "S+1/2", lambda S, M: S + 1 / 2,
    ),
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    options = parser.parse_args(arguments)
    for n, seconds in enumerate(SECONDS):
        print("\n" * (n > 0) + table(options.devices, options.microbatches, seconds))


def table(devices: int, microbatches: int, seconds: Seconds) -> str:
    """The schedules for these seconds of a device and microbatch."""
    f, b, w = seconds
    lines = [
        f"S = {devices} devices, M = {microbatches} microbatches; F = {f:g}, B = {b:g}, W = {w:g} seconds",
        f"{'':18}{'bubble':>16} {'formula':>8} {'simulated':>9}   {'holds':>9} {'formula':>7} {'simulated':>9}   "
        f"{'step':>6} {'ours':>6}  {'bubble':>6}  shorter",
    ]
    ours: dict[int, tuple[Pipeline, float, float]] = {}
    for own in _known(devices, microbatches):
        each = own.chunks // devices
        theirs = run(own, [Seconds(*(s / each for s in seconds))] * own.chunks)
        most = max(own.most_held) * 2 // each
        if most not in ours:
            pipeline, found = best_pipeline([Seconds(*(s / 2 for s in seconds))] * 2 * devices, microbatches, most)
            ours[most] = pipeline, found.makespan_s, found.bubble_s
        _, step_s, bubble_s = ours[most]
        text, bubble, holds, held = FORMULAS[own.name]
        lines.append(
            f"{own.name:18}{text:>16} {bubble(devices, seconds):8.2f} {theirs.bubble_s:9.2f}   {holds:>9} "
            f"{held(devices, microbatches):7.1f} {most / 2:9.1f}   {theirs.makespan_s:6.2f} {step_s:6.2f}  {bubble_s:6.2f}  "
            f"{1 - step_s / theirs.makespan_s:7.1%}"
        )
    return "\n".join(lines)


def _known(devices: int, microbatches: int) -> list[Pipeline]:
    every = (make(devices, microbatches, each) for make in KNOWN for each in (1, 2))
    return [own for own in every if own is not None]


if __name__ == "__main__":
    main()
