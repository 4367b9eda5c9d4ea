"""A planned step, jitted, and its checks: arguments must have the planned types, and are moved to the planned devices."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.export
from jax.core import Tracer
from jax.sharding import NamedSharding

from shardplan import _jax
from shardplan.errors import ArgumentError, ShardplanError
from shardplan.frontend.argnums import leaves_of
from shardplan.frontend.deleted import deleted_error, is_deleted
from shardplan.frontend.keywords import ordered, taking
from shardplan.frontend.nnx_state import abstract, apart, has_objects, through, trace_step
from shardplan.frontend.trace import Traced, path_words
from shardplan.plans.fingerprint import difference
from shardplan.plans.jit_stages import LoweredStep, TracedStep, Trees, compiled


class Leaves:
    """The planned types and shardings of arguments' leaves: checks leaves, and moves them to the planned devices.

    With ``weak``, leaves must be weakly typed (as Python numbers are) exactly where the planned ones were. A leaf with the type
    and the sharding of the last call costs next to nothing. ``put`` moves a leaf to a sharding.
    """

    def __init__(
        self,
        paths: Sequence[str],
        shapes: Sequence[Any],
        shardings: Sequence[NamedSharding],
        *,
        weak: bool = False,
        put: Callable[[Any, NamedSharding], Any] = jax.device_put,
    ) -> None:
        self._paths, self._shapes, self._shardings, self._weak, self._put = paths, shapes, shardings, weak, put
        self._size = shardings[0].mesh.size if shardings else 0
        self._seen_avals: list[Any] = [None] * len(paths)  # of the last call
        self._seen_shardings: list[Any] = [None] * len(paths)

    @property
    def devices(self) -> int:
        """The number of devices of their mesh; 0 without leaves."""
        return self._size

    @property
    def shardings(self) -> list[NamedSharding]:
        """The planned shardings."""
        return list(self._shardings)

    def part(self, numbers: Sequence[int]) -> Leaves:
        """The `Leaves` with these numbers."""
        shapes, shardings = [self._shapes[i] for i in numbers], [self._shardings[i] for i in numbers]
        return Leaves([self._paths[i] for i in numbers], shapes, shardings, weak=self._weak, put=self._put)

    def fit(self, leaves: Sequence[Any]) -> None:
        """Checks that every leaf has its planned type; leaves may be `jax.ShapeDtypeStruct`.

        Raises:
            ArgumentError: for a leaf of another type.
            ShardplanError: for a leaf that was donated to an earlier call.
        """
        seen_avals, array_class = self._seen_avals, _jax.array_type()
        for i, x in enumerate(leaves):
            if type(x) is array_class:
                if x.aval is not seen_avals[i]:
                    self._check_leaf(i, x)
                    seen_avals[i] = x.aval
                if x.is_deleted():
                    raise deleted_error(self._paths[i])
            else:
                self._check_leaf(i, x)
                if is_deleted(x):
                    raise deleted_error(self._paths[i])

    def check_donated(self, leaves: Sequence[Any], donated: Collection[int]) -> None:
        """Refuses an array that is given twice and donated: XLA refuses it on some devices and waits on the others.

        Raises:
            ShardplanError: with both paths.
        """
        first: dict[int, int] = {}
        for i, x in enumerate(leaves):
            j = first.setdefault(id(x), i)
            if j != i and (i in donated or j in donated) and isinstance(x, jax.Array) and not isinstance(x, Tracer):
                raise ShardplanError(
                    f"{self._paths[j]} and {self._paths[i]} are the same array, which is donated: pass a copy of it "
                    "(jnp.copy) as one of them, or do not donate it (donate_argnums)"
                )

    def check_context(self) -> None:
        """Refuses to run where the user has set a mesh of another size: JAX does so, in words about its own insides.

        Raises:
            ShardplanError: where such a mesh is set.
        """
        context = jax.sharding.get_abstract_mesh()
        if not context.empty and self._size not in (0, context.size):
            raise ShardplanError(
                f"jax.set_mesh has set a mesh of {context.size} devices, and the plan runs on {self._size}: call the step "
                "outside, or under jax.set_mesh(plan.mesh())"
            )

    def placed(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves on their planned devices; tracers and shapes stay as they are."""
        moved, seen_shardings, array_class = list(leaves), self._seen_shardings, _jax.array_type()
        for i, x in enumerate(leaves):
            if type(x) is array_class:
                if x.sharding is not seen_shardings[i]:
                    if x.sharding.is_equivalent_to(self._shardings[i], x.ndim):
                        seen_shardings[i] = x.sharding
                    else:
                        moved[i] = self._put(x, self._shardings[i])
            elif not isinstance(x, Tracer | jax.ShapeDtypeStruct):
                in_place = isinstance(x, jax.Array) and x.sharding.is_equivalent_to(self._shardings[i], x.ndim)
                moved[i] = x if in_place else self._put(x, self._shardings[i])
        return moved

    def abstract(self, leaves: Sequence[Any]) -> list[Any]:
        """The types and shardings of leaves once `placed`, wherever they lie now: a call runs what is compiled for them."""
        types = [(x, abstract(x), sharding) for x, sharding in zip(leaves, self._shardings, strict=True)]
        return [
            x if own is None else jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=sharding, weak_type=own.weak_type)
            for x, own, sharding in types
        ]

    def _check_leaf(self, i: int, x: Any) -> None:
        found, planned = abstract(x), self._shapes[i]
        if found is None or (found.shape, found.dtype) != (planned.shape, planned.dtype):
            raise ArgumentError(self._paths[i], shape_text(planned), shape_text(found) if found is not None else type(x).__name__)
        if self._weak and found.weak_type != planned.weak_type:
            raise ArgumentError(self._paths[i], f"{shape_text(planned)}, weak={planned.weak_type}", f"weak={found.weak_type}")


