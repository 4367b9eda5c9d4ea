"""Published step times beside predicted ones: JAX frameworks, Alpa, Megatron, FSDP in PyTorch; A100, H100, V100.

``python benchmarks/truth.py [--only GLOB] [--json FILE] [--priced FILE ...] [--model MODEL] [--brief]``

Each row of ``measured_steps.csv`` and ``megatron_a100.csv`` that the models can say is traced as it was run (``truth_rows.py``),
its sharding fixed as it was written, and priced (``truth_price.py``). Rates are those of the presets; two that they do not have
are fitted to few rows, which are named and left out of all figures (``truth_fit.py``). *serial* adds compute and communication
up, *hidden* is the larger of both, *partly* hides all but tensor parallelism, *overlap* is the time model of plans; *predicted*
is that of `--model`.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.truth_fit import Priced, Rates, fit
from benchmarks.truth_price import Price, UnpricedError, fusible, price
from benchmarks.truth_rows import LeftOut, Row, rows

MODELS: Mapping[str, Callable[[Price], float]] = {
    "serial": lambda p: p.serial_s,
    "hidden": lambda p: p.hidden_s,
    "partly": lambda p: p.partly_s,
    "overlap": lambda p: p.overlap_s,
}
APART = 1.05
"""Two rows are compared in order where the slower takes so much longer."""


class Predicted(Protocol):
    """A row with the seconds that are predicted for it."""

    @property
    def row(self) -> Row:
        """The row."""
        ...

    @property
    def predicted_s(self) -> float:
        """The prediction."""
        ...


@dataclass(frozen=True, slots=True)
class Result:
    """A row with its price at the rate of its attention kernel, and the seconds that a time model makes of it."""

    row: Row
    price: Price
    predicted_s: float

    @property
    def error(self) -> float:
        """The relative error; NaN where the row ran out of memory."""
        return self.predicted_s / self.row.measured_s - 1 if self.row.measured_s else float("nan")

    @property
    def fits(self) -> bool:
        """Whether the predicted peak is within the device's memory."""
        return self.price.peak_bytes <= self.row.cluster.device.memory_bytes


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the rows, the figures of each framework, and what is left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="GLOB", help="rows by id")
    parser.add_argument("--model", choices=MODELS, default="serial", help="what the prediction is (default: serial)")
    parser.add_argument("--brief", action="store_true", help="the figures alone, without the rows and what is left out")
    parser.add_argument("--json", type=Path, help="write rows and what is left out, after every row")
    parser.add_argument("--priced", type=Path, nargs="+", default=[], help="files of --json whose rows are not priced again")
    given = parser.parse_args(argv)
    found, left = rows()
    found = [r for r in found if fnmatch.fnmatchcase(r.id, given.only)]
    left = [r for r in left if fnmatch.fnmatchcase(r.id, given.only)]
    if not found and not left:
        parser.error(f"--only {given.only}: no row has such an id")
    known = {r["id"]: r for file in given.priced for r in json.loads(file.read_text())["rows"]}
    priced: list[Priced] = []
    for row in sorted(found, key=lambda r: (r.framework, r.model, sorted((k, str(v)) for k, v in r.options.items()))):
        try:
            paid = Price(**{f.name: known[row.id][f.name] for f in fields(Price)}) if row.id in known else price(row)
        except UnpricedError as error:
            left.append(LeftOut(row.id, row.framework, str(error)))
            continue
        priced.append((row, paid))
        if sys.stderr.isatty():
            print(f"{len(priced)} of {len(found)} {row.id}", file=sys.stderr, flush=True)
        _write(given.json, priced, [], left)
    model = MODELS[given.model]
    rates, launched, attending = fit(priced, model)
    results = _predicted([r for r in priced if r not in (*launched, *attending)], rates, model)
    fitted = _predicted([*launched, *attending], rates, model)
    if not given.brief:
        print("\n".join([_HEAD, *map(_line, [*results, *fitted])]))
    _print_fitted(rates, launched, attending)
    _write(given.json, priced, [*results, *fitted], left)
    _print_figures(results)
    if not given.brief:
        print_left_out(left)
    return 0


