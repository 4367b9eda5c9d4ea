"""The two rates that neither presets nor papers give, fitted to few of the published rows: launches from the host, and
FlashAttention 1 in Triton on H100s.

PyTorch without compilation launches kernel by kernel from the host, and a step cannot be shorter than that takes. The launch is
fitted to every tenth of vTrain's rows on one node. On A100s, a paper gives the rate of the attention kernel that LLM Foundry ran;
on H100s, none does. It is fitted to the tenth of these rows that spend the largest part of their seconds in attention. Rows that
a rate is fitted to are named, and left out of all figures.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.truth_price import Price
from benchmarks.truth_rows import Row, triton_on_a100

Priced = tuple[Row, Price]
LAUNCHED = "vtrain-single-*"
EVERY = 10


@dataclass(frozen=True, slots=True)
class Rates:
    """Seconds of a launch from the host, and the part of an H100's peak that Triton's kernel reaches (None: unknown)."""

    launch_s: float = 0.0
    triton_on_h100: float | None = None

    def price(self, row: Row, price: Price) -> Price:
        """The price of a row with the attention kernel that it ran; that of the preset, where its rate is not known."""
        if not row.attention_kernel:
            return price
        device = row.cluster.device
        on_a100 = "A100" in device.name
        rate = triton_on_a100(forwards=2 if row.options["remat"] is True else 1) if on_a100 else self.triton_on_h100
        return price if rate is None else price.with_attention(device.attention_efficiency / rate)

    def seconds(self, row: Row, price: Price, model: Callable[[Price], float]) -> float:
        """The seconds that a time model predicts."""
        floor = self.launch_s * price.launches if row.eager else 0.0
        return max(model(self.price(row, price)), floor)


def launch_rows(found: Sequence[Row]) -> list[Row]:
    """The rows that the launch is fitted to; none where there are too few."""
    candidates = sorted((r for r in found if r.measured_s and fnmatch.fnmatchcase(r.id, LAUNCHED)), key=lambda r: r.id)
    return candidates[::EVERY] if len(candidates) >= 2 * EVERY else []


def launch_s(launched: Sequence[Priced], model: Callable[[Price], float]) -> float:
    """The seconds of a launch from the host that these rows are predicted best with; none without rows."""
    return _best([Rates(launch_s=n * 1e-7) for n in range(1000)], launched, model).launch_s if launched else 0.0


def fit(found: Sequence[Priced], model: Callable[[Price], float]) -> tuple[Rates, list[Priced], list[Priced]]:
    """(the rates, the rows that the launch is fitted to, those that the attention kernel is fitted to).

    Where too few rows are priced, a rate is not fitted.
    """
    measured = [(row, price) for row, price in found if row.measured_s]
    named = {row.id for row in launch_rows([row for row, _ in measured])}
    launched = sorted((r for r in measured if r[0].id in named), key=lambda r: r[0].id)
    rates = Rates(launch_s=launch_s(launched, model))
    triton = [r for r in measured if r[0].attention_kernel and "H100" in r[0].cluster.device.name]
    triton.sort(key=lambda r: (-r[1].attention_s / r[1].compute_s, r[0].id))
    attending = triton[: len(triton) // EVERY] if len(triton) >= 2 * EVERY else []
    if attending:
        rates = _best([replace(rates, triton_on_h100=n / 1000) for n in range(50, 1000)], attending, model)
    return rates, launched, attending


def _best(tried: Sequence[Rates], rows: Sequence[Priced], model: Callable[[Price], float]) -> Rates:
    """The rates of the least mean error over some rows."""

    def error(rates: Rates) -> float:
        return statistics.mean(abs(rates.seconds(row, price, model) / (row.measured_s or 1.0) - 1) for row, price in rows)

    return min(tried, key=error)
