"""The kernels that HLO text holds: their bytes, flops and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax import lax

from benchmarks.hlo_kernels import kernels
from shardplan.frontend.trace import trace
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.search.problem.compute_prices import whole_compute_s

TEXT = """\
HloModule step, num_partitions=1

%sliced (p0: f32[16,128], p1: s32[]) -> f32[128] {
  %p0 = f32[16,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %one = f32[1,128]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,128}
  %flat = f32[128]{0} bitcast(%one)
  ROOT %e = f32[128]{0} exponential(%flat)
}

%stacked (p0: f32[16,128], p1: f32[128], p2: s32[]) -> f32[16,128] {
  %p0 = f32[16,128]{1,0} parameter(0)
  %p1 = f32[128]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,128]{1,0} bitcast(%p1)
  ROOT %u = f32[16,128]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

%body (s: (s32[], f32[16,128], f32[16,128])) -> (s32[], f32[16,128], f32[16,128]) {
  %s = (s32[], f32[16,128]{1,0}, f32[16,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %xs = f32[16,128]{1,0} get-tuple-element(%s), index=1
  %ys = f32[16,128]{1,0} get-tuple-element(%s), index=2
  %x = f32[128]{0} fusion(%xs, %i), kind=kLoop, calls=%sliced
  %y = f32[16,128]{1,0} fusion(%ys, %x, %i), kind=kLoop, calls=%stacked
  ROOT %t = (s32[], f32[16,128]{1,0}, f32[16,128]{1,0}) tuple(%i, %xs, %y)
}

%test (s: (s32[], f32[16,128], f32[16,128])) -> pred[] {
  %s = (s32[], f32[16,128]{1,0}, f32[16,128]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(16)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%product (p0: bf16[64,32], p1: bf16[32,8]) -> bf16[64,8] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,8]{1,0} parameter(1)
  ROOT %d = bf16[64,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[16,128], b: bf16[64,32], c: bf16[32,8]) -> (f32[16,128], bf16[64,8]) {
  %a = f32[16,128]{1,0} parameter(0)
  %b = bf16[64,32]{1,0} parameter(1)
  %c = bf16[32,8]{1,0} parameter(2)
  %i = s32[] constant(0)
  %zeros = f32[16,128]{1,0} broadcast(%i), dimensions={}
  %s = (s32[], f32[16,128]{1,0}, f32[16,128]{1,0}) tuple(%i, %a, %zeros)
  %w = (s32[], f32[16,128]{1,0}, f32[16,128]{1,0}) while(%s), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"16"}}
  %out = f32[16,128]{1,0} get-tuple-element(%w), index=2
  %r = f32[16,128]{1,0} all-reduce(%out), replica_groups={{0}}, to_apply=%sum
  %p = bf16[64,8]{1,0} fusion(%b, %c), kind=kCustom, calls=%product
  ROOT %result = (f32[16,128]{1,0}, bf16[64,8]{1,0}) tuple(%r, %p)
}
"""  # noqa: E501


def test_slices_count_as_what_is_read_and_updates_as_what_is_written() -> None:
    by_name = {k.name: k for k in kernels(TEXT)}
    assert (by_name["x"].times, by_name["x"].read_bytes, by_name["x"].written_bytes) == (16, 512 + 4, 512)
    assert (by_name["y"].times, by_name["y"].read_bytes, by_name["y"].written_bytes) == (16, 512 + 4, 512)


def test_products_have_flops_and_collectives_are_no_kernels() -> None:
    by_name = {k.name: k for k in kernels(TEXT)}
    assert (by_name["p"].flops, by_name["p"].dtype) == (2 * 64 * 8 * 32, "bf16")
    assert by_name["p"].nbytes == 2 * (64 * 32 + 32 * 8 + 64 * 8)
    assert not by_name.keys() & {"r", "w", "s", "out", "a"}
    assert by_name["x"].flops == 0


def test_a_loop_of_known_trip_count_does_not_run_its_condition() -> None:
    assert not {k.name for k in kernels(TEXT)} & {"less"}
    unknown = TEXT.replace(', backend_config={"known_trip_count":{"n":"16"}}', "")
    assert {k.name: k.times for k in kernels(unknown)}["less"] == 1


LIBRARY = """\
HloModule step, num_partitions=1

%update (p0: f32[16,128], p1: f32[128], p2: s32[]) -> f32[16,128] {
  %p0 = f32[16,128]{1,0} parameter(0)
  %p1 = f32[128]{0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,128]{1,0} bitcast(%p1)
  ROOT %u = f32[16,128]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero)
}

