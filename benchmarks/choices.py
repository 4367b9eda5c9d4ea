"""What plans lose or gain where a number that is a choice is halved or doubled (`shardplan.constants`).

``python benchmarks/choices.py [--names NAME ...] [--steps NAME ...] [--json FILE] [--table]``

Every constant whose words say "Choice" is halved and doubled, one at a time, and each step of `STEPS` is planned with it. The
table has a row for each: the change of predicted step times (the worst and the best of all steps), and the planning time in all,
over that with the constants as they are. A choice that changes no plan either way decides nothing here; one that makes plans
faster either way was chosen badly. Planning times are of one run, in one process, and noisy.

Results are kept in ``--json`` (`choices.json`) as soon as they are there; ``--table`` prints what is kept and plans nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shardplan.constants import CONSTANTS, Constants  # noqa: E402

KEPT = ROOT / "benchmarks" / "choices.json"
_LAYER = {"layers": 2, "width": 256, "sequence": 64, "heads": 4, "vocabulary": 512}
STEPS: Mapping[str, tuple[str, str, Mapping[str, Any], float]] = {
    "GPT, 2x4": ("gpt", "2x4", {**_LAYER, "batch": 256}, 1.0),
    "GPT, 2x2x2": ("gpt", "2x2x2", {**_LAYER, "batch": 256}, 1.0),
    "MLP, half of the memory": ("mlp", "2x4", {"layers": 3, "width": 1024, "batch": 512}, 0.5),
    "WResNet, 8": ("wresnet", "8", {"blocks": (1, 1), "width": 4, "image": 32, "batch": 128}, 1.0),
}
"""The model, the cluster, its options, and the part of the fastest plan's peak that plans may hold."""


def choices() -> list[str]:
    """The constants whose words say that they are choices, those that are numbers."""
    body = ast.parse(inspect.getsource(Constants)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: list[str] = []
    for field, words in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(words, ast.Expr) and isinstance(words.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            number = isinstance(getattr(CONSTANTS, field.target.id), int | float)
            if number and "Choice" in str(words.value.value):
                found.append(field.target.id)
    return found


def other(value: float, factor: float) -> float:
    """Half or twice a constant; an integer stays one, at least 1 apart."""
    if isinstance(value, int):
        return max(0, min(value - 1, round(value * factor))) if factor < 1 else max(value + 1, round(value * factor))
    return value * factor


def planned(names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(predicted step seconds, planning seconds) of each step; infinite where nothing fits."""
    import shardplan
    from shardplan.errors import MemoryLimitError

    result: dict[str, tuple[float, float]] = {}
    for name in names:
        model, cluster, options, part = STEPS[name]
        step, args = importlib.import_module(f"models.{model}").train_step(**options)
        limit = "1000TiB" if part == 1.0 else round(part * _peak(name))
        began = time.perf_counter()
        try:
            plan = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, memory_limit=limit)
            seconds = plan.step_time_s
        except MemoryLimitError:
            seconds = math.inf
        result[name] = seconds, time.perf_counter() - began
    return result


_PEAKS: dict[str, int] = {}


def _peak(name: str) -> int:
    """The peak of the fastest plan, with the constants as they are (asked first with these)."""
    if name not in _PEAKS:
        import shardplan

        model, cluster, options, _ = STEPS[name]
        step, args = importlib.import_module(f"models.{model}").train_step(**options)
        _PEAKS[name] = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, memory_limit="1000TiB").peak_bytes
    return _PEAKS[name]


def table(kept: Mapping[str, Any]) -> list[str]:
    """A row for each choice."""
    lines = [
        "| constant | value | halved: slowest | fastest | planning | doubled: slowest | fastest | planning |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    base = kept["as they are"]
    for name, row in sorted(kept.items()):
        if name == "as they are":
            continue
        cells: list[str] = []
        for which in ("halved", "doubled"):
            ratios = [row[which][step][0] / base[step][0] - 1 for step in base if step in row[which]]
            spent = sum(row[which][step][1] for step in row[which]) / sum(base[step][1] for step in row[which])
            cells += [
                f"{max(*ratios, 0.0):+.2%}" if max(ratios) > 1e-4 else "",
                f"{min(ratios):+.2%}" if min(ratios) < -1e-4 else "",
            ]
            cells.append(f"{spent:.2f}")
        lines.append(f"| {name} | {row['value']:g} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Plans with each choice halved and doubled, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=choices(), default=choices(), metavar="NAME")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME")
    parser.add_argument("--json", type=Path, default=KEPT)
    parser.add_argument("--table", action="store_true", help="prints what is kept, and plans nothing")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {}
    for name in () if given.table else ["as they are", "as they are", *given.names]:
        if name == "as they are":  # twice: the first run also imports
            kept[name] = planned(given.steps)
        else:
            value = getattr(CONSTANTS, name)
            kept[name] = {"value": value}
            for which, factor in (("halved", 0.5), ("doubled", 2.0)):
                object.__setattr__(CONSTANTS, name, other(value, factor))
                kept[name][which] = planned(given.steps)
            object.__setattr__(CONSTANTS, name, value)
        print(name, kept[name], file=sys.stderr, flush=True)
        whole = given.json.with_suffix(".tmp")
        whole.write_text(json.dumps(kept, indent=1))
        whole.replace(given.json)
    print("\n".join(table(kept)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
