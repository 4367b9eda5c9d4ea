"""A description in words: its loops, what it reads, and each strategy as a sentence."""

from __future__ import annotations

from typing import Any, assert_never

from shardplan.ir import Partial, Placement, Replicated, Split
from shardplan.tdl import language as lang
from shardplan.tdl.description import Description
from shardplan.tdl.index import show
from shardplan.tdl.strategies import Strategy, cuts, linear_sets


def expression(node: lang.Scalar, names: dict[int, str]) -> str:
    """An element expression as a person would write it."""
    match node:
        case lang.Number(value):
            return f"{value:g}"
        case lang.Access(operand, indices):
            return f"x{operand}[{', '.join(show(ix, names) for ix in indices)}]"
        case lang.Apply("add", args, _):
            return "(" + " + ".join(expression(a, names) for a in args) + ")"
        case lang.Apply("mul", (a, b), _):
            return f"{expression(a, names)} * {expression(b, names)}"
        case lang.Apply("div", (a, b), _):
            return f"{expression(a, names)} / {expression(b, names)}"
        case lang.Apply("neg", (a,), _):
            return f"-{expression(a, names)}"
        case lang.Apply("where", (c, a, b), name):
            inner = ", ".join(expression(x, names) for x in ((c, a) if name else (c, a, b)))
            return f"{name or 'where'}({inner})"
        case lang.Apply(_, args, name):
            return f"{name}({', '.join(expression(a, names) for a in args)})"
        case lang.Reduce(reducer, loops, body):
            return f"{reducer.capitalize()}({', '.join(names[v] for v in loops)}: {expression(body, names)})"
        case lang.Match(element, index):
            return f"{expression(element, names)} == {show(index, names)}"
        case lang.HiddenLoops(args, loops):
            return f"Opaque({', '.join(expression(a, names) for a in args)})[{', '.join(names[v] for v in sorted(loops))}]"
        case lang.OpaqueResult(args):
            return f"Opaque({', '.join(expression(a, names) for a in args)})"
        case _:
            return type(node).__name__


def sentence(description: Description, strategy: Strategy) -> str:
    """One strategy in words."""
    loop = description.loops[strategy.loop]
    reads = [f"x{i} {_placed(p)}" for i, p in enumerate(strategy.operands)]
    gives = ", ".join(_placed(p) for p in strategy.results)
    return f"cut {loop.name} ({loop.extent}) {strategy.ways} ways: reads {', '.join(reads) or 'nothing'}; the result is {gives}"


_LINES = {
    "pallas_call": (
        "import shardplan",
        "from shardplan import tdl",
        "",
        "# NAME as in pallas_call(..., name='NAME'); run: what calls the kernel, for a block of the operands too",
        "@shardplan.register('pallas_call:NAME', run=function_that_calls_it, example=[jnp.ones((4, 6))])",
        "def describe(x):",
        "    return lambda i, j: tdl.Opaque()(x[i, :])[j]  # rows one by one; a loop in brackets stays whole",
    ),
    "ffi_call": (
        "import shardplan",
        "from shardplan import tdl",
        "",
        "# TARGET as in jax.ffi.ffi_call('TARGET', ...), which is made again for the shapes of a block",
        "@shardplan.register('ffi_call:TARGET')",
        "def describe(x):",
        "    return lambda i, j: tdl.Opaque()(x[i, :])[j]  # rows one by one; a loop in brackets stays whole",
    ),
}


def register_lines(kernel: str) -> list[str]:
    """Example code that registers a kernel with one operand and one result of two dims."""
    return list(_LINES.get(kernel, ()))


def _placed(placement: Placement) -> str:
    match placement:
        case Split(dim, (0, 0)):
            return f"split along dim {dim}"
        case Split(dim, (lo, hi)):
            return f"split along dim {dim} with a halo of {lo} before and {hi} after"
        case Replicated():
            return "whole"
        case Partial(reducer):
            return f"partial ({reducer})"
        case _:
            assert_never(placement)


def words(description: Description, *, ways: int = 2) -> dict[str, Any]:
    """The description, its loops, its strategies and linear sets, ready to print or to write as JSON."""
    call = description.call
    names = {i: loop.name for i, loop in enumerate(description.loops)}
    lambdas = [
        f"lambda {', '.join(names[v] for v in dims)}: {expression(tree, names)}"
        for dims, tree in zip(description.results, description.trees, strict=True)
    ]
    return {
        "primitive": call.primitive,
        "operands": [list(s) for s in call.operands],
        "results": [list(s) for s in call.results],
        "description": lambdas,
        "loops": [
            {"name": v.name, "extent": v.extent, "kind": "whole" if v.whole else v.reducer or "parallel"}
            for v in description.loops
        ],
        "strategies": [sentence(description, s) for s in cuts(description, ways)],
        "linear_in": [[f"x{o}" for o in members] for members in linear_sets(description)],
    }
