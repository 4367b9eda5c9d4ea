"""nnx objects around a step: split into arrays before it, updated in place after it, as `nnx.jit` does.

All arguments are split together, so an object that several of them share is one object inside the step too. Everything but
arrays (train or eval mode, an optimizer's transformation) is static: it belongs to the tree structure of the arguments, and the
step's changes to it come back in the tree structure of the result. An `nnx.State` is a tree of arrays, as for `jax.jit`: changes
to it come back only where the step returns it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import DictKey

from shardplan import _jax
from shardplan.errors import TraceError
from shardplan.frontend.trace import HIDDEN, Traced, trace

_TAG = "shardplan"


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class SplitObject:
    """An object split into arrays: ``value`` is the tree of its arrays, ``graph`` everything else, which is static."""

    graph: Any
    value: Any

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], Any]:
        """As JAX asks for it."""
        return ((HIDDEN, self.value),), self.graph

    @classmethod
    def tree_unflatten(cls, graph: Any, children: Sequence[Any]) -> SplitObject:
        """As JAX asks for it."""
        return cls(graph, children[0])


@jax.tree_util.register_static
@dataclass(frozen=True, slots=True)
class Same:
    """Stands for an array that the step left unchanged: leaf ``index`` of the arguments."""

    index: int


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, slots=True)
class StepResult:
    """The return value of a step with objects: its result, and by argument name the objects there (None for other leaves)."""

    result: Any
    objects: Mapping[str, Any]

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], tuple[Any, Any]], None]:
        """As JAX asks for it."""
        return ((HIDDEN, self.result), (HIDDEN, self.objects)), None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Any]) -> StepResult:
        """As JAX asks for it."""
        return cls(*children)


def is_object(value: Any) -> bool:
    """Whether nnx updates a value in place: a module, an optimizer, a metric, random streams, a variable by itself."""
    return isinstance(value, nnx.Variable) or nnx.graphlib.is_graph_node(value)


def has_objects(args: Any) -> bool:
    """Whether a tree holds an object anywhere."""
    return any(is_object(x) for x in jax.tree.leaves(args, is_leaf=_stops))


def apart(args: Any) -> Any:
    """The arguments with each object as `SplitObject`; unchanged if there are no objects."""
    if not has_objects(args):
        return args
    with nnx.update_context(_TAG):
        return _split(args)


def together(args: Any) -> Any:
    """The arguments with new objects in place of `SplitObject`; shared parts are shared again."""
    with nnx.update_context(_TAG):
        return _merged(args, inner=True)


def bare(tree: Any, leaves: Sequence[Any]) -> Any:
    """A tree without wrappers: `StepResult` becomes its result, `SplitObject` its values, and `Same` its entry of ``leaves``."""
    tree = _unchanged(tree.result if isinstance(tree, StepResult) else tree, leaves)
    return jax.tree.map(lambda x: x.value if isinstance(x, SplitObject) else x, tree, is_leaf=_held)


def through(args: Any, run: Callable[[list[Any], Any], tuple[Any, Sequence[Any]]]) -> Any:
    """The step's result from ``run(leaves, tree)`` on the split arguments; updates the objects among them in place.

    ``run`` returns the return value of a `Pure` step, and the leaves that it used.
    """
    with nnx.update_context(_TAG):
        leaves, tree = jax.tree.flatten(_split(args))
        stepped, used = run(leaves, tree)
        return _merged(_unchanged(stepped, used), inner=False).result


class Pure:
    """A step on split arguments: it returns `StepResult` where there are objects among them, else the step's own result.

    Object arrays that the step leaves unchanged are not returned, except those of the arguments ``donated``.
    """

    def __init__(self, step: Callable[..., Any], donated: Sequence[int] = ()) -> None:
        functools.update_wrapper(self, step, updated=())
        self._step, self._donated = step, frozenset(donated)

    def __repr__(self) -> str:
        """The step's name, as JAX's errors give it."""
        return getattr(self._step, "__qualname__", type(self._step).__name__)

    def __call__(self, *args: Any) -> Any:
        """Runs the step."""
        leaves = jax.tree.leaves(args)
        if not any(isinstance(x, SplitObject) for x in jax.tree.leaves(args, is_leaf=_held)):
            return self._step(*args)
        with nnx.update_context(_TAG):
            with nnx.split_context(_TAG):  # the outer half of the update is in `through`
                pass
            whole = _merged(args, inner=True)
            result = self._step(*whole)
            names = _jax.argument_names(self._step, len(args))
            with nnx.split_context(_TAG) as context:
                result = _split_by(context, result)
                objects = _split_by(context, _objects(whole))
        kept = [i for i, n in enumerate(_arguments(args)) if n not in self._donated]
        known = {id(leaves[i]): Same(i) for i in kept}
        stepped = StepResult(result, dict(zip(names, objects, strict=True)))
        return jax.tree.map(lambda x: _marked(x, known) if isinstance(x, SplitObject) else x, stepped, is_leaf=_held)


def trace_step(step: Callable[..., Any], args: Sequence[Any], donated: Sequence[int] = ()) -> Traced:
    """Traces a step on arguments that may hold objects, whole or split; the arrays of an object feed back into it.

    Raises:
        TraceError: if the step is no function, if an argument holds anything but arrays, or if the step fails on these shapes.
    """
    if not callable(step):
        raise TraceError(f"the step is {step!r}, a value of type {type(step).__name__}: give the function that runs a train step")
    args = jax.tree_util.tree_map_with_path(lambda path, x: _abstract(step, path, x), apart(tuple(args)))
    traced = trace(Pure(step, donated), *args, donate_argnums=donated)
    back = _feedback(step, traced)
    fed = {i for i in back if i is not None}
    program = traced.program
    feedback = tuple(i if i is not None else None if old in fed else old for i, old in zip(back, program.feedback, strict=True))
    return replace(traced, program=replace(program, feedback=feedback))


def abstract(leaf: Any) -> jax.ShapeDtypeStruct | None:
    """The shape and dtype of a leaf inside JAX; None for a leaf that is no array. Python numbers are weakly typed; 64-bit types
    become 32-bit ones unless JAX is told to keep them.
    """
    dtype: Any = getattr(leaf, "dtype", None)
    shape, weak = getattr(leaf, "shape", ()), getattr(leaf, "weak_type", False)
    if dtype is None and isinstance(leaf, bool | int | float | complex):
        dtype, shape, weak = jax.dtypes.scalar_type_of(leaf), (), True
    if dtype is None:
        return None
    try:
        if not jax.numpy.issubdtype(dtype, jax.dtypes.extended):
            if not _is_supported(np.dtype(dtype)):
                return None
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, weak_type=weak)
    except TypeError:
        return None


@functools.cache
def _is_supported(dtype: np.dtype[Any]) -> bool:
    """Whether JAX supports arrays of a NumPy dtype; it supports none of text, objects, dates or records."""
    try:
        jax.eval_shape(lambda x: x, np.zeros((), dtype))
    except TypeError:
        return False
    return True


def _abstract(step: Callable[..., Any], path: Sequence[Any], leaf: Any) -> Any:
    found = abstract(leaf)
    if found is None:
        names = _jax.argument_names(step, path[0].idx + 1)
        where = names[-1] + jax.tree_util.keystr(tuple(path[1:]))
        if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
            raise TraceError(
                f"{where} is a {type(leaf).__name__} of dtype {leaf.dtype}, which JAX has no arrays of: convert it to one of its "
                "dtypes, or close over it"
            )
        raise TraceError(
            f"{where} is a {type(leaf).__name__}, not an array: bind it with functools.partial (parallelize: static_argnums)"
        )
    return found


def _feedback(step: Callable[..., Any], traced: Traced) -> list[int | None]:
    """For each result the leaf of the arguments that it replaces, matched by its path in an object."""
    args = jax.tree.unflatten(traced.in_tree, range(traced.in_tree.num_leaves))
    if not any(isinstance(x, SplitObject) for x in jax.tree.leaves(args, is_leaf=_held)):
        return [None] * traced.out_tree.num_leaves
    names = _jax.argument_names(step, len(args))
    places = {(names[p[0].idx], *p[1:]): i for p, i in jax.tree_util.tree_leaves_with_path(args)}  # type: ignore[attr-defined]
    found: list[int | None] = []
    stepped = jax.tree.unflatten(traced.out_tree, range(traced.out_tree.num_leaves))
    found += [None] * len(jax.tree.leaves(stepped.result))
    for path, _ in jax.tree_util.tree_leaves_with_path(stepped.objects):
        assert isinstance(path[0], DictKey)
        found.append(places.get((path[0].key, *path[1:])))
    shapes = [(x.shape, x.dtype) for x in traced.in_shapes]
    same = [i is not None and shapes[i] == (o.shape, o.dtype) for i, o in zip(found, traced.out_shapes, strict=True)]
    return [i if fits else None for i, fits in zip(found, same, strict=True)]


def _arguments(args: Sequence[Any]) -> list[int]:
    """For each leaf the number of its argument."""
    return [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg)]


def _objects(args: Any) -> Any:
    return jax.tree.map(lambda x: x if is_object(x) else None, args, is_leaf=_stops)


def _split(args: Any) -> Any:
    with nnx.split_context(_TAG) as context:
        return _split_by(context, args)


def _split_by(context: Any, tree: Any) -> Any:
    return jax.tree.map(lambda x: SplitObject(*context.split(x)) if is_object(x) else x, tree, is_leaf=_stops)


def _merged(tree: Any, *, inner: bool) -> Any:
    with nnx.merge_context(_TAG, inner=inner) as context:
        return jax.tree.map(lambda x: context.merge(x.graph, x.value) if isinstance(x, SplitObject) else x, tree, is_leaf=_held)


def _marked(held: SplitObject, known: Mapping[int, Same]) -> SplitObject:
    return SplitObject(held.graph, jax.tree.map(lambda x: known.get(id(x), x), held.value))


def _unchanged(tree: Any, leaves: Sequence[Any]) -> Any:
    return jax.tree.map(lambda x: leaves[x.index] if isinstance(x, Same) else x, tree, is_leaf=lambda x: isinstance(x, Same))


def _stops(value: Any) -> bool:
    return isinstance(value, nnx.State | SplitObject) or is_object(value)


def _held(value: Any) -> bool:
    return isinstance(value, SplitObject)
