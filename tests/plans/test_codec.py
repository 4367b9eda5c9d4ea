"""Dataclasses as JSON values, by their declared fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest

import shardplan
from shardplan.plans.codec import Least, Reader, Writer
from shardplan.plans.data import PlanData


class Wood(StrEnum):
    """A type with names."""

    OAK = "oak"
    ASH = "ash"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A type that is written once."""

    spokes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cart:
    """A field of every kind."""

    kind: Literal["hand", "ox"]
    wheels: tuple[Wheel | None, ...]
    load: Annotated[float, Least(0)] | None
    axle: tuple[Wood, int]
    places: Mapping[tuple[int, int], str | tuple[str, ...]]
    notes: Mapping[str, bool]


WHEEL = Wheel((3, 4))
CARTS = (
    Cart("ox", (WHEEL, None, WHEEL), 2.5, (Wood.OAK, 1), {(1, 0): "front", (0, 1): ("left", "right")}, {"old": True}),
    Cart("hand", (), None, (Wood.ASH, 2), {}, {}),
)


def written(cart: Cart) -> dict[str, Any]:
    writer = Writer({}, (Wheel,))
    return json.loads(json.dumps({**writer.fields(cart), "table": writer.rows[Wheel]}))


def read(content: dict[str, Any]) -> Cart:
    reader = Reader({})
    reader.table(Wheel, content["table"], "table")
    return reader.fields(Cart, content)


@pytest.mark.parametrize("cart", CARTS)
def test_what_is_written_is_read_back(cart: Cart) -> None:
    content = written(cart)
    assert read(content) == cart
    assert len(content["table"]) == bool(cart.wheels), "equal values are one row"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "dog"}, "unsupported kind='dog': use 'hand', 'ox'"),
        ({"wheels": [1]}, r"wheels\[0\]=1 is no Wheel: the file has 1"),
        ({"wheels": [True]}, r"wheels\[0\]=True is no Wheel"),
        ({"load": -1}, "load=-1 is below 0"),
        ({"load": "much"}, "load='much' is not a number"),
        ({"load": float("inf")}, "load is inf, not a finite number"),
        ({"load": float("nan")}, "load is nan, not a finite number"),
        ({"load": 10**400}, r"load is 1000.*000, not a finite number"),
        ({"load": True}, "load=True is not a number"),
        ({"axle": ["oak", True]}, r"axle\[1\]=True is not a whole number"),
        ({"axle": ["oak"]}, r"axle=\['oak'\] has 1 items, not 2"),
        ({"axle": ["elm", 1]}, r"unsupported axle\[0\]='elm': use 'oak', 'ash'"),
        ({"axle": ["oak", 1.5]}, r"axle\[1\]=1.5 is not a whole number"),
        ({"places": [[[0], "front"]]}, r"places\[0\]\[0\]=\[0\] has 1 items, not 2"),
        ({"places": [[[0, 0], 3]]}, r"places\[0\]\[1\]=3 is not a list"),
        ({"notes": {"old": 1}}, "notes.old=1 is not true or false"),
        ({"table": [{"spokes": [], "rim": 3}]}, r"table\[0\].rim is not a field of this version"),
    ],
)
def test_an_error_names_the_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(written(CARTS[0]) | change)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(KeyError, match=r"table\[0\].spokes"):
        read(written(CARTS[0]) | {"table": [{}]})


@pytest.mark.parametrize("name", [f.name for f in fields(PlanData)])
def test_a_plan_has_every_field_of_its_data(name: str) -> None:
    assert isinstance(getattr(shardplan.Plan, name), property)