_HEAD = (
    f"{'row':<44} {'measured':>9} {'predicted':>9} {'error':>7} {'compute':>9} {'tensor':>8} {'data':>8} "
    f"{'serial':>9} {'hidden':>9} {'peak GB':>8}  memory"
)


def _write(path: Path | None, priced: Sequence[Priced], results: Sequence[Result], left: Sequence[LeftOut]) -> None:
    """The prices, at the rates of the presets; and the predictions, once there are any."""
    if path is not None:
        of = {r.row.id: r for r in results}
        part = path.with_name(path.name + ".part")
        written = [_record(row, paid, of.get(row.id)) for row, paid in priced]
        part.write_text(json.dumps({"rows": written, "left_out": [_why(r) for r in left]}, indent=1))
        part.replace(path)


def _line(r: Result) -> str:
    p, row = r.price, r.row
    measured = f"{row.measured_s:9.4f}" if row.measured_s else f"{'memory':>9}"
    error = f"{r.error:+7.1%}" if row.measured_s else " " * 7
    memory = "" if r.fits else "out of memory"
    memory += f" (measured {row.memory_gb:.1f} GB)" if row.memory_gb else ""
    return (
        f"{row.id:<44} {measured} {r.predicted_s:9.4f} {error} {p.compute_s:9.4f} {p.tensor_s:8.4f} {p.data_s:8.4f} "
        f"{p.serial_s:9.4f} {p.hidden_s:9.4f} {p.peak_bytes / 1e9:8.1f}  {memory}"
    )


def _record(row: Row, paid: Price, result: Result | None) -> dict[str, Any]:
    return {
        "id": row.id,
        "framework": row.framework,
        "sweep": row.sweep,
        "samples": row.samples,
        "measured_s": row.measured_s,
        "predicted_s": None if result is None else result.predicted_s,
        **asdict(paid),
        **({} if result is None else {f"{name}_s": model(result.price) for name, model in MODELS.items()}),
        "fits": paid.peak_bytes <= row.cluster.device.memory_bytes,
        "measured_gb": row.memory_gb,
        "assumed": row.assumed,
    }


def _why(r: LeftOut) -> dict[str, str]:
    return {"id": r.id, "framework": r.framework, "reason": r.reason}


def _predicted(found: Sequence[Priced], rates: Rates, model: Callable[[Price], float]) -> list[Result]:
    return [Result(row, rates.price(row, paid), rates.seconds(row, paid, model)) for row, paid in found]


def _print_fitted(rates: Rates, launched: Sequence[Priced], attending: Sequence[Priced]) -> None:
    told = (
        (launched, f"PyTorch launches a kernel in {rates.launch_s * 1e6:.1f} us"),
        (attending, f"FlashAttention 1 in Triton reaches {rates.triton_on_h100 or 0:.1%} of an H100's peak"),
    )
    for rows_of, words in told:
        if rows_of:
            print(f"\nfitted to {', '.join(row.id for row, _ in rows_of)}: {words}; these rows are in no figure below")


# -- figures -----------------------------------------------------------------------------------------------------------


def ordered(results: Sequence[Predicted], *, each: bool) -> tuple[int, int]:
    """(pairs of a sweep in the right order, pairs): those whose seconds, of a step or of ``each`` sample, differ by over 5%."""
    right = pairs = 0
    for _, group in itertools.groupby(sorted(results, key=lambda r: r.row.sweep), key=lambda r: r.row.sweep):
        known = [r for r in group if r.row.measured_s]
        for a, b in itertools.combinations(known, 2):
            ours, theirs = (
                (f(a) / f(b)) * (b.row.samples / a.row.samples if each else 1.0)
                for f in (lambda r: r.predicted_s, lambda r: r.row.measured_s or 0.0)
            )
            if max(theirs, 1 / theirs) > APART:
                pairs += 1
                right += (ours > 1) == (theirs > 1)
    return right, pairs


