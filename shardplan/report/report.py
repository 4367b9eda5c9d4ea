"""The answer of a command of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """One answer, as text for people and as JSON values for programs; ``passed`` is false if its check failed."""

    text: str
    json: Any
    passed: bool = True
