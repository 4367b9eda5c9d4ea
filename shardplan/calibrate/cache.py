"""Measurements on disk, by op, shapes, dtypes and device (FlexFlow, section 5): a second calibration measures what is new."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shardplan.calibrate.timing import Timed
from shardplan.errors import CalibrationError
from shardplan.plans.files import write_whole

_log = logging.getLogger("shardplan")

VERSION = 1
FILE = f"measurements-{VERSION}.json"


def default_folder(environment: Mapping[str, str]) -> Path:
    """The user's folder for caches: ``$XDG_CACHE_HOME/shardplan``, or ``~/.cache/shardplan``."""
    base = environment.get("XDG_CACHE_HOME", "")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "shardplan"


def key_of(identity: Mapping[str, Any]) -> str:
    """A digest of the identity of a measurement."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Cache:
    """The measurements in one folder, by `key_of`. ``entries`` holds the measurements of its file and those added since."""

    folder: Path
    entries: dict[str, Timed] = field(default_factory=dict[str, Timed])

    @staticmethod
    def opened(folder: Path) -> Cache:
        """The cache of a folder, empty if it has none.

        A file that holds anything else is ignored with a warning and later replaced: it only costs the time to measure again.

        Raises:
            CalibrationError: if the folder cannot be made or read.
        """
        file = folder / FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            text = file.read_text(encoding="utf-8") if file.exists() else None
        except OSError as error:
            raise CalibrationError(
                f"the cache {file} cannot be used: {error.strerror}; give another folder, --cache DIR"
            ) from error
        except UnicodeDecodeError:
            text = ""
        entries = {} if text is None else _parsed(text)
        if entries is None:
            _log.warning("%s is not a cache of measurements: it is measured anew and replaced", file)
        return Cache(folder, entries or {})

    def add(self, measured: Mapping[str, Timed]) -> None:
        """Adds measurements by key and replaces the file, once the new one is complete.

        Measurements that other calibrations have written since are kept.

        Raises:
            CalibrationError: if the folder cannot be written.
        """
        if not measured:
            return
        try:
            text = (self.folder / FILE).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            text = ""
        self.entries.update({**(_parsed(text) or {}), **measured})
        rows = {key: [float(t.seconds), float(t.spread)] for key, t in sorted(self.entries.items())}
        if not os.access(self.folder, os.W_OK):
            raise CalibrationError(f"the cache {self.folder} cannot be written: give another folder, --cache DIR")
        write_whole(self.folder / FILE, json.dumps({"version": VERSION, "measurements": rows}, indent=0))


def _parsed(text: str) -> dict[str, Timed] | None:
    """The measurements in a file's text; None if it holds anything else."""
    try:
        content: Any = json.loads(text)
    except json.JSONDecodeError:
        return None
    if not isinstance(content, dict) or content.get("version") != VERSION or not isinstance(content.get("measurements"), dict):
        return None
    rows = cast("dict[str, Any]", content["measurements"])
    result: dict[str, Timed] = {}
    for key, row in rows.items():
        if not isinstance(row, list) or [type(x) for x in row] != [float, float]:
            return None
        seconds, spread = cast("list[float]", row)
        if not (0 < seconds < math.inf and 0 <= spread < math.inf):
            return None
        result[key] = Timed(seconds, spread)
    return result
