"""Words for what was found: a program as a test, and the counts of a run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.fuzz.arguments import WORDS
from tests.fuzz.check import Finding
from tests.fuzz.program import Program, source

STATUSES = ("equal", "wrong", "unplanned", "crashed", "aborted", "hung", "refused", "invalid")


def as_test(program: Program, name: str) -> str:
    """A program as the text of a test that passes where the plan computes what the step does."""
    lines = source(program)
    text = "\n".join(lines)
    words = [w for w in WORDS if re.search(rf"\b{w}\(", text)]
    roots = {"jax": "import jax", "jnp": "import jax.numpy as jnp", "np": "import numpy as np", "optax": "import optax"}
    imports = [line for root, line in roots.items() if re.search(rf"\b{root}\.", text)]
    if re.search(r"\blax\.", text):
        imports.append("from jax import lax")
    options = ", ".join(f"{key}={value!r}" for key, value in program.options.items())
    return "\n".join(
        [
            *imports,
            *([f"from tests.fuzz.arguments import {', '.join(sorted(words))}"] if words else []),
            "from tests.fuzz.check import examine",
            "",
            "",
            f"def test_{name}():",
            *[f"    {line}" for line in lines],
            f"    found = examine(step, args, {options})",
            '    assert found.status == "equal", found.detail',
        ]
    )


def line(seed: int, finding: Finding) -> str:
    """A failure on one line."""
    word = finding.status.upper() if finding.status == "wrong" else finding.status
    return f"seed {seed}: {word} {finding.detail}"


def counts(findings: Mapping[int, Finding], templates: Counter[str]) -> str:
    """How many programs went how, and how many had each template."""
    total = max(len(findings), 1)
    by_status = Counter(f.status for f in findings.values())
    sending = sum(f.communicates for f in findings.values())
    silent = sum(f.silent for f in findings.values())
    folded = sum(f.folded for f in findings.values())
    rounding = sum(f.status == "equal" and bool(f.detail) for f in findings.values())
    return "\n".join(
        [
            "programs with each template:",
            *_columns([f"{name} {n}" for name, n in sorted(templates.items(), key=lambda row: (-row[1], row[0]))]),
            f"{len(findings)} programs: " + ", ".join(f"{by_status[s]} {s}" for s in STATUSES),
            f"{sending} communicate ({100 * sending / total:.0f}%)",
            f"{rounding} differ by rounding alone, {silent} have no finite number, of {folded} XLA left out a collective",
        ]
    )


def _columns(words: Sequence[str], width: int = 27, count: int = 4) -> list[str]:
    return ["  " + "".join(w.ljust(width) for w in words[i : i + count]).rstrip() for i in range(0, len(words), count)]
