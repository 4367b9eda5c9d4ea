# pyright: basic
"""Arguments by name: a step that is planned with some of them becomes a function of positional arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardplan import _jax
from shardplan.errors import ShardplanError


class Positional:
    """A step as a function of positional arguments alone: its first ``count``, then those of ``names`` in their order."""

    def __init__(self, step: Callable[..., Any], count: int, names: Sequence[str]) -> None:
        functools.update_wrapper(self, step, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
        self.__dict__.pop("__wrapped__", None)
        self.step, self.count, self.names = step, count, tuple(names)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [name for name in _jax.argument_names(step, count) if name not in self.names]
        self.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in (*own, *self.names)])

    def __call__(self, *args: Any) -> Any:
        """Runs the step with the last arguments by name."""
        return self.step(*args[: self.count], **dict(zip(self.names, args[self.count :], strict=True)))


def taking(count: int, names: Sequence[str]) -> Positional:
    """The `Positional` of a step that takes ``count`` arguments by position alone and others by these names alone. It only binds
    calls (`ordered`); it does not run.
    """

    def form(*args: Any, **named: Any) -> Any:
        raise AssertionError("only its signature is used")

    places = [inspect.Parameter(f"argument_{i}", inspect.Parameter.POSITIONAL_ONLY) for i in range(count)]
    form.__signature__ = inspect.Signature([*places, *(inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names)])
    return Positional(form, count, names)


def as_positional(step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> tuple[Any, tuple[Any, ...]]:
    """(the step as a function of positional arguments alone, all arguments). Arguments by name come last, sorted by name.

    Raises:
        ShardplanError: for ``kwargs`` that are no mapping from names, and for arguments with which the step cannot be called.
    """
    if not kwargs:
        return step, tuple(args)
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise ShardplanError(f"kwargs is a {type(kwargs).__name__}: give a dict of the arguments that the step takes by name")
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
    """A step as a function of the same positional arguments as the planned step; the step itself if none were given by name."""
    if not isinstance(planned, Positional) or isinstance(step, Positional):
        return step
    return planned if planned.step is step else Positional(step, planned.count, planned.names)


def ordered(step: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call in the order in which the step was planned with them, those by name last. They are bound as Python
    binds them.

    Raises:
        ShardplanError: for a call that the step itself would refuse, or that gives other arguments than were planned.
    """
    names, count, own = (step.names, step.count, step.step) if isinstance(step, Positional) else ((), len(args), step)
    if len(args) == count and set(named) == set(names):
        return (*args, *(named[name] for name in names))
    planned = f"takes {count} by position and {', '.join(names)} by name" if names else "takes its arguments by position"
    try:
        signature = inspect.signature(own)
        bound = signature.bind(*args, **named)
    except (TypeError, ValueError) as error:  # another call, or a function without a signature
        raise ShardplanError(f"the planned step {planned}: {error}") from error
    if not names and not bound.kwargs:
        return bound.args
    by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    first = [p.name for p in signature.parameters.values() if p.kind in by_place and p.name not in names][:count]
    given = bound.arguments
    if set(given) != {*first, *names}:
        raise ShardplanError(f"the planned step {planned}: this call gives {', '.join(given)}; plan with these arguments")
    return tuple(given[name] for name in (*first, *names))
