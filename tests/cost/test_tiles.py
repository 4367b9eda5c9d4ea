"""Products are priced by their tiles: small and skinny ones fall behind the rate of large ones, none gets ahead of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax import lax

from shardplan.collectives.reshard import Resharder
from shardplan.constants import CONSTANTS
from shardplan.cost import Network
from shardplan.cost.tiles import tile_factor
from shardplan.frontend.trace import trace
from shardplan.graph import Signature, flatten
from shardplan.mesh import Cluster, factors, preset_names
from shardplan.search.problem import composite_strategies
from shardplan.search.problem.compute_prices import least_compute_s, whole_compute_s
from tests.oracles import prices

UNITS = sorted({cluster.device.compute_units or 0 for cluster in map(Cluster.load, preset_names())} - {0})
extents = st.one_of(st.integers(1, 300), st.sampled_from((512, 768, 1000, 1024, 4096, 5000, 50304)))
batches = st.integers(1, 200)
H100 = Cluster.load("8").device


def factor(units: int, batch: int, rows: int, columns: int, depth: int) -> float:
    return float(tile_factor(units, batch, rows, columns, depth)[0])


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def product_of(step: Callable[..., Any], *args: Any) -> Signature:
    """The one op of a step that contracts."""
    (found,) = (n.signature for n in flatten(trace(step, *args).program).nodes if n.signature.contracts)
    return found


def sides(step: Callable[..., Any], *args: Any) -> tuple[int, ...] | None:
    """(batch, rows, columns, depth) of the product of a step; None where it has no tiles."""
    signature = product_of(step, *args)
    if signature.product is None or signature.description is None:
        return None
    loops, own = signature.description.loops, signature.product
    return tuple(int(np.prod([loops[v].extent for v in side])) for side in (own.batch, own.rows, own.columns, own.depth))


@given(units=st.integers(1, 200), batch=batches, rows=extents, columns=extents, depth=extents)
def test_no_product_is_faster_than_its_share_of_the_peak(units: int, batch: int, rows: int, columns: int, depth: int) -> None:
    assert factor(units, batch, rows, columns, depth) >= 1


@given(units=st.integers(1, 200), batch=batches, rows=extents, columns=extents, depth=extents)
def test_the_factor_is_that_of_the_best_tile_and_split(units: int, batch: int, rows: int, columns: int, depth: int) -> None:
    expected = prices.slowdown(units, batch, rows, columns, depth)
    assert factor(units, batch, rows, columns, depth) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("units", UNITS)
def test_a_large_product_reaches_the_peak(units: int) -> None:
    """The devices' efficiencies are measured on such products."""
    assert factor(units, 1, 8192, 8192, 8192) <= 1.03


@given(tiles=st.integers(1, 132), tile=st.sampled_from(CONSTANTS.tiles))
def test_a_wave_costs_the_same_however_full_it_is(tiles: int, tile: tuple[int, int, float]) -> None:
    def seconds(batch: int) -> float:
        return batch * factor(132, batch, tile[0] // 4, tile[1] // 4, 255)

    assert seconds(tiles) == pytest.approx(seconds(132))
    assert seconds(133) == pytest.approx(2 * seconds(132))


@given(units=st.integers(1, 200), sides=st.tuples(batches, extents, extents, extents), side=st.integers(0, 4))
def test_twice_the_work_takes_no_less_time(units: int, sides: tuple[int, ...], side: int) -> None:
    """One extent, or all of them."""
    doubled = tuple(n * (1 + (i == side or side == 4)) for i, n in enumerate(sides))

    def seconds(own: tuple[int, ...]) -> float:
        return float(np.prod(own)) * factor(units, own[0], own[1], own[2], own[3])

    assert seconds(doubled) >= seconds(sides) * (1 - 1e-12)


def test_the_factors_of_many_products_are_those_of_each() -> None:
    rng = np.random.default_rng(0)
    cases = rng.integers(1, 2000, (4, 50))
    assert tile_factor(132, *cases).tolist() == [factor(132, *map(int, case)) for case in cases.T]


def test_the_loops_of_products_have_their_roles() -> None:
    def batched(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))

    assert sides(jnp.dot, array(6, 5), array(5, 7)) == (1, 6, 7, 5)
    assert sides(jnp.matmul, array(2, 6, 5), array(5, 7)) == (1, 12, 7, 5)
    assert sides(batched, array(2, 6, 5), array(2, 5, 7)) == (2, 6, 7, 5)
    assert sides(lambda x, y: jnp.tensordot(x, y, 2), array(6, 5, 4), array(5, 4, 7)) == (1, 6, 7, 20)


