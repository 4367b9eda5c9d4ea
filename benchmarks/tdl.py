"""Seconds of analysis: once for each distinct signature, and for a graph of 10,000 ops once its signatures are known.

``python benchmarks/tdl.py [--ops 10000] [--repeats 5]``

The chain repeats eight ops, so that nearly all of it is met before; the GPT is a real train step. *Describing* reads each op's
rule and its index maps; *cutting* is the interval analysis of every loop, 2, 4 and 8 ways. Medians of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parent.parent))

from models import gpt
from shardplan.search.graph import Signature, flatten
from shardplan.tdl import cuts
from shardplan.trace import trace

WAYS = (2, 4, 8)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print(f"{'program':<8} {'ops':>7} {'signatures':>11} {'describing':>11} {'cutting':>9} {'a signature':>12}")
    for name, (step, args) in {"chain": chain(given.ops), "gpt": gpt.train_step(layers=12)}.items():
        program = trace(step, *args).program
        graph = flatten(program)
        signatures = list({node.signature.id: node.signature for node in graph.nodes}.values())
        described = median(lambda program=program: flatten(program), given.repeats)
        cutting = median(lambda signatures=signatures: analyse(signatures), given.repeats)
        each = f"{cutting / len(signatures) * 1e3:.2f} ms"
        print(f"{name:<8} {len(graph.nodes):>7} {len(signatures):>11} {described:>9.3f} s {cutting:>7.3f} s {each:>12}")
    return 0


def chain(ops: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program of at least so many ops, of eight kinds."""

    def step(x: Any, w: Any) -> Any:
        for _ in range(-(-ops // 8)):
            y = jnp.tanh(jnp.einsum("bd,de->be", x, w)) * 0.5 + x
            x = y - jnp.broadcast_to(jnp.max(y, -1, keepdims=True), y.shape)
        return x

    return step, (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2


def analyse(signatures: Sequence[Signature]) -> int:
    """All legal cuts of each signature."""
    return sum(len(cuts(s.description, k)) for s in signatures if s.description is not None for k in WAYS)


def median(run: Callable[[], object], repeats: int) -> float:
    """Seconds of a run."""
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
