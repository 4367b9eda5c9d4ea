# pyright: basic
"""A user's own descriptions of primitives, ``custom_vjp`` functions, Pallas kernels and FFI calls."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardplan import _jax
from shardplan.errors import DescriptionError, nearest
from shardplan.tdl import localize
from shardplan.tdl.cut_proof import draw_array, verify
from shardplan.tdl.describe import (
    describe,
    named_call,
    put_back,
    recognised_by,
    rule,
    rule_of,
)
from shardplan.tdl.description import (
    Call,
    Description,
    Lambda,
    RuleFunction,
    described_at,
    failed,
)
from shardplan.tdl.identity import same_function, same_kernel
from shardplan.tdl.index import Affine, Data, Full, Loop, interval
from shardplan.tdl.language import Recorder, TensorRef, lambda_names
from shardplan.tdl.strategies import cuts
from shardplan.user_code import users_code

Function = Callable[..., Any]
_FUNCTIONS = ("jit:", "custom_vjp_call:", "custom_jvp_call:")


def register(target: Any, *, example: Sequence[Any] | None = None, run: Function | None = None) -> Callable[[Function], Function]:
    """Registers a TDL description: ``function(*operands)`` returns a lambda over the result's indices, or one for each result.

    ``target`` is a primitive or its name, a ``custom_vjp``, ``custom_jvp`` or ``jit`` function, ``"pallas_call:NAME"`` or
    ``"ffi_call:TARGET"``.

    The description is proven at once: every legal cut is run on the shapes of ``example``, a list of the target's arguments
    (arrays or `jax.ShapeDtypeStruct`, nested as the target takes them; the operands are their leaves). Without an example, small
    float32 arrays are tried.

    ``run(*operands)`` is what a worker runs in place of the target. For a kernel or a primitive it runs on every block (a
    primitive's parameters come by keyword). For a function it runs only on blocks with a halo, which the operands include; it is
    proven if a cut of the example has a halo.

    Differentiation replaces a ``custom_vjp`` function by its forward and backward functions: register those too, as ``jit``
    functions.

    Raises:
        DescriptionError: if the description does not fit the example's shapes, or a cut's result differs from the uncut one.
    """
    name, own = target_of(target)
    if own is None and name.startswith(_FUNCTIONS):
        raise DescriptionError("register the function itself, not its name, which other functions may share", expression=name)
    if example is not None and not isinstance(example, list | tuple):
        raise DescriptionError(
            f"the example of {name} must be a list of its arguments, even of one", expression=f"example={type(example).__name__}"
        )
    if name == "pallas_call:?":
        raise DescriptionError("all kernels without a name share this one; name yours: pallas_call(..., name=)", expression=name)
    if own is None and run is None and name.startswith("pallas_call:"):
        raise DescriptionError(
            f"{name} is compiled for its whole shape; say how a worker runs it on its block", expression="run="
        )

    def accept(function: Function) -> Function:
        """Registers a description, proves it on the example, and removes it if the proof fails."""
        names = (name, f"{name}{localize.HALO}")
        old = {n: rule_of(n) for n in names}
        rule(*names)(_as_rule(function))
        whole = own or run if ":" in name else run or own  # a primitive alone would lack its parameters in the proof
        undo, called = _no_undo, None
        if whole is not None:
            tree = None if example is None else jax.tree.structure(tuple(example))
            called = _of_leaves(whole, tree)
            undo = localize.run_as(name, called, beyond=None if run is None else _of_leaves(run, tree))
        try:
            known = run or getattr(target, "impl", None)
            sample = example if example is not None or whole is None else _small_example(name, whole, known, function)
            if sample is not None:
                _prove(name, whole, sample, halo=run is not None and (own is not None or example is None))
        except DescriptionError:
            undo()
            for n, before in old.items():
                put_back(n, before)
            raise
        if whole is not None and called is not None:
            _warn_if_replaced(name, whole, replaced=old[name] is not None)
            _recognise(name, called)
        return function

    return accept


def _as_rule(function: Function) -> RuleFunction:
    """A user's description as a rule; the call is its first parameter, also in its signature."""

    def read(call: Call, *operands: TensorRef) -> Lambda | tuple[Lambda, ...]:
        return function(*operands)

    own = inspect.signature(function)
    of_call = inspect.Parameter("call", inspect.Parameter.POSITIONAL_ONLY)
    read.__wrapped__ = function  # type: ignore[attr-defined]
    read.__signature__ = own.replace(parameters=[of_call, *own.parameters.values()])  # type: ignore[attr-defined]
    return read


def _no_undo() -> None:
    """Does nothing: there is nothing to undo."""


def target_of(target: Any) -> tuple[str, Function | None]:
    """The target's name, and the function that evaluates it whole, if that is known."""
    if isinstance(target, str):
        known = _jax.primitives()
        if ":" not in target and target not in known:
            raise DescriptionError(
                f"the installed JAX has no such primitive{nearest(target, sorted(known))}; register a primitive of your "
                "own as an object, not by its name",
                expression=repr(target),
            )
        return target, None
    if isinstance(target, jax.custom_vjp):
        return f"custom_vjp_call:{target.__name__}", target
    if isinstance(target, jax.custom_jvp):
        return f"custom_jvp_call:{target.__name__}", target
    if hasattr(target, "trace") and hasattr(target, "lower"):
        return f"jit:{target.__name__}", target
    if hasattr(target, "bind") and hasattr(target, "name"):
        return target.name, target.bind
    raise DescriptionError(
        "a description is registered for a primitive, a custom_vjp or jit function, or a name", expression=repr(target)
    )


def _recognise(name: str, function: Function) -> None:
    """Applies the description only to calls of this function, not to those of others with the same name."""
    if name.startswith("pallas_call:"):

        def same(params: Any, operands: Sequence[Any]) -> bool:
            return _leaves_its_operands(name, params, operands) or same_kernel(function, name, params, operands)

        recognised_by(name, same)
    elif ":" in name and not name.startswith("ffi_call:"):
        recognised_by(name, lambda body, operands: same_function(function, name, body, operands))


def _leaves_its_operands(name: str, params: Any, operands: Sequence[Any]) -> bool:
    """Whether a kernel's indices leave its operands: its ``run`` then takes halos, and other shapes than the kernel's own."""
    ins, outs = (tuple(tuple(x.shape) for x in avals) for avals in (operands, params["out_avals"]))
    try:
        description = describe(Call(name, ins, outs, {}, tuple(str(x.dtype) for x in operands)))
        assert description is not None
        check_ranges(description)
    except DescriptionError:
        return True
    return False


_TARGETS: dict[str, Function] = {}


def _warn_if_replaced(name: str, whole: Function, *, replaced: bool) -> None:
    if ":" in name and replaced and _TARGETS.get(name, whole) is not whole:
        warnings.warn(
            f"{name} was registered for another function, which is no longer described: give each a name of its own", stacklevel=3
        )
    _TARGETS[name] = whole


def _of_leaves(function: Function, tree: Any) -> Function:
    """The function as a program calls it: on the leaves of its arguments, with a primitive's parameters by keyword."""
    return lambda *leaves, **params: function(*(leaves if tree is None else jax.tree.unflatten(tree, leaves)), **params)


def _check_operand_count(name: str, runs: Function | None, function: Function) -> None:
    """Checks that ``runs``, which is called on single operands, takes at least as many as are described.

    Raises:
        DescriptionError: naming the parameters that it takes, if its signature is known and has fewer.
    """
    described = list(inspect.signature(function).parameters)
    try:
        known = inspect.signature(runs) if runs is not None else None
    except (TypeError, ValueError):
        return
    if known is None or _accepts(known, len(described)):
        return
    raise DescriptionError(
        f"{name} takes ({', '.join(known.parameters)}), but its description takes {len(described)} operands",
        expression=f"({', '.join(described)}), {described_at(function)}",
    )


def _accepts(known: inspect.Signature, count: int) -> bool:
    """Whether a function of this signature takes ``count`` operands; other parameters may come by keyword."""
    try:
        known.bind_partial(*[None] * count)
    except TypeError:
        return False
    return True


def _small_example(name: str, whole: Function, known: Function | None, function: Function) -> list[Any] | None:
    """Small arrays of the ranks that a description reads; None, with a warning, if a rank is unknown or the target refuses them.

    ``known`` takes the operands one by one, so its signature tells their number.
    """
    _check_operand_count(name, known, function)
    with users_code(lambda error: failed(name, function, error, lambdas=False)):
        ranks = _ranks(name, function)
    unknown = [p for p, rank in zip(inspect.signature(function).parameters, ranks, strict=True) if rank is None]
    if unknown:
        why = f"it does not say of which rank {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'}"
        warnings.warn(f"the description of {name} is not proven: give an example= ({why})", stacklevel=3)
        return None
    example = [jax.ShapeDtypeStruct((_SMALL,) * rank, np.float32) for rank in ranks if rank is not None]
    try:
        jax.eval_shape(whole, *example)
    except (TypeError, ValueError, NotImplementedError, IndexError) as error:
        message = str(error).strip().splitlines()[0]
        shapes = ", ".join(str(x.shape) for x in example)
        why = f"float32 arrays of shape {shapes} are not taken: {type(error).__name__}: {message}"
        warnings.warn(f"the description of {name} is not proven: give an example= ({why})", stacklevel=3)
        return None
    return example


_SMALL = 6


def _ranks(name: str, function: Function) -> tuple[int | None, ...]:
    """The number of indices with which each operand is read; None for one that is never read.

    Raises:
        DescriptionError: if the description returns something other than lambdas.
    """
    count = len(inspect.signature(function).parameters)
    result: tuple[int | None, ...] = ()
    for rank in range(5):
        refs = [_Probe(i) for i in range(count)]
        with Recorder() as recorder:
            bodies = function(*refs)
            for body in bodies if isinstance(bodies, tuple) else (bodies,):
                if not callable(body):
                    what = f"operand {body.position}" if isinstance(body, _Probe) else repr(body)
                    raise DescriptionError(
                        f"{name}: a description returns a lambda for each result", expression=f"{what}, {described_at(function)}"
                    )
                names = [str(n) for n in lambda_names(body, rank)]
                recorder.parallel.update({n: recorder.loop(n, None, _SMALL) for n in names if n not in recorder.parallel})
                body(*(Loop(Affine(((recorder.parallel[n], 1),))) for n in names))
        result = tuple(ref.rank for ref in refs)
        if None not in result:
            break
    return result


class _Probe:
    """An operand of unknown rank; it records the number of indices with which it is read."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.rank: int | None = None

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        self.rank = len(keys)
        return TensorRef(self.position, (_SMALL,) * len(keys))[keys]


def _prove(name: str, whole: Function | None, example: Sequence[Any], *, halo: bool) -> None:
    """Runs every legal cut on the example. ``halo``: workers run on blocks with halos, so an index may leave its operand."""
    rng = np.random.default_rng(0)
    if whole is None:
        raise DescriptionError(f"{name}: give run=, which runs the example")
    leaves = [x if hasattr(x, "dtype") else np.asarray(x) for x in jax.tree.leaves(tuple(example))]
    operands = [draw_array(tuple(x.shape), str(x.dtype), rng) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
    try:
        shaped = jax.tree.leaves(jax.eval_shape(whole, *example))
    except (TypeError, ValueError) as error:
        remedy = "" if ":" in name else " (a primitive with parameters needs run=, which has values for them)"
        if ":" in name and len(leaves) > sum(hasattr(x, "dtype") for x in jax.tree.leaves(tuple(example))):
            remedy = " (bind static arguments in a jax.jit function of the others and register that function)"
        raise DescriptionError(
            f"{name} does not take the example{remedy}", expression=str(error).strip().splitlines()[0]
        ) from error
    call = Call(
        name,
        tuple(tuple(x.shape) for x in operands),
        tuple(tuple(x.shape) for x in shaped),
        {},
        tuple(str(x.dtype) for x in operands),
        tuple(str(x.dtype) for x in shaped),
    )
    description = describe(call)
    assert description is not None
    if not halo:
        check_ranges(description)
    try:
        result = verify(call, operands)
    except (TypeError, ValueError) as error:
        message = str(error).splitlines()[0]
        raise DescriptionError(f"{name} refuses the regions that its description names", expression=message) from error
    if result.faults:
        fault = result.faults[0]
        loops = " then ".join(description.loops[s.loop].name for s in fault.strategies) or "nothing (linearity)"
        raise DescriptionError(
            f"the description of {name} does not hold on the example, cut along {loops} (a loop that must stay whole is written "
            f"behind Opaque(), in brackets)",
            expression=str(fault),
        )
    _warn_unproven(name, description)
    if halo and ":" in name and not any(s.has_halo for k in (2, 3) for s in cuts(description, k)):
        warnings.warn(
            f"run= of {name} is neither used nor proven: a worker calls the function itself, except on blocks with a halo, and "
            "no cut of the example has one",
            stacklevel=3,
        )


def _warn_unproven(name: str, description: Description) -> None:
    """Warns of loops that the proof does not cut: it cuts 2 and 3 ways, and neither divides their extents."""
    unproven = [
        f"{x.name} ({x.extent})"
        for x in description.loops
        if not x.whole and not any(x.extent >= k and x.extent % k == 0 for k in (2, 3))
    ]
    if unproven:
        warnings.warn(
            f"the description of {name} is not proven along {', '.join(unproven)}: no cut 2 or 3 ways divides that; "
            "give an example= where one does",
            stacklevel=4,
        )


def check_ranges(description: Description) -> None:
    """Checks that every index stays inside its operand's dim.

    Raises:
        DescriptionError: naming the operand, the dim and the range that the index sweeps.
    """
    extents = {i: loop.extent for i, loop in enumerate(description.loops)}
    for operand, indices in description.accesses:
        for dim, ix in enumerate(indices):
            at = interval(ix, extents, -1, 1)
            size = description.call.operands[operand][dim]
            if size > 1 and at is not None and not isinstance(ix, Full | Data) and (at.lo < 0 or at.hi >= size):
                raise DescriptionError(
                    f"{description.call.primitive}: operand {operand} has {size} elements along dim {dim}, "
                    f"its index runs from {at.lo} to {at.hi}"
                )


__all__ = ["check_ranges", "named_call", "register"]
