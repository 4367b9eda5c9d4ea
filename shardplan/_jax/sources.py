"""Where an equation or an error comes from in the user's code."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable
from typing import Any

from shardplan.user_code import NOT_THE_USERS, shown_path


def source_line(eqn: Any) -> str:
    """``file:line (function)`` of the user's code behind an equation, libraries left out; ``?`` if JAX no longer tells."""
    try:
        from jax._src import source_info_util
    except ImportError:  # the module moved: only messages lose their line
        return "?"
    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    own = [f for f in frames if not f.file_name.startswith(_INSTALLED)] or frames
    return f"{shown_path(own[0].file_name)}:{own[0].start_line} ({own[0].function_name})" if own else "?"


def raised_at(error: BaseException) -> str:
    """``file:line (function)`` of the user's last line in the traceback of an error, libraries left out.

    If the traceback has none, it is the user's line that called shardplan, or ``""`` if there is none.
    """
    for frames in (traceback.extract_tb(error.__traceback__), traceback.extract_stack()):
        own = [f for f in frames if not f.filename.startswith(NOT_THE_USERS)]
        if own:
            return f"{shown_path(own[-1].filename)}:{own[-1].lineno} ({own[-1].name})"
    return ""


_INSTALLED = tuple(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


def argument_names(step: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of a step's positional arguments; ``args0``, ``args1`` ... where it has none."""
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for i in range(count):
        if i < len(parameters) and parameters[i].kind in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            names.append(parameters[i].name)
        else:
            names.append(f"args{i}")
    return tuple(names)