class FlatStep(Protocol):
    """A step on flat leaves."""

    def __call__(self, *leaves: Any) -> list[Any]:
        """The flat results."""
        ...

    def trace(self, *leaves: Any) -> Any:
        """The function as `jax.stages.Traced`."""
        ...

    def cache_size(self) -> int:
        """The number of entries in the call caches."""
        ...


class Flat:
    """A function of flat leaves, jitted with compiler options. JAX takes these of the outermost `jax.jit` alone, so a call inside
    another jitted function goes without them.
    """

    def __init__(self, run: Callable[..., Any], options: Mapping[str, Any], **jitted: Any) -> None:
        self._outermost = jax.jit(run, **jitted, compiler_options=dict(options) or None)
        self._inside = jax.jit(run, **jitted) if options else self._outermost

    def __call__(self, *leaves: Any) -> list[Any]:
        """The flat results."""
        return compiled(self._function(), *leaves)

    def trace(self, *leaves: Any) -> Any:
        """The function as `jax.stages.Traced`."""
        return self._function().trace(*leaves)

    def cache_size(self) -> int:
        """The number of entries in the call caches."""
        functions = {id(f): f for f in (self._outermost, self._inside)}
        return sum(map(_jax.compilations, functions.values()))

    def exported(self, leaves: Sequence[Any], platform: str | None) -> bytes:
        """The function for leaves of these types as a serialized `jax.export.Exported`, for a platform, by default its devices'.

        Raises:
            ShardplanError: for a program that JAX cannot export, and where the package flatbuffers is not installed.
        """
        try:
            # without compiler options, which are not part of an export
            return bytes(jax.export.export(self._inside, platforms=platform and [platform])(*leaves).serialize())
        except ImportError as error:
            raise ShardplanError("JAX needs flatbuffers to export a step: pip install 'shardplan[export]'") from error
        except (ValueError, NotImplementedError) as error:
            raise ShardplanError(f"JAX cannot export this step: {error}") from error

    def _function(self) -> Any:
        return self._outermost if _jax.is_outermost() else self._inside


