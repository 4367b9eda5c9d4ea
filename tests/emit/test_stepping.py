"""A partitioner that aborts on moves of two axes is asked to move one at a time."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan.emit.stepping import steps_to
from shardplan.ir import Layout
from shardplan.tdl.xla_quirks import aborts_on_two_axes

SHAPE = (24, 24)


def layouts() -> Iterator[Layout]:
    """Every layout of a matrix over two factors."""
    for places in itertools.product((None, 0, 1), repeat=2):
        dims = [tuple(f for f in (0, 1) if places[f] == d) for d in (0, 1)]
        yield Layout(tuple(dims))
        if places[0] is not None and places[0] == places[1]:
            yield Layout(tuple(dim[::-1] for dim in dims))


PAIRS = [pair for pair in itertools.permutations(layouts(), 2) if pair[0] != pair[1]]


def moved(mesh: Mesh) -> None:
    """Moves a matrix from each layout into each other one, in one program."""

    def constrained(x: jax.Array, at: Layout) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*at.entries(mesh.axis_names))))

    def every(x: jax.Array) -> list[jax.Array]:
        found: list[jax.Array] = []
        for n, (before, after) in enumerate(PAIRS):
            y = constrained(x * n, before)
            for layout in steps_to(before, after, mesh.devices.shape):
                y = constrained(y, layout)
            found.append(y + 1)
        return found

    x = np.arange(SHAPE[0] * SHAPE[1], dtype=np.float32).reshape(SHAPE)
    whole = NamedSharding(mesh, P())
    for n, y in enumerate(jax.jit(every, in_shardings=whole, out_shardings=whole)(x)):
        np.testing.assert_array_equal(np.asarray(y), x * n + 1)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), pytest.param((2, 4), marks=pytest.mark.slow)])
def test_every_move_of_a_matrix_is_compiled_and_right(sizes: tuple[int, int], devices: list[Any]) -> None:
    moved(Mesh(np.array(devices[: sizes[0] * sizes[1]]).reshape(sizes), ("n", "g")))


def test_axes_that_divide_one_another_move_together() -> None:
    assert all(steps_to(before, after, (2, 4)) == (after,) for before, after in PAIRS)


def test_a_move_of_one_axis_is_one_step() -> None:
    assert steps_to(Layout(((0,), ())), Layout(((), (0,))), (3, 2)) == (Layout(((), (0,))),)


def test_the_fault_is_there_where_it_is_said_to_be(environment: dict[str, str]) -> None:
    """The process dies in exactly the releases that are named."""
    code = (
        "import jax, numpy as np\nfrom jax.sharding import Mesh, NamedSharding, PartitionSpec as P\n"
        "jax.config.update('jax_platforms', 'cpu'); jax.config.update('jax_num_cpu_devices', 6)\n"
        "mesh = Mesh(np.array(jax.devices()).reshape(3, 2), ('n', 'g'))\n"
        "at = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))\n"
        "jax.jit(lambda x: at(at(x * 2, None, 'n'), ('n', 'g')) * 2)(np.ones((24, 24)))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert (run.returncode < 0) == aborts_on_two_axes((3, 2))
    assert not aborts_on_two_axes((2, 4))
