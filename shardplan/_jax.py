"""Every use of JAX's private names, with what it is for and what to do when it moves. Works with jax 0.10 and 0.11."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal as Literal  # a constant inside a jaxpr; public in jax.extend


def source_line(eqn: Any) -> str:
    """``file:line (function)`` of the user's code behind an equation; ``?`` if JAX stops saying so."""
    try:
        from jax._src import source_info_util
    except ImportError:  # the module moved: only messages lose their line
        return "?"
    return source_info_util.summarize(eqn.source_info)


def itemsize(dtype: Any) -> int:
    """Bytes of one element; a key's are those of its words."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        return words.size * words.dtype.itemsize
    return dtype.itemsize


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
