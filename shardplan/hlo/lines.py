"""The stack frames in the text of a compiled program, as lines of the user's code."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardplan.user_code import NOT_THE_USERS, shown_path

_TABLE = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)
_ROW = re.compile(r"^(\d+) (.*)$", re.MULTILINE)
_FIELD = re.compile(r"(\w+)=(\d+)")


def frame_lines(text: str) -> Mapping[int, str]:
    """``file:line (function)`` of each stack frame of a module's text: its innermost line in the user's code, if any."""
    tables = {name: dict(_ROW.findall(rows)) for name, rows in _TABLE.findall(text.partition("\n%")[0])}
    if "StackFrames" not in tables:
        return {}
    places = {key: dict(_FIELD.findall(row)) for key, row in tables["FileLocations"].items()}
    frames = {key: dict(_FIELD.findall(row)) for key, row in tables["StackFrames"].items()}

    first = min((int(frame.get("parent_frame_id", 0)) for frame in frames.values()), default=0)  # what stands for no parent

    def line(key: str) -> tuple[str, str]:
        """The file of a frame, and its whole line."""
        place = places[frames[key]["file_location_id"]]
        file = tables["FileNames"][place["file_name_id"]].strip('"')
        function = tables["FunctionNames"][place["function_name_id"]].strip('"')
        return file, f"{shown_path(file)}:{place['line']} ({function})"

    def users(key: str) -> str:
        inner, seen = key, set[str]()
        while key in frames and key not in seen:
            file, text = line(key)
            if not file.startswith(NOT_THE_USERS):
                return text
            seen.add(key)
            key = str(int(frames[key].get("parent_frame_id", first)) - first)
        return line(inner)[1]

    return {int(key): users(key) for key in frames}
