"""Writes a plan in forms that other programs read; the file's name selects the form."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from shardplan.errors import ShardplanError
from shardplan.plans.data import PlanData
from shardplan.plans.files import AnyData, write_whole
from shardplan.plans.placed_data import PlacedData
from shardplan.report.maxtext_file import maxtext_file
from shardplan.report.placed_specs_file import placed_specs_file
from shardplan.report.rules_file import rules_file
from shardplan.report.specs_file import specs_file

STEP = "step.stablehlo"
"""The form that needs the step."""

_TEXTS: dict[str, Callable[[PlanData], str]] = {"specs.py": specs_file, "rules.yml": rules_file, "maxtext.yml": maxtext_file}
"""The forms that need the plan's data alone."""


def form_of(file: str | os.PathLike[str]) -> str:
    """The form that a file's name ends in: ``gpt-specs.py`` is ``specs.py``.

    Raises:
        ShardplanError: if the name ends in no form.
    """
    name = Path(file).name
    for form in (*_TEXTS, STEP):
        if name.endswith(form):
            return form
    raise ShardplanError(f"{os.fspath(file)!r} names no form of export: end the name in {', '.join(_TEXTS)} or {STEP}")


def write_text(data: AnyData, file: str | os.PathLike[str], order: Sequence[int] | None = None) -> None:
    """Writes a form that needs the plan's data alone; an existing file is replaced once the new one is complete.

    ``order`` has the numbers of the mesh's devices, by default in the cluster's order.

    Raises:
        ShardplanError: if the name is none of these forms, if the file cannot be written, or if the form has one mesh and the
            plan has groups of devices.
    """
    form = form_of(file)
    if not isinstance(data, PlacedData):
        text = specs_file(data, order) if form == "specs.py" else _TEXTS[form](data)
    elif form == "specs.py":
        text = placed_specs_file(data)
    else:
        one = f"{form} is of one mesh, and this plan has {len(data.groups)} groups of devices"
        raise ShardplanError(f"{one}: export specs.py, or plan with placement='one'")
    write_whole(Path(file), text)
