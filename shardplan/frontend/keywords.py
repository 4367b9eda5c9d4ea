# pyright: basic
"""Arguments by name: a step that takes some by keyword alone becomes a function of positional arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardplan import _jax
from shardplan.errors import ShardplanError


class Positional:
    """A step as a function of ``count`` positional arguments and then of those that it takes by ``names``, in this order."""

    def __init__(self, step: Callable[..., Any], count: int, names: Sequence[str]) -> None:
        functools.update_wrapper(self, step, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
        self.__dict__.pop("__wrapped__", None)
        self.step, self.count, self.names = step, count, tuple(names)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [name for name in _jax.argument_names(step, count) if name not in self.names]
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in (*own, *self.names)])

    def __call__(self, *args: Any) -> Any:
        """Runs the step."""
        return self.step(*args[: self.count], **dict(zip(self.names, args[self.count :], strict=True)))


def as_positional(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, tuple[Any, ...]]:
    """(the step as a function of positional arguments alone, all arguments): those by name come last, sorted.

    Raises:
        ShardplanError: for ``kwargs`` that are no mapping from names, or that name what the step does not take so.
    """
    if not kwargs:
        return step, tuple(args)
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ShardplanError(f"kwargs={kwargs!r}: give a dict of the arguments that the step takes by name")
    names = sorted(kwargs)
    try:
        inspect.signature(step).bind(*args, **kwargs)
    except TypeError as error:
        name = getattr(step, "__name__", "the step")
        raise ShardplanError(f"{name} cannot be called with these arguments: {error}") from error
    except ValueError:  # no signature is known
        pass
    return Positional(step, len(args), names), (*args, *(kwargs[name] for name in names))


def with_arguments_of(step: Callable[..., Any], planned: Callable[..., Any]) -> Callable[..., Any]:
    """A step as a function of the arguments of the planned one, where that takes some by name."""
    if not isinstance(planned, Positional) or isinstance(step, Positional):
        return step
    return planned if planned.step is step else Positional(step, planned.count, planned.names)


def ordered(step: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call of a planned step, those by name last.

    Raises:
        ShardplanError: for other names than were planned.
    """
    names = step.names if isinstance(step, Positional) else ()
    if not named:
        return tuple(args)  # all in order, as `Plan.put` returns them
    if set(named) != set(names):
        wrong = ", ".join(sorted(set(named) ^ set(names)))
        taken = f"by name {', '.join(names)} and the others" if names else "its arguments"
        raise ShardplanError(
            f"a planned step takes {taken} by position: this call differs in {wrong}; pass the arguments as they were planned"
        )
    return (*args, *(named[name] for name in names))
