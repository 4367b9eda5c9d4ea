"""The templates of instructions, by name: what fuzzed programs consist of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.draw import Drawer

Rule = Callable[[Drawer, str], None]
"""Adds one instruction (now and then a few) of the template of that name to a program."""


@dataclass(frozen=True, slots=True)
class Template:
    """A way to add an instruction, and how often it is drawn beside others."""

    name: str
    rule: Rule
    weight: float


TEMPLATES: dict[str, Template] = {}


def template(weight: float = 1.0) -> Callable[[Rule], Rule]:
    """Makes a function a template of its own name."""

    def register(rule: Rule) -> Rule:
        name = rule.__name__.strip("_")
        assert name not in TEMPLATES, f"two templates are called {name}"
        TEMPLATES[name] = Template(name, rule, weight)
        return rule

    return register
