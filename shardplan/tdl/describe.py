"""The registry of rules: the names of calls, and their descriptions."""

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
from shardplan.versions import is_within

_RULES: dict[str, RuleFunction] = {}
_ABSENT: set[str] = set()
_ONLY: dict[RuleFunction, Callable[[Call], bool]] = {}


def rule(
    *primitives: str, only: Callable[[Call], bool] | None = None, since: str | None = None, until: str | None = None
) -> Callable[[RuleFunction], RuleFunction]:
    """Registers ``function(call, *operands)`` as the description of these primitives.

    ``since`` is the minor release of JAX (``"0.11"``) that brought these primitives, ``until`` the first without them. If the
    installed JAX lacks them, nothing is registered.

    It returns a lambda over the dims of the result, or a tuple with one for each result. Loops of the same name in several
    lambdas are the same loop. A call for which ``only`` is false has no description.
    """

    def register(function: RuleFunction) -> RuleFunction:
        if only is not None:
            _ONLY[function] = only
        for name in primitives:
            if is_within(since, until):
                _RULES[name] = function
            else:
                _ABSENT.add(name)
        return function

    return register


def is_absent(primitive: str) -> bool:
    """Whether a rule says that the installed JAX does not have this primitive, but another release does."""
    return primitive in _ABSENT and primitive not in _RULES


def described() -> tuple[str, ...]:
    """The primitives that have a rule, sorted."""
    return tuple(sorted(_RULES))


def forget(primitive: str) -> None:
    """Removes a rule, and the test that recognises its calls."""
    _RULES.pop(primitive, None)
    _SAME.pop(primitive, None)


def put_back(primitive: str, older: RuleFunction | None) -> None:
    """Removes a rule, and restores the older one if there is one."""
    _RULES.pop(primitive, None)
    if older is not None:
        _RULES[primitive] = older


def rule_of(primitive: str) -> RuleFunction | None:
    """The rule that is registered for a primitive, or None."""
    return _RULES.get(primitive)


_RUN_BY_USER: set[str] = set()


def run_by_user(primitive: str) -> None:
    """Records that a user gave the function that runs this primitive."""
    _RUN_BY_USER.add(primitive)


def is_named_call(primitive: str) -> bool:
    """Whether it is a call of a named function or kernel, such as ``pallas_call:flash``."""
    return ":" in primitive


def is_run_by_user(primitive: str) -> bool:
    """Whether a user gave the function that runs this primitive."""
    return primitive in _RUN_BY_USER


Same = Callable[[Any, Sequence[Any]], bool]
_SAME: dict[str, Same] = {}
_KERNELS = {"pallas_call": "name", "ffi_call": "target_name"}


def recognised_by(name: str, same: Same) -> None:
    """From now on a call of this name counts as the registered one only if ``same(body or params, operands)`` is true."""
    _SAME[name] = same


def kernel_name(primitive: str, params: Mapping[str, Any]) -> str | None:
    """``pallas_call:NAME`` or ``ffi_call:TARGET``; None for any other primitive."""
    return f"{primitive}:{params.get(_KERNELS[primitive]) or '?'}" if primitive in _KERNELS else None


def named_call(primitive: str, params: Mapping[str, Any], operands: Sequence[Any] | None = None) -> str | None:
    """The name of a call that is kept as one op; None for a call that is seen through.

    ``pallas_call:NAME`` and ``ffi_call:TARGET`` are always kept: their bodies are opaque. ``custom_vjp_call:FUNCTION``,
    ``custom_jvp_call:FUNCTION`` and ``jit:FUNCTION`` are kept if that very function is registered; another function of the same
    name is seen through, with a warning. ``operands`` are the types of a kernel's operands.

    Raises:
        DescriptionError: if a different kernel is registered under this kernel's name.
    """
    kernel = kernel_name(primitive, params)
    if kernel is not None:
        if operands is not None and kernel in _RULES and kernel in _SAME and not _SAME[kernel](params, operands):
            raise DescriptionError(
                f"two kernels share the name {kernel}, and run= calls the other one; give each its own (name=), and register "
                "each",
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
        f"{name} is seen through where it is not the registered function but another of the same name, or the same function "
        "with other static arguments or constants; give it a name of its own",
        stacklevel=2,
    )
    return False


def _fits(name: str, body: Any) -> bool:
    """Whether a call has the operands and results that its description takes.

    Under vmap, or inside remat, where JAX removes unused results, it may lack some. The call is then seen through, with a
    warning (without one if no result is left).
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
    """Tofu's ``@tdl.op``: ``function(*operands)`` returns the lambda; the decorated function maps a `Call` to a `Description`."""

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

    Rules of elementwise ops depend only on whether an extent is 0, 1 or more: they are read once for each pattern of dims.
    """
    function = _RULES.get(call.primitive)
    if function is None or (function in _ONLY and not _ONLY[function](call)):
        return None
    key = _pattern(call, function)
    cached = _PATTERNS.get(key)
    if cached is not None:
        loops = tuple([LoopInfo(loop.name, n, None, False) for loop, n in zip(cached.loops, call.results[0], strict=True)])
        return Description(call, loops, cached.results, cached.accesses, cached.trees, cached.monomials, True)
    description = read(call, function)
    if key is not None and description.elementwise:
        _PATTERNS[key] = description
    return description


def _pattern(call: Call, function: RuleFunction) -> Hashable:
    """Everything in a call on which a built-in elementwise rule depends: extents count as 0, 1 or more. None for other rules."""
    if function.__module__ != _ELEMENTWISE:
        return None
    shapes = tuple([tuple([n if n < 2 else 2 for n in shape]) for shape in (*call.operands, *call.results)])
    params: tuple[Hashable, ...] = tuple([(name, type(value).__name__, value) for name, value in call.params.items()])
    try:
        hash(params)
    except TypeError:
        return None
    return function, call.primitive, shapes, call.dtypes, call.result_dtypes, call.scalars, params
