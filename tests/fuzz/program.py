"""Fuzzed programs as data, and their source: what is printed is what runs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from tests.fuzz import arguments
from tests.fuzz.nudge import nudge

Form = Literal["plain", "sgd", "adam"]
Shape = tuple[int, ...]
ADAM = "optax.adam(0.01, eps=0.01)"
NAME = re.compile(r"\{(\d+)\}")


@dataclass(frozen=True, slots=True)
class Value:
    """The type of an array. ``exact``: no order of summation changes it, so that a step may decide by it."""

    shape: Shape
    dtype: str
    exact: bool = True

    @property
    def like(self) -> tuple[Shape, str]:
        """What another value must share to take this one's place."""
        return self.shape, self.dtype

    @property
    def inexact(self) -> bool:
        """Whether it holds floats or complex numbers."""
        return self.dtype in ("float32", "bfloat16", "complex64")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument: ``kind`` is a function of `tests.fuzz.arguments`, ``limit`` what its whole numbers stay below."""

    name: str
    kind: str
    seed: int
    value: Value
    limit: int = 10
    trained: bool = False

    @property
    def text(self) -> str:
        """Its source."""
        shape, dtype = self.value.shape, self.value.dtype
        match self.kind:
            case "key":
                return f"key({self.seed})"
            case "permutation":
                return f"permutation({self.seed}, {math.prod(shape)})"
            case "bools":
                return f"bools({self.seed}, {shape})"
            case "ints":
                return f"ints({self.seed}, {shape}, {self.limit}" + (f", {dtype!r})" if dtype != "int32" else ")")
            case _:
                return f"{self.kind}({self.seed}, {shape}" + (f", {dtype!r})" if dtype != "float32" else ")")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: ``text`` with ``{0}``, ``{1}`` in the place of its operands."""

    name: str
    template: str
    text: str
    operands: tuple[str, ...]
    value: Value

    @property
    def line(self) -> str:
        """Its source."""
        return f"{self.name} = {filled(self.text, self.operands)}"


@dataclass(frozen=True, slots=True)
class Program:
    """A step, its arguments, and how it is planned.

    ``state`` pairs an argument with what replaces it in the next step (of plain functions; trained arguments are replaced by
    their updates). ``returned`` names what else is returned or, if it is trained on, goes into the loss. ``memory_part`` is the
    memory limit, as a part of the peak of the plan without one; ``layouts`` the seed of layouts drawn at random in place of the
    planned ones.
    """

    arguments: tuple[Argument, ...]
    instructions: tuple[Instruction, ...]
    returned: tuple[str, ...]
    form: Form = "plain"
    state: tuple[tuple[str, str], ...] = ()
    cluster: str = "8:eager"
    pins: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    memory_part: float | None = None
    remat: str = "none"
    objective: str = "time"
    donate: bool = False
    layouts: int | None = None
    backend: str = "specs"
    groups: int | None = None
    microbatches: int = 1
    reference: Literal["always", "unequal"] = "unequal"

    @property
    def values(self) -> dict[str, Value]:
        """The type of each name."""
        return {x.name: x.value for x in (*self.arguments, *self.instructions)}

    @property
    def options(self) -> dict[str, Any]:
        """What `tests.fuzz.check.examine` is told beside the step."""
        found: dict[str, Any] = {"cluster": self.cluster}
        if self.pins:
            named = {place(self)[name]: entries for name, entries in self.pins}
            found["pins"] = named
        defaults = {
            "memory_part": None,
            "remat": "none",
            "objective": "time",
            "donate": False,
            "layouts": None,
            "backend": "specs",
            "groups": None,
            "microbatches": 1,
            "reference": "unequal",
        }
        for name, default in defaults.items():
            if getattr(self, name) != default:
                found[name] = getattr(self, name)
        return found


def filled(text: str, operands: tuple[str, ...]) -> str:
    """A template's text with its operands' names."""
    return NAME.sub(lambda m: operands[int(m[1])], text)


def place(program: Program) -> dict[str, str]:
    """The path of each argument, as plans call it."""
    group, inside = _group(program)
    found = {name: f"{group}/{i}" for i, name in enumerate(inside)}
    return {a.name: found.get(a.name, a.name) for a in program.arguments}


