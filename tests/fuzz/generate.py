"""Programs from seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.fuzz import (  # noqa: F401  (each adds its templates)
    templates_contraction,
    templates_control,
    templates_elementwise,
    templates_indexing,
    templates_movement,
    templates_random,
    templates_reduction,
)
from tests.fuzz.draw import Drawer, UnfitError
from tests.fuzz.program import Form, Program, Value
from tests.fuzz.templates import TEMPLATES
from tests.machines import SHAPES, machine

LEAST, MOST = 5, 40
"""Instructions of a program."""
OP_BY_OP = 4
"""One program in so many is compiled for one device and compared with itself op by op, which takes as long as all else."""
SPEEDS = {"eager": 0.45, "crawl": 0.38, "slow": 0.12, "": 0.05}
"""How often clusters of each kind are drawn."""


def program(seed: int, backend: str = "specs") -> Program:
    """The program of that seed, to run under a backend."""
    rng = np.random.default_rng([seed, 20])
    form: Form = "plain" if rng.random() < 0.5 else "sgd" if rng.random() < 0.5 else "adam"
    drawer = _grown(rng, form != "plain", LEAST + int((MOST - LEAST + 1) * rng.random() ** 2.5))
    made = replace(_options(rng, _finished(rng, drawer, form)), backend=backend)
    made = replace(made, reference="always") if seed % OP_BY_OP == 0 else made
    if backend == "microbatches":
        return replace(made, backend="explicit", microbatches=2, memory_part=None, objective="time")
    if backend != "regions":
        return made
    return replace(made, groups=seed, pins=(), memory_part=None, remat="none", objective="time", layouts=None)


def _grown(rng: np.random.Generator, trains: bool, count: int) -> Drawer:
    """A program of so many instructions."""
    drawer = Drawer(rng, trains=trains, sizes=_sizes(rng))
    drawer.argument(drawer.shape(2, 2))
    drawer.argument(drawer.shape(3, 3))
    weights = np.array([t.weight for t in TEMPLATES.values()])
    order = list(TEMPLATES.values())
    # a program dwells on some templates, so that rare ones meet each other too
    weights = weights * rng.choice([0.2, 1.0, 4.0], len(order), p=[0.45, 0.4, 0.15])
    while len(drawer.instructions) < count:
        drawn = order[int(rng.choice(len(order), p=weights / weights.sum()))]
        before = len(drawer.arguments)
        try:
            drawn.rule(drawer, drawn.name)
        except UnfitError:
            for argument in drawer.arguments[before:]:
                del drawer.values[argument.name]
            del drawer.arguments[before:]
    return drawer


def _sizes(rng: np.random.Generator) -> Sequence[int]:
    """The dims of a program: few, so that values fit each other; most of them divide among devices."""
    even = rng.choice([2, 4, 6, 8, 8, 12, 16, 16, 24, 32, 64], 4)
    odd = rng.integers(1, 18, 2)
    return [int(n) for n in (*even, *odd)]


def _finished(rng: np.random.Generator, drawer: Drawer, form: Form) -> Program:
    """Everything that nothing reads is returned; of a plain function some of it is the next step's state."""
    unread = [x.name for x in drawer.instructions if x.name not in drawer.used]
    arguments = tuple(a for a in drawer.arguments if a.name in drawer.used)
    if form != "plain" and not any(a.trained for a in arguments):
        form = "plain"
    if form != "plain":
        return Program(arguments, tuple(drawer.instructions), tuple(unread), form)
    arguments = tuple(replace(a, trained=False) for a in arguments)
    state: list[tuple[str, str]] = []
    left = list(unread)
    for a in arguments:
        fits = [name for name in left if drawer.values[name].like == a.value.like]
        if fits and a.kind in ("normal", "key", "bools") and rng.random() < 0.8:
            state.append((a.name, fits[0]))
            left.remove(fits[0])
    return Program(arguments, tuple(drawer.instructions), tuple(left), "plain", tuple(state))


def _options(rng: np.random.Generator, made: Program) -> Program:
    """With a cluster, and now and then pins, a memory limit and the like."""
    kind = str(rng.choice(list(SPEEDS), p=list(SPEEDS.values())))
    shape = str(rng.choice(SHAPES))
    made = replace(made, cluster=f"{shape}:{kind}" if kind else shape)
    if rng.random() < 0.4:
        made = replace(made, pins=_pins(rng, made))
    if rng.random() < 0.12:
        made = replace(made, memory_part=round(float(rng.uniform(0.85, 1.0)), 2), remat=str(rng.choice(["none", "auto"])))
    if rng.random() < 0.08:
        made = replace(made, objective="bytes")
    elif made.memory_part is None and rng.random() < 0.2:
        made = replace(made, layouts=int(rng.integers(100)))
    return replace(made, donate=bool(rng.random() < 0.15) and bool(made.state or made.form != "plain"))


def _pins(rng: np.random.Generator, made: Program) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Up to three arguments, each held whole or cut over levels that divide a dim."""
    levels = {level.name: level.size for level in machine(made.cluster).levels}
    able = [a for a in made.arguments if a.value.shape]
    chosen = [able[int(i)] for i in rng.permutation(len(able))[: int(rng.integers(1, 4))]]
    return tuple((a.name, _entries(rng, a.value, levels)) for a in chosen)


def _entries(rng: np.random.Generator, value: Value, levels: dict[str, int]) -> tuple[Any, ...]:
    """A PartitionSpec's entries that divide the dims of a value."""
    left = [str(name) for name in rng.permutation(list(levels))]
    entries: list[Any] = []
    for n in value.shape:
        taken: list[str] = []
        while left and rng.random() < 0.6 and n % math.prod(levels[name] for name in (*taken, left[0])) == 0:
            taken.append(left.pop(0))
        taken.sort(key=list(levels).index)  # slowest first: other orders are not planned
        entries.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)
