"""The constants that decide results, by room, each with the line on where it comes from.

``python benchmarks/constants.py [--rooms search planning schedule cost collectives graph remat]``
"""

from __future__ import annotations

import argparse
import ast
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROOMS = ("cost", "graph", "collectives", "search", "schedule", "planning", "remat")


@dataclass(frozen=True, slots=True)
class Constant:
    """A number at the top of a file. ``why`` is its docstring or the comment behind it; empty where there is none."""

    file: str
    name: str
    value: str
    why: str


def constants(rooms: Sequence[str] = ROOMS) -> Iterator[Constant]:
    """The numbers that stand in capitals at the top of the files of some rooms."""
    for room in rooms:
        for path in sorted((ROOT / "shardplan" / room).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield from of_file(str(path.relative_to(ROOT / "shardplan")), text)


def of_file(file: str, text: str) -> Iterator[Constant]:
    """The constants in the text of one file."""
    body, lines = ast.parse(text).body, text.splitlines()
    for at, node in enumerate(body):
        if not (isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name) and name.id.isupper()):
            continue
        value = ast.unparse(node.value)
        if not _is_number(node.value):
            continue
        follows = body[at + 1] if at + 1 < len(body) else None
        said = ""
        if isinstance(follows, ast.Expr) and isinstance(follows.value, ast.Constant):
            said = str(follows.value.value)
        comment = lines[node.lineno - 1].partition("  # ")[2]
        yield Constant(file, name.id, value, " ".join((said or comment).split()))


def _is_number(value: ast.expr) -> bool:
    """Whether an expression is made of numbers alone."""
    numbers = (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)
    leaves = [n for n in ast.walk(value) if not isinstance(n, numbers)]
    return bool(leaves) and all(isinstance(n, ast.Constant) and isinstance(n.value, int | float) for n in leaves)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, choices=ROOMS)
    given = parser.parse_args(argv)
    rows = list(constants(given.rooms))
    for row in rows:
        print(f"{row.file} {row.name} = {row.value}")
        print(textwrap.indent(textwrap.fill(row.why or "(nothing is said)", 110), "    "))
    print(f"\n{len(rows)} constants in {len({row.file for row in rows})} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
