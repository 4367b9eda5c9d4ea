"""Descriptions: a primitive's rule, read into loops, accesses and linearity."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, cast

from shardplan.errors import DescriptionError, MisfitError
from shardplan.ir import Reducer
from shardplan.tdl import language as lang
from shardplan.tdl.index import Affine, IndexExpr, Loop, loops_of
from shardplan.user_code import users_code

Lambda = Callable[..., Any]
RuleFunction = Callable[..., "Lambda | tuple[Lambda, ...]"]
Monomials = frozenset[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Call:
    """One application of a primitive, as a rule sees it: shapes and dtypes of operands and results, and parameters.

    ``scalars[i]`` is the value of operand i if it is a literal of the program, else None (empty: nothing is known). A literal
    zero counts as no term, so a partial sum passes through padding with zeros.
    """

    primitive: str
    operands: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]
    params: Mapping[str, Any]
    dtypes: tuple[str, ...] = ()
    result_dtypes: tuple[str, ...] = ()
    scalars: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class LoopInfo:
    """A loop. ``reducer`` is None for a parallel loop; a ``whole`` loop runs inside an opaque function and may not be cut."""

    name: str
    extent: int
    reducer: Reducer | None = None
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Description:
    """A primitive application in TDL.

    ``results[r][d]`` is the loop that is dim d of result r. ``accesses`` lists each (operand, index expressions) once.
    ``trees[r]`` is the element expression of result r. ``monomials[r]`` says how result r depends on its operands: a sum of
    products of the listed operands (an operand that passes through a nonlinear function is listed twice). ``elementwise``: every
    operand is read at the result's own index (size-1 dims and scalars broadcast).
    """

    call: Call
    loops: tuple[LoopInfo, ...]
    results: tuple[tuple[int, ...], ...]
    accesses: tuple[tuple[int, tuple[IndexExpr, ...]], ...]
    trees: tuple[lang.Scalar, ...]
    monomials: tuple[Monomials, ...]
    elementwise: bool


def _takes(function: RuleFunction, count: int) -> bool:
    try:
        inspect.signature(function).bind(None, *[None] * count)
    except TypeError:
        return False
    return True


def read(call: Call, function: RuleFunction) -> Description:
    """Reads a rule for this call into loops, accesses and linearity."""
    operands = [
        lang.TensorRef(i, shape, call.dtypes[i] if i < len(call.dtypes) else "float32") for i, shape in enumerate(call.operands)
    ]
    registered = ":" in call.primitive or hasattr(function, "__signature__")
    if registered and not _takes(function, len(operands)):
        described = [str(p) for p in inspect.signature(function).parameters.values()][1:]
        raise MisfitError(
            f"{call.primitive} has {len(operands)} operands, but its description takes {len(described)}",
            expression=f"({', '.join(described)})",
        )
    results: list[tuple[int, ...]] = []
    trees: list[lang.Scalar] = []
    with lang.Recorder() as recorder, users_code(lambda error: failed(call.primitive, function, error, lambdas=bool(results))):
        rule_result = function(call, *operands)
        lambdas = cast("tuple[Lambda, ...]", rule_result if isinstance(rule_result, tuple) else (rule_result,))
        for body in lambdas:
            if not callable(body):
                raise DescriptionError(f"{call.primitive}: a description returns a lambda for each result", expression=repr(body))
        if len(lambdas) != len(call.results):
            raise MisfitError(f"{call.primitive} has {len(call.results)} results, but its description returns {len(lambdas)}")
        places = [_parallel(recorder, call, body, shape) for body, shape in zip(lambdas, call.results, strict=True)]
        for body, place in zip(lambdas, places, strict=True):
            recorder.open = [recorder.names[i] for i in place.dims]
            results.append(place.dims)
            trees.append(_element(call, body, place.indices))
    accesses = _accesses(trees)
    _check(call, accesses)
    extents = _extents(recorder, call, accesses)
    whole = frozenset(recorder.whole).union(*(_hidden(tree) for tree in trees))
    loops = tuple(
        LoopInfo(n, e, r, i in whole) for i, (n, r, e) in enumerate(zip(recorder.names, recorder.kinds, extents, strict=True))
    )
    zeros = frozenset(i for i, v in enumerate(call.scalars) if isinstance(v, int | float) and v == 0)
    booleans = tuple(t == "bool" for t in call.result_dtypes) or (False,) * len(trees)
    monomials = tuple(_twice(t) if b else products(t, zeros) for t, b in zip(trees, booleans, strict=True))
    plain = all(k is None for k in recorder.kinds) and len(set(results)) == 1 and not whole
    elementwise = plain and all(_identity(ix, call.operands[o], results[0], loops) for o, ix in accesses)
    return Description(call, loops, tuple(results), accesses, tuple(trees), monomials, elementwise)


def failed(primitive: str, function: Callable[..., Any], error: BaseException, *, lambdas: bool) -> DescriptionError:
    """The error for an exception raised by a description, or by one of its ``lambdas``, with the line in its file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    file = None if code is None else code.co_filename
    lines = [at.tb_lineno for at in _frames(error) if at.tb_frame.f_code.co_filename == file]
    message = (str(error).strip().splitlines() or ["no message"])[0]
    what = "description's lambda fails on symbolic indices" if lambdas else "description fails on symbolic operands"
    return DescriptionError(
        f"{primitive}: the {what}",
        expression=f"{type(error).__name__}: {message}" + (f" ({file}:{lines[-1]})" if lines else ""),
    )


