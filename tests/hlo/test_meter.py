"""The meter against closed forms: programs compiled here, and text as GPU compilers write it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan import hlo
from shardplan.hlo.text import HloError

FIXTURES = Path(__file__).parent / "fixtures"
P = PartitionSpec


def compiled(
    devices: list[Any], f: Any, specs: Any, out: Any, *args: Any, shape: tuple[int, ...] = (2, 4), **options: Any
) -> str:
    """The optimized HLO of ``f`` on the mesh (a, b), its arguments and result sharded by specs."""
    mesh = Mesh(np.array(devices).reshape(shape), ("a", "b")[: len(shape)])
    put = lambda tree: jax.tree.map(lambda s: NamedSharding(mesh, s), tree, is_leaf=lambda x: isinstance(x, P))  # noqa: E731
    step = jax.jit(f, in_shardings=put(specs), out_shardings=put(out))
    return as_text(step.lower(*args).compile(**options))


def as_text(executable: Any) -> str:
    text = executable.as_text()
    assert text is not None
    return text


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def matmul(x: Any, w: Any) -> Any:
    return x @ w


def fixture(name: str) -> str:
    return (FIXTURES / f"{name}.hlo").read_text()


def totals(measured: hlo.Measured) -> dict[str, tuple[int, float]]:
    return {kind: (total.count, total.wire_bytes) for kind, total in measured.kinds.items()}


# Every case: specs of x [64, 128] and w [128, 32], of the result, and what goes over the wire with elements of one byte.
MATMULS = {
    "contracted dim split, result whole": ((P(None, "b"), P("b")), P(), {"all-reduce": 2 * 3 / 4 * 64 * 32}),
    "contracted dim split, result split": ((P(None, "b"), P("b")), P("b"), {"reduce-scatter": 3 / 4 * 64 * 32}),
    "contracted dim split, other dim split": ((P("a", "b"), P("b")), P("a"), {"all-reduce": 2 * 3 / 4 * 32 * 32}),
    "contracted dim split over all, result over one": (
        (P(None, ("a", "b")), P(("a", "b"))),
        P("b"),
        {"reduce-scatter": 3 / 4 * 64 * 32, "all-reduce": 2 * 1 / 2 * 16 * 32},
    ),
    "result split further than it was contracted": ((P(None, "b"), P("b")), P(("a", "b")), {"reduce-scatter": 3 / 4 * 64 * 32}),
    "weights gathered": ((P(("a", "b")), P("b")), P(("a", "b")), {"all-gather": 3 / 4 * 128 * 32}),
    "result gathered": ((P("b"), P()), P(), {"all-gather": 3 / 4 * 64 * 32}),
    "nothing to send": ((P("a"), P(None, "b")), P("a", "b"), {}),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", MATMULS)
def test_matmuls_send_their_closed_form(devices: list[Any], case: str, dtype: Any) -> None:
    specs, out, expected = MATMULS[case]
    text = compiled(devices, matmul, specs, out, array(64, 128, dtype=dtype), array(128, 32, dtype=dtype))
    measured = hlo.measure(text)
    width = jnp.dtype(dtype).itemsize
    assert {kind: total.wire_bytes for kind, total in measured.kinds.items()} == {k: width * n for k, n in expected.items()}
    assert measured.wire_bytes == width * sum(expected.values())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("source", "target", "kind", "elements"),
    [
        (P("b"), P(None, "b"), "all-to-all", 3 / 4 * 16 * 128),
        (P(("a", "b")), P(("b", "a")), "collective-permute", 8 * 128),
        (P(("a", "b")), P("a"), "all-gather", 3 / 4 * 32 * 128),
        (P(("a", "b")), P(), "all-gather", 7 / 8 * 64 * 128),
    ],
)
def test_reshardings_send_their_closed_form(
    devices: list[Any], source: P, target: P, kind: str, elements: float, dtype: Any
) -> None:
    text = compiled(devices, lambda x: x + 1, (source,), target, array(64, 128, dtype=dtype))
    assert totals(hlo.measure(text)) == {kind: (1, elements * jnp.dtype(dtype).itemsize)}


def test_raw_figures_are_the_texts_own(devices: list[Any]) -> None:
    """The CPU compiler widens bfloat16 and writes an all-reduce for a reduce-scatter: four times the bytes."""
    shapes = array(64, 128, dtype=jnp.bfloat16), array(128, 32, dtype=jnp.bfloat16)
    text = compiled(devices, matmul, (P(None, "b"), P("b")), P("b"), *shapes)
    undone, raw = hlo.measure(text), hlo.measure(text, undo_cpu=False)
    assert totals(undone) == {"reduce-scatter": (1, 3072.0)}
    assert totals(raw) == {"all-reduce": (1, 12288.0)}
    assert undone.raw_wire_bytes == raw.raw_wire_bytes == raw.wire_bytes == 4 * undone.wire_bytes


def test_collectives_in_a_scan_run_once_a_trip(devices: list[Any]) -> None:
    def step(x: Any, ws: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    text = compiled(devices, step, (P("a", "b"), P(None, "b")), P("a", "b"), array(64, 128), array(5, 128, 128))
    assert totals(hlo.measure(text)) == {"reduce-scatter": (5, 5 * 3 / 4 * 32 * 128 * 4)}
    (collective,) = hlo.parse(text)
    assert (collective.kind, collective.trips, collective.trips_known) == ("all-reduce", 5, True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_fully_sharded_scan_gathers_twice_and_scatters_once(devices: list[Any], dtype: Any) -> None:
    def loss(ws: Any, x: Any) -> Any:
        return (lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).astype(jnp.float32).sum()

    sharded = P(None, ("a", "b"))
    text = compiled(
        devices,
        jax.value_and_grad(loss),
        (sharded, P(("a", "b"))),
        (P(), sharded),
        array(5, 128, 128, dtype=dtype),
        array(64, 128, dtype=dtype),
    )
    weights = 5 * 7 / 8 * 128 * 128 * jnp.dtype(dtype).itemsize
    assert totals(hlo.measure(text)) == {
        "all-reduce": (1, 2 * 7 / 8 * 4),
        "all-gather": (10, 2 * weights),
        "reduce-scatter": (5, weights),
    }


def test_collectives_written_by_hand_count_as_written(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))

    def chain(x: Any) -> Any:
        return lax.all_gather(lax.psum(lax.psum_scatter(x, "b", tiled=True), "a"), "b", tiled=True)

    step = jax.shard_map(chain, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check_vma=False)
    text = as_text(jax.jit(step).lower(array(64, 128, dtype=jnp.bfloat16)).compile())
    local = 32 * 128 * 2
    assert totals(hlo.measure(text)) == {
        "all-reduce": (1, local / 4),
        "all-gather": (1, 3 / 4 * local),
        "reduce-scatter": (1, 3 / 4 * local),
    }


def test_real_gpu_text_of_the_same_chain_counts_the_same() -> None:
    local = 32 * 128 * 2
    measured = hlo.measure(fixture("gpu_chain"), undo_cpu=False)
    assert totals(measured) == {
        "all-reduce": (1, local / 4),
        "all-gather": (1, 3 / 4 * local),
        "reduce-scatter": (1, 3 / 4 * local),
    }
    assert [c.groups[0] for c in measured.collectives] == [(0, 1, 2, 3), (0, 4), (0, 1, 2, 3)]
    assert measured.collectives[1].op_name == "jit(<lambda>)/shard_map/psum"


@pytest.mark.parametrize(
    ("name", "kind", "trips", "dtype", "wire"),
    [
        ("gpu_scan", "reduce-scatter", 5, "f32", 3 / 4 * 32 * 128 * 4),
        ("gpu_all_to_all", "all-to-all", 1, "f32", 3 / 4 * 16 * 128 * 4),
        ("gpu_permute", "collective-permute", 1, "f32", 8 * 128 * 4),
        ("gpu_ragged", "ragged-all-to-all", 1, "f32", 3 / 4 * 16 * 128 * 4),
    ],
)
def test_real_gpu_text_is_read(name: str, kind: str, trips: int, dtype: str, wire: float) -> None:
    (collective,) = hlo.parse(fixture(name))
    assert (collective.kind, collective.trips, collective.dtype, collective.wire_bytes) == (kind, trips, dtype, wire)


def test_trip_counts_multiply_and_branches_and_calls_count_once_each() -> None:
    runs = {c.name: (c.trips, c.trips_known, c.group_size) for c in hlo.parse(fixture("nested_loops"))}
    assert runs == {
        "all-reduce.1": (15, True, 2),
        "all-reduce.2": (5, True, 8),
        "all-reduce.3": (6, True, 8),
        "all-gather.4": (1, False, 2),
    }


def test_async_forms_are_read_from_their_first_half() -> None:
    found = {c.name: c for c in hlo.parse(fixture("async_forms"))}
    sizes = {name: (c.kind, c.operand_bytes, c.result_bytes, c.group_size) for name, c in found.items()}
    assert sizes == {
        "reduce-scatter.1": ("reduce-scatter", 256, 32, 8),
        "all-gather.9": ("all-gather", 32, 64, 2),
        "ar-start": ("all-reduce", 512, 512, 4),
        "ag-start": ("all-gather", 512, 1024, 2),
        "cp-start": ("collective-permute", 256, 256, 2),
    }
    assert found["reduce-scatter.1"].op_name == 'jit(step)/psum_scatter (old, \\"quoted\\")'
    assert found["all-gather.9"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["ag-start"].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["cp-start"].groups == ((0, 1), (1, 2), (2, 3), (3, 0))


def test_short_names_and_types_before_operands_are_read() -> None:
    found = {c.name: (c.kind, c.operand_bytes, c.group_size) for c in hlo.parse(fixture("short_names"))}
    assert found == {
        "total": ("all-reduce", 128, 4),
        "whole": ("all-gather", 8, 4),
        "sent": ("collective-permute", 128, 2),
    }


def test_a_permute_in_which_nobody_sends_has_no_bytes() -> None:
    text = re.sub(r"source_target_pairs=\{\{.*?\}\}", "source_target_pairs={}", fixture("gpu_permute"))
    (found,) = hlo.parse(text)
    assert (found.kind, found.groups, found.wire_bytes) == ("collective-permute", (), 0.0)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("replica_groups=[4,2]<=[8]", "replica_groups=@everyone", "unknown form of replica_groups"),
        ("all-reduce(%v)", "all-shuffle(%v)", "unknown collective 'all-shuffle'"),
        (
            "f32[64]{0} get-tuple-element(%state), index=1",
            "q9[64]{0} get-tuple-element(%state), index=1",
            "unknown element type 'q9'",
        ),
        ("all-reduce(%v)", "all-reduce(%nobody)", "operands that are not in its computation"),
        ("= f32[64]{0} all-reduce(%v)", "= all-reduce", "not an instruction"),
        ("source_target_pairs", "pairs", "a permute without source_target_pairs"),
        ("ENTRY", "EXIT", "no ENTRY computation"),
    ],
)
def test_an_unknown_form_is_an_error_that_names_its_line(before: str, after: str, message: str) -> None:
    text = fixture("async_forms" if before == "source_target_pairs" else "nested_loops").replace(before, after, 1)
    with pytest.raises(HloError, match=message) as caught:
        hlo.parse(text)
    assert after.split()[0].strip("=") in text.splitlines()[caught.value.line - 1] or message.startswith("no ENTRY")
    assert f"HLO line {caught.value.line}" in str(caught.value)
