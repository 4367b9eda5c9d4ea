"""The order of the code: who may import whom, who may know JAX, and what every front and file keeps to.

Everything here reads source text, so that a file is held to the order as soon as it exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardplan"

# From the top row down; a module imports only from rows above its own, and from its own package. The last row but one are the
# shells: they may use each other. An import for type checkers alone counts like any other.
ROWS = (
    ("versions", "constants", "ir", "errors", "user_code", "sizes", "_jax"),
    ("mesh",),
    ("dag",),
    ("tdl",),
    ("frontend",),
    ("remat",),
    ("offload",),
    ("cost",),
    ("graph",),
    ("collectives",),
    ("search",),
    ("schedule",),
    ("planning",),
    ("simulate",),
    ("placement",),
    ("regions",),
    ("hlo",),
    ("emit",),
    ("microbatches",),
    ("verify",),
    ("plans",),
    ("calibrate",),
    ("report",),
    ("shell", "__main__"),
    ("testing",),
)
RANK = {name: rank for rank, row in enumerate(ROWS) for name in row}
SHELLS = ROWS[-2]

# The files that know JAX, and the packages.
JAX_FILES = (
    "plans.canonical",
    "plans.fingerprint",
    "plans.fitted",
    "plans.local_parts",
    "plans.runner",
    "plans.jit_stages",
    "plans.placed_runner",
    "microbatches.accumulating",
    "microbatches.layers",
    "microbatches.whole_ops",
    "shell.agreement",
    "shell.clusters",
    "shell.compare_command",
    "shell.doctor",
    "shell.loading",
    "shell.plan_of_step",
    "shell.api",
    "shell.parallel",
    "shell.place",
    "shell.placed_loading",
    "shell.placed_plan",
    "shell.placed_replanning",
    "shell.score",
    "shell.score_command",
    "shell.sharding_files",
    "shell.planned_step",
    "shell.registering",
    "shell.replanning",
    "shell.resharding",
    "shell.target",
    "shell.pytest_plugin",
    "mesh.devices",
    "tdl.identity",
    "tdl.localize",
    "tdl.rewrite",
    "tdl.cut_proof",
    "tdl.register",
    "tdl.coverage",
    "tdl.releases",
    "collectives.lower",
)
JAX_PACKAGES = ("_jax", "frontend", "emit", "verify", "tdl.proof", "calibrate")
JAX_LIBRARIES = ("jax", "jaxlib", "flax", "optax")
PRIVATE_JAX = ("jax._src", "jax.extend", "jaxlib")


def _module(path: Path) -> str:
    """``shardplan/mesh/devices.py`` -> ``mesh.devices``; a front is its package; the top one is ``""``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_module(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FRONTS = {name: path for name, path in FILES.items() if path.name == "__init__.py"}
EVERY_FILE = [
    p for d in ("shardplan", "models", "benchmarks", "docs", "examples", "tests") for p in sorted((ROOT / d).rglob("*.py"))
]


def _ids(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _imports(path: Path) -> Iterator[tuple[str, str | None, int]]:
    """Every (absolute module, imported name or None, line) of a file, those inside functions included."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None, node.lineno
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                here = path.relative_to(ROOT).with_suffix("").parts
                module = ".".join((*here[: -node.level], module)).rstrip(".")
            for alias in node.names:
                yield module, alias.name, node.lineno


def _home(module: str, name: str | None) -> str:
    """The shardplan module in which an imported thing lives: a submodule, or where a front has it from."""
    seen: set[str] = set()
    inner = module.removeprefix("shardplan").removeprefix(".")
    while name and inner not in seen:
        seen.add(inner)
        if f"{inner}.{name}".strip(".") in FILES:
            return f"{inner}.{name}".strip(".")
        inner = _hands_on(FRONTS[inner]).get(name, inner) if inner in FRONTS else inner
    return inner


@cache
def _hands_on(front: Path) -> dict[str, str]:
    """The shardplan names that a front imports, each with the module that it imports it from."""
    pairs = ((name, module) for module, name, _ in _imports(front) if name)
    return {name: module.removeprefix("shardplan.") for name, module in pairs if module.startswith("shardplan.")}


def _of_shardplan(path: Path) -> Iterator[tuple[str, int]]:
    for module, name, line in _imports(path):
        if module == "shardplan" or module.startswith("shardplan."):
            yield _home(module, name), line


def _rank(module: str) -> int:
    return RANK[module.split(".")[0]]


def _knows_jax(module: str) -> bool:
    return module in JAX_FILES or _is_one_of(module, JAX_PACKAGES)


def _is_one_of(module: str, libraries: tuple[str, ...]) -> bool:
    return any(module == library or module.startswith(library + ".") for library in libraries)


def test_every_file_has_its_row() -> None:
    strangers = [name for name in FILES if name and name.split(".")[0] not in RANK]
    assert not strangers, f"no row in the layout for {strangers}: add them to ROWS, in the right place"


@pytest.mark.parametrize("module", [m for m in FILES if m])
def test_a_file_imports_only_from_the_rows_above(module: str) -> None:
    package = module.split(".")[0]
    faults: list[str] = []
    for target, line in _of_shardplan(FILES[module]):
        if not target:
            # Only the shells may use the public face; a version number is read from it at most.
            allowed = package in SHELLS
        else:
            own = target.split(".")[0]
            shell_to_shell = package in SHELLS and own in SHELLS
            top = _rank(module) == 0 and _rank(target) == 0
            allowed = own == package or _rank(target) < _rank(module) or shell_to_shell or top
        if not allowed:
            faults.append(f"{_ids(FILES[module])}:{line} imports shardplan.{target}".rstrip("."))
    assert not faults, faults


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count; the top front alone hands names on lazily."""
    imports = nx.DiGraph((name, target) for name, path in FILES.items() for target, _ in _of_shardplan(path) if name and target)
    imports.remove_edges_from([(name, name) for name in FILES])
    circles = [sorted(part) for part in nx.strongly_connected_components(imports) if len(part) > 1]
    print(f"{imports.number_of_nodes()} files, {imports.number_of_edges()} imports, circles: {circles or 'none'}")  # noqa: T201 - shown with -s
    assert not circles


def test_architecture_md_lists_the_rooms_in_this_order() -> None:
    table = (PACKAGE.parent / "ARCHITECTURE.md").read_text().partition("| room |")[2].partition("\n\n")[0]
    named = [
        name
        for line in table.splitlines()
        for name in re.findall(r"`(\w+)(?:/|\.py)`?", line.split("|")[1] if "|" in line else "")
    ]
    listed = [name for name in dict.fromkeys(named) if name in RANK]
    assert [RANK[name] for name in listed] == sorted(RANK[name] for name in listed)
    assert {name for row in ROWS[1:] for name in row} - {"__main__"} <= set(listed)


def test_a_room_imports_only_from_rooms_above_it() -> None:
    """The rooms of the search stand on floors, too."""
    rooms = nx.DiGraph()
    for name, path in FILES.items():
        for target, _ in _of_shardplan(path):
            a, b = _room(name), _room(target)
            if name and target and a != b:
                rooms.add_edge(a, b)
    circles = [sorted(part) for part in nx.strongly_connected_components(rooms) if len(part) > 1]
    assert not circles, circles


def _room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "search" else parts[0]


@pytest.mark.parametrize("module", [m for m in FILES if m and not _knows_jax(m)])
def test_jax_stays_in_its_files(module: str) -> None:
    path = FILES[module]
    faults = [f"{_ids(path)}:{line} imports {m}" for m, _, line in _imports(path) if _is_one_of(m, JAX_LIBRARIES)]
    # A front hands on the names of its JAX file, and the shells may use anything; nobody else reaches JAX by way of another file.
    if module not in FRONTS and module.split(".")[0] not in SHELLS:
        known = [(target, line) for target, line in _of_shardplan(path) if _knows_jax(target)]
        faults += [f"{_ids(path)}:{line} imports {target}, which knows JAX" for target, line in known]
    assert not faults, faults


def test_private_jax_names_live_in_one_package() -> None:
    """Also uses such as ``jax._src.core`` without an import of it."""
    faults = [
        f"{_ids(path)}:{line} imports {m}"
        for name, path in FILES.items()
        if name.split(".")[0] != "_jax"
        for m, inner, line in _imports(path)
        if _is_one_of(f"{m}.{inner}" if inner else m, PRIVATE_JAX)
    ]
    faults += [
        f"{_ids(path)}:{node.lineno} uses jax.{node.attr}"
        for name, path in FILES.items()
        if name.split(".")[0] != "_jax"
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("_src", "extend")
        and isinstance(node.value, ast.Name)
        and node.value.id == "jax"
    ]
    assert not faults, faults


def test_models_know_nothing_of_shardplan() -> None:
    faults = [
        f"{_ids(path)}:{line}"
        for path in EVERY_FILE
        if path.is_relative_to(ROOT / "models")
        for module, _, line in _imports(path)
        if _is_one_of(module, ("shardplan",))
    ]
    assert not faults, faults


def _exported(front: Path) -> list[str] | None:
    """The literal ``__all__`` of a file; None if it has none."""
    for names, value in _assignments(front):
        if "__all__" in names and value is not None:
            return [str(name) for name in ast.literal_eval(value)]
    return None


def _assignments(front: Path) -> Iterator[tuple[list[str], ast.expr | None]]:
    """The names and the value of each assignment at the top level."""
    for node in _tree(front).body:
        if isinstance(node, ast.Assign):
            yield [t.id for t in node.targets if isinstance(t, ast.Name)], node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield [node.target.id], node.value


def _public(front: Path) -> set[str]:
    """Public names that a front defines, or imports from shardplan; submodules imported for their effect left out."""
    package = _module(front)
    names: set[str] = set()
    # what a front imports for type checkers alone it hands on at first use
    body = [inner for node in _tree(front).body for inner in (node.body if isinstance(node, ast.If) else [node])]
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("shardplan")):
            inner = package if node.level else (node.module or "").removeprefix("shardplan").removeprefix(".")
            names |= {a.asname or a.name for a in node.names if f"{inner}.{a.name}".strip(".") not in FILES}
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("package", list(FRONTS))
def test_a_front_says_what_happens_in_it_and_lists_what_it_hands_on(package: str) -> None:
    front = FRONTS[package]
    assert ast.get_docstring(_tree(front)), f"{_ids(front)} has no docstring"
    exported, public = _exported(front), _public(front)
    if exported is None:
        assert not public, f"{_ids(front)} hands on {sorted(public)} without __all__"
        return
    assert len(exported) == len(set(exported)), f"{_ids(front)}: __all__ repeats a name"
    missing = sorted(public - set(exported))
    submodules = {name.rpartition(".")[2] for name in FILES if name.rpartition(".")[0] == package}
    unbound = sorted(set(exported) - public - submodules - {name for names, _ in _assignments(front) for name in names})
    assert not missing, f"{_ids(front)}: __all__ lacks {missing}"
    assert not unbound, f"{_ids(front)}: __all__ names {unbound}, which are not there"


@pytest.mark.parametrize("package", list(FRONTS))
def test_a_front_speaks_of_what_is_there(package: str) -> None:
    """Each lower-case name in backquotes is a module of the package, or a name that it hands on; others start at their root."""
    front = FRONTS[package]
    said = re.findall(r"(?<!`)`{1,2}([a-z_][\w.]*)`{1,2}(?!`)", ast.get_docstring(_tree(front)) or "")
    modules = {name.removeprefix(package).strip(".") for name in FILES if f".{name}".startswith(f".{package}".rstrip("."))}
    known = modules | {m.rpartition(".")[2] for m in modules} | _public(front) | set(_exported(front) or ())
    gone = [name for name in said if name not in known and name.split(".")[0] not in ("shardplan", "jax")]
    assert not gone, f"{_ids(front)} speaks of {gone}, which are not there"


def test_no_public_name_is_the_name_of_a_file() -> None:
    """Loading ``shardplan/plan.py`` would put a module in the place of ``shardplan.plan``."""
    names = set(_exported(FRONTS[""]) or ())
    assert not names & set(FILES)


def test_every_package_has_a_front() -> None:
    packages = {p.parent for p in FILES.values()}
    missing = sorted(_ids(p) for p in packages if not (p / "__init__.py").exists())
    assert not missing, f"no __init__.py in {missing}"


@pytest.mark.parametrize("path", EVERY_FILE, ids=_ids)
def test_no_broad_except_but_around_the_users_code(path: Path) -> None:
    broad = {"Exception", "BaseException"}
    faults: list[int] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or (isinstance(kind, ast.Name) and kind.id in broad) for kind in kinds):
                faults.append(node.lineno)
    assert len(faults) == (path == PACKAGE / "user_code.py"), (
        f"{_ids(path)} catches everything in lines {faults}: name what can be raised"
    )


