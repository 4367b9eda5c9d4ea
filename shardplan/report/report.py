"""What a command of the command line says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Report:
    """One answer, for a person as text and for a program as JSON values; ``passed``: its check did not fail."""

    text: str
    json: Any
    passed: bool = True
