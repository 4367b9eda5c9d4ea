"""Tofu's Figures 8 and 9, Table 3 and Table 1 in this cost model: throughput beside the Ideal and the alternatives.

``python benchmarks/tofu_throughput.py [--models NAME ...] [--all] [--exit-zero] [--json FILE]``

The cluster is Tofu's, 8 K80s (ec2-p2.8xlarge). Systems as in its section 7.1:

- *Ideal*: one GPU with infinite memory, times 8. A batch of 128 (WResNet) or 512 (RNN) on that GPU.
- *SmallBatch*: the largest batch that fits one GPU, times 8.
- *Swapping*: one GPU that swaps blocks over its eighth of the host's link, times 8, under the faster of two policies
  (`tofu_swapping.py`). No gradients are exchanged: the figure is an upper bound, as for the two before.
- *Op-Placement*: the layers of an RNN round-robin over the GPUs (`tofu_placement.py`).
- *Tofu*: ``objective="bytes"`` over three factors of two. *ours*: the default objective over the same factors.

Batches are the largest power of two up to the Ideal's that fits. The paper's numbers are those in its text and its Tables 1 and
3; its bars are not read off. Exits with 1 where a claim of the paper does not hold (``--exit-zero``: with 0).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tofu_blocks import trace_of
from benchmarks.tofu_models import (
    GPUS,
    MODELS,
    SOME,
    Model,
    cluster,
    largest_batch,
    memory_bytes,
    on_eight_gpus,
    on_one_gpu,
)
from benchmarks.tofu_placement import Placed, placed
from benchmarks.tofu_recursion import Searched, searched
from benchmarks.tofu_swapping import HOST_BYTES_PER_S, Policy, swapped

POLICIES: tuple[Policy, ...] = ("lru", "farthest")
TABLE_3 = {
    "RNN-6-4K": {"Tofu": 210, "Op-Placement": 107},
    "RNN-8-4K": {"Tofu": 154, "Op-Placement": 95},
    "RNN-10-4K": {"Tofu": 122, "Op-Placement": 59},
}
"""Samples/s, by model and system (Tofu, Table 3; Op-Placement is MXNet's)."""
TABLE_1 = {"WResNet-152-10": ("8.3 s", "8 hours"), "RNN-10-8K": ("66.6 s", "> 24 hours")}
"""The search with recursion and without (Tofu, Table 1, which states neither the widening nor the hidden size)."""
SMALL = ("WResNet-50-4", "WResNet-50-6", "WResNet-101-4")
"""The WResNets that fit one GPU (section 7.2)."""
LARGE = 6
"""Weights of an RNN count as large from this many thousand hidden on: more than a GPU holds (Table 2)."""


@dataclass(frozen=True, slots=True)
class Row:
    """A system's largest batch and samples/s; None where it runs out of memory. ``note`` says more."""

    model: str
    system: str
    batch: int | None
    samples_per_s: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement of the paper, the models that it is about, whether it holds for a model's rates, and why it may fail here."""

    text: str
    about: Callable[[Model], bool]
    holds: Callable[[dict[str, float]], bool]
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table of throughput, the claims, and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [m.name for m in MODELS]
    parser.add_argument("--models", nargs="+", default=SOME, choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--all", action="store_true", help="every model of Figures 8 and 9")
    parser.add_argument("--exit-zero", action="store_true", help="exit with 0 also where a claim does not hold")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    models = [m for m in MODELS if given.all or m.name in given.models]
    print("| model | system | batch | samples/s | of Ideal | paper | |\n|---|---|---:|---:|---:|---|---|")
    found = {model: _printed(model) for model in models}
    print()
    broken = _print_claims(found)
    _print_recursion(models, found)
    if given.json:
        rows = [asdict(row) for every in found.values() for row in every]
        given.json.write_text(json.dumps({"rows": rows, "broken": broken}, indent=1))
    return int(bool(broken) and not given.exit_zero)


# -- the systems ---------------------------------------------------------------------------------------------------------


def rows(model: Model) -> Iterator[Row]:
    """A row for each system."""
    ideal = model.ideal_batch
    yield Row(model.name, "Ideal", ideal, _copies(ideal, on_one_gpu(model, ideal).step_time_s))
    yield small_batch(model, memory_bytes())
    yield swapping(model)
    if model.recurrent:
        yield op_placement(model)
    for system, objective in (("Tofu", "bytes"), ("ours", "time")):
        yield partitioned(model, system, objective)


def _copies(batch: int, step_s: float) -> float:
    """Samples/s of a copy of the model on each GPU."""
    return GPUS * batch / step_s


def small_batch(model: Model, limit: float) -> Row:
    """The largest batch whose plan on one GPU fits in ``limit`` bytes."""
    batch = largest_batch(lambda b: on_one_gpu(model, b).peak_bytes <= limit, model.ideal_batch)
    rate = None if batch is None else _copies(batch, on_one_gpu(model, batch).step_time_s)
    return Row(model.name, "SmallBatch", batch, rate)


def swapping(model: Model) -> Row:
    """The largest batch of which every kernel fits, swapped under the faster policy."""

    def fits(batch: int) -> bool:
        return trace_of(on_one_gpu(model, batch)).largest_kernel_bytes <= memory_bytes()

    batch = largest_batch(fits, model.ideal_batch)
    if batch is None:
        return Row(model.name, "Swapping", None, None)
    trace = trace_of(on_one_gpu(model, batch))
    each = [(swapped(trace, memory_bytes(), HOST_BYTES_PER_S / GPUS, policy), policy) for policy in POLICIES]
    best, policy = min(((s, p) for s, p in each if s is not None), key=lambda pair: pair[0].seconds)
    note = f"{policy}: {best.in_bytes / 2**30:.1f} GiB in, {best.out_bytes / 2**30:.1f} out a step and GPU"
    return Row(model.name, "Swapping", batch, _copies(batch, best.seconds), note)


def op_placement(model: Model) -> Row:
    """The largest batch of which the fullest GPU holds its layers."""

    def of(batch: int) -> Placed:
        level = cluster().levels[-1]
        links = {"bytes_per_s": level.bandwidth_bytes_per_s, "latency_s": level.latency_s}
        return placed(on_one_gpu(model, batch), model.depth, GPUS, **links)

    batch = largest_batch(lambda b: of(b).peak_bytes <= memory_bytes(), model.ideal_batch)
    return Row(model.name, "Op-Placement", batch, None if batch is None else batch / of(batch).seconds)


def partitioned(model: Model, system: str, objective: str) -> Row:
    """A plan over all GPUs."""

    def fits(batch: int) -> bool:
        # an eighth of the step on one GPU is the least that a plan holds: no search finds less
        least = on_one_gpu(model, batch).peak_bytes / GPUS
        return least <= memory_bytes() and on_eight_gpus(model, batch, objective) is not None

    batch = largest_batch(fits, model.ideal_batch)
    if batch is None:
        return Row(model.name, system, None, None)
    plan = on_eight_gpus(model, batch, objective)
    assert plan is not None
    note = f"{plan.communication_s / plan.step_time_s:.0%} communication"
    return Row(model.name, system, batch, batch / plan.step_time_s, note)


# -- the claims ----------------------------------------------------------------------------------------------------------


def _always(_: Model) -> bool:
    return True


_ROOFLINE = "kernels of few samples are as efficient here as large ones, but for their tiles and the weights that they read"
CLAIMS = (
    Claim(
        "Tofu at most at the Ideal", _always, lambda r: r["Tofu"] <= r["Ideal"] * 1.001, "smaller tensors, fewer waves of tiles"
    ),
    Claim("Tofu runs every model", _always, lambda r: r["Tofu"] > 0, "a plan holds more than the paper's runtime"),
    Claim(
        "Swapping slower than Tofu",
        _always,
        lambda r: r["Swapping"] < r["Tofu"],
        "the little that is swapped hides behind a large batch, and no gradients are exchanged",
    ),
    Claim(
        "SmallBatch fits WResNet-50-4, WResNet-50-6 and WResNet-101-4",
        lambda m: m.name in SMALL,
        lambda r: r["SmallBatch"] > 0,
        "a plan holds more than the paper's runtime",
    ),
    Claim(
        "SmallBatch runs out of memory for the other WResNets",
        lambda m: not m.recurrent and m.name not in SMALL,
        lambda r: not r["SmallBatch"],
        "gradients die in the update here, so a model may hold 2 of the paper's 3 copies of its weights",
    ),
    Claim(
        "SmallBatch runs out of memory for RNNs of 6K and 8K",
        lambda m: m.recurrent and m.size >= LARGE,
        lambda r: not r["SmallBatch"],
        "gradients die in the update here",
    ),
    Claim(
        "SmallBatch faster than Tofu for WResNet-50-4 and WResNet-101-4 (by 12% and 15%)",
        lambda m: m.name in ("WResNet-50-4", "WResNet-101-4"),
        lambda r: r["SmallBatch"] > r["Tofu"],
        "communication is a small part of Tofu's step here",
    ),
    Claim(
        "SmallBatch no faster than Tofu for RNNs",
        lambda m: m.recurrent,
        lambda r: r["SmallBatch"] <= r["Tofu"],
        _ROOFLINE,
    ),
    Claim(
        "Op-Placement slower than Tofu",
        lambda m: m.recurrent,
        lambda r: r["Op-Placement"] < r["Tofu"],
        "transfers between layers cost less than Tofu's",
    ),
    Claim(
        "Op-Placement runs out of memory for RNN-10-8K",
        lambda m: m.name == "RNN-10-8K",
        lambda r: not r["Op-Placement"],
        "two layers of a GPU fit",
    ),
    Claim(
        "Swapping slower than Op-Placement for large weights",
        lambda m: m.recurrent and m.size >= LARGE and m.name != "RNN-10-8K",
        lambda r: r["Swapping"] < r["Op-Placement"],
        "the link keeps up",
    ),
)
"""The orders that section 7.2 states."""


def _print_claims(found: dict[Model, list[Row]]) -> list[str]:
    """Prints each claim about the models; returns those that do not hold."""
    print("| the paper says (section 7.2) | models | holds | |\n|---|---:|---|---|")
    broken: list[str] = []
    for claim in CLAIMS:
        about = [m for m in found if claim.about(m)]
        failed = [m.name for m in about if not claim.holds(_rates(found[m]))]
        if about:
            print(f"| {claim.text} | {len(about)} | {_verdict(failed)} | {claim.reason if failed else ''} |")
        broken += [f"{claim.text}: {name}" for name in failed]
    print("\n| ratio | least | most | paper |\n|---|---:|---:|---|")
    for name, of, to, wanted, paper in RATIOS:
        ratios = [r[of] / r[to] for m in found if wanted(m) and (r := _rates(found[m]))[of] and r[to]]
        if ratios:
            print(f"| {name} | {min(ratios):.0%} | {max(ratios):.0%} | {paper} |")
    print()
    return broken


def _verdict(failed: Sequence[str]) -> str:
    return f"no: {', '.join(failed)}" if failed else "yes"


def _large(model: Model) -> bool:
    return model.recurrent and model.size >= LARGE


RATIOS: tuple[tuple[str, str, str, Callable[[Model], bool], str], ...] = (
    ("WResNets: Tofu of Ideal", "Tofu", "Ideal", lambda m: not m.recurrent, "60% to 95%"),
    ("RNNs: Tofu of Ideal", "Tofu", "Ideal", lambda m: m.recurrent, "70% to 98%"),
    ("WResNets: Swapping of Tofu", "Swapping", "Tofu", lambda m: not m.recurrent, "37% to 80%"),
    ("RNNs of 6K and 8K: Swapping of Tofu", "Swapping", "Tofu", _large, "23% to 30%"),
    ("RNNs of 6K and 8K: Swapping of Op-Placement", "Swapping", "Op-Placement", _large, "48% to 53%"),
    ("RNNs: Op-Placement of Tofu", "Op-Placement", "Tofu", lambda m: m.recurrent, "38% to 61%"),
)
"""Ratios that section 7.2 states in its text."""


def _rates(of: Sequence[Row]) -> dict[str, float]:
    """Samples/s by system; 0 where it runs out of memory."""
    return {row.system: row.samples_per_s or 0.0 for row in of}


# -- the tables ----------------------------------------------------------------------------------------------------------


def _printed(model: Model) -> list[Row]:
    """The rows of a model, each printed as soon as it is known."""
    ideal, every = 0.0, list[Row]()
    for row in rows(model):
        every.append(row)
        rate = row.samples_per_s
        ideal = ideal or rate or 0.0
        shown = "OOM | | " if rate is None else f"{row.batch} | {rate:.1f} | {rate / ideal:.0%}"
        print(f"| {row.model} | {row.system} | {shown} | {paper(model, row.system)} | {row.note} |", flush=True)
    return every


def paper(model: Model, system: str) -> str:
    """What the paper's text and Table 3 say about a model and a system."""
    stated = TABLE_3.get(model.name, {}).get(system)
    if stated is not None:
        return f"{stated} samples/s (Table 3)"
    if system == "SmallBatch" and not model.recurrent and model.name not in SMALL:
        return "OOM"
    if (model.name, system) == ("RNN-10-8K", "Op-Placement"):
        return "OOM"
    batches = {"WResNet-50-4": 128, "WResNet-152-4": 32, "WResNet-152-10": 8, "RNN-10-8K": 128}
    return f"batch {batches[model.name]}" if system == "Tofu" and model.name in batches else ""


def _print_recursion(models: Sequence[Model], found: dict[Model, list[Row]]) -> None:
    """Prints Table 1 for the models that it names."""
    named = [m for m in models if m.name in TABLE_1]
    if not named:
        return
    print("| Table 1 | recursion s | GB | paper | jointly s | GB | paper | entries of joint tables | |")
    print("|---|---:|---:|---|---:|---:|---|---:|---|")
    for model in named:
        batch = next(row.batch for row in found[model] if row.system == "Tofu")
        plan = on_eight_gpus(model, batch, "bytes") if batch else None
        if plan is not None:
            print(_recursion_row(model, searched(plan)))


def _recursion_row(model: Model, s: Searched) -> str:
    with_s, without_s = TABLE_1[model.name]
    ended = "exact" if s.exact else "too many: a beam in place of the whole tables"
    recursion = f"{s.recursion_s:.1f} | {s.recursion_gb:.2f} | {with_s}"
    return f"| {model.name} | {recursion} | {s.joint_s:.1f} | {s.joint_gb:.2f} | {without_s} | {s.entries:.1e} | {ended} |"


if __name__ == "__main__":
    sys.exit(main())
