"""Frozen dataclasses as JSON values, written and read by their declared fields.

A dataclass is an object with a key for each field, a tuple is a list, and a mapping is an object, or a list of pairs if its keys
are not strings. A type may have a form of its own. Values of *tabled* types are written once, as rows of a table, and elsewhere
as their number in it.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

_Read = Callable[[Any, str], Any]
"""Reads the JSON value at a place."""


@dataclass(frozen=True, slots=True)
class Least:
    """The least value of a number: ``Annotated[float, Least(0)]``."""

    value: int


class Writer:
    """Writes values. ``forms`` has what writes the types with forms of their own; ``rows`` the tables that were written."""

    def __init__(self, forms: Mapping[type, Callable[[Any], Any]], tabled: Collection[type] = ()) -> None:
        self.rows: dict[type, list[Any]] = {kind: [] for kind in tabled}
        self._forms, self._numbers = forms, dict[Any, int]()

    def value(self, value: Any) -> Any:
        """The JSON value of any value."""
        kind = cast(type, type(value))
        if kind in self._forms:
            return self._forms[kind](value)
        if kind in self.rows:
            return self._number(value, self.rows[kind])
        if is_dataclass(value):
            return self.fields(value)
        if isinstance(value, Mapping):
            return self._mapping(cast("Mapping[Any, Any]", value))
        if isinstance(value, tuple):
            return [self.value(one) for one in cast("tuple[Any, ...]", value)]
        return value.value if isinstance(value, StrEnum) else value

    def fields(self, value: Any) -> dict[str, Any]:
        """The fields of a dataclass."""
        return {f.name: self.value(getattr(value, f.name)) for f in fields(value)}

    def _number(self, value: Any, rows: list[Any]) -> int:
        if value not in self._numbers:
            row = self.fields(value)
            self._numbers[value] = len(rows)
            rows.append(row)
        return self._numbers[value]

    def _mapping(self, items: Mapping[Any, Any]) -> Any:
        if all(isinstance(key, str) for key in items):
            return {key: self.value(one) for key, one in items.items()}
        return [[self.value(key), self.value(items[key])] for key in sorted(items)]


class Reader:
    """Reads values of declared types; every error names the place of the value, such as ``baselines[0].fits``.

    ``forms`` has what reads the types with forms of their own.
    """

    def __init__(self, forms: Mapping[type, _Read]) -> None:
        self._readers: dict[Any, _Read] = dict(forms)

    def table(self, kind: type, rows: Any, place: str) -> list[Any]:
        """The rows of the table of a type; afterwards, values of this type are read as their numbers."""
        result = [self.fields(kind, row, f"{place}[{n}]") for n, row in enumerate(_list(rows, place))]
        self._readers[kind] = partial(_row, kind, result)
        return result

    def fields(self, kind: Any, content: Any, place: str = "") -> Any:
        """The dataclass with these fields. Keys that are not among its fields are refused, except at the top (``place`` empty).

        Raises:
            KeyError: with the place of a field that is missing.
            ValueError: for a value that is not of its field's type.
        """
        hints = _hints(kind)
        given, dot = _object(content, place), "." if place else ""
        if place and (others := given.keys() - hints.keys()):
            raise ValueError(f"{place}.{min(others)} is not a field of this version")
        for name in hints:
            if name not in given:
                raise KeyError(f"{place}{dot}{name}")
        return kind(**{name: self.reads(hint)(given[name], f"{place}{dot}{name}") for name, hint in hints.items()})

    def reads(self, hint: Any) -> _Read:
        """The function that reads the values of a declared type."""
        if hint not in self._readers:
            self._readers[hint] = self._of(hint)
        return self._readers[hint]

    def _of(self, hint: Any) -> _Read:
        origin, parts = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return partial(_at_least, parts[1], self.reads(parts[0]))
        if origin is Literal:
            return partial(_known, parts)
        if origin in (Union, UnionType):
            return partial(_either, [self.reads(part) for part in parts if part is not NoneType], NoneType in parts)
        if origin is tuple and parts[1:] == (...,):
            return partial(_items, self.reads(parts[0]))
        if origin is tuple:
            return partial(_row_of, [self.reads(part) for part in parts])
        if origin is Mapping:
            return partial(_mapping, *map(self.reads, parts), parts[0] is str)
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return lambda value, place: hint(_known(tuple(hint), value, place))
        return partial(self.fields if is_dataclass(hint) else plain, hint)


@cache
def _hints(kind: type) -> dict[str, Any]:
    """The declared types of a dataclass's fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in fields(kind)}


def plain(kind: Any, value: Any, place: str) -> Any:
    """A text, a number or a truth value."""
    what = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[kind]
    fits = type(value) is kind or (kind is float and type(value) is int)
    if not fits:
        raise ValueError(f"{place}={value!r} is not {what}")
    if kind is float and not abs(value) <= sys.float_info.max:
        raise ValueError(f"{place} is {reprlib.repr(value)}, not a finite number")
    return kind(value)


def _at_least(least: Least, read: _Read, value: Any, place: str) -> Any:
    if (result := read(value, place)) < least.value:
        raise ValueError(f"{place}={value!r} is below {least.value}")
    return result


def _known(known: tuple[Any, ...], value: Any, place: str) -> Any:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"unsupported {place}={value!r}: use {', '.join(repr(str(one)) for one in known)}")
    return value


def _row(kind: type, rows: list[Any], number: Any, place: str) -> Any:
    if type(number) is not int or not 0 <= number < len(rows):
        raise ValueError(f"{place}={number!r} is no {kind.__name__}: the file has {len(rows)}")
    return rows[number]


def _either(readers: list[_Read], none: bool, value: Any, place: str) -> Any:
    """A value of the first type that accepts it; if none does, the error of the last."""
    if none and value is None:
        return None
    for read in readers[:-1]:
        try:
            return read(value, place)
        except ValueError:
            continue
    return readers[-1](value, place)


def _items(read: _Read, value: Any, place: str) -> tuple[Any, ...]:
    return tuple([read(item, f"{place}[{n}]") for n, item in enumerate(_list(value, place))])


def _row_of(readers: list[_Read], value: Any, place: str) -> tuple[Any, ...]:
    items = _list(value, place)
    if len(items) != len(readers):
        raise ValueError(f"{place}={reprlib.repr(value)} has {len(items)} items, not {len(readers)}")
    return tuple([read(item, f"{place}[{n}]") for n, (read, item) in enumerate(zip(readers, items, strict=True))])


def _mapping(key: _Read, read: _Read, texts: bool, value: Any, place: str) -> dict[Any, Any]:
    if texts or isinstance(value, dict):
        return {key(name, place): read(item, f"{place}.{name}") for name, item in _object(value, place).items()}
    pairs = _items(partial(_row_of, [key, read]), value, place)
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError(f"{place} has a key twice")
    return result


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{place}={reprlib.repr(value)} is not a list")
    return cast("list[Any]", value)


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}={reprlib.repr(value)} is not an object")
    return cast("dict[str, Any]", value)