class Runner:
    """A planned step, jitted: it is called, lowered and inspected like the function that `jax.jit` returns.

    Arguments with another sharding are moved to the planned one. nnx objects are updated in place, as under `nnx.jit`.
    """

    def __init__(self, flat: FlatStep, step: Callable[..., Any], traced: Traced, donated: Sequence[int], leaves: Leaves) -> None:
        self._flat, self._step, self._traced, self._donated, self._fit = flat, step, traced, donated, leaves
        self._ordered = partial(ordered, step)
        self._results = {traced.in_tree: traced.out_tree}
        self._donated_leaves = frozenset(leaves_of(traced.in_tree, donated))
        self.__wrapped__, self.__name__ = step, getattr(step, "__name__", "step")

    def __repr__(self) -> str:
        return f"<{self.__name__}, planned for {self._fit.devices} devices>"

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the step.

        Raises:
            ArgumentError: for an argument of another shape or dtype than was planned.
            ShardplanError: for arguments of another structure, given by name, or deleted, for a donated array that is given
                twice, and where another mesh is set.
        """
        return self._call(self._flat, *args, **named)

    def _call(self, flat: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The step's result from a jitted or compiled function of flat leaves."""
        args = self._ordered(args, named)
        leaves, tree = jax.tree.flatten(args)
        if self._results.get(tree) is None and has_objects(args):
            return through(args, lambda leaves, tree: self._run(flat, leaves, tree))
        return self._run(flat, leaves, tree)[0]

    def taking(self, count: int, names: Sequence[str]) -> Runner:
        """The same, called with ``count`` arguments by position and others by these ``names``, which are the step's last."""
        other = copy.copy(self)
        other._ordered = partial(ordered, taking(count, names))
        return other

    def run(self, leaves: Sequence[Any], tree: Any) -> tuple[Any, Sequence[Any]]:
        """Runs the step on the leaves of flattened arguments: (the result of the traced step, the leaves as placed)."""
        return self._run(self._flat, leaves, tree)

    def _run(self, flat: Callable[..., Any], leaves: Sequence[Any], tree: Any) -> tuple[Any, Sequence[Any]]:
        results = self._checked(leaves, tree)
        if self._donated_leaves and len(set(map(id, leaves))) < len(leaves):
            self._fit.check_donated(leaves, self._donated_leaves)
        placed = self._fit.placed(leaves)
        return results.unflatten(flat(*placed)), placed

    def trace(self, *args: Any, **named: Any) -> TracedStep:
        """The step traced for these arguments (arrays or shapes), to lower or inspect it."""
        leaves, tree = jax.tree.flatten(apart(self._ordered(args, named)))
        trees = Trees(tree, self._checked(leaves, tree))
        return TracedStep(self._flat.trace(*self._fit.abstract(leaves)), trees, self._call)

    def traced_programs(self, *args: Any, **named: Any) -> list[Any]:
        """The programs that a step runs, traced: one."""
        return [self.trace(*args, **named)]

    def lower(self, *args: Any, **named: Any) -> LoweredStep:
        """The step lowered for these arguments (arrays or shapes); the result of its ``.compile()`` is called like the step."""
        return self.trace(*args, **named).lower()

    def eval_shape(self, *args: Any, **named: Any) -> Any:
        """The shapes and dtypes of the step's result."""
        return self.trace(*args, **named).out_info

    def exported(self, platform: str | None = None) -> bytes:
        """The step of flat leaves as a serialized `jax.export.Exported` (`Flat.exported`)."""
        assert isinstance(self._flat, Flat), "a step of several programs"
        return self._flat.exported(self._traced.in_shapes, platform)

    def _checked(self, leaves: Sequence[Any], tree: Any) -> Any:
        """The tree of the results, once the leaves are known to have their planned types."""
        results = self._results.get(tree)
        if results is None:
            results = self._results[tree] = self._result_tree(tree)
        self._fit.fit(leaves)
        self._fit.check_context()
        return results

    def _cache_size(self) -> int:
        """`cache_size`, by the name that it has on a jitted function."""
        return self.cache_size()

    def cache_size(self) -> int:
        """The number of entries in the call cache: one for each combination of shapes, dtypes and shardings."""
        return self._flat.cache_size()

    def _result_tree(self, tree: Any) -> Any:
        """The tree of the results for arguments whose static parts are not the objects of planning, but act the same."""
        count = tree.num_leaves
        check_tree(tree, self._traced, self._step)
        retraced = trace_step(self._step, jax.tree.unflatten(tree, self._traced.in_shapes[:count]), self._donated)
        first_difference = difference(self._traced, retraced)
        if first_difference:
            raise ShardplanError(
                "the static parts of these arguments (a module's mode, an optimizer's settings, functions) make another program "
                f"than the one that was planned: they differ first at {first_difference}; plan for these arguments"
            )
        return retraced.out_tree


def check_tree(tree: Any, traced: Traced, step: Callable[..., Any]) -> None:
    """Checks that a tree of arguments has the planned leaves; static parts may differ.

    Raises:
        ShardplanError: if it does not, with the first difference.
    """
    if what := structure_difference(tree, traced, step):
        raise ShardplanError(f"the plan was made for arguments of another structure: {what}; plan for these arguments")


def structure_difference(tree: Any, traced: Traced, step: Callable[..., Any]) -> str:
    """The first difference of a tree of arguments from the planned one, as text; empty if it has the planned leaves."""
    found, planned = leaf_paths(tree, step), leaf_paths(traced.in_tree, step)
    if found == planned:
        return ""
    here, there = set(found), set(planned)
    missing = next((path for path in planned if path not in here), None)
    other = next((path for path in found if path not in there), None)
    match missing, other:
        case None, None:
            return "they come in another order, or twice"
        case _, None:
            return f"{missing} is missing"
        case None, _:
            return f"{other} is not in the plan"
        case _:
            return f"{other} stands in place of {missing}"


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
