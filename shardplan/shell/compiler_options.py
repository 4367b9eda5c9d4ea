"""The options with which XLA compiles a planned step: the flags that the plan counts on, unless its user says otherwise."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardplan.errors import ShardplanError

_log = logging.getLogger("shardplan")

XLA_FLAGS = "XLA_FLAGS"
_TAKES_GPU_FLAGS = frozenset({"cpu", "cuda", "gpu", "rocm"})
"""The platforms whose compilers know the flags of GPUs; that of CPUs takes them and does nothing with them."""


def compiler_options(planned: Mapping[str, Any], asked: object, platform: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The compiler options for a platform, as `jax.jit` takes them.

    ``asked`` is None or True for the flags ``planned``, False for none, or a mapping of the user's own in place of them, for any
    platform. A flag that the environment's XLA_FLAGS sets keeps its value there, and a warning is logged.

    Raises:
        ShardplanError: for anything else, or where XLA_FLAGS, or the file that it names, cannot be read.
    """
    if isinstance(asked, Mapping):
        unnamed = [name for name in asked if not isinstance(name, str) or name.startswith("-")]
        if unnamed:
            raise ShardplanError(f"xla_flags names {unnamed[0]!r}: give names of XLA flags without dashes")
        invalid = [name for name, value in asked.items() if not isinstance(value, bool | int | float | str)]
        if invalid:
            raise ShardplanError(f"xla_flags={{{invalid[0]!r}: {asked[invalid[0]]!r}}}: give a number, a bool or a string")
        return _left(asked, "xla_flags gives", environment)
    if asked is not None and not isinstance(asked, bool):
        raise ShardplanError(f"xla_flags={asked!r}: give None for the plan's own, False for none, or a dict of flags")
    if asked is False or platform not in _TAKES_GPU_FLAGS:
        return {}
    return _left(planned, "the plan counts on", environment)


def _left(planned: Mapping[str, Any], who: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The flags that the environment does not set; says which of the others it sets to another value."""
    own = _set_by_user(environment)
    kept = {name: own[name] for name in planned if name in own and own[name].lower() != str(planned[name]).lower()}
    if kept:
        said = ", ".join(f"--{name}={value}" for name, value in kept.items())
        counted = ", ".join(str(planned[name]) for name in kept)
        _log.warning("%s has %s, which wins: %s %s", XLA_FLAGS, said, who, counted)
    return {name: value for name, value in planned.items() if name not in own}


def _set_by_user(environment: Mapping[str, str]) -> dict[str, str]:
    """The flags of XLA_FLAGS, by name: the variable holds them, or the name of a file with them."""
    text = environment.get(XLA_FLAGS, "").strip()
    if text and not text.startswith("-"):
        try:
            text = Path(text).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ShardplanError(f"{XLA_FLAGS}={text!r} names a file of flags that cannot be read: {error}") from error
    try:
        words = [word.lstrip("-").partition("=") for word in shlex.split(text) if word.startswith("-")]
    except ValueError as error:
        raise ShardplanError(f"{XLA_FLAGS}={text!r} cannot be read: {error}") from error
    return {name: value if given else "true" for name, given, value in words}
