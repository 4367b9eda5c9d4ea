"""The options with which XLA compiles a planned step: the flags that the plan counts on, unless the user asks for others."""

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
"""The platforms whose compilers accept the flags of GPUs. The compiler for CPUs ignores them."""


def compiler_options(planned: Mapping[str, Any], asked: object, platform: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The compiler options for a platform, as `jax.jit` takes them.

    ``asked`` is None or True for the flags ``planned`` (on the platforms that accept them), False for none, or a mapping of
    flags that takes their place on any platform. A flag that XLA_FLAGS in the environment sets keeps that value; if the two
    values differ, a warning is logged.

    Raises:
        ShardplanError: for any other ``asked``, or where XLA_FLAGS, or the file that it names, cannot be read.
    """
    if isinstance(asked, Mapping):
        unnamed = [name for name in asked if not isinstance(name, str) or name.startswith("-")]
        if unnamed:
            raise ShardplanError(f"xla_flags names {unnamed[0]!r}: give names of XLA flags without dashes")
        invalid = [name for name, value in asked.items() if not isinstance(value, bool | int | float | str)]
        if invalid:
            raise ShardplanError(f"xla_flags={{{invalid[0]!r}: {asked[invalid[0]]!r}}}: give a number, a bool or a string")
        return _without_set(asked, "xla_flags gives", environment)
    if asked is not None and not isinstance(asked, bool):
        raise ShardplanError(f"xla_flags={asked!r}: give None for the plan's own, False for none, or a dict of flags")
    if asked is False or platform not in _TAKES_GPU_FLAGS:
        return {}
    return _without_set(planned, "the plan counts on", environment)


def _without_set(flags: Mapping[str, Any], source: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The flags that the environment's XLA_FLAGS does not set. Warns of those that it sets to another value than ``source``."""
    own = flags_set(environment)
    other = {name: own[name] for name in flags if name in own and own[name].lower() != str(flags[name]).lower()}
    if other:
        winning = ", ".join(f"--{name}={value}" for name, value in other.items())
        losing = ", ".join(str(flags[name]) for name in other)
        _log.warning("%s has %s, which wins: %s %s", XLA_FLAGS, winning, source, losing)
    return {name: value for name, value in flags.items() if name not in own}


def flags_set(environment: Mapping[str, str]) -> dict[str, str]:
    """The flags of XLA_FLAGS, by name: the variable holds the flags, or the name of a file that holds them.

    Raises:
        ShardplanError: if the variable, or the file that it names, cannot be read.
    """
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
