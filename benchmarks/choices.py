"""What plans lose or gain where a number that is a choice is halved or doubled (`shardplan.constants`).

``python benchmarks/choices.py [--names NAME ...] [--steps NAME ...] [--json FILE] [--table]``

Every constant whose words say "Choice" is halved and doubled, one at a time, and each step of `STEPS` is planned with it. The
table has a row for each that changes a predicted step time: the slowest and the fastest of all steps. A choice that changes no
plan decides nothing on these steps.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from shardplan.constants import CONSTANTS, Constants  # noqa: E402

KEPT = ROOT / "benchmarks" / "choices.json"
SAME = 1e-4
"""A smaller change of a step time is none."""
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


def planned(names: Sequence[str]) -> dict[str, float]:
    """The predicted seconds of each step; infinite where nothing fits."""
    import shardplan
    from shardplan.errors import MemoryLimitError

    result: dict[str, float] = {}
    for name in names:
        model, cluster, options, part = STEPS[name]
        step, args = importlib.import_module(f"models.{model}").train_step(**options)
        limit = "1000TiB" if part == 1.0 else round(part * _peak(name))
        try:
            result[name] = shardplan.plan(step, *args, cluster=cluster, donate_argnums=0, memory_limit=limit).step_time_s
        except MemoryLimitError:
            result[name] = math.inf
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
    """A row for each choice that changes a step time; the names of the others."""
    base, silent = kept["as they are"], list[str]()
    lines = ["| constant | value | halved: slowest | fastest | doubled: slowest | fastest |", "|---|---:|---:|---:|---:|---:|"]
    for name, row in sorted(kept.items()):
        if name == "as they are":
            continue
        ratios = {which: [row[which][step] / base[step] - 1 for step in base] for which in ("halved", "doubled")}
        if max(abs(r) for both in ratios.values() for r in both) < SAME:
            silent.append(name)
            continue
        cells = [f"{max(0.0, *both):+.2%} | {min(0.0, *both):+.2%}" for both in ratios.values()]
        lines.append(f"| {name} | {row['value']:g} | {' | '.join(cells)} |")
    return [*lines, "", f"Steps: {', '.join(base)}. No plan changes by over {SAME:.2%} with: {', '.join(silent)}."]


def main() -> int:
    """Plans with each choice halved and doubled, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", nargs="+", choices=choices(), default=choices(), metavar="NAME")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), metavar="NAME")
    parser.add_argument("--json", type=Path, default=KEPT)
    parser.add_argument("--table", action="store_true", help="prints what is kept, and plans nothing")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {}
    for name in () if given.table else ["as they are", *given.names]:
        if name == "as they are":
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
