"""Perturbations: one unit in the last place of the type that a step reads an argument in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardplan import _jax
from shardplan.frontend.trace import trace
from shardplan.tdl.proof import CASES
from shardplan.tdl.proof.case import Drawn
from shardplan.verify.perturb import PICKING, moved, narrowed, narrows, neighbours, perturbed_op, rounds_narrow


def units(x: Any, y: Any) -> np.ndarray:
    """How many numbers of their type lie from ``x`` to ``y``."""
    x, y = np.asarray(x), np.asarray(y)
    assert x.dtype == y.dtype
    signed = f"int{8 * x.itemsize}"
    return np.abs(x.view(signed).astype(np.int64) - y.view(signed).astype(np.int64))


def normal(*shape: int, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def test_an_argument_without_a_finite_neighbour_stays() -> None:
    edge = np.array([np.inf, -np.inf, np.nan, np.finfo(np.float32).max, np.finfo(np.float32).min] * 20, np.float32)
    near = neighbours(edge, np.random.default_rng(0))
    np.testing.assert_array_equal(np.isfinite(near), np.isfinite(edge))
    np.testing.assert_allclose(near, edge, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2"])
def test_a_neighbour_is_one_unit_away(dtype: str) -> None:
    x = np.array(normal(1000, dtype=dtype))
    x = x[x != 0]
    y = neighbours(x, np.random.default_rng(1))
    np.testing.assert_array_equal(units(x, y), 1)
    assert 300 < int(np.sum(np.asarray(y > x))) < 700


def test_each_part_of_a_complex_number_has_its_own_neighbour() -> None:
    x = np.array([1 + 2j, complex(1, np.inf), complex(np.nan, 1)] * 50, np.complex64)
    near = neighbours(x, np.random.default_rng(0))
    for part, own in ((np.real(near), np.real(x)), (np.imag(near), np.imag(x))):
        np.testing.assert_array_equal(part != own, np.isfinite(own) | np.isnan(own))
        np.testing.assert_allclose(part, own, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_a_copy_is_moved_by_one_unit(dtype: str) -> None:
    x = normal(40, 50, dtype=dtype)
    y, other = moved(x, 1), moved(x, 2)
    np.testing.assert_array_equal(units(x, y), np.asarray(x) != 0)
    assert 700 < int(np.sum(np.asarray(y > x))) < 1300
    assert 500 < int(np.sum(np.asarray(y != other))) < 1500
    np.testing.assert_array_equal(np.asarray(moved(x, 1)), np.asarray(y))


def test_equal_numbers_do_not_all_move_one_way() -> None:
    y = moved(jnp.ones((16, 64), "bfloat16"), 3)
    assert 300 < int(np.sum(np.asarray(y > 1))) < 724


def test_what_has_no_finite_neighbour_stays() -> None:
    largest = float(jnp.finfo("bfloat16").max)
    x = jnp.asarray([0.0, -0.0, np.inf, -np.inf, np.nan] + [largest, -largest] * 20, "bfloat16")
    y = np.asarray(moved(x, 0))
    np.testing.assert_array_equal(y[:5].view("uint16"), np.asarray(x)[:5].view("uint16"))
    assert np.isfinite(y[5:].astype("float32")).all()


def through_a_call(w: Any) -> Any:
    return jax.jit(lambda v: v.astype("bfloat16"))(w)


def through_a_scan(w: Any) -> Any:
    return jax.lax.scan(lambda c, v: (c, v.astype("bfloat16")), 0.0, w)[1]


def through_remat(w: Any) -> Any:
    return jax.checkpoint(lambda v: v.astype("bfloat16") * 1)(w)


@pytest.mark.parametrize("step", [lambda w: w.astype("bfloat16"), through_a_call, through_a_scan, through_remat])
def test_the_copy_moves_and_the_argument_stays(step: Any) -> None:
    w = normal(8, 100)
    copy, same = narrowed(lambda w: (step(w), w), 5)(w)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(w))
    np.testing.assert_array_equal(units(copy, w.astype("bfloat16")), 1)
    assert narrows(trace(step, w).program)


def test_only_copies_of_arguments_move() -> None:
    def step(w: Any, half: Any) -> Any:
        return (w * 2).astype("bfloat16"), half.astype("float32"), half + 1, {"again": w.astype("int32")}

    args = normal(50), normal(50, dtype="bfloat16")
    for x, y in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(narrowed(step, 1)(*args)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert not narrows(trace(lambda w: w * 2.0, args[0]).program)


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x[None])[0]])
def test_sums_of_narrow_floats_are_added_up_in_float32(wrapped: Any) -> None:
    """One device rounds after each of many terms: by what that is off, another order of them may be."""

    def total(x: jax.Array) -> jax.Array:
        return jax.vjp(lambda bias: jnp.broadcast_to(bias, x.shape), jnp.bfloat16(0))[1](x)[0]

    x = jnp.full(4096, 1.0, jnp.bfloat16)
    step = wrapped(total)
    assert narrows(trace(step, x).program)
    assert float(narrowed(step, 1)(x)) == 4096.0


def equation(step: Any, *args: Any) -> Any:
    """The last equation of a step."""
    return jax.make_jaxpr(step)(*args).jaxpr.eqns[-1]


@pytest.mark.parametrize(("step", "dtype"), [(lambda x: x * x, "bfloat16"), (lambda x: x.astype("float16"), "float32")])
def test_a_narrow_result_that_an_op_rounds_is_moved(step: Any, dtype: str) -> None:
    x = normal(8, 50, dtype=dtype)
    eqn = equation(step, x)
    (found,) = perturbed_op(eqn, lambda *xs: _jax.bound(eqn, xs), [x] * len(eqn.invars), 3)
    np.testing.assert_array_equal(units(found, step(x)), np.asarray(step(x)) != 0)
    assert rounds_narrow(eqn)


@pytest.mark.parametrize("step", [lambda x: x.T, jnp.abs, lambda x: x.astype("float32")])
def test_a_result_that_no_op_rounds_stays(step: Any) -> None:
    x = normal(8, 50, dtype="bfloat16")
    eqn = equation(step, x)
    (found,) = perturbed_op(eqn, lambda *xs: _jax.bound(eqn, xs), [x], 3)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(step(x)))
    assert not rounds_narrow(eqn)


@pytest.mark.parametrize("name", sorted(PICKING & CASES.keys()))
def test_a_primitive_that_picks_gives_numbers_of_its_operands(name: str) -> None:
    """Scatters and pads keep what they do not replace; a window that is all padding gives the identity of its reducer."""
    for seed in range(4):
        case = CASES[name](Drawn(seed))
        results = _jax.bind(name, case.operands, case.call.params)
        known = {0.0, np.inf, *(abs(float(x)) for o in case.operands for x in np.ravel(np.asarray(o)).astype(np.float64))}
        for x in results if isinstance(results, list | tuple) else [results]:
            if jnp.issubdtype(x.dtype, jnp.floating):
                assert {abs(float(y)) for y in np.ravel(np.asarray(x)).astype(np.float64)} <= known
