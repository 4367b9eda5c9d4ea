"""The Hoare rules of Figure 8, each on a state that meets it and on one that does not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.collectives.states import COLLECTIVES, Clash, P2Collective, StateSpace
from shardplan.ir import Collective

SPACE = StateSpace(2)


def apply(collective: P2Collective, *states: str) -> list[str] | str:
    result = SPACE.apply(collective, [SPACE.parse(s) for s in states])
    return result.reason if isinstance(result, Clash) else [SPACE.show(s) for s in result]


def test_rules_on_states_that_meet_them():
    assert apply(Collective.ALL_REDUCE, "10/10", "01/01") == ["11/11", "11/11"]
    assert apply(Collective.ALL_REDUCE, "10/00", "01/00") == ["11/00", "11/00"]
    assert apply(Collective.REDUCE_SCATTER, "10/10", "01/01") == ["11/00", "00/11"]
    assert apply(Collective.ALL_GATHER, "11/00", "00/11") == ["11/11", "11/11"]
    assert apply(Collective.REDUCE, "10/10", "01/01") == ["11/11", "00/00"]
    assert apply(Collective.BROADCAST, "11/11", "00/00") == ["11/11", "11/11"]
    assert apply(Collective.BROADCAST, "11/11", "01/01") == ["11/11", "11/11"]


@pytest.mark.parametrize(
    ("collective", "states", "why"),
    [
        (
            Collective.ALL_REDUCE,
            ("10/10", "11/11"),
            "both hold the contribution of device 0 to chunk 0, which would be reduced twice",
        ),
        (Collective.ALL_REDUCE, ("10/00", "00/01"), "members 0 and 1 hold different chunks, {0} and {1}"),
        (Collective.REDUCE_SCATTER, ("10/00", "01/00"), "1 chunks do not divide among 2 members"),
        (Collective.REDUCE_SCATTER, ("10/10", "00/00"), "hold different chunks, {0, 1} and {}"),
        (Collective.REDUCE, ("10/10", "10/01"), "both hold the contribution of device 0 to chunk 0"),
        (Collective.ALL_GATHER, ("11/00", "01/00"), "members 0 and 1 both hold chunk 0"),
        (Collective.ALL_GATHER, ("11/00", "00/00"), "members 0 and 1 hold 1 and 0 chunks, not the same number"),
        (Collective.BROADCAST, ("10/10", "00/01"), "member 1 holds contributions to chunk 1 that the root lacks"),
        (Collective.BROADCAST, ("11/11", "11/11"), "nobody in the group learns anything"),
    ],
)
def test_rules_refuse_what_breaks_them_with_the_reason(collective: P2Collective, states: tuple[str, str], why: str):
    result = apply(collective, *states)
    assert isinstance(result, str), result
    assert why in result


def literal(collective: P2Collective, s: Any) -> Any:
    """Figure 8 word for word on boolean matrices [devices, chunk, contributor]; None where a premise fails."""
    n = len(s)
    rows = s.any(axis=2)
    pairs = list(itertools.combinations(range(n), 2))
    if collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE):
        if any((rows[i] != rows[j]).any() for i, j in pairs):
            return None
        if any((s[i] & s[j]).any() for i, j in pairs):
            return None
        total = s.any(axis=0)
        if collective == Collective.ALL_REDUCE:
            return np.stack([total] * n)
        if collective == Collective.REDUCE:
            return np.stack([total] + [np.zeros_like(total)] * (n - 1))
        held = np.flatnonzero(rows[0])
        if len(held) % n:
            return None
        out = np.zeros_like(s)
        for i, block in enumerate(np.split(held, n)):
            out[i, block] = total[block]
        return out
    if collective == Collective.ALL_GATHER:
        if any((rows[i] & rows[j]).any() for i, j in pairs) or len({int(r.sum()) for r in rows}) > 1:
            return None
        return np.stack([s.any(axis=0)] * n)
    if any((s[i] & ~s[0]).any() for i in range(n)) or all((s[i] == s[0]).all() for i in range(n)):
        return None
    return np.stack([s[0]] * n)


@given(st.integers(1, 4), st.data())
def test_bitsets_do_what_the_rules_say_literally(k: int, data: st.DataObject):
    space = StateSpace(k)
    n = data.draw(st.integers(1, k))
    collective = data.draw(st.sampled_from(COLLECTIVES))
    # states near what programs meet: rows are empty, one's own, or of several contributors
    pick = st.sampled_from([0, 0, 1, 2, 3, (1 << k) - 1])
    rows = [[data.draw(pick) & ((1 << k) - 1) for _ in range(k)] for _ in range(n)]
    if data.draw(st.booleans()):
        rows = [[row[0]] * k for row in rows]
    states = [sum(bits << (r * k) for r, bits in enumerate(row)) for row in rows]
    matrices = np.array([[[bits >> j & 1 for j in range(k)] for bits in row] for row in rows], bool)
    mine, theirs = space.apply(collective, states), literal(collective, matrices)
    if theirs is None:
        assert isinstance(mine, Clash)
        return
    assert not isinstance(mine, Clash), mine
    assert [space.show(s) for s in mine] == ["/".join("".join("01"[b] for b in row) for row in m) for m in theirs.astype(int)]


@given(st.integers(1, 5), st.data())
def test_showing_and_parsing_are_inverse(k: int, data: st.DataObject):
    space = StateSpace(k)
    state = data.draw(st.integers(0, space.full))
    assert space.parse(space.show(state)) == state
