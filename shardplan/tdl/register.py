# pyright: basic
"""A user's own descriptions: a primitive, a ``custom_vjp`` function, a Pallas kernel or an FFI call, cut as its author says."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from shardplan.errors import DescriptionError
from shardplan.tdl import localize
from shardplan.tdl.describe import Call, Description, Lambda, describe, forget, named_call, rule, rule_of
from shardplan.tdl.index import Data, Full, interval
from shardplan.tdl.language import TensorRef
from shardplan.tdl.verify import draw_array, verify

Function = Callable[..., Any]
_NEED_RUN = ("pallas_call:", "jit:", "custom_vjp_call:", "custom_jvp_call:")


def register(target: Any, *, example: Sequence[Any] | None = None, run: Function | None = None) -> Callable[[Function], Function]:
    """Registers a TDL description: ``function(*operands)`` returns a lambda over the result's indices, or one for each result.

    ``target`` is a primitive or its name, a ``custom_vjp``, ``custom_jvp`` or ``jit`` function, or ``"pallas_call:NAME"`` and
    ``"ffi_call:TARGET"``. With ``example`` (arguments: arrays or `jax.ShapeDtypeStruct`, nested as the target takes them) the
    description, whose operands are their leaves, is proven at once: every legal cut is run on these shapes. ``run(*operands)``
    is what a worker runs on its blocks where that is not the target itself.

    Differentiation puts the forward and the backward function in place of a ``custom_vjp`` function: register those too, as
    ``jit`` functions.

    Raises:
        DescriptionError: if the description does not fit the example's shapes, or a cut does not give what the whole gives.
    """
    name, own = _target(target)
    own = run or own
    if own is None and name.startswith(_NEED_RUN):
        raise DescriptionError(
            f"{name} is compiled for its whole shape; say how a worker runs it on its block", expression="run="
        )
    if own is not None and example is not None:
        own = _of_leaves(own, example)

    def accept(function: Function) -> Function:
        def read(call: Call, *operands: TensorRef) -> Lambda | tuple[Lambda, ...]:
            return function(*operands)

        own_signature = inspect.signature(function)
        of_call = inspect.Parameter("call", inspect.Parameter.POSITIONAL_ONLY)
        read.__signature__ = own_signature.replace(parameters=[of_call, *own_signature.parameters.values()])
        old = rule_of(name)
        rule(name)(read)
        if own is not None:
            localize.run_as(name, own)
        if example is not None:
            try:
                _prove(name, own, example)
            except DescriptionError:
                forget(name, restore=old)
                raise
        return function

    return accept


def _target(target: Any) -> tuple[str, Function | None]:
    if isinstance(target, str):
        return target, None
    if isinstance(target, jax.custom_vjp):
        return f"custom_vjp_call:{target.__name__}", target
    if isinstance(target, jax.custom_jvp):
        return f"custom_jvp_call:{target.__name__}", target
    if hasattr(target, "trace") and hasattr(target, "lower"):
        return f"jit:{target.__name__}", target
    if hasattr(target, "bind") and hasattr(target, "name"):
        return target.name, _bind_of(target)
    raise DescriptionError(
        "a description is registered for a primitive, a custom_vjp or jit function, or a name", expression=repr(target)
    )


def _of_leaves(function: Function, example: Sequence[Any]) -> Function:
    """The function as it is called in a program: on the leaves of its arguments."""
    tree = jax.tree.structure(tuple(example))
    return lambda *leaves: function(*jax.tree.unflatten(tree, leaves))


def _bind_of(primitive: Any) -> Function:
    return lambda *operands: primitive.bind(*operands)


def _prove(name: str, own: Function | None, example: Sequence[Any]) -> None:
    rng = np.random.default_rng(0)
    leaves = jax.tree.leaves(tuple(example))
    operands = [draw_array(tuple(x.shape), str(x.dtype), rng) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
    if own is None:
        raise DescriptionError(f"{name}: an example is run by run=, which is missing")
    shaped = jax.tree.leaves(jax.eval_shape(own, *operands))
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
    check_ranges(description)
    try:
        found = verify(call, operands)
    except (TypeError, ValueError) as error:
        message = str(error).splitlines()[0]
        raise DescriptionError(f"{name} refuses the regions that its description names", expression=message) from error
    if found.faults:
        raise DescriptionError(f"the description of {name} does not hold on the example", expression=str(found.faults[0]))


def check_ranges(description: Description) -> None:
    """Every index stays inside its operand's dim.

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