ENTRY %main (x: f32[8,16,16,4], k: f32[3,3,4,32], a: bf16[64,32], b: bf16[32,8], s: f32[16,128], r: f32[128], i: s32[]) -> f32[16,128] {
  %x = f32[8,16,16,4]{3,2,1,0} parameter(0)
  %k = f32[3,3,4,32]{3,2,1,0} parameter(1)
  %a = bf16[64,32]{1,0} parameter(2)
  %b = bf16[32,8]{1,0} parameter(3)
  %s = f32[16,128]{1,0} parameter(4)
  %r = f32[128]{0} parameter(5)
  %i = s32[] parameter(6)
  %conv = (f32[8,16,16,32]{3,2,1,0}, u8[1000]{0}) custom-call(%x, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %gemm = (bf16[64,8]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"]}
  %sort = (f32[128]{0}, u8[1000]{0}) custom-call(%r), custom_call_target="__cub$DeviceRadixSort", metadata={op_name="jit(step)/conv1/sort"}
  %start = ((f32[16,128]{1,0}, f32[128]{0}, s32[]), f32[16,128]{1,0}, u32[]) fusion-start(%s, %r, %i), kind=kLoop, calls=%update
  %old = f32[16,128]{1,0} copy(%s)
  ROOT %done = f32[16,128]{1,0} fusion-done(%start)
}
"""  # noqa: E501


def test_library_calls_have_the_flops_of_their_products_and_no_workspace() -> None:
    by_name = {k.name: k for k in kernels(LIBRARY)}
    conv, gemm, sort = by_name["conv"], by_name["gemm"], by_name["sort"]
    assert conv.flops == 2 * (8 * 16 * 16 * 32) * 3 * 3 * 4
    assert conv.written_bytes == 4 * 8 * 16 * 16 * 32
    assert (gemm.flops, gemm.written_bytes) == (2 * 64 * 8 * 32, 2 * 64 * 8)
    assert (sort.flops, sort.written_bytes) == (0, 512 + 1000), "a scope named conv1 is no convolution"


def test_a_fusion_beside_others_is_counted_where_it_starts() -> None:
    by_name = {k.name: k for k in kernels(LIBRARY)}
    assert (by_name["start"].read_bytes, by_name["start"].written_bytes) == (512 + 4, 512)
    assert "done" not in by_name
    assert (by_name["old"].read_bytes, by_name["old"].written_bytes) == (8192, 8192)


H100 = Cluster.load("8").device


def compiled(step: Callable[..., Any], args: tuple[Any, ...]) -> str:
    return jax.jit(step).lower(*args).compile().as_text() or ""


def written(dims: str, call: str, *shapes: str) -> str:
    """A text of one product of two parameters."""
    left, right = (f"bf16[{shape}]" for shape in shapes)
    return f"""\
HloModule step, num_partitions=1

ENTRY %main (a: {left}, b: {right}) -> bf16[{dims}] {{
  %a = {left} parameter(0)
  %b = {right} parameter(1)
  ROOT %p = bf16[{dims}] {call}
}}
"""


CONVOLVED = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
GEMM = """custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"]}"""
LIBRARY_CONVOLUTION = f'custom-call(%a, %b), {CONVOLVED}, custom_call_target="__cudnn$convBackward'
PLAIN_DOT = "dot(%a, %b), lhs_contracting_dims={0}, rhs_contracting_dims={1}"
BATCH_DOT = "dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}"
PRODUCTS = {
    "dot": ((1, 96, 200, 600), written("96,200", PLAIN_DOT, "600,96", "200,600")),
    "library": ((1, 96, 200, 600), written("96,200", GEMM, "96,600", "600,200")),
    "batch": ((6, 96, 200, 600), written("6,96,200", BATCH_DOT, "6,96,600", "6,600,200")),
    "forward": ((1, 128, 32, 144), written("2,8,8,32", f"convolution(%a, %b), {CONVOLVED}", "2,8,8,16", "3,3,16,32")),
    "image": ((1, 128, 16, 288), written("2,8,8,16", f'{LIBRARY_CONVOLUTION}Input"', "2,8,8,32", "3,3,16,32")),
    "filter": ((1, 144, 32, 128), written("3,3,16,32", f'{LIBRARY_CONVOLUTION}Filter"', "2,8,8,16", "2,8,8,32")),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_extents_of_products_are_read(name: str) -> None:
    extents, text = PRODUCTS[name]
    (kernel,) = kernels(text)
    (product,) = kernel.products
    assert product.extents == extents
    assert kernel.flops == product.flops == 2.0 * extents[0] * extents[1] * extents[2] * extents[3]


def test_a_grouped_convolution_has_no_tiles() -> None:
    grouped = written("2,8,8,32", f"convolution(%a, %b), {CONVOLVED}, feature_group_count=4", "2,8,8,16", "3,3,4,32")
    assert [p.extents for (kernel,) in [kernels(grouped)] for p in kernel.products] == [None]


@pytest.mark.parametrize("units", [132, 13, None])
def test_the_compiled_program_and_the_plan_price_a_product_alike(units: int | None) -> None:
    device = replace(H100, compute_units=units, memory_bytes_per_s=1e30)

    def batched(x: Any, y: Any) -> Any:
        return lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))

    for step, shapes in ((lambda x, y: x @ y, ((300, 600), (600, 900))), (batched, ((6, 96, 600), (6, 600, 200)))):
        args = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
        (planned,) = (n.signature for n in flatten(trace(step, *args).program).nodes if n.signature.contracts)
        (kernel,) = (k for k in kernels(compiled(step, args)) if k.flops)
        assert kernel.seconds(device) == pytest.approx(whole_compute_s(planned, device), rel=1e-9)


def test_a_kernel_of_many_products_takes_the_time_of_each() -> None:
    """A product of few rows does not run at the rate of a large one beside it."""
    device = replace(H100, launch_s=0.0, memory_bytes_per_s=1e30)
    (kernel,) = (k for k in kernels(TEXT) if k.flops)
    twice = replace(kernel, products=kernel.products * 2)
    assert twice.seconds(device) == pytest.approx(2 * kernel.seconds(device))
    assert kernel.seconds(device) > 50 * kernel.seconds(replace(device, compute_units=None))


@pytest.mark.parametrize(("hlo", "dtype"), [("f8e4m3fn", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2"), ("s8", "int8")])
def test_products_of_8_bits_run_at_their_own_peak(hlo: str, dtype: str) -> None:
    device = Cluster.load("dgx-h100:1").device
    text = (
        TEXT.replace("bf16[64,32]", f"{hlo}[4096,8192]")
        .replace("bf16[32,8]", f"{hlo}[8192,4096]")
        .replace("[64,8]", "[4096,4096]")
    )
    (product,) = (k for k in kernels(text) if k.name == "p")
    device = replace(device, compute_units=None)
    expected = 2 * 4096 * 4096 * 8192 / (device.flops_per_s[dtype] * device.flops_efficiency)
    assert product.seconds(device) == pytest.approx(expected + device.launch_s)
