"""What templates draw with: values to work on, new arguments, sizes and words."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from tests.fuzz.program import VOCABULARY, Argument, Instruction, Shape, Value, filled

T = TypeVar("T")
KINDS = {
    "float": ("float32", "bfloat16"),
    "f32": ("float32",),
    "int": ("int32", "uint32", "int8"),
    "int32": ("int32",),
    "bool": ("bool",),
    "complex": ("complex64",),
    "key": ("key<fry>",),
}
KINDS |= {"real": (*KINDS["float"], *KINDS["int"]), "any": (*KINDS["float"], *KINDS["int"], "bool", "complex64")}
"""The dtypes that a word of a template stands for; new arguments take the first one, now and then another."""
MAKERS = {"bool": "bools", "key<fry>": "key", "complex64": "normal", "float32": "normal", "bfloat16": "normal"}
LARGEST = 8192
"""Numbers in an array."""


class UnfitError(Exception):
    """A template finds nothing to work on."""


class Drawer:
    """A program that grows. ``trains`` says whether it will be differentiated, ``sizes`` which dims its arguments have."""

    def __init__(self, rng: np.random.Generator, *, trains: bool, sizes: Sequence[int]) -> None:
        self.rng, self.trains, self.sizes = rng, trains, tuple(sizes)
        self.arguments: list[Argument] = []
        self.instructions: list[Instruction] = []
        self.values: dict[str, Value] = {}
        self.used: set[str] = set()

    # -- words and numbers ---------------------------------------------------------------------------------------------

    def below(self, limit: int, low: int = 0) -> int:
        """A whole number from ``low`` to ``limit`` - 1."""
        return int(self.rng.integers(low, limit))

    def chance(self, part: float) -> bool:
        """True so often."""
        return bool(self.rng.random() < part)

    def choice(self, items: Sequence[T]) -> T:
        """One of them."""
        return items[self.below(len(items))]

    def size(self, least: int = 1) -> int:
        """A dim."""
        fit = [n for n in self.sizes if n >= least]
        return self.choice(fit) if fit else least

    def shape(self, low: int = 1, high: int = 3, largest: int = 2048) -> Shape:
        """The shape of a new argument."""
        drawn = [self.size() for _ in range(self.below(high + 1, low))]
        while math.prod(drawn) > largest:
            at = drawn.index(max(drawn))
            drawn[at] = self.choice([1, 2, 4, min(8, drawn[at] // 2)])
        return tuple(drawn)

    def axis(self, name: str) -> int:
        """A dim of a value."""
        return self.below(len(self.values[name].shape))

    # -- values --------------------------------------------------------------------------------------------------------

    def value(
        self,
        kind: str = "float",
        low: int = 1,
        high: int = 4,
        *,
        exact: bool = False,
        where: Callable[[Shape], bool] = lambda shape: True,
        fresh: float = 0.12,
    ) -> str:
        """A value of that kind and rank, seldom a new argument; unused ones and late ones first."""
        dtypes = KINDS[kind]
        fit = [
            name
            for name, v in self.values.items()
            if v.dtype in dtypes and low <= len(v.shape) <= high and where(v.shape) and (v.exact or not (exact and v.inexact))
        ]
        if fit and not self.chance(fresh):
            weights = np.array([(4.0 if name not in self.used else 1.0) * (1 + i / len(fit)) for i, name in enumerate(fit)])
            return fit[int(self.rng.choice(len(fit), p=weights / weights.sum()))]
        dtype = dtypes[0] if self.chance(0.85) else self.choice(dtypes)
        for _ in range(30):
            shape = () if dtype == "key<fry>" else self.shape(max(low, min(1, high)), min(high, max(low, 3)))
            if where(shape):
                return self.argument(shape, dtype, exact=exact)
        if fit:
            return self.choice(fit)
        raise UnfitError

    def like(self, name: str, *, dtype: str = "", broadcast: bool = True, exact: bool = False) -> str:
        """A value of the shape of another, or one that is broadcast to it."""
        shape, dtype = self.values[name].shape, dtype or self.values[name].dtype
        fit = [n for n, v in self.values.items() if v.like == (shape, dtype) and n != name and (v.exact or not exact)]
        if fit and self.chance(0.7):
            return self.choice(fit)
        if broadcast and shape and self.chance(0.5):
            shape = shape[self.below(len(shape)) :] if self.chance(0.5) else tuple(1 if self.chance(0.4) else n for n in shape)
        return self.argument(shape, dtype, exact=exact)

    def argument(self, shape: Shape, dtype: str = "float32", *, exact: bool = False, limit: int = 10, kind: str = "") -> str:
        """A new argument, trained if it may be; ``exact`` floats may be compared with each other."""
        if math.prod(shape) > LARGEST:
            raise UnfitError
        inexact = dtype in ("float32", "bfloat16", "complex64")
        kind = kind or ("spread" if exact and inexact else MAKERS.get(dtype, "ints"))
        trained = self.trains and kind == "normal" and dtype != "complex64" and self.chance(0.6)
        name = f"a{len(self.arguments)}"
        value = Value(tuple(shape), dtype, kind != "normal")
        self.arguments.append(Argument(name, kind, self.below(100), value, limit, trained))
        self.values[name] = value
        return name

    def index(self, shape: Shape, limit: int, over: int = 0) -> str:
        """A new argument of whole numbers below ``limit``, or beyond it by up to ``over``."""
        return self.argument(shape, "int32", limit=limit + over)

    def scalar(self, dtype: str = "int32") -> str:
        """A scalar that a step may decide by."""
        fit = [n for n, v in self.values.items() if v.like == ((), dtype) and v.exact]
        return self.choice(fit) if fit and self.chance(0.6) else self.argument((), dtype, limit=7)

    def add(self, template: str, text: str, *operands: str, exact: bool = False, smooth: bool = True) -> str:
        """A new instruction; what cannot be differentiated (not ``smooth``) reads its floats as constants.

        ``exact``: its floats are those of its operands, moved or rounded but not added up.
        """
        if self.trains and not smooth:
            text = self._constants(text, operands)
        value = inferred(text, tuple(self.values[n] for n in operands))
        exact = not value.inexact or (exact and all(self.values[n].exact for n in operands))
        if math.prod(value.shape) > LARGEST or 0 in value.shape or len(value.shape) > 5:
            raise UnfitError
        name = f"x{len(self.instructions)}"
        self.values[name] = Value(value.shape, value.dtype, exact)
        self.instructions.append(Instruction(name, template, text, operands, self.values[name]))
        self.used.update(operands)
        return name

    def _constants(self, text: str, operands: Sequence[str]) -> str:
        for i, name in enumerate(operands):
            if self.values[name].inexact:
                text = text.replace(f"{{{i}}}", f"lax.stop_gradient({{{i}}})")
        return text


@functools.lru_cache(maxsize=4096)
def inferred(text: str, operands: tuple[Value, ...]) -> Value:
    """The type of what a text computes of operands of these types."""
    names = tuple(f"v{i}" for i in range(len(operands)))
    run = eval(f"lambda {', '.join(names)}: {filled(text, names)}", dict(VOCABULARY))
    made = jax.eval_shape(run, *[_struct(v) for v in operands])
    return Value(tuple(made.shape), str(made.dtype))


def _struct(value: Value) -> Any:
    if value.dtype == "key<fry>":
        return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), value.shape) if value.shape else jax.random.key(0))
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
