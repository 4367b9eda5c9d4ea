"""Every number that decides a plan stands in one value, with where it comes from; the others say why they are elsewhere."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from shardplan import constants
from shardplan.constants import CONSTANTS, Constants

PACKAGE = Path(constants.__file__).parent
ROOMS = ("cost", "graph", "collectives", "search", "schedule", "planning", "remat")

ELSEWHERE = {
    "cost/wire.py BYTE_S": "a unit",
    "cost/network.py _DENSE_COUNTERS": "memory or time of the same sums",
    "collectives/laying.py SMALL": "the sizes at which a program is replayed: the same result at any",
    "collectives/moves.py BUFFER": "a code",
    "search/coarsening/variables.py FREE": "a code",
    "search/inference/eliminate.py _PIECE": "a piece of work",
    "search/memory/buffers.py _CHUNK": "a piece of work",
    "search/problem/ops.py MOST_AXES": "NumPy's limit",
    "search/problem/pricing.py _CHUNK": "a piece of work",
    "search/problem/pricing.py _MANY": "from where strategies that are never the cheapest are left out: the same table",
    "search/problem/pricing.py _GOOD": "with what they are compared",
    "search/problem/problem.py _ROUNDED_S": "half a unit",
    "search/problem/cost_tables.py BIG": "infinity",
    "search/problem/cost_tables.py _PER_SECOND": "a unit",
    "search/problem/cost_tables.py LONGEST_S": "the range of the unit",
    "planning/host_memory.py _SEARCHES": "parts of a progress bar",
    "schedule/passes/extents.py _MOST_DIMS": "NumPy's limit",
}


def _numbers() -> Iterator[str]:
    """The numbers in capitals at the top of the rooms' files."""
    for path in sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name) and name.id.isupper():
                leaves = [
                    n for n in ast.walk(node.value) if not isinstance(n, ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
                ]
                if all(isinstance(n, ast.Constant) and isinstance(n.value, int | float) for n in leaves):
                    yield f"{path.relative_to(PACKAGE)} {name.id}"


def test_a_number_at_the_top_of_a_file_decides_no_plan() -> None:
    assert sorted(_numbers()) == sorted(ELSEWHERE), "move it to shardplan/constants.py, or say in ELSEWHERE what it is"


def test_every_constant_says_where_it_comes_from() -> None:
    (body,) = (n.body for n in ast.parse(inspect.getsource(Constants)).body if isinstance(n, ast.ClassDef))
    silent = [
        ast.unparse(node)
        for node, behind in zip(body, [*body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and not (isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant))
    ]
    assert silent == []


def test_every_constant_is_used() -> None:
    texts = "".join(p.read_text(encoding="utf-8") for p in PACKAGE.rglob("*.py"))
    assert [f.name for f in fields(Constants) if f"CONSTANTS.{f.name}" not in texts] == []


def test_literals_give_the_constants_again() -> None:
    assert Constants(**{name: ast.literal_eval(text) for name, text in CONSTANTS.literals.items()}) == CONSTANTS