def _print_figures(results: Sequence[Result]) -> None:
    head = f"{'framework':<20} {'rows':>4} {'median':>7} {'mean':>7} {'worst':>7}  {'order of steps':>17} {'of samples':>17}"
    print(f"\n{head}  {'serial':>7} {'hidden':>7} {'inside':>7}")
    names = sorted({r.row.framework for r in results})
    for name in [*names, "all"]:
        own = [r for r in results if r.row.measured_s and name in (r.row.framework, "all")]
        if not own:
            continue
        errors = [abs(r.error) for r in own]
        cells = [of_pairs(*ordered(own, each=each)) for each in (False, True)]
        sums = [
            statistics.median(abs(f(r.price) / (r.row.measured_s or 1.0) - 1) for r in own) for f in list(MODELS.values())[:2]
        ]
        inside = sum(r.price.hidden_s <= (r.row.measured_s or 0.0) <= r.price.serial_s for r in own)
        worst = max(own, key=lambda r: abs(r.error))
        print(
            f"{name:<20} {len(own):4} {statistics.median(errors):7.1%} {statistics.mean(errors):7.1%} {worst.error:+7.1%}  "
            f"{cells[0]:>17} {cells[1]:>17}  {sums[0]:7.1%} {sums[1]:7.1%} {inside:7}  worst: {worst.row.id}"
        )
    print(
        "(errors are absolute and relative, worst with its sign; order: pairs of one model on one machine that differ by over 5%;"
    )
    print(" serial, hidden: the median error of each sum; inside: rows measured between the two sums)")
    _print_memory(results)
    _print_beside_calculon(results)
    fused = sorted({r.row.model for r in results if r.row.options.get("fused") and not fusible(r.row.model)})
    if fused:
        print(f"\nno fused attention in {', '.join(fused)}: the rows that used it are priced with scores written to memory")


def of_pairs(right: int, pairs: int) -> str:
    """How many pairs are in the right order, as a cell."""
    return f"{right:>5} of {pairs:<5}{right / pairs:4.0%}" if pairs else ""


def _print_memory(results: Sequence[Result]) -> None:
    """Whether what ran out of memory is predicted to, and what ran is predicted to fit."""
    known = [r for r in results if r.row.framework.startswith("Alpa")]
    if not known:
        return
    failed = [r for r in known if r.row.measured_s is None]
    ran = [r for r in known if r.row.measured_s is not None]
    print(
        f"\nmemory, Alpa: {sum(not r.fits for r in failed)} of {len(failed)} rows that ran out of it are predicted to,", end=" "
    )
    print(f"{sum(r.fits for r in ran)} of {len(ran)} rows that ran are predicted to fit")
    ratios = [r.price.peak_bytes / 1e9 / r.row.memory_gb for r in known if r.row.memory_gb]
    if ratios:
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"  predicted peak over the published one: median {statistics.median(ratios):.2f}, {spread}")


def _print_beside_calculon(results: Sequence[Result]) -> None:
    """Megatron's rows without a pipeline."""
    own = [r for r in results if r.row.framework == "Megatron-LM"]
    if own:
        errors = [abs(r.error) for r in own]
        print(f"\nMegatron-LM on Selene, the {len(own)} rows without a pipeline: mean {statistics.mean(errors):.1%},", end=" ")
        print(f"largest {max(errors):.1%} (Calculon, on eight rows, six of which have pipelines: 3.65% and 8.87%)")


def print_left_out(left: Sequence[LeftOut]) -> None:
    """Prints what is left out, by reason."""
    if not left:
        return
    print(f"\n{len(left)} rows are left out:")
    key = lambda r: (r.framework, r.reason)  # noqa: E731
    for (framework, reason), group in itertools.groupby(sorted(left, key=key), key=key):
        ids = [r.id for r in group]
        print(f"  {framework}: {reason} ({len(ids)})")
        print(f"    {', '.join(ids)}")


if __name__ == "__main__":
    sys.exit(main())
