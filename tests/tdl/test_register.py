"""A user's own op is cut as its author says, and an author who errs is told so at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

import shardplan
from shardplan import tdl
from shardplan.errors import DescriptionError, MisfitError, UndescribedPrimitiveError
from shardplan.frontend.trace import trace
from shardplan.graph.flattening import flatten
from shardplan.ir import Split
from shardplan.tdl.describe import forget
from shardplan.tdl.localize import HALO, evaluate
from shardplan.tdl.register import register


@jax.custom_vjp
def attention(q: Any, k: Any, v: Any) -> Any:
    """As a fused kernel would be: opaque from outside."""
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


attention.defvjp(lambda q, k, v: (attention(q, k, v), (q, k, v)), lambda saved, g: (g, g, g))
EXAMPLE = [jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)] * 3
NAME = "custom_vjp_call:attention"


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    for name in (NAME, "pallas_call:double", "jit:differences", "doubled"):
        for ending in ("", HALO):
            forget(name + ending)


def test_flash_attention_is_cut_along_batch_and_queries() -> None:
    @register(attention, example=EXAMPLE)
    def describe(q: Any, k: Any, v: Any) -> Any:
        return lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, d])

    (eqn,) = jax.make_jaxpr(attention)(*(jnp.zeros(x.shape) for x in EXAMPLE)).eqns
    name = tdl.named_call(eqn.primitive.name, eqn.params)
    assert name == NAME
    description = tdl.describe(tdl.Call(name, ((4, 6, 8),) * 3, ((4, 6, 8),), {}))
    assert description is not None
    assert {description.loops[s.loop].name: s.operands[0] for s in tdl.cuts(description, 2)} == {
        "b": Split(0), "i": Split(1), "d": tdl.cuts(description, 2)[2].operands[0],
    }  # fmt: skip


def test_a_call_without_description_is_seen_through() -> None:
    (eqn,) = jax.make_jaxpr(attention)(*(jnp.zeros(x.shape) for x in EXAMPLE)).eqns
    assert tdl.named_call(eqn.primitive.name, eqn.params) is None


def test_a_kernel_is_described_by_its_name() -> None:
    @register("pallas_call:double", example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)], run=lambda x: 2 * x)
    def describe(x: Any) -> Any:
        return lambda i, j: 2.0 * x[i, j]

    assert tdl.named_call("pallas_call", {"name": "double"}) == "pallas_call:double"


def test_a_description_that_does_not_hold_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"does not hold on the example, cut along i .*loop 1 2 ways"):

        @register(attention, example=EXAMPLE)
        def describe(q: Any, k: Any, v: Any) -> Any:
            return lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, i, :], v[b, i, d])

    assert NAME not in tdl.described()


def test_a_description_of_another_shape_is_refused() -> None:
    with pytest.raises(DescriptionError, match="has a result of rank 3"):

        @register(attention, example=EXAMPLE)
        def describe(q: Any, k: Any, v: Any) -> Any:
            return lambda b, i: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, :])


def test_an_index_outside_its_operand_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"operand 0 has 6 elements along dim 1, its index runs from 1 to 6"):

        @register(attention, example=EXAMPLE)
        def describe(q: Any, k: Any, v: Any) -> Any:
            return lambda b, i, d: tdl.Opaque()(q[b, i + 1, :], k[b, :, :], v[b, :, d])


def test_a_thing_that_is_no_op_is_refused() -> None:
    with pytest.raises(DescriptionError, match="registered for a primitive, a custom_vjp or jit function, or a name"):
        register(3)


def test_a_name_that_is_no_primitive_is_refused() -> None:
    with pytest.raises(DescriptionError, match=r"no such primitive .nearest: .*'dot_genral'"):
        register("dot_genral")


def test_a_kernel_must_say_how_a_worker_runs_it() -> None:
    with pytest.raises(DescriptionError, match=r"pallas_call:double is compiled for its whole shape; .*: run="):
        register("pallas_call:double")


def test_a_kernel_without_a_name_is_asked_for_one() -> None:
    with pytest.raises(DescriptionError, match=r"name yours: pallas_call\(..., name=\)"):
        register("pallas_call:?", run=lambda x: x)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda q, k, v: lambda b, i, d: q[b * i, i, d], r"a product of two indices is not affine: \(i0\) \* \(i1\)"),
        (lambda q, k, v: lambda b, i, d: q[b, i], r"operand 0 has rank 3, 2 indices given: \(i0, i1\)"),
        (lambda q, k, v: lambda b, i, d: tdl.Sum(lambda: q[b, i, d]), "a reducer needs an index to reduce over: sum"),
        (lambda q, k, v: lambda b, i, d: tdl.Sum(lambda j: q[b, i, d]), "the extent of j cannot be read off an operand"),
        (lambda q, k, v: lambda b, i, d: jnp.exp(q[b, i, d]), "tdl.apply"),
        (lambda q, k, v: lambda b, i, d: None, "built from operand elements and numbers: None"),
        (
            lambda q, k, v: lambda b, i, d: q[1 // 0, i, d],
            r"the description's lambda fails on symbolic indices: ZeroDivisionError: .*test_register.py:\d+\)",
        ),
        (lambda q, k, v: {}["q"], r"the description fails on symbolic operands: KeyError: 'q' \(.*test_register.py:\d+\)"),
        (lambda q, k, v: lambda b, i, d: missing[b], "the description's lambda fails on symbolic indices: NameError"),  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        (lambda q, k, v: lambda b, i, d: q[next(iter(())), i, d], "fails on symbolic indices: StopIteration: no message"),
        (
            lambda q, k, v: lambda b, i, d: tdl.Sum(lambda k: tdl.Sum(lambda k: q[b, i, k])),
            "the index k of a reduction has the name of an index around it.*: sum over k inside b, i, d, k",
        ),
        (
            lambda q, k, v: lambda b, i, d: tdl.Max(lambda i: q[b, i, d]),
            "the index i of a reduction has the name of an index around it.*: max over i inside b, i, d",
        ),
        (lambda q, k, v: lambda b, i, d: q[b.size, i, d], r"fails on symbolic indices: AttributeError"),
        (lambda q, k, v: None, "a description returns a lambda for each result: None"),
        (lambda q, k, v: (lambda b, i, d: q[b, i, d],) * 2, "has 1 results, but its description returns 2"),
        (lambda q, k: lambda b, i, d: q[b, i, d], r"has 3 operands, but its description takes 2: \(q, k\)"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(function: Any, says: str) -> None:
    with pytest.raises(DescriptionError, match=says):
        register(attention, example=EXAMPLE)(function)
    assert NAME not in tdl.described()


def test_an_example_that_the_function_does_not_take_is_refused() -> None:
    with pytest.raises(DescriptionError, match=f"{NAME} does not take the example"):
        register(attention, example=EXAMPLE[:2])(lambda q, k: lambda b, i, d: q[b, i, d])


def test_a_description_that_fails_before_its_lambda_is_refused_without_an_example() -> None:
    with pytest.raises(DescriptionError, match=r"fails on symbolic operands: ZeroDivisionError: .*test_register.py:\d+\)"):
        register(attention)(lambda q, k, v: 1 // 0)
    assert NAME not in tdl.described()


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: None, "a description returns a lambda for each result: None, described at"),
        (lambda x: "x", "a description returns a lambda for each result: 'x', described at"),
        (lambda x: x, "a description returns a lambda for each result: operand 0, described at"),
        (lambda x: (lambda i: x[i], None), "a description returns a lambda for each result: None, described at"),
        (lambda x, y: lambda i, j: x[i, j], r"doubled takes \(x\), but its description takes 2 operands: \(x, y\), described at"),
        (lambda x: lambda i, j: 2.0 * x[i], "doubled has a result of rank 1, described with indices"),
    ],
)
def test_nonsense_about_a_primitive_of_ones_own_is_refused_without_an_example(function: Any, says: str) -> None:
    doubled = Primitive("doubled")
    doubled.def_impl(lambda x: 2 * x)
    doubled.def_abstract_eval(lambda x: x)
    with pytest.raises(DescriptionError, match=says) as caught:
        register(doubled)(function)
    assert "described at" not in says or "test_register.py:" in str(caught.value)
    assert "doubled" not in tdl.described()


def test_a_description_of_one_rank_meets_another_with_both_places_named() -> None:
    """For arrays of rank 1 it holds, so it is registered; the op that it does not fit is named beside its own line."""
    doubled = Primitive("doubled")
    doubled.def_impl(lambda x: 2 * x)
    doubled.def_abstract_eval(lambda x: x)
    register(doubled)(lambda x: lambda i: 2.0 * x[i])
    places = r"\(used at .*test_register.py:\d+ .*, described at .*test_register.py:\d+\)"
    with pytest.raises(MisfitError, match=rf"doubled has a result of rank 2, described with indices \['i'\] {places}"):
        flatten(trace(lambda x: doubled.bind(x), jax.ShapeDtypeStruct((4, 6), jnp.float32)).program)


def test_why_a_description_is_not_proven_is_said_where_it_is_registered() -> None:
    doubled = Primitive("doubled")
    doubled.def_abstract_eval(lambda x, y, *, times: x)
    with pytest.warns(UserWarning, match=r"\(it does not say of which rank y is\)") as told:
        register(doubled)(lambda x, y: lambda i, j: 2.0 * x[i, j])
    with pytest.warns(UserWarning, match=r"shape \(6, 6\), \(6,\) are not taken: TypeError: .*times") as more:
        register(doubled)(lambda x, y: lambda i, j: 2.0 * x[i, j] + y[i])
    assert {warning.filename for warning in (*told, *more)} == {__file__}


def test_reductions_beside_each_other_may_use_one_name() -> None:
    made = tdl.op(lambda x: lambda i: tdl.Sum(lambda k: x[i, k]) + tdl.Sum(lambda k: 2 * x[i, k]))(
        tdl.Call("sums", ((4, 6),), ((4,),), {})
    )
    assert [loop.name for loop in made.loops] == ["i", "k", "k"]


def test_a_function_s_run_that_no_block_needs_is_said_to_be_unproven() -> None:
    @jax.jit
    def differences(x: Any) -> Any:
        return 2 * x

    with pytest.warns(UserWarning, match=r"run= of jit:differences is neither used nor proven: .* no cut of the example has one"):
        register(differences, run=lambda x: 3 * x, example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)])(
            lambda x: lambda i, j: 2 * x[i, j]
        )


def test_an_example_that_is_no_list_is_refused() -> None:
    with pytest.raises(
        DescriptionError, match=r"the example of .* must be a list of its arguments, even of one: example=ShapeDtypeStruct"
    ):
        register(attention, example=EXAMPLE[0])  # pyright: ignore[reportArgumentType]


def test_a_static_argument_is_told_its_way() -> None:
    def scaled(x: Any, how: str) -> Any:
        return x if how == "whole" else 2 * x

    differences = jax.custom_vjp(scaled, nondiff_argnums=(1,))
    differences.defvjp(lambda x, how: (x, None), lambda how, saved, g: (g,))
    with pytest.raises(DescriptionError, match=r"bind static arguments in a jax.jit function of the others"):
        register(differences, example=[EXAMPLE[0], True])(lambda x, how: lambda *i: x[i])


def test_without_an_example_small_arrays_are_tried() -> None:
    with pytest.raises(DescriptionError, match=r"does not hold on the example.*\(6, 6, 6\)"):
        register(attention)(lambda q, k, v: lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, i, :], v[b, i, d]))
    register(attention)(lambda q, k, v: lambda b, i, d: tdl.Opaque()(q[b, i, :], k[b, :, :], v[b, :, d]))
    with pytest.warns(UserWarning, match="is not proven: give an example="):
        register("pallas_call:double", run=lambda x: 2 * jnp.reshape(x, (5, 7)))(lambda x: lambda i, j: 2.0 * x[i, j])


def test_what_no_cut_of_the_example_divides_is_said_to_be_unproven() -> None:
    @jax.jit
    def differences(x: Any) -> Any:
        return x - x.mean(0)

    for shape in ((5, 7), (1, 6), (0, 6)):
        with pytest.warns(UserWarning, match=rf"is not proven along i \({shape[0]}\): no cut 2 or 3 ways divides"):
            register(differences, example=[jax.ShapeDtypeStruct(shape, jnp.float32)])(
                lambda x: lambda i, j: tdl.Opaque()(x[i, :])[j]
            )


def test_a_halo_is_proven_where_it_is_said_how_blocks_run() -> None:
    def apart(x: Any) -> Any:
        return x[1:] - x[:-1]

    @jax.jit
    def differences(x: Any) -> Any:
        return apart(jnp.pad(x, ((1, 0), (0, 0))))

    example = [jax.ShapeDtypeStruct((6, 4), jnp.float32)]
    register(differences, run=apart, example=example)(lambda x: lambda i, j: x[i, j] - x[i - 1, j])
    with pytest.raises(DescriptionError, match=r"does not hold|refuses the regions"):
        register(differences, run=apart, example=example)(lambda x: lambda i, j: x[i, j] - x[i - 2, j])


def test_a_primitive_with_parameters_asks_for_run() -> None:
    doubled = Primitive("doubled")
    doubled.def_abstract_eval(lambda x, *, times: x)
    with pytest.raises(DescriptionError, match=r"does not take the example .a primitive with parameters needs run="):
        register(doubled, example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)])(lambda x: lambda *i: 2.0 * x[i])


def test_a_primitive_of_ones_own_keeps_its_parameters() -> None:
    doubled = Primitive("doubled")
    doubled.def_impl(lambda x, *, times: x * times)
    doubled.def_abstract_eval(lambda x, *, times: x)

    @register(doubled, example=[jax.ShapeDtypeStruct((4, 6), jnp.float32)], run=lambda x, times=2: x * times)
    def describe(x: Any) -> Any:
        return lambda *i: 2.0 * x[i]

    call = tdl.Call("doubled", ((2,),), ((2,),), {"times": 3})
    assert [float(v) for v in evaluate(call, [jnp.ones(2)])[0]] == [3.0, 3.0]


def test_a_primitive_of_ones_own_is_told_which_lines_to_write() -> None:
    """They are run as they stand."""
    mine = Primitive("doubled")
    mine.def_impl(lambda x, y: x + y)
    mine.def_abstract_eval(lambda x, y: x)
    shape = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    program = trace(lambda w, x: w - mine.bind(w, x), shape, shape).program
    with pytest.raises(UndescribedPrimitiveError) as told:
        flatten(program)
    lines = [line.strip() for line in str(told.value).splitlines()[1:4]]
    assert lines[1:] == ["def describe(x0, x1):", "return lambda i0, i1: tdl.Opaque()(x0[i0, :], x1[i0, :])[i1]"]
    known = {"shardplan": shardplan, "tdl": tdl, "the_primitive": mine, "function_that_calls_it": lambda x, y: x + y}
    exec(f"{lines[0]}\n{lines[1]}\n    {lines[2]}", known)
    assert [node.signature.call.primitive for node in flatten(program).nodes] == ["doubled", "sub"]


def test_a_kernel_under_vmap_is_told_the_ways_out() -> None:
    def double(x: Any) -> Any:
        return pl.pallas_call(_double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="double")(x)

    def ranks(x: Any) -> Any:
        return double(x) if x.ndim == 2 else jax.vmap(double)(x)

    example, shape = [jax.ShapeDtypeStruct((4, 6), jnp.float32)], jax.ShapeDtypeStruct((8, 4, 6), jnp.float32)
    register("pallas_call:double", run=double, example=example)(lambda x: lambda i, j: 2.0 * x[i, j])
    with pytest.raises(MisfitError, match=r"rank 3, described with indices .*used at .*test_register.py.*lambda \*i.*jax.jit"):
        flatten(trace(jax.vmap(double), shape).program)

    with pytest.warns(UserWarning, match="was registered for another function"):  # the first way
        register("pallas_call:double", run=ranks, example=example)(lambda x: lambda *i: 2.0 * x[i])
    assert len(flatten(trace(jax.vmap(double), shape).program).nodes) == 1
    forget("pallas_call:double")

    @jax.jit
    def differences(x: Any) -> Any:  # the second
        return jax.vmap(double)(x)

    register(differences, example=[shape])(lambda x: lambda b, i, j: 2.0 * x[b, i, j])
    (node,) = flatten(trace(lambda x: differences(x), shape).program).nodes
    assert node.signature.call.primitive == "jit:differences"


def _double(x: Any, y: Any) -> None:
    y[...] = 2.0 * x[...]
