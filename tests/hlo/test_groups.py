"""Every form of replica_groups against the coordinates of devices, computed one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardplan.hlo.groups import replica_groups
from shardplan.hlo.text import HloError, parse_module


def groups(form: str, devices: int = 8) -> set[frozenset[int]]:
    """The groups of an all-reduce with this text, as sets."""
    text = f"""HloModule m, num_partitions={devices}

ENTRY main {{
  a = f32[8]{{0}} parameter(0)
  ROOT r = f32[8]{{0}} all-reduce(a), channel_id=1, {form}use_global_device_ids=true, to_apply=add, metadata={{op_name="f"}}
}}
"""
    module = parse_module(text)
    return {frozenset(group) for group in replica_groups(module.computations["main"].instructions["r"], module)}


def sets(*rows: tuple[int, ...]) -> set[frozenset[int]]:
    return {frozenset(row) for row in rows}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("", sets((0, 1, 2, 3, 4, 5, 6, 7))),
        ("replica_groups={}, ", sets((0, 1, 2, 3, 4, 5, 6, 7))),
        ("replica_groups={{0,1},{2,3},{4,5,6,7}}, ", sets((0, 1), (2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[8], ", sets((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[2,4]<=[4,2]T(1,0), ", sets((0, 2, 4, 6), (1, 3, 5, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1), ", sets((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['x'=8] {'x'}, ", sets((0, 1, 2, 3, 4, 5, 6, 7))),
        ("replica_groups=mesh['x'=1,'y'=8] {'y'}, ", sets((0, 1, 2, 3, 4, 5, 6, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'x'}, ", sets((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['x'=2,'y'=4] {'y','x'}, ", sets((0, 1, 2, 3, 4, 5, 6, 7))),
        ("replica_groups=mesh['x'=4,'y'=1,'z'=2], device_ids=([2,4]T(1,0)) {'x'}, ", sets((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=mesh['x'=2,'y'=4], device_ids=(7,6,5,4,0,1,2,3) {'y'}, ", sets((4, 5, 6, 7), (0, 1, 2, 3))),
        ("replica_groups=mesh['x'=8] {'x':(1)2}, ", sets((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['x'=8] {'x':(2)2}, ", sets((0, 2), (1, 3), (4, 6), (5, 7))),
        ("replica_groups=mesh['x'=8] {'x':(1)2,'x':(4)2}, ", sets((0, 1, 4, 5), (2, 3, 6, 7))),
        ("replica_groups=mesh[x=2,y=4] {y:(2)2}, ", sets((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_every_form_is_read(form: str, expected: set[frozenset[int]]) -> None:
    assert groups(form) == expected


def test_an_axis_that_is_not_in_the_mesh_is_an_error() -> None:
    with pytest.raises(HloError, match="the axis 'z' is not in its mesh"):
        groups("replica_groups=mesh['x'=2,'y'=4] {'z'}, ")


@st.composite
def meshes(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]], list[int] | None]:
    """Axes as lists of sub-axis sizes (a divisor chain), the (axis, part) pairs that are named, and an order of the devices."""
    axes = draw(st.lists(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=3), min_size=1, max_size=3))
    axes = axes if math.prod(math.prod(a) for a in axes) <= 216 else axes[:1]
    parts = [(i, j) for i, axis in enumerate(axes) for j in range(len(axis))]
    chosen = draw(st.lists(st.sampled_from(parts), min_size=1, unique=True))
    count = math.prod(math.prod(a) for a in axes)
    order = draw(st.none() | st.permutations(range(count)))
    return axes, chosen, order


@given(meshes())
def test_sub_axes_group_the_devices_that_differ_only_there(
    mesh: tuple[list[list[int]], list[tuple[int, int]], list[int] | None],
) -> None:
    axes, chosen, order = mesh
    names = [f"'n{i}'={math.prod(axis)}" for i, axis in enumerate(axes)]
    refs = [f"'n{i}':({math.prod(axes[i][:j])}){axes[i][j]}" for i, j in chosen]
    ids = f", device_ids=({','.join(map(str, order))})" if order is not None else ""
    found = groups(f"replica_groups=mesh[{','.join(names)}]{ids} {{{','.join(refs)}}}, ", 216)

    parts = [(i, j) for i, axis in enumerate(axes) for j in range(len(axis))]
    coordinates = list(itertools.product(*(range(axes[i][j]) for i, j in parts)))
    devices = order if order is not None else range(len(coordinates))
    expected: dict[tuple[int, ...], set[int]] = {}
    for place, device in zip(coordinates, devices, strict=True):
        key = tuple(c for c, part in zip(place, parts, strict=True) if part not in chosen)
        expected.setdefault(key, set()).add(device)
    assert found == {frozenset(group) for group in expected.values()}


@given(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=4), st.data())
def test_iota_lists_count_transpose_and_cut(dims: list[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(dims))))
    total = math.prod(dims)
    rows = data.draw(st.sampled_from([n for n in range(1, total + 1) if total % n == 0]))
    shape, swap = ",".join(map(str, dims)), ",".join(map(str, order))
    found = groups(f"replica_groups=[{rows},{total // rows}]<=[{shape}]T({swap}), ", total)
    flat = np.arange(total).reshape(dims).transpose(order).ravel().tolist()
    size = total // rows
    assert found == {frozenset(flat[i : i + size]) for i in range(0, total, size)}
