"""The registry of rules: which call goes by which name, and its description."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import wraps
from typing import Any

from shardplan.errors import DescriptionError, MisfitError
from shardplan.tdl import language as lang
from shardplan.tdl.description import (
    Call,
    Description,
    Lambda,
    LoopInfo,
    RuleFunction,
    read,
)

_RULES: dict[str, RuleFunction] = {}


def rule(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """Registers ``function(call, *operands)`` as the description of these primitives.

    It returns a lambda over the dims of the result, or one for each result; loops of the same name in several lambdas are the
    same loop.
    """

    def register(function: RuleFunction) -> RuleFunction:
        for name in primitives:
            _RULES[name] = function
        return function

    return register


def described() -> tuple[str, ...]:
    """The primitives that have a rule, sorted."""
    return tuple(sorted(_RULES))


def forget(primitive: str) -> None:
    """Takes a rule back, and how its calls are recognised."""
    _RULES.pop(primitive, None)
    _SAME.pop(primitive, None)


def put_back(primitive: str, older: RuleFunction | None) -> None:
    """Takes a rule back, and puts an older one in its place."""
    _RULES.pop(primitive, None)
    if older is not None:
        _RULES[primitive] = older


def rule_of(primitive: str) -> RuleFunction | None:
    """The rule that is registered for a primitive, or None."""
    return _RULES.get(primitive)


_RUN_BY_USER: set[str] = set()


def run_by_user(primitive: str) -> None:
    """Notes that a user has said how this primitive is run."""
    _RUN_BY_USER.add(primitive)


def is_named_call(primitive: str) -> bool:
    """Whether it calls a function that has a name of its own, as a kernel: ``pallas_call:flash``."""
    return ":" in primitive


def is_run_by_user(primitive: str) -> bool:
    """Whether a user has said how this primitive is run."""
    return primitive in _RUN_BY_USER


Same = Callable[[Any, Sequence[Any]], bool]
_SAME: dict[str, Same] = {}
_KERNELS = {"pallas_call": "name", "ffi_call": "target_name"}


def recognised_by(name: str, same: Same) -> None:
    """From now on a call of this name is the registered one only where ``same(body or params, operands)``."""
    _SAME[name] = same


def kernel_name(primitive: str, params: Mapping[str, Any]) -> str | None:
    """``pallas_call:NAME`` and ``ffi_call:TARGET``; None for what is no kernel."""
    return f"{primitive}:{params.get(_KERNELS[primitive]) or '?'}" if primitive in _KERNELS else None


def named_call(primitive: str, params: Mapping[str, Any], operands: Sequence[Any] | None = None) -> str | None:
    """The name under which this call is one op that is not seen through, or None.

    Always ``pallas_call:NAME`` and ``ffi_call:TARGET``, whose insides nobody can see. Where they are registered also
    ``custom_vjp_call:FUNCTION``, ``custom_jvp_call:FUNCTION`` and ``jit:FUNCTION``, if it is the very function that was
    registered: another one of that name is seen through, with a warning. ``operands`` are the types of a kernel's.

    Raises:
        DescriptionError: if a kernel is another one than that which is registered under its name.
    """
    kernel = kernel_name(primitive, params)
    if kernel is not None:
        if operands is not None and kernel in _RULES and kernel in _SAME and not _SAME[kernel](params, operands):
            raise DescriptionError(
                f"another kernel than the one that run= calls goes by the name {kernel} too; give each its own (name=), and "
                "register each",
                expression=str(params.get("name_and_src_info") or params.get("name")),
            )
        return kernel
    if primitive in ("jit", "pjit"):
        name, body = f"jit:{params.get('name')}", params.get("jaxpr")
    elif primitive in ("custom_vjp_call", "custom_jvp_call"):
        body = params.get("call_jaxpr")
        info = getattr(getattr(body, "jaxpr", body), "debug_info", None)
        name = f"{primitive}:{str(getattr(info, 'func_src_info', '')).split(' at ')[0]}"
    else:
        return None
    return name if name in _RULES and _fits(name, body) and _recognised(name, body) else None


def _recognised(name: str, body: Any) -> bool:
    if name not in _SAME or _SAME[name](body, body.in_avals):
        return True
    warnings.warn(
        f"{name} is seen through where it is not the function that was registered: another of the same name, or with other "
        "static arguments or constants; give it a name of its own",
        stacklevel=2,
    )
    return False


def _fits(name: str, body: Any) -> bool:
    """Whether a call has the operands and results that its description is for.

    It has not under vmap, and inside remat, where JAX takes unused results away: there it is seen through, with a warning
    (without one where nothing is left of it).
    """
    if not body.out_avals:
        return False
    operands, results = (tuple(tuple(x.shape) for x in avals) for avals in (body.in_avals, body.out_avals))
    try:
        describe(Call(name, operands, results, {}, tuple(str(x.dtype) for x in body.in_avals)))
    except MisfitError as error:
        warnings.warn(f"{name} is seen through where its description does not fit: {error}", stacklevel=2)
        return False
    return True


def op(function: Callable[..., Any]) -> Callable[[Call], Description]:
    """Tofu's ``@tdl.op``: ``function(*operands)`` returns the lambda; the result reads a `Call` into a `Description`."""

    def of(call: Call) -> Description:
        @wraps(function)
        def without_call(_: Call, *operands: lang.TensorRef) -> Lambda:
            return function(*operands)

        return read(call, without_call)

    of.__doc__ = function.__doc__
    return of


_PATTERNS: dict[Hashable, Description] = {}
_ELEMENTWISE = "shardplan.tdl.rules.elementwise"


def describe(call: Call) -> Description | None:
    """The description of this application, or None where no rule covers the primitive.

    Rules of elementwise ops only ask whether an extent is 0, 1 or more: they are read once for each pattern of dims.
    """
    function = _RULES.get(call.primitive)
    if function is None:
        return None
    alike = _pattern(call, function)
    known = _PATTERNS.get(alike)
    if known is not None:
        loops = tuple([LoopInfo(loop.name, n, None, False) for loop, n in zip(known.loops, call.results[0], strict=True)])
        return Description(call, loops, known.results, known.accesses, known.trees, known.monomials, True)
    found = read(call, function)
    if alike is not None and found.elementwise:
        _PATTERNS[alike] = found
    return found


def _pattern(call: Call, function: RuleFunction) -> Hashable:
    """All that our own rule of an elementwise op sees of a call: of extents whether they are 0, 1 or more. None of others."""
    if function.__module__ != _ELEMENTWISE:
        return None
    shapes = tuple([tuple([n if n < 2 else 2 for n in shape]) for shape in (*call.operands, *call.results)])
    params: tuple[Hashable, ...] = tuple([(name, type(value).__name__, value) for name, value in call.params.items()])
    try:
        hash(params)
    except TypeError:
        return None
    return function, call.primitive, shapes, call.dtypes, call.result_dtypes, call.scalars, params