@pytest.mark.parametrize("path", EVERY_FILE, ids=_ids)
def test_no_file_grows_too_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= 500, f"{_ids(path)} has {lines} lines: a file holds one idea, 500 lines are too many"


# What is changed while it is used, or keeps what it worked out beside its fields, each with why it cannot be frozen and slotted.
NOT_FROZEN = {
    "hlo.text.HloInstruction": "works out its operands at first use",
    "hlo.text.Computation": "works out its index at first use",
    "hlo.text.Module": "works out its index at first use",
    "graph.kernel_traffic._Kernel": "grows while ops and kernels are joined",
    "simulate.step_tasks._Frame": "the values of a body while it is walked",
    "placement.forward.GrowingOperator": "grows while ops join it",
    "placement.group_reductions.GroupPrices": "keeps the prices of groups",
    "placement.device_groups.GroupTimes": "keeps the seconds of operators",
    "placement.region_plans.RegionPlans": "keeps the plans of regions",
    "placement.prices.PartPrices": "keeps the tables of equal operators",
    "placement.device_topology.DeviceTopology": "works out ticks at first use",
    "microbatches.phases._Sorter": "notes values while instructions are walked",
    "regions.assignment.Assignment": "works out who makes and holds tensors at first use",
    "regions.group_programs.StepSplit": "makes the programs at first use",
    "regions.loops.LoopSplit": "makes the programs at first use",
    "regions.segment_plans.GroupChoices": "makes the collectives of reshardings at first use",
    "shell.place.Placement": "simulates at first use",
    "schedule.frame.Frame": "the values of a body while it is spelled out",
    "schedule.prefetch.Ties": "the barriers of a body while it is spelled out",
    "schedule.passes.extents._Facts": "grows while classes are joined",
    "mesh.topology.Tier": "made by a topology alone",
    "report.html_collectives._Row": "adds up the collectives of a row",
    "report.html_seconds._Sum": "adds up the seconds of a part",
    "mesh.topology.Topology": "works out sizes at first use",
    "search.inference.anytime.Incumbent": "the best so far",
    "search.inference.anytime.Watch": "is closed when the search is over",
    "search.inference.eliminate.Eliminator": "keeps eliminations of interned tables",
    "search.problem.extract.Extractor": "keeps programs that were looked up",
    "search.strategy.polish._Polish": "the best so far",
    "search.problem.cost_tables.TableStore": "interns tables",
    "tdl.proof.indexing._Lookup": "lives inside one proof case",
}
# Functions of more than 50 lines, docstring left out, each with why it is one function.
LONG = {
    "shardplan/report/mesh_text.py:reduce_report": "one report, line by line",
    "tests/oracles/ilp.py:solve": "one integer program: variables, constraints, solution",
    "shardplan/tdl/rules/indexing.py:_scatter": "one description, its dims in the primitive's own order",
}
# The rooms that know primitives by their names: all others read descriptions, and the properties of ops.
KNOW_PRIMITIVES = ("_jax", "frontend", "ir", "tdl")