def described_at(function: Callable[..., Any]) -> str:
    """``described at file:line``; empty where the description's code is not known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"described at {code.co_filename}:{code.co_firstlineno}"


def _frames(error: BaseException) -> Iterator[TracebackType]:
    at = error.__traceback__
    while at is not None:
        yield at
        at = at.tb_next


def _element(call: Call, body: Lambda, indices: tuple[Loop, ...]) -> lang.Scalar:
    try:
        return lang.scalar(body(*indices))
    except TypeError as error:
        says = "an element is built with + - * / and tdl's own functions (tdl.apply('exp', x) names any other)"
        raise DescriptionError(f"{call.primitive}: {says}", expression=str(error).partition("\n")[0]) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """The loops that cut the dims of a result, and the indices of its dims."""

    dims: tuple[int, ...]
    indices: tuple[Loop, ...]


def _parallel(recorder: lang.Recorder, call: Call, body: Lambda, shape: tuple[int, ...]) -> _Place:
    names = lang.lambda_names(body, len(shape))
    if len(names) != len(shape):
        raise MisfitError(f"{call.primitive} has a result of rank {len(shape)}, described with indices {names}")
    dims: list[int] = []
    indices: list[Loop] = []
    for name, extent in zip(names, shape, strict=True):
        match name:
            case lang.Grouped(group, size):
                dims.append(_loop(recorder, call, group, extent // size))
                within = _loop(recorder, call, f"{group}_within", size)
                recorder.whole.add(within)
                indices.append(Loop(Affine(((dims[-1], size), (within, 1)))))
            case str():
                dims.append(_loop(recorder, call, name, extent))
                indices.append(Loop(Affine(((dims[-1], 1),))))
    return _Place(tuple(dims), tuple(indices))


def _loop(recorder: lang.Recorder, call: Call, name: str, extent: int) -> int:
    """The parallel loop of a name: the same one in each result."""
    if name not in recorder.parallel:
        recorder.parallel[name] = recorder.loop(name, None, extent)
    loop = recorder.parallel[name]
    if recorder.extents[loop] != extent:
        raise DescriptionError(f"{call.primitive}: index {name} has extent {recorder.extents[loop]} and {extent}")
    return loop


def children(node: lang.Scalar) -> tuple[lang.Scalar, ...]:
    """The nodes below this one."""
    if isinstance(node, lang.Access | lang.Number):
        return ()
    if isinstance(node, lang.Apply | lang.HiddenLoops | lang.OpaqueResult):
        return node.args
    if isinstance(node, lang.Reduce):
        return (node.body,)
    return (node.element,) if isinstance(node, lang.Match) else ()


def _accesses(trees: list[lang.Scalar]) -> tuple[tuple[int, tuple[IndexExpr, ...]], ...]:
    unique: list[tuple[int, tuple[IndexExpr, ...]]] = []
    stack = list(reversed(trees))
    while stack:
        node = stack.pop()
        if isinstance(node, lang.Access) and (node.operand, node.indices) not in unique:
            unique.append((node.operand, node.indices))
        stack.extend(reversed(children(node)))
    return tuple(unique)


def _check(call: Call, accesses: tuple[tuple[int, tuple[IndexExpr, ...]], ...]) -> None:
    for operand, _ in accesses:
        if operand >= len(call.operands):
            raise DescriptionError(f"{call.primitive} has {len(call.operands)} operands", expression=f"operand {operand}")


def _extents(recorder: lang.Recorder, call: Call, accesses: tuple[tuple[int, tuple[IndexExpr, ...]], ...]) -> tuple[int, ...]:
    """The loops' extents: a parallel loop's from the result, a reduction loop's from an operand dim that it indexes alone."""
    extents = list(recorder.extents)
    if all(n is not None for n in extents):
        return cast("tuple[int, ...]", tuple(extents))
    for operand, indices in accesses:
        for dim, ix in enumerate(indices):
            match ix:
                case Affine(((loop, 1),), 0) if extents[loop] is None:
                    extents[loop] = call.operands[operand][dim]
                case _:
                    pass
    for name, extent in zip(recorder.names, extents, strict=True):
        if extent is None:
            raise DescriptionError(f"{call.primitive}: the extent of {name} cannot be read off an operand; give extents=")
    return tuple(e for e in extents if e is not None)


