"""A planned step, jitted, and what it asks of its arguments: the shapes that were planned, on the planned devices."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardplan import _jax
from shardplan.errors import ArgumentError, ShardplanError
from shardplan.frontend.nnx_state import abstract, apart, has_objects, through, trace_step
from shardplan.frontend.trace import Traced, path_words
from shardplan.plans.fingerprint import difference


class Leaves:
    """Leaves of arguments that must have the planned shapes and dtypes, and are moved to the planned devices.

    With ``weak`` they must be weakly typed, as Python's numbers are, exactly where the planned ones were. A leaf that comes back
    with the type and the sharding of the call before costs next to nothing.
    """

    def __init__(
        self, paths: Sequence[str], shapes: Sequence[Any], shardings: Sequence[NamedSharding], *, weak: bool = False
    ) -> None:
        self._paths, self._shapes, self._shardings, self._weak = paths, shapes, shardings, weak
        self._typed: list[Any] = [None] * len(paths)  # of the call before
        self._lain: list[Any] = [None] * len(paths)

    @property
    def shardings(self) -> list[NamedSharding]:
        """Where they lie."""
        return list(self._shardings)

    def part(self, numbers: Sequence[int]) -> Leaves:
        """The same of some of them."""
        shapes, shardings = [self._shapes[i] for i in numbers], [self._shardings[i] for i in numbers]
        return Leaves([self._paths[i] for i in numbers], shapes, shardings, weak=self._weak)

    def fit(self, leaves: Sequence[Any]) -> None:
        """Passes where every leaf is as planned; the leaves may be shapes.

        Raises:
            ArgumentError: for one that is not, or that was donated to an earlier call.
        """
        typed, plain = self._typed, _jax.array_type()
        for i, x in enumerate(leaves):
            if type(x) is plain:
                if x.aval is not typed[i]:
                    self._fits(i, x)
                    typed[i] = x.aval
                if x.is_deleted():
                    raise self._gone(i)
            else:
                self._fits(i, x)
                if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted():
                    raise self._gone(i)

    def placed(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves on the devices that the plan has for them; values of a trace that goes on stay as they are."""
        taken, lain, plain = list(leaves), self._lain, _jax.array_type()
        for i, x in enumerate(leaves):
            if type(x) is plain:
                if x.sharding is not lain[i]:
                    if x.sharding.is_equivalent_to(self._shardings[i], x.ndim):
                        lain[i] = x.sharding
                    else:
                        taken[i] = jax.device_put(x, self._shardings[i])
            elif not isinstance(x, Tracer | jax.ShapeDtypeStruct):
                there = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(self._shardings[i], x.ndim)
                taken[i] = x if there else jax.device_put(x, self._shardings[i])
        return taken

    def _fits(self, i: int, x: Any) -> None:
        found, planned = abstract(x), self._shapes[i]
        if found is None or (found.shape, found.dtype) != (planned.shape, planned.dtype):
            raise ArgumentError(self._paths[i], shape_text(planned), shape_text(found) if found is not None else type(x).__name__)
        if self._weak and found.weak_type != planned.weak_type:
            raise ArgumentError(self._paths[i], f"{shape_text(planned)}, weak={planned.weak_type}", f"weak={found.weak_type}")

    def _gone(self, i: int) -> ShardplanError:
        return ShardplanError(
            f"{self._paths[i]} was donated to an earlier call and is deleted: pass on what that call returned, "
            "or do not donate it (donate_argnums)"
        )


class Runner:
    """A planned step, jitted: called, lowered and inspected like the function that `jax.jit` returns.

    Arguments lie where the plan has them, or are moved there; nnx objects among them are changed in place, as under `nnx.jit`.
    """

    def __init__(self, flat: Any, step: Callable[..., Any], traced: Traced, donated: Sequence[int], leaves: Leaves) -> None:
        self._flat, self._step, self._traced, self._donated, self._fit = flat, step, traced, donated, leaves
        self._results = {traced.in_tree: traced.out_tree}

    def __call__(self, *args: Any) -> Any:
        """Runs the step.

        Raises:
            ArgumentError: for an argument of another shape or dtype than was planned.
            ShardplanError: for arguments of another structure, or for deleted ones.
        """
        leaves, tree = jax.tree.flatten(args)
        if self._results.get(tree) is None and has_objects(args):
            return through(args, self.run)
        return self.run(leaves, tree)[0]

    def run(self, leaves: Sequence[Any], tree: Any) -> tuple[Any, Sequence[Any]]:
        """Runs the step on leaves of arguments taken apart: (what the traced step returns, the leaves as they were placed)."""
        results = self._results.get(tree)
        if results is None:
            results = self._results[tree] = self._adopted(tree)
        self._fit.fit(leaves)
        placed = self._fit.placed(leaves)
        return results.unflatten(self._flat(*placed)), placed

    def lower(self, *args: Any) -> Any:
        """The step lowered for these arguments, to compile or to read."""
        leaves, tree = jax.tree.flatten(apart(args))
        if tree not in self._results:
            self._results[tree] = self._adopted(tree)
        self._fit.fit(leaves)
        return self._flat.lower(*leaves)

    def _cache_size(self) -> int:
        """How many entries the call cache holds, as of a jitted function."""
        return self.cache_size()

    def cache_size(self) -> int:
        """How many entries the call cache holds: one for each combination of shapes, dtypes and shardings."""
        return _jax.compilations(self._flat)

    def _adopted(self, tree: Any) -> Any:
        """The tree of the results for arguments whose static parts are other objects than at planning, but do the same."""
        count = tree.num_leaves
        check_tree(tree, self._traced, self._step)
        again = trace_step(self._step, jax.tree.unflatten(tree, self._traced.in_shapes[:count]), self._donated)
        odd = difference(self._traced, again)
        if odd:
            raise ShardplanError(
                "what is static in these arguments (a module's mode, an optimizer's settings, functions) makes another program "
                f"than the one that was planned: they differ first at {odd}; plan for these arguments"
            )
        return again.out_tree


def check_tree(tree: Any, traced: Traced, step: Callable[..., Any]) -> None:
    """Passes where a tree of arguments has the leaves that were planned, static parts aside.

    Raises:
        ShardplanError: where it has others, with the first of them.
    """
    found, planned = leaf_paths(tree, step), leaf_paths(traced.in_tree, step)
    for a, b in itertools.zip_longest(found, planned):
        if a != b:
            what = f"{b} is missing" if a is None else f"{a} is not in it" if b is None else f"{a} stands in place of {b}"
            raise ShardplanError(f"the plan was made for arguments of another structure: {what}; plan for these arguments")


def leaf_paths(tree: Any, step: Callable[..., Any]) -> list[str]:
    """The path of every leaf of a tree of arguments, as plans name them."""
    args = jax.tree.unflatten(tree, range(tree.num_leaves))
    names = _jax.argument_names(step, len(args))
    found: list[str] = []
    for (first, *rest), _ in jax.tree_util.tree_leaves_with_path(args):
        found.append("/".join([names[first.idx], *path_words(rest)]))
    return found


def shape_text(shape: Any) -> str:
    """``float32[512, 2048]``."""
    return f"{shape.dtype}{list(shape.shape)}"
