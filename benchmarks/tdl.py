"""How often an op is analysed on symbols, and seconds: for the first time, and once its questions have been answered.

``python benchmarks/tdl.py [--ops 10000] [--repeats 5]``

The chain repeats eight ops, so that nearly all of it is met before; the others are real train steps. *Analyses* are runs of a
rule on symbols, until all are known; *cuts* likewise of the interval analysis, for every loop, 2, 4 and 8 ways. *Numbers* is what
it costs to analyse each signature on its own numbers, *first* with nothing known (a few times on numbers), *again* with all of it
known. *Graph* is the whole of flattening the program, descriptions included. Medians of the repeats, seconds of the processor.
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

from models import gpt, rnn, wresnet
from shardplan.frontend.trace import trace
from shardplan.graph.flattening import flatten
from shardplan.tdl import Call, Description, cuts, describe
from shardplan.tdl.describe import forget_analyses, rule_of
from shardplan.tdl.description import read
from shardplan.tdl.once import FEW, Tree

WAYS = (2, 4, 8)
COLUMNS = ("program", "ops", "signatures", "analyses", "cuts", "graph first", "again", "numbers", "first", "again")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    print("  ".join(f"{name:>11}" for name in COLUMNS))
    programs = {
        "chain": chain(given.ops),
        "gpt 48": gpt.train_step(layers=48),
        "wresnet 152": wresnet.train_step(depth=152),
        "rnn": rnn.train_step(),
    }
    for name, (step, args) in programs.items():
        program = trace(step, *args).program
        graph = flatten(program)
        signatures = {node.signature.id: node.signature for node in graph.nodes}
        calls = [s.call for s in signatures.values() if s.description is not None]
        forget_analyses()
        often = range(FEW + 1)  # the first few on numbers
        analyses, cutting = counted(lambda calls=calls, often=often: [[describe(call) for call in calls] for _ in often][-1])
        cuts_made, _ = counted(lambda made=cutting, often=often: [analyse(made) for _ in often])
        again = [
            median(lambda program=program: flatten(program), given.repeats),
            median(lambda calls=calls: analyse([describe(call) for call in calls]), given.repeats),
        ]
        seconds = [
            median(lambda program=program: flatten(program), given.repeats, forget_analyses),
            again[0],
            median(lambda calls=calls: analyse([on_numbers(call) for call in calls]), given.repeats),
            median(lambda calls=calls: analyse([describe(call) for call in calls]), given.repeats, forget_analyses),
            again[1],
        ]
        row = [name, *map(str, (len(graph.nodes), len(signatures), analyses, cuts_made)), *(f"{s:.4f}" for s in seconds)]
        print("  ".join(f"{cell:>11}" for cell in row), flush=True)
    return 0


def chain(ops: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program of at least so many ops, of eight kinds."""

    def step(x: Any, w: Any) -> Any:
        for _ in range(-(-ops // 8)):
            y = jnp.tanh(jnp.einsum("bd,de->be", x, w)) * 0.5 + x
            x = y - jnp.broadcast_to(jnp.max(y, -1, keepdims=True), y.shape)
        return x

    return step, (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2


def on_numbers(call: Call) -> Description:
    """The description as its own numbers give it."""
    function = rule_of(call.primitive)
    assert function is not None
    return read(call, function)


def analyse(descriptions: Sequence[Description | None]) -> int:
    """All legal cuts."""
    return sum(len(cuts(made, k)) for made in descriptions if made is not None for k in WAYS)


def counted(run: Callable[[], Any]) -> tuple[int, Any]:
    """How many symbolic analyses a run makes, and what it returns."""
    before = Tree.runs
    made = run()
    return Tree.runs - before, made


def median(run: Callable[[], object], repeats: int, before: Callable[[], None] | None = None) -> float:
    """Seconds of a run, each after ``before``."""
    seconds: list[float] = []
    for _ in range(repeats):
        if before is not None:
            before()
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
