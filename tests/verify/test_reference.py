"""The step compiled for one device is checked against the step op by op: a fault is the reference's, with its op and line."""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import shardplan
from shardplan import _jax, tdl
from shardplan.report.verified_text import verified_text
from shardplan.tdl.describe import forget
from shardplan.verify import check, op_by_op
from shardplan.verify.on_host import as_numbers, on_host
from shardplan.verify.op_by_op import OpByOp, laid_open, unmerged_bytes
from shardplan.verify.reference import Bisection
from shardplan.verify.runs import Single, StateFeedback
from shardplan.verify.verify import verify

ROWS = 64


Wave = Callable[[str, Callable[[tuple[int, ...]], bool]], Callable[[jax.Array], jax.Array]]


@pytest.fixture
def wave() -> Iterator[Wave]:
    """Makes cosines of a name. Once compiled, the first number is off by one for the shapes that are ``wrong``."""
    names: list[str] = []

    def made(name: str, wrong: Callable[[tuple[int, ...]], bool]) -> Callable[[jax.Array], jax.Array]:
        primitive = Primitive(name)
        primitive.def_abstract_eval(lambda x: x)
        primitive.def_impl(jnp.cos)

        def compiled(x: jax.Array) -> jax.Array:
            return jnp.cos(x).at[(0,) * x.ndim].add(1.0) if wrong(x.shape) else jnp.cos(x)

        mlir.register_lowering(primitive, mlir.lower_fun(compiled, multiple_results=False))
        tdl.rule(name)(lambda _, x: lambda i, j: tdl.apply("cos", x[i, j]))
        names.append(name)
        return primitive.bind

    yield made
    for name in names:
        forget(name)


def arrays(rows: int = ROWS, width: int = 8) -> tuple[jax.Array, jax.Array]:
    w, x = (np.random.default_rng(n).standard_normal(shape) for n, shape in enumerate(((16, width), (rows, 16))))
    return jnp.asarray(w, jnp.float32), jnp.asarray(x, jnp.float32)


