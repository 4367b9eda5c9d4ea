"""Tokens: text that is equal exactly when the values are, in every process.

An array is a hash of its bytes, a program its computation, a function its code and what it closes over. No token depends on an
object's address or on the order of a set.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import re
from collections.abc import Mapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
import numpy as np

from shardplan import _jax

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The name and the source lines of a program do not change its results.
_NAMES = frozenset({"name", "debug_info", "source_info"})


class Tokens:
    """Makes tokens of values. Each program and each array is read once, however often it occurs."""

    def __init__(self) -> None:
        self._memo: dict[int, tuple[Any, str]] = {}  # by id; the value is kept, so that its id is not reused
        self._in_progress: set[int] = set()

    def of(self, value: Any) -> str:
        """The token of any value that a program holds."""
        match value:
            case None | bool() | int() | float() | complex() | str() | bytes() if not isinstance(value, enum.Enum):
                return f"{type(value).__name__} {value!r}"
            case tuple() | list():
                return f"{type(value).__qualname__}({', '.join(map(self.of, value))})"
            case enum.Enum():
                return f"{type(value).__qualname__}.{value.name}"
            case set() | frozenset():
                return f"set({', '.join(sorted(map(self.of, value)))})"
            case Mapping():
                return f"map({', '.join(sorted(f'{self.of(k)}: {self.of(v)}' for k, v in value.items()))})"
            case _:
                return self._memoised(value)

    def params(self, params: Mapping[str, Any], *, but: Sequence[str] = ()) -> str:
        """The parameters of an equation, without those named in ``but``."""
        return ", ".join(f"{k}={self.of(v)}" for k, v in sorted(params.items()) if k not in _NAMES and k not in but)

    def _memoised(self, value: Any) -> str:
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        if id(value) in self._in_progress:
            return "itself"
        self._in_progress.add(id(value))
        token = self._token(value)
        self._in_progress.discard(id(value))
        self._memo[id(value)] = (value, token)
        return token

    def _token(self, value: Any) -> str:
        if hasattr(value, "__array__") and hasattr(value, "dtype"):
            return array_token(value)
        if hasattr(value, "eqns"):
            return _hashed(f"{self._program(value)}\n{self.of(list(getattr(value, 'consts', ())))}")
        if isinstance(value, functools.partial):
            return f"partial({self.of(value.func)}, {self.of(value.args)}, {self.of(value.keywords)})"
        if isinstance(value, MethodType):
            return f"method({self.of(value.__func__)}, {self.of(value.__self__)})"
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, CodeType):
            return _hashed(f"{value.co_code!r} {value.co_names} {self.of(value.co_consts)}")
        if isinstance(value, type):
            return f"{value.__module__}.{value.__qualname__}"
        if dataclasses.is_dataclass(value):
            fields = (f"{f.name}={self.of(getattr(value, f.name, None))}" for f in dataclasses.fields(value))
            return f"{type(value).__qualname__}({', '.join(fields)})"
        return f"{type(value).__qualname__} {_ADDRESS.sub('', repr(value))}"

    def _program(self, jaxpr: Any) -> str:
        """A jaxpr with its variables numbered in the order in which they are bound."""
        numbers = {v: n for n, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}

        def atom(a: Any) -> str:
            return f"{self.of(a.val)}:{a.aval}" if hasattr(a, "val") else f"{numbers[a]}"

        lines = [" ".join(f"{v.aval}" for v in (*jaxpr.constvars, *jaxpr.invars))]
        for eqn in jaxpr.eqns:
            reads = " ".join(atom(a) for a in eqn.invars)
            for v in eqn.outvars:
                numbers[v] = len(numbers)
            results = " ".join(f"{v.aval}" for v in eqn.outvars)
            lines.append(f"{eqn.primitive.name} {reads} -> {results} [{self.params(_jax.params_of(eqn))}] {context(eqn)}")
        lines.append(" ".join(atom(a) for a in jaxpr.outvars))
        return "\n".join(lines)

    def _function(self, value: FunctionType) -> str:
        captured = [c.cell_contents for c in value.__closure__ or () if _filled(c)]
        parts = (value.__code__, value.__defaults__, value.__kwdefaults__, captured)
        return f"{value.__module__}.{value.__qualname__}({', '.join(self.of(part) for part in parts)})"


def array_token(value: Any) -> str:
    """The token of an array: its dtype, its shape and a hash of its bytes. A random key has its kind and its words.

    >>> array_token(np.zeros(2)) == array_token(np.zeros(2)) != array_token(np.zeros((2, 1)))
    True
    """
    kind = ""
    if not getattr(value, "is_fully_addressable", True):  # spread over several processes: none has all of it
        return f"array {value.dtype}{list(value.shape)}"
    if hasattr(value, "dtype") and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        kind, value = f"{jax.random.key_impl(value)} ", jax.random.key_data(value)
    plain = np.asarray(value)
    content = repr(plain.tolist()) if plain.dtype == object else hashlib.blake2b(plain.tobytes(), digest_size=16).hexdigest()
    return f"array {kind}{plain.dtype.name}{list(plain.shape)} {content}"


def context(eqn: Any) -> str:
    """The part of an equation's context that changes its results: how random bits are drawn."""
    return str(getattr(getattr(eqn, "ctx", None), "threefry_partitionable", ""))


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading is the test
    except ValueError:
        return False
    return True