_NONE = frozenset[int]()


def _hidden(tree: lang.Scalar) -> frozenset[int]:
    if isinstance(tree, lang.Access | lang.Number):
        return _NONE
    hidden = tree.loops if isinstance(tree, lang.HiddenLoops) else _NONE
    for child in children(tree):
        hidden |= _hidden(child)
    return hidden


def _identity(
    indices: tuple[IndexExpr, ...], shape: tuple[int, ...], result: tuple[int, ...], loops: tuple[LoopInfo, ...]
) -> bool:
    if not indices:
        return True
    if len(indices) != len(result):
        return False
    for ix, n, loop in zip(indices, shape, result, strict=True):
        own = isinstance(ix, Affine) and ix.terms == ((loop, 1),) and ix.const == 0
        if not (own and n == loops[loop].extent) and n != 1:  # a slice from the start reads only the first elements
            return False
    return True


def products(node: lang.Scalar, zeros: frozenset[int] = frozenset()) -> Monomials:
    """The expression as a sum of products of operands; a nonlinear function lists its operands twice. Zero is the empty sum."""
    match node:
        case lang.Number(value):
            return frozenset({()}) if value else frozenset()
        case lang.Access(operand, _):
            return frozenset() if operand in zeros else frozenset({(operand,)})
        case lang.Apply("add", args, _):
            return frozenset[tuple[int, ...]]().union(*(products(a, zeros) for a in args))
        case lang.Apply("neg", (arg,), _):
            return products(arg, zeros)
        case lang.Apply("mul", (a, b), _):
            return _product(products(a, zeros), products(b, zeros))
        case lang.Apply("div", (a, b), _):
            return _product(products(a, zeros), _twice(b))
        case lang.Apply("where", (c, a, b), _):
            return _product(products(a, zeros) | products(b, zeros), _twice(c))
        case lang.Reduce("sum", _, body):
            return products(body, zeros)
        case _:
            return _twice(node)


def _product(left: Monomials, right: Monomials) -> Monomials:
    return frozenset(tuple(sorted(x + y)) for x in left for y in right)


def _twice(node: lang.Scalar) -> Monomials:
    used = sorted({operand for operand, _ in _accesses([node])})
    return frozenset({tuple(sorted(used + used))})


def reads(description: Description, loop: int) -> tuple[int, ...]:
    """The operands whose index depends on a loop."""
    return tuple(sorted({o for o, indices in description.accesses if any(loop in loops_of(i) for i in indices)}))