def _dataclasses(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ClassDef):
            for decorator in map(ast.unparse, node.decorator_list):
                if decorator.startswith("dataclass"):
                    yield f"{_module(path)}.{node.name}", decorator


def test_stage_types_are_frozen_and_slotted() -> None:
    found = {name: how for path in FILES.values() for name, how in _dataclasses(path)}
    free = sorted(name for name, how in found.items() if not ("frozen=True" in how and "slots=True" in how))
    assert sorted(set(free) - set(NOT_FROZEN)) == [], "freeze and slot them, or say in NOT_FROZEN why not"


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, its docstring left out."""
    assert function.end_lineno is not None
    first = function.body[0]
    said = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    assert first.end_lineno is not None
    return function.end_lineno - function.lineno + 1 - (first.end_lineno - first.lineno + 1 if said else 0)


@pytest.mark.parametrize("path", EVERY_FILE, ids=_ids)
def test_a_function_can_be_seen_at_once(path: Path) -> None:
    functions = [n for n in ast.walk(_tree(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = {f"{_ids(path)}:{f.name}": _length(f) for f in functions if _length(f) > 50}
    assert not set(long) - set(LONG), f"{long}: 50 lines are many for one function"


def test_rooms_behind_the_frontend_know_no_primitive_by_its_name() -> None:
    """Names of primitives are for messages there: nothing is compared with one."""
    faults = [
        f"{_ids(path)}:{node.lineno}"
        for name, path in FILES.items()
        if name and name.split(".")[0] not in KNOW_PRIMITIVES
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Compare | ast.Match) and any(map(_names_a_primitive, _asked(node)))
    ]
    assert not faults, faults


def _asked(node: ast.Compare | ast.Match) -> list[ast.expr]:
    """What is compared, or matched."""
    if isinstance(node, ast.Match):
        return [node.subject]
    values = [node.left, *node.comparators]
    return [] if any(isinstance(v, ast.Constant) and v.value is None for v in values) else values


def _names_a_primitive(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "primitive"
