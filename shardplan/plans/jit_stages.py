# pyright: basic
"""The stages of compiling a planned step, as `jax.stages` has them: traced, lowered, compiled.

Inside, JAX compiles a function of flat leaves. A stage shows them in the step's own trees. The tree of the arguments is that of
``((arguments...), {})``, as JAX has it for positional arguments; arguments that were planned by name are the last of these, and
the dict stays empty. An nnx object is shown as its state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from shardplan.errors import ShardplanError
from shardplan.frontend.nnx_state import bare


@dataclass(frozen=True, slots=True)
class Trees:
    """The trees of a step's arguments, split into arrays, and of the traced step's results."""

    arguments: Any
    results: Any

    def of_arguments(self, leaves: Sequence[Any]) -> tuple[Any, dict[str, Any]]:
        """``((arguments...), {})`` with these leaves, those of nnx objects as their state."""
        return bare(self.arguments.unflatten(leaves), leaves), {}

    def of_results(self, leaves: Sequence[Any], arguments: Sequence[Any]) -> Any:
        """The step's result with these leaves. Parts of an nnx object that the step leaves unchanged take the leaves of the
        arguments.
        """
        return bare(self.results.unflatten(leaves), arguments)


class Stage:
    """A stage of `jax.stages` for flat leaves, shown with the step's trees. All other attributes are the attributes of JAX's
    stage.

    ``run(flat, *args, **named)`` calls a compiled function of flat leaves with the step's arguments (`Runner`).
    """

    def __init__(self, flat: Any, trees: Trees, run: Callable[..., Any]) -> None:
        self._flat, self._trees, self._run = flat, trees, run

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._flat, name)

    @property
    def in_tree(self) -> Any:
        """The tree of the arguments and of an empty dict of keyword arguments."""
        return jax.tree.structure(self.args_info)

    @property
    def out_tree(self) -> Any:
        """The tree of the result."""
        return jax.tree.structure(self.out_info)

    @property
    def args_info(self) -> tuple[Any, dict[str, Any]]:
        """The shape, the dtype and whether it is donated, for each leaf of the arguments."""
        return self._trees.of_arguments(self._flat.args_info[0])

    @property
    def in_avals(self) -> tuple[Any, dict[str, Any]]:
        """The type of each leaf of the arguments."""
        return self._trees.of_arguments(self._flat.in_avals[0])

    @property
    def out_info(self) -> Any:
        """The shape and dtype of each leaf of the result."""
        return self._trees.of_results(self._flat.out_info, [_shape(info) for info in self._flat.args_info[0]])


class TracedStep(Stage):
    """A planned step, traced."""

    def lower(self, **options: Any) -> LoweredStep:
        """The step lowered; options as for `jax.stages.Traced.lower`."""
        return LoweredStep(self._flat.lower(**options), self._trees, self._run)


class LoweredStep(Stage):
    """A planned step, lowered."""

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> CompiledStep:
        """The step compiled with the options of `Plan.jit` and these; these take precedence."""
        return CompiledStep(compiled(self._flat.compile, compiler_options=compiler_options), self._trees, self._run)


class CompiledStep(Stage):
    """A planned step, compiled: called with the step's arguments, it returns the step's result."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the step, as `Runner` does: arguments are moved to their planned shardings, nnx objects updated in place."""
        return self._run(self._flat, *args, **named)

    @property
    def input_shardings(self) -> tuple[Any, dict[str, Any]]:
        """The sharding of each leaf of the arguments."""
        return self._trees.of_arguments(self._flat.input_shardings[0])

    @property
    def output_shardings(self) -> Any:
        """The sharding of each leaf of the result."""
        return self._trees.of_results(self._flat.output_shardings, self._flat.input_shardings[0])

    @property
    def input_formats(self) -> tuple[Any, dict[str, Any]]:
        """The sharding and the layout in memory of each leaf of the arguments."""
        return self._trees.of_arguments(self._flat.input_formats[0])

    @property
    def output_formats(self) -> Any:
        """The sharding and the layout in memory of each leaf of the result."""
        return self._trees.of_results(self._flat.output_formats, self._flat.input_formats[0])


def compiled(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of ``run(*args, **options)``, which compiles a step, or calls one and may compile it first.

    Raises:
        ShardplanError: for a compiler option that XLA refuses.
    """
    try:
        return run(*args, **options)
    except jax.errors.JaxRuntimeError as error:
        found = re.search(r"(No such compile option|While setting option)[^\n]*", str(error))
        if found is None:
            raise
        raise ShardplanError(
            f"XLA refuses a compiler option: {found[0]}; change xla_flags, or the options of compile()"
        ) from error


def _shape(info: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(info.shape, info.dtype)