def source(program: Program, noise: bool = False) -> list[str]:
    """The lines that define ``step`` and ``args``. With ``noise`` the step moves each float by a unit in the last place."""
    group, inside = _group(program)
    rest = [a.name for a in program.arguments if a.name not in inside]
    head = [group] if inside else []
    if program.form == "adam":
        head.append("opt")
    unpack = [f"{_tuple(inside)} = {group}"] if inside else []
    lines = [*unpack, *_nudged(program, inside, noise), *_lines(program, noise)]
    body = _plain(program, lines) if program.form == "plain" else _train(program, lines)
    body = [*_nudged(program, rest, noise), *body]
    return [f"def step({', '.join([*head, *rest])}):", *_indented(body), *_arguments(program, inside, rest)]


def make(program: Program, noise: int | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The step and its arguments; ``noise`` is the seed of the moves of its floats."""
    space: dict[str, Any] = {**VOCABULARY, "nudge": lambda x, place: nudge(x, place, noise or 0)}
    exec(compile("\n".join(source(program, noise is not None)), "<fuzz>", "exec"), space)
    return space["step"], space["args"]


VOCABULARY: Mapping[str, Any] = MappingProxyType(
    {"jax": jax, "jnp": jnp, "lax": lax, "np": np, "optax": optax} | {name: getattr(arguments, name) for name in arguments.WORDS}
)
"""What the source of a program may use."""


def _group(program: Program) -> tuple[str, list[str]]:
    """(the name of the arguments that come as a tuple, which they are): the trained, or the state of a plain function."""
    if program.form == "plain":
        return "state", [name for name, _ in program.state]
    return "params", [a.name for a in program.arguments if a.trained]


def _nudged(program: Program, names: Iterable[str], noise: bool) -> list[str]:
    """The lines that move those of the arguments."""
    values, places = program.values, {a.name: i for i, a in enumerate(program.arguments)}
    return [f"{name} = nudge({name}, {places[name]})" for name in names if noise and _moves(values[name])]


def _lines(program: Program, noise: bool) -> list[str]:
    lines: list[str] = []
    for i, x in enumerate(program.instructions):
        lines.append(x.line)
        if noise and _moves(x.value):
            lines.append(f"{x.name} = nudge({x.name}, {1000 + i})")
    return lines


def _moves(value: Value) -> bool:
    return value.inexact and not value.exact


def _plain(program: Program, lines: list[str]) -> list[str]:
    if program.state:
        state = _tuple([new for _, new in program.state])
        return [*lines, f'return {{"state": {state}, "out": {_dict(program.returned)}}}']
    at = [a.value.like for a in program.arguments]
    values = program.values
    fed = any(i < len(at) and values[name].like == at[i] for i, name in enumerate(program.returned))
    return [*lines, f"return {_dict(program.returned) if fed else _tuple(program.returned)}"]


def _train(program: Program, lines: list[str]) -> list[str]:
    values = program.values
    terms = [_term(name, values[name].dtype) for name in program.returned if values[name].inexact]
    aux = _dict([name for name in program.returned if not values[name].inexact])
    loss = [*lines, f"return {' + '.join(terms) or '0.0'}, {aux}"]
    gradient = "(value, aux), grads = jax.value_and_grad(loss, has_aux=True)(params)"
    head = ["def loss(params):", *_indented(loss), gradient]
    if program.form == "sgd":
        update = "jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads)"
        return [*head, f'return {{"params": {update}, "loss": value, "aux": aux}}']
    return [
        *head,
        f"updates, opt = {ADAM}.update(grads, opt, params)",
        'return {"params": optax.apply_updates(params, updates), "opt": opt, "loss": value, "aux": aux}',
    ]


def _term(name: str, dtype: str) -> str:
    """The share of a value in the loss."""
    if dtype == "complex64":
        return f"jnp.mean(jnp.real({name} * jnp.conj({name})))"
    return f"jnp.mean({name}{'.astype(jnp.float32)' if dtype == 'bfloat16' else ''} ** 2)"


def _arguments(program: Program, inside: Iterable[str], rest: Iterable[str]) -> list[str]:
    texts = {a.name: a.text for a in program.arguments}
    others = [texts[name] for name in rest]
    group = _tuple([texts[name] for name in inside])
    if program.form == "adam":
        return [f"params = {group}", f"args = {_tuple(['params', f'{ADAM}.init(params)', *others])}"]
    return [f"args = {_tuple([group, *others] if texts and group != '()' else others)}"]


def _tuple(items: Iterable[str]) -> str:
    items = list(items)
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def _dict(items: Iterable[str]) -> str:
    return "{" + ", ".join(f'"{x}": {x}' for x in items) + "}"


def _indented(lines: Iterable[str]) -> list[str]:
    return ["    " + line for line in lines]
