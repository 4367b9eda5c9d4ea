"""What the CPU compiler did is undone where it did it, and nowhere else."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardplan import hlo
from shardplan.ir import Collective

ALL = "{{0,1,2,3,4,5,6,7}}"
ROWS = "constant({0, 1, 2, 3, 4, 5, 6, 7})"


def kinds(body: str, *, groups: str = ALL, table: str = ROWS, promoted: str = "") -> dict[str, float]:
    """Wire bytes by kind of an all-reduce of f32[64,32] (8,192 bytes), followed by these instructions."""
    text = f"""HloModule m, num_partitions=8

%add{promoted} (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

ENTRY %main (a: f32[64,32], other: f32[64,32], i: s32[]) -> f32[] {{
  %a = f32[64,32]{{1,0}} parameter(0)
  %other = f32[64,32]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %id = u32[] partition-id()
  %table = s32[8]{{0}} {table}
  %entry = s32[1]{{0}} dynamic-slice(%table, %id), dynamic_slice_sizes={{1}}
  %row = s32[] reshape(%entry)
  %eight = s32[] constant(8)
  %start = s32[] multiply(%row, %eight)
  %four = s32[] constant(4)
  %column = s32[] multiply(%row, %four)
  %ar = f32[64,32]{{1,0}} all-reduce(%a), channel_id=1, replica_groups={groups}, to_apply=%add{promoted}
{body}
}}
"""
    return {kind: total.wire_bytes for kind, total in hlo.measure(text).kinds.items()}


REDUCED = {"all-reduce": 2 * 7 / 8 * 8192}
SCATTERED = {"reduce-scatter": 7 / 8 * 8192}
OWN_ROWS = "dynamic-slice({}, %start, %zero), dynamic_slice_sizes={{8,32}}"


def test_a_slice_of_its_own_on_each_device_is_a_reduce_scatter() -> None:
    assert kinds(f"  ROOT %own = f32[8,32]{{1,0}} {OWN_ROWS.format('%ar')}") == SCATTERED


def test_a_barrier_hides_no_slice() -> None:
    program: Any = jax.jit(lax.optimization_barrier).lower(jnp.ones(3)).compiler_ir("hlo")
    assert " opt-barrier(" in program.as_hlo_text()
    body = "  %held = f32[64,32]{1,0} opt-barrier(%ar)\n"
    assert kinds(f"{body}  ROOT %own = f32[8,32]{{1,0}} {OWN_ROWS.format('%held')}") == SCATTERED


def test_elementwise_work_before_the_slice_changes_nothing() -> None:
    body = f"""  %scaled = f32[64,32]{{1,0}} add(%ar, %other)
  %rooted = f32[64,32]{{1,0}} sqrt(%ar)
  %both = f32[64,32]{{1,0}} multiply(%scaled, %rooted)
  ROOT %own = f32[8,32]{{1,0}} {OWN_ROWS.format("%both")}"""
    assert kinds(body) == SCATTERED


def test_one_path_that_needs_the_whole_keeps_the_all_reduce() -> None:
    body = f"""  %own = f32[8,32]{{1,0}} {OWN_ROWS.format("%ar")}
  %whole = f32[] reduce(%ar, %zero), dimensions={{0,1}}, to_apply=%add
  ROOT %out = (f32[8,32]{{1,0}}, f32[]) tuple(%own, %whole)"""
    assert kinds(body) == REDUCED


def test_a_result_that_leaves_keeps_the_all_reduce() -> None:
    body = f"""  %own = f32[8,32]{{1,0}} {OWN_ROWS.format("%ar")}
  ROOT %out = (f32[8,32]{{1,0}}, f32[64,32]{{1,0}}) tuple(%own, %ar)"""
    assert kinds(body) == REDUCED


@pytest.mark.parametrize("start", ["%zero", "%i"])
def test_the_same_slice_everywhere_keeps_the_all_reduce(start: str) -> None:
    assert kinds(f"  ROOT %own = f32[8,32]{{1,0}} dynamic-slice(%ar, {start}, %zero), dynamic_slice_sizes={{8,32}}") == REDUCED


def test_slices_that_differ_only_between_groups_keep_the_all_reduce() -> None:
    """The devices of a group need the same rows: they cannot share the work of reducing them."""
    by_four = "constant({0, 1, 2, 3, 0, 1, 2, 3})"
    own = f"  ROOT %own = f32[8,32]{{1,0}} {OWN_ROWS.format('%ar')}"
    assert kinds(own, groups="{{0,4},{1,5},{2,6},{3,7}}", table=by_four) == {"all-reduce": 8192}


def test_slices_that_some_devices_share_are_scattered_then_reduced() -> None:
    table = "constant({0, 1, 2, 3, 0, 1, 2, 3})"
    body = """  %sixteen = s32[] constant(16)
  %begin = s32[] multiply(%row, %sixteen)
  ROOT %own = f32[16,32]{1,0} dynamic-slice(%ar, %begin, %zero), dynamic_slice_sizes={16,32}"""
    assert kinds(body, table=table) == {"reduce-scatter": 3 / 4 * 8192, "all-reduce": 2 * 1 / 2 * 2048}


def test_slices_shared_unevenly_keep_the_all_reduce() -> None:
    own = f"  ROOT %own = f32[8,32]{{1,0}} {OWN_ROWS.format('%ar')}"
    assert kinds(own, table="constant({0, 0, 0, 3, 4, 5, 6, 7})") == REDUCED


def test_two_cuts_that_differ_keep_the_all_reduce() -> None:
    body = f"""  %own = f32[8,32]{{1,0}} {OWN_ROWS.format("%ar")}
  %across = f32[64,4]{{1,0}} dynamic-slice(%ar, %zero, %column), dynamic_slice_sizes={{64,4}}
  ROOT %out = (f32[8,32]{{1,0}}, f32[64,4]{{1,0}}) tuple(%own, %across)"""
    assert kinds(body) == REDUCED


def test_the_same_cut_under_other_shapes_is_one_cut() -> None:
    """Rows of the result are columns of its transpose and a block of its reshape."""
    body = f"""  %own = f32[8,32]{{1,0}} {OWN_ROWS.format("%ar")}
  %turned = f32[32,64]{{1,0}} transpose(%ar), dimensions={{1,0}}
  %columns = f32[32,8]{{1,0}} dynamic-slice(%turned, %zero, %start), dynamic_slice_sizes={{32,8}}
  %folded = f32[64,4,8]{{2,1,0}} reshape(%ar)
  %block = f32[8,4,8]{{2,1,0}} dynamic-slice(%folded, %start, %zero, %zero), dynamic_slice_sizes={{8,4,8}}
  %cast = f32[32,64]{{0,1}} bitcast(%ar)
  %again = f32[32,8]{{0,1}} dynamic-slice(%cast, %zero, %start), dynamic_slice_sizes={{32,8}}
  ROOT %out = (f32[8,32]{{1,0}}, f32[32,8]{{1,0}}, f32[8,4,8]{{2,1,0}}, f32[32,8]{{0,1}}) tuple(%own, %columns, %block, %again)"""
    assert kinds(body) == SCATTERED


def test_a_table_that_the_text_leaves_out_is_judged_by_sizes() -> None:
    own = f"  ROOT %own = f32[8,32]{{1,0}} {OWN_ROWS.format('%ar')}"
    assert kinds(own, table="constant({...})") == SCATTERED


def test_only_the_compilers_own_conversions_tell_of_widening() -> None:
    """A float32 result that the user casts down was sent in float32."""
    body = '  ROOT %down = bf16[64,32]{1,0} convert(%ar), metadata={op_name="jit(f)/convert_element_type"}'
    assert kinds(body) == REDUCED
    assert kinds("  ROOT %down = bf16[64,32]{1,0} convert(%ar)") == {"all-reduce": 7 / 8 * 8192}
    assert kinds("  ROOT %down = f32[64,32]{1,0} negate(%ar)", promoted="_promoted") == {"all-reduce": 7 / 8 * 8192}
    assert kinds("  ROOT %down = f32[64,32]{1,0} negate(%ar)", promoted="_reassoc_promoted") == REDUCED


def _transformer_block(params: Any, tokens: Any, dtype: Any) -> Any:
    cast = lambda w: w.astype(dtype)  # noqa: E731
    hidden = cast(params["embedding"])[tokens]
    scale = lax.rsqrt((hidden.astype(jnp.float32) ** 2).mean(-1, keepdims=True) + 1e-6).astype(dtype)
    q, k, v = jnp.split((hidden * scale) @ cast(params["qkv"]), 3, axis=-1)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", q, k).astype(jnp.float32), axis=-1).astype(dtype)
    hidden = hidden + jnp.einsum("bts,bsd->btd", scores, v)
    hidden = hidden + jax.nn.gelu(hidden @ cast(params["up"])) @ cast(params["down"])
    logits = (hidden @ cast(params["embedding"]).T).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], axis=-1).mean()


SHARDINGS = {
    "data": {"embedding": P(), "qkv": P(), "up": P(), "down": P()},
    "fully": {"embedding": P("b"), "qkv": P("b"), "up": P("b"), "down": P("b")},
    "tensor": {"embedding": P("b"), "qkv": P(None, "b"), "up": P(None, "b"), "down": P("b")},
}


@pytest.mark.parametrize("stored", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("sharding", [pytest.param("data", marks=pytest.mark.slow), "fully", "tensor"])
def test_widths_are_those_that_left_the_partitioner(
    devices: list[Any], tmp_path: pathlib.Path, sharding: str, stored: Any
) -> None:
    """The compiler's own dump from before it widens anything: a bfloat16 model, weights stored in either type."""
    mesh = Mesh(np.array(devices).reshape(2, 4), ("a", "b"))
    shapes = {"embedding": (128, 64), "qkv": (64, 192), "up": (64, 256), "down": (256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, stored) for name, shape in shapes.items()}
    specs = {name: NamedSharding(mesh, spec) for name, spec in SHARDINGS[sharding].items()}

    def step(params: Any, tokens: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: _transformer_block(p, tokens, jnp.bfloat16))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    batch = NamedSharding(mesh, P(("a", "b") if sharding != "tensor" else "a"))
    jitted = jax.jit(step, in_shardings=(specs, batch), out_shardings=(specs, NamedSharding(mesh, P())))
    lowered = jitted.lower(params, jax.ShapeDtypeStruct((8, 32), jnp.int32))
    text = lowered.compile(compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd.*"}).as_text()
    (dump,) = tmp_path.glob("*after_spmd-partitioning*")
    before = hlo.measure(dump.read_text(), undo_cpu=False)
    assert text is not None
    after = hlo.measure(text)
    scattered = after.kinds.get(Collective.REDUCE_SCATTER, hlo.KindTotal(0, 0.0)).wire_bytes
    # An all-reduce is twice its reduce-scatter; everything else must be equal to the byte.
    assert after.wire_bytes + scattered == pytest.approx(before.wire_bytes, rel=1e-12)
    assert after.raw_wire_bytes > 1.5 * before.wire_bytes
