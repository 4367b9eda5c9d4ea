"""Shardings as a user writes them: each belongs to one place, and a rule that decides nothing is refused."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from shardplan.errors import PinError
from shardplan.frontend.given_shardings import from_rules, from_tree

ARRAY = jax.ShapeDtypeStruct((8, 8), "float32")


class Values(NamedTuple):
    """Two arrays with one path: each has a name under which nnx keeps a variable's array."""

    value: Any
    raw_value: Any


def step(state: Any, x: Any) -> Any:
    return state, x


@pytest.mark.parametrize("second", [P("gpu"), P("node")])
def test_a_tree_of_other_types_is_read_by_names_that_differ(second: P) -> None:
    args, given = ({"v": ARRAY, "w": ARRAY}, ARRAY), ({"v": P(), "w": Values(P("gpu"), second)}, P())
    if second == P("gpu"):
        assert from_tree(given, step, args).entries["state/w"] == ("gpu",)
        return
    with pytest.raises(
        PinError, match=r"several entries named state/w, .*'gpu'.*, .*'node'.*: give a tree of the argument's own"
    ):
        from_tree(given, step, args)


def test_a_spec_that_no_argument_takes_is_refused() -> None:
    """The name of the spec of ``value`` begins the names of all others, which have specs of their own."""
    given = ({"w": Values(P("gpu"), P())._replace(raw_value={"b": P()})}, P())
    with pytest.raises(PinError, match="in_shardings has state/w, which is no argument"):
        from_tree(given, step, ({"w": {"raw_value": {"b": ARRAY}}}, ARRAY))


@pytest.mark.parametrize("first", ["*", "x*", "[x]", "x"])
def test_a_rule_behind_one_for_the_same_arguments_is_refused(first: str) -> None:
    why = r"x' stands before it too; keep one" if first == "x" else rf"{re.escape(first)}' before it matches all .*; put it first"
    with pytest.raises(PinError, match=rf"the rule 'x' = P.* never applies: '{why}"):
        from_rules([(first, P()), ("x", P("gpu"))], step, (ARRAY, ARRAY))


def test_a_rule_for_the_rest_may_find_none_left() -> None:
    entries = from_rules([("x", P("gpu")), ("state", P("node")), ("*", P())], step, (ARRAY, ARRAY)).entries
    assert entries == {"state": ("node",), "x": ("gpu",)}
    assert from_rules([("state*", P("gpu")), ("*a*", P()), ("x", P())], step, (ARRAY, ARRAY)).entries["state"] == ("gpu",)


def test_an_object_that_stands_in_two_arguments_may_have_its_spec_in_both() -> None:
    module = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    given = P("gpu"), {"module": P("gpu"), "none": P()}
    entries = from_tree(given, lambda model, state: model, (module, {"module": module, "none": None})).entries
    assert entries == {"model/bias": ("gpu",), "model/kernel": ("gpu",)}