def convolve(x: Any, k: Any, stride: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[3] // k.shape[2]
    )


def test_a_convolution_is_an_implicit_product() -> None:
    image, kernel, out = array(2, 8, 8, 16), array(3, 3, 16, 32), array(2, 8, 8, 32)
    assert sides(convolve, image, kernel) == (1, 2 * 8 * 8, 32, 3 * 3 * 16)
    of_image = sides(lambda k, g: jax.vjp(lambda x: convolve(x, k), jnp.zeros(image.shape, image.dtype))[1](g)[0], kernel, out)
    assert of_image == (1, 2 * 8 * 8, 16, 3 * 3 * 32)
    of_kernel = sides(lambda x, g: jax.vjp(lambda k: convolve(x, k), jnp.zeros(kernel.shape, image.dtype))[1](g)[0], image, out)
    assert of_kernel in ((1, 3 * 3 * 16, 32, 2 * 8 * 8), (1, 32, 3 * 3 * 16, 2 * 8 * 8))


def test_products_without_known_tiles_have_no_factor() -> None:
    grouped = product_of(convolve, array(2, 8, 8, 16), array(3, 3, 4, 32))
    assert seconds_of(grouped, units=132) == seconds_of(grouped, units=None)
    ragged = product_of(lax.ragged_dot, array(16, 8), array(4, 8, 8), array(4, dtype="int32"))
    assert ragged.product is None
    lookup = flatten(trace(lambda t, i: t[i], array(100, 8), array(6, dtype="int32")).program)
    assert all(n.signature.product is None for n in lookup.nodes)


def seconds_of(signature: Signature, units: int | None) -> float:
    return whole_compute_s(signature, replace(H100, memory_bytes_per_s=1e30, launch_s=0.0, compute_units=units))


def priced(step: Callable[..., Any], args: tuple[Any, ...], units: int | None, cluster: str = "4") -> tuple[Signature, Any]:
    """The product of a step, and its strategies on a device without launches whose memory is free."""
    base = Cluster.load(cluster)
    device = replace(base.device, memory_bytes_per_s=1e30, launch_s=0.0, compute_units=units)
    signature, over = product_of(step, *args), factors(base)
    resharder = Resharder(Network(replace(base, device=device), over), [f.size for f in over])
    return signature, composite_strategies.options(signature, resharder, device)


@given(st.tuples(*[st.sampled_from((16, 100, 512, 4096))] * 3), st.sampled_from((132, 13, None)), st.sampled_from(("4", "2x4")))
@example((4, 4096, 4096), 132, "4")
def test_no_strategy_is_priced_below_the_least(shape: tuple[int, int, int], units: int | None, cluster: str) -> None:
    """The example cuts a product into products with vectors, which have no tiles."""
    m, n, k = shape
    signature, rows = priced(jnp.dot, (array(m, k), array(k, n)), units, cluster)
    device = replace(H100, memory_bytes_per_s=1e30, launch_s=0.0, compute_units=units)
    least = least_compute_s(signature, device, Cluster.load(cluster).size)
    assert rows.compute_s.min() >= least * (1 - 1e-12)
    assert (rows.loops < 0).all(axis=1).any()
    whole = rows.compute_s[(rows.loops < 0).all(axis=1)]
    assert whole == pytest.approx(whole_compute_s(signature, device))


def test_slivers_of_a_product_cost_more_than_their_share() -> None:
    """A quarter of 64 rows fills as many tiles as all of them: only cuts into whole tiles save time."""
    args = array(64, 1024), array(1024, 8192)
    (_, rows), (_, plain) = priced(jnp.dot, args, 132), priced(jnp.dot, args, None)
    assert rows.loops.tolist() == plain.loops.tolist()
    by_loop = {loop: (a, b) for (loop,), a, b in zip(rows.loops.tolist(), rows.compute_s, plain.compute_s, strict=True)}
    (whole, share), (slivers, a_quarter), (wide, _), (deep, _) = (by_loop[v] for v in (-1, 0, 1, 2))
    assert share / 4 == pytest.approx(a_quarter)
    assert slivers == pytest.approx(whole)
    assert slivers > 2 * max(wide, deep)


def test_a_device_without_compute_units_prices_flops_alone() -> None:
    _, rows = priced(jnp.dot, (array(16, 64), array(64, 8)), None)
    rate = H100.flops_per_s["bfloat16"] * H100.flops_efficiency
    ways = np.where(rows.loops[:, 0] < 0, 1, 4)
    assert rows.compute_s == pytest.approx(2 * 16 * 64 * 8 / rate / ways)
