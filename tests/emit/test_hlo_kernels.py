"""The kernels that HLO text holds: their bytes, flops and runs."""

from __future__ import annotations

from shardplan.emit.hlo_kernels import kernels

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
