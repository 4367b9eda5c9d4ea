"""Tensor descriptions and what follows from them (Tofu, section 4).

`describe` reads a rule into loops and index expressions, `cuts` lists the legal strategies, `linear_sets` lists the operands that
may be partial sums together, and `shrink` gives the smaller op that one worker runs. The rules of all primitives live in
``rules``; ``localize`` and ``cut_proof`` run them against JAX.
"""

from shardplan.tdl import rules as _rules
from shardplan.tdl.describe import describe, described, named_call, op, rule
from shardplan.tdl.description import Call, Description, LoopInfo
from shardplan.tdl.effort import light
from shardplan.tdl.index import (
    Affine,
    Data,
    Exact,
    FloorDiv,
    Full,
    IndexExpr,
    Interval,
    Loop,
    Mod,
    interval,
)
from shardplan.tdl.language import (
    DATA,
    And,
    ArgMax,
    ArgMin,
    Max,
    Min,
    Opaque,
    Or,
    Prod,
    Sum,
    TensorRef,
    apply,
    equals,
    where,
)
from shardplan.tdl.shrink import shrink
from shardplan.tdl.strategies import (
    Strategy,
    cut,
    cut_in_step,
    cuts,
    in_step,
    linear_sets,
)

assert _rules

__all__ = [
    "DATA",
    "Affine",
    "And",
    "ArgMax",
    "ArgMin",
    "Call",
    "Data",
    "Description",
    "Exact",
    "FloorDiv",
    "Full",
    "IndexExpr",
    "Interval",
    "Loop",
    "LoopInfo",
    "Max",
    "Min",
    "Mod",
    "Opaque",
    "Or",
    "Prod",
    "Strategy",
    "Sum",
    "TensorRef",
    "apply",
    "cut",
    "cut_in_step",
    "cuts",
    "describe",
    "described",
    "equals",
    "in_step",
    "interval",
    "light",
    "linear_sets",
    "named_call",
    "op",
    "rule",
    "shrink",
    "where",
]
