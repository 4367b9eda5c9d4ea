"""The answer of a command of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """One answer, as text and as JSON values.

    ``passed`` is false if its check failed, ``for_people`` if the text is for programs: then it has no colours.
    """

    text: str
    json: Any
    passed: bool = True
    for_people: bool = True
