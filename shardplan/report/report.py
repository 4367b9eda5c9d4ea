"""The answer of a command-line command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """One answer, as text and as JSON values.

    ``passed`` is false if the command's check failed. ``for_people`` is false if the text is for programs: it gets no colours.
    """

    text: str
    json: Any
    passed: bool = True
    for_people: bool = True
