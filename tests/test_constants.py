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
ROOMS = (
    "collectives", "cost", "dag", "graph", "hlo", "mesh", "microbatches", "offload", "placement", "planning", "regions", "remat",
    "schedule", "search", "simulate",
)  # fmt: skip

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
    "search/problem/cost_tables.py MOST_BYTES": "memory or time of the same sums",
    "search/problem/cost_tables.py _PER_SECOND": "a unit",
    "search/problem/cost_tables.py LONGEST_S": "the range of the unit",
    "dag/exact.py GAP": "the solver's tolerance",
    "dag/exact.py MAX_TASKS": "more are an error",
    "dag/memory.py NODES": "packings not found by then are an error",
    "dag/memory.py SLACK": "the rounding of sums of bytes",
    "hlo/undo.py _STEPS": "reads compiled programs, after the plan",
    "mesh/checks.py LARGEST_PART": "more are an error",
    "mesh/checks.py MOST_SECONDS": "more are an error",
    "mesh/detect.py _PCIE_BYTES_PER_S": "describes a device, and stands in the plan's cluster",
    "mesh/gpus.py _A100_40": "describes a device",
    "mesh/gpus.py _V100_32": "describes a device",
    "mesh/machine.py DEFAULT_ATTENTION_EFFICIENCY": "describes a device",
    "mesh/machine.py DEFAULT_CONTENTION": "describes a device",
    "mesh/machine.py LARGEST": "more are an error",
    "mesh/machine.py MOST_CONTENTION": "more are an error",
    "mesh/profile.py FORMAT": "a code",
    "microbatches/time_cut.py _BYTE_S": "a unit, far above the next",
    "microbatches/time_cut.py _FLOP_S": "a unit, far below the last",
    "microbatches/time_cut.py _WHOLE": "a code",
    "placement/chains.py _PATIENCE_S": "how long processes may take to end",
    "placement/placement_problem.py LARGEST_TICKS": "more are an error",
    "placement/device_topology.py MOST_DEVICES": "more are an error",
    "placement/device_topology.py TICK_S": "a unit",
    "placement/optimum.py MOST_SIMULATIONS": "more are an error",
    "placement/pair_costs.py NEVER_SENT": "a code",
    "placement/simulation.py _FEW": "which of two engines runs: the same result",
    "placement/strategy_files.py VERSION": "a code",
    "placement/task_loop.py NEVER": "a code",
    "placement/task_loop.py NONE": "a code",
    "planning/host_memory.py _SEARCHES": "parts of a progress bar",
    "planning/suspects.py MOST": "which losses are named: no plan follows from it",
    "regions/tasks.py WHOLE": "a code",
    "simulate/engine.py _FEW": "which of two engines runs: the same result",
    "simulate/engine.py _MOST_TICKS": "the range of the unit",
    "simulate/event_loop.py NONE": "a code",
    "simulate/figures.py _INSTANT_S": "how figures are drawn",
    "simulate/simulated_step.py _FEW": "a piece of work: folds are checked",
    "simulate/simulated_step.py _MANY": "a piece of work: folds are checked",
    "simulate/step_tasks.py _MANY": "how the same dependencies are written",
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