def step_of(op: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    def step(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        y = x @ w
        moved = op(y)  # the line at fault
        return {"w": w - 0.1 * x.T @ moved, "x": x * 2}

    return step


LINE = next(n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# the line at fault"))
PINS = {"x": P(("node", "gpu"))}


def test_a_wrong_reference_is_not_held_against_a_right_plan(wave: Wave, devices: list[Any]) -> None:
    """The compiled op is wrong for all rows, and right for those of one device."""
    step, args = step_of(wave("wave_whole", lambda shape: shape[0] == ROWS)), arrays()
    told: list[float] = []
    plan = shardplan.plan(step, *args, cluster="2x4", pins=PINS)
    found = verify(plan, step, args, steps=2, devices=devices, observer=lambda _, share: told.append(share))
    assert told == sorted(told)
    fault = found.reference
    assert fault is not None
    assert (found.equal, found.passed, found.unequal) == (True, False, ())
    assert (fault.primitive, fault.path, fault.unequal, fault.sharded) == ("wave_whole", "w", ("w",), "right")
    assert re.fullmatch(rf".*test_reference\.py:{LINE} \(step_of\.<locals>\.step\)", fault.source)
    text = verified_text(found.json)
    assert text.startswith(
        "equal to the step op by op after each of 2 steps\n  the reference is at fault: the step compiled for one"
    )
    assert f"first at wave_whole, {fault.source}; the sharded step is right" in text
    assert found.json["reference"]["primitive"] == "wave_whole"


def test_a_fault_that_plan_and_reference_share_is_noticed(wave: Wave, devices: list[Any]) -> None:
    step, args = step_of(wave("wave_always", lambda shape: True)), arrays(61, 7)  # nothing divides
    found = verify(shardplan.plan(step, *args, cluster="2x4"), step, args, steps=1, devices=devices)
    assert found.reference is not None
    assert (found.equal, found.passed, found.unequal, found.reference.sharded) == (False, False, ("w",), "same")
    assert "the sharded step is wrong in the same way, which is the compiler's fault" in verified_text(found.json)


def test_a_wrong_plan_stays_wrong_beside_a_wrong_reference(wave: Wave, devices: list[Any]) -> None:
    step, args = step_of(wave("wave_and_plan", lambda shape: shape[0] == ROWS)), arrays()
    plan = shardplan.plan(step, *args, cluster="2x4", pins=PINS)
    found = verify(plan, step, args, steps=1, devices=devices, backend="specs", drop=0)
    assert found.reference is not None
    assert (found.equal, found.reference.sharded, found.reference.primitive) == (False, "wrong", "wave_and_plan")


def test_a_wrong_plan_beside_a_right_reference_is_at_fault_alone(devices: list[Any]) -> None:
    step, args = step_of(jnp.cos), arrays()
    plan = shardplan.plan(step, *args, cluster="2x4", pins=PINS)
    found = verify(plan, step, args, steps=1, devices=devices, backend="specs", drop=0)
    assert (found.equal, found.reference) == (False, None)
    assert verified_text(found.json).startswith("NOT EQUAL to the single-device step")


def test_an_op_that_is_right_in_smaller_programs_leaves_the_leaf_and_its_ops(wave: Wave, devices: list[Any]) -> None:
    compiled: list[Any] = []

    def wrong(shape: tuple[int, ...]) -> bool:
        compiled.append(shape)
        return shape == (ROWS, 8) and compiled.count(shape) == 1  # the reference is compiled first

    step, args = step_of(wave("wave_once", wrong)), arrays()
    found = verify(shardplan.plan(step, *args, cluster="2x4", pins=PINS), step, args, steps=1, devices=devices)
    fault = found.reference
    assert fault is not None
    assert (found.equal, fault.primitive, fault.source, fault.path) == (True, "", "", "w")
    assert [op.partition(" at ")[0] for op in fault.ops] == ["dot_general", "wave_once", "transpose", "mul", "dot_general", "sub"]
    assert "in w, by" in str(fault)
    assert "at an op that is right when compiled again: w depends on 6 ops, the last of which are transpose at" in str(fault)


# -- mixed precision -----------------------------------------------------------------------------------------------------


def half(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def squares(h: jax.Array) -> jax.Array:
    return h * h + h


def narrow_products(w: jax.Array, x: jax.Array) -> jax.Array:
    return squares(jnp.tanh(half(x @ w))).astype(jnp.float32)


def narrow_places(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.argmax(narrow_products(w, x), axis=0)


def narrow_scan(w: jax.Array, x: jax.Array) -> jax.Array:
    def body(c: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = squares(jnp.tanh(half(r @ w))).astype(jnp.float32)
        return c * 0.5 + y, y

    return lax.scan(body, jnp.zeros(w.shape[1]), x)[0]


def narrow_branch(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] < 1e9, narrow_products, lambda w, x: x @ w, w, x)


@pytest.mark.parametrize("step", [narrow_products, narrow_places, narrow_scan, narrow_branch])
def test_narrow_results_that_the_compiler_keeps_wide_are_rounding(step: Any, devices: list[Any]) -> None:
    args = arrays(16, 16)
    exact, _ = op_by_op_of(step, *args)
    if (np.asarray(jax.jit(step)(*args)) == exact[0]).all():
        pytest.skip("the compiler rounds each result")
    found = verify(shardplan.plan(step, *args, cluster="2x4"), step, args, steps=1, devices=devices)
    assert found.passed, found.reference


@pytest.mark.parametrize("lasting", [True, False])
def test_a_fault_among_narrow_results_is_found(lasting: bool, wave: Wave, devices: list[Any]) -> None:
    """One that any perturbation of the compiled step would remove is not taken for rounding."""
    compiled: list[Any] = []

    def wrong(shape: tuple[int, ...]) -> bool:
        compiled.append(shape)
        return shape[0] == ROWS and (lasting or compiled.count(shape) == 1)

    name = f"wave_narrow_{lasting}"
    op = wave(name, wrong)

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return squares(half(op(squares(jnp.tanh(half(x @ w))).astype(jnp.float32)))).astype(jnp.float32)

    args = arrays()
    found = verify(shardplan.plan(step, *args, cluster="2x4", pins=PINS), step, args, steps=1, devices=devices)
    assert found.reference is not None
    assert (found.equal, found.reference.primitive) == (True, name if lasting else "")


# -- checks on the user's own values ---------------------------------------------------------------------------------------


def test_a_check_with_a_wrong_reference_warns_and_passes(
    wave: Wave, devices: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    step, args = step_of(wave("wave_checked", lambda shape: shape[0] == ROWS)), arrays()
    judged = shardplan.plan(step, *args, cluster="2x4", pins=PINS).check(args, devices=devices)
    assert judged.reference is not None
    assert (judged.unequal, judged.reference.primitive) == ((), "wave_checked")
    parallel = shardplan.parallelize(cluster="2x4", devices=devices, pins=PINS, check="first")(step)
    assert parallel(*args)["x"].shape == (ROWS, 16)
    said = [
        r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "the reference is at fault" in r.getMessage()
    ]
    assert len(said) == 2
    assert all("first at wave_checked" in text and "the sharded step is right" in text for text in said)


def test_a_check_of_a_wrong_plan_names_the_reference_too(wave: Wave, devices: list[Any]) -> None:
    step, args = step_of(wave("wave_refused", lambda shape: shape[0] == ROWS)), arrays()
    plan = shardplan.plan(step, *args, cluster="2x4", pins=PINS)
    with pytest.raises(
        shardplan.CheckError, match=r"op by op on one device and .* under the plan .*first at wave_refused"
    ) as caught:
        plan.check(args, devices=devices, backend="specs", drop=0)
    error = caught.value
    expected = np.asarray(step_of(jnp.cos)(*args)[error.path])[error.index]
    assert error.reference.sharded == "wrong"
    assert error.single == pytest.approx(float(expected), rel=1e-4)


def test_a_reference_that_does_not_fit_op_by_op_is_said_to_be_unchecked(
    devices: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, args = step_of(jnp.cos), arrays()
    plan = shardplan.plan(step, *args, cluster="2x4", pins=PINS)
    monkeypatch.setattr(check, "unmerged_bytes", lambda lines: 2**50)
    unchecked = "whether the step compiled for one device is right was not checked: op by op, the step on one device needs"
    with pytest.raises(shardplan.CheckError, match=unchecked):
        plan.check(args, devices=devices, backend="specs", drop=0)


# -- ops inside bodies -------------------------------------------------------------------------------------------------


def departure(step: Callable[..., Any], *args: Any) -> Any:
    """The first line of a step whose compiled value departs."""
    tree, none = jax.tree.structure(args), [False] * len(args)
    one = Single(jax.jit(step), jax.devices()[0], StateFeedback(tree, (), none, none, 1))
    host = [on_host(x) for x in args]
    return Bisection(one).departure(one.lines(host), host)


def in_scan(op: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, r: (c + 0.1 * op(r), c.sum()), x[0], x)[0]


def in_while(op: Any, x: jax.Array) -> jax.Array:
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, op(c[1])), (0, x))[1]


def in_cond(op: Any, x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() < 1e9, lambda x: op(x) + 1, lambda x: x, x)


def in_remat(op: Any, x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: jnp.sin(op(jnp.sin(x))))(x)


def in_calls(op: Any, x: jax.Array) -> jax.Array:
    own = jax.custom_vjp(jax.jit(lambda x: op(x) * 2))
    own.defvjp(lambda x: (own(x), x), lambda x, g: (g,))
    return jnp.sin(own(x))


def in_scans(op: Any, x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (in_scan(op, x) + c, None), x[0], None, length=2)[0]


@pytest.mark.parametrize("inside", [in_scan, in_while, in_cond, in_remat, in_calls, in_scans])
def test_an_op_in_a_body_is_named(inside: Any, wave: Wave, devices: list[Any]) -> None:
    op = wave(f"wave_{inside.__name__}", lambda shape: True)
    line = departure(lambda x: inside(op, jnp.tanh(x)) * 3, arrays()[1])
    assert line.primitive == f"wave_{inside.__name__}"
    assert departure(lambda x: inside(jnp.cos, jnp.tanh(x)) * 3, arrays()[1]) is None


def test_the_first_of_two_faults_is_named(wave: Wave, devices: list[Any]) -> None:
    one, two = (wave(f"wave_{n}", lambda shape: True) for n in ("first", "second"))
    assert departure(lambda x: two(one(jnp.sin(x)) * 2), arrays()[1]).primitive == "wave_first"


# -- evaluation ----------------------------------------------------------------------------------------------------------


def op_by_op_of(step: Callable[..., Any], *args: Any) -> tuple[list[np.ndarray], OpByOp]:
    closed = jax.make_jaxpr(step)(*args)
    run = OpByOp()
    outs = run(laid_open(closed.jaxpr, closed.consts), jax.tree.leaves(args))
    return [as_numbers(x) for x in outs], run


def control(x: jax.Array, key: jax.Array) -> Any:
    """Every kind of control flow, with keys, literals and constants."""
    jax.debug.print("acts {}", x[0, 0])
    shifted = np.arange(16.0, dtype=np.float32) + x
    keys = jax.random.split(key, 3)
    drawn = lax.scan(
        lambda c, k: (c * 0.5 + jax.random.normal(k, (4,)), jax.random.fold_in(k, 1)), jnp.zeros(4), keys, reverse=True
    )
    rows = jax.vmap(lambda r: lax.while_loop(lambda c: c[1] < jnp.abs(r[0]) * 5, lambda c: (c[0] * 2 + r, c[1] + 1), (r, 0.0)))(x)
    empty = lax.scan(lambda c, r: (c + r, r), x[0], x[:0])
    branch = lax.switch(jnp.int32(7), [jnp.sin, jnp.cos], x)
    platform = lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
    gradient = jax.grad(lambda x: jnp.sum(jax.checkpoint(jnp.sin)(jax.nn.relu(x)) ** 2))(x)
    return shifted, drawn, rows, empty, branch, platform, gradient, jax.random.bits(key, (8,)), key, 3, x


def test_op_by_op_a_step_is_the_step_and_does_not_act(capfd: pytest.CaptureFixture[str]) -> None:
    args = arrays()[1], jax.random.key(3)
    expected = [as_numbers(x) for x in jax.tree.leaves(jax.jit(control)(*args))]
    jax.effects_barrier()
    assert "acts" in capfd.readouterr().out
    found, _ = op_by_op_of(control, *args)
    jax.effects_barrier()
    assert "acts" not in capfd.readouterr().out
    for a, b in zip(expected, found, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_loops_that_are_too_long_run_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_by_op, "MOST_OPS_OF_LOOPS", 50)

    def step(x: jax.Array) -> Any:
        short = lax.scan(lambda c, r: (c + r, None), x[0], x[:4])[0]
        long = lax.scan(lambda c, r: (c * 0.5 + r, None), x[0], x)[0]
        return short, long, lax.while_loop(lambda c: c[0] < 100, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))

    (x,) = args = (arrays()[1],)
    found, run = op_by_op_of(step, *args)
    assert [line.primitive for line in run.whole] == ["scan", "while"]
    for a, b in zip(jax.tree.leaves(jax.jit(step)(x)), found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def compilations_of(step: Callable[..., Any], *args: Any) -> int:
    """The programs that are compiled to run a step op by op."""
    before = _jax.programs_compiled()
    op_by_op_of(step, *args)
    return _jax.programs_compiled() - before


@pytest.mark.parametrize("kernel", ["pallas_call", "one without a program of its own"])
def test_an_op_in_a_loop_is_compiled_once(kernel: str) -> None:
    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    bare = Primitive(f"bare_{kernel}")
    bare.def_abstract_eval(lambda x: x)
    mlir.register_lowering(bare, mlir.lower_fun(jnp.sin, multiple_results=False))
    one: Any = (
        pl.pallas_call(double, jax.ShapeDtypeStruct((8,), jnp.float32), interpret=True) if "pallas" in kernel else bare.bind
    )

    def step(x: jax.Array) -> jax.Array:
        return lax.scan(lambda c, r: (one(c) * 0.5 + r, None), x[0], x)[0]

    x = arrays(width=8)[1][:, :8]
    assert compilations_of(step, x[:40]) < 10


def test_unmerged_bytes_are_those_of_the_values_that_are_alive_together() -> None:
    def step(x: jax.Array) -> jax.Array:
        wide = jnp.cos(x[:, None] * jnp.ones((1, 100), jnp.float32))  # 4,000 bytes, and as many before the cosine
        return jnp.sin(jnp.sum(wide, axis=1))

    closed = jax.make_jaxpr(step)(jnp.ones(10, jnp.float32))
    assert 8_000 <= unmerged_bytes(laid_open(closed.jaxpr, closed.consts)) <= 8_000 + 500


# -- a fault of a compiler -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "sharded"), [(32776, "right"), (32769, "same")], ids=["divides", "is whole"])
def test_a_fault_of_a_compiler_is_found(rows: int, sharded: str, devices: list[Any]) -> None:
    """jaxlib 0.10.2 merges a product into the sum of its squares, and gets rows behind the first 32,768 wrong."""
    matrix, r = (np.random.default_rng(n).standard_normal(s).astype("float32") for n, s in enumerate(((3, 3), (rows, 3))))

    def step(r: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(r)

    if np.abs(np.asarray(jax.jit(step)(r)) - ((r.astype("float64") @ matrix.T) ** 2).sum(1)).max() < 1e-3:
        pytest.skip(f"jaxlib {importlib.import_module('jaxlib').__version__} compiles this right")
    pins = {"r": P("gpu")} if sharded == "right" else None
    plan = shardplan.plan(step, r, cluster="8", pins=pins)
    found = verify(plan, step, (r,), steps=1, devices=devices)
    assert found.reference is not None
    assert (found.equal, found.reference.sharded, found.reference.primitive) == (sharded == "right", sharded, "reduce_sum")
    assert "test_reference.py" in found.reference.source
