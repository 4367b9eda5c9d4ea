"""One program serves all workers: the worker may be a traced index, inside ``shard_map`` as well."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardplan import tdl
from shardplan.ir import Partial, Replicated, Split
from shardplan.tdl.cut_proof import verify
from shardplan.tdl.localize import localize, run
from shardplan.tdl.proof import CASES, Drawn
from shardplan.tdl.proof.case import traced

WAYS = 2
SPEC = {Replicated: lambda p: PartitionSpec(), Split: lambda p: PartitionSpec(*[None] * p.dim, "w")}


def sharded(call: tdl.Call, strategy: tdl.Strategy, operands: Any, devices: Any) -> list[Any]:
    """The strategy run by ``shard_map`` on as many devices; partial results are summed."""
    local = localize(call, strategy)

    def worker(*ops: Any) -> tuple[Any, ...]:
        outs = run(local, ops, jax.lax.axis_index("w"))
        return tuple(
            jax.lax.psum(out, "w") if isinstance(p, Partial) else out for out, p in zip(outs, strategy.results, strict=True)
        )

    spec = [SPEC[type(p)](p) for p in strategy.operands]
    out = tuple(PartitionSpec() if isinstance(p, Partial) else SPEC[type(p)](p) for p in strategy.results)
    mesh = Mesh(np.array(devices[:WAYS]), ("w",))
    return list(
        jax.jit(partial(jax.shard_map, check_vma=False)(worker, mesh=mesh, in_specs=tuple(spec), out_specs=out))(*operands)
    )


@pytest.mark.parametrize("name", ["iota", "random_bits", "gather", "scatter", "reshape", "conv_general_dilated", "dot_general"])
def test_a_strategy_runs_in_shard_map(name: str, devices: Any) -> None:
    ran = 0
    for seed in range(4):
        case = CASES[name](Drawn(seed))
        description = tdl.describe(case.call)
        assert description is not None
        whole = tdl_evaluate(case)
        for strategy in tdl.cuts(description, WAYS):
            partial_max = any(isinstance(p, Partial) and p.reducer != "sum" for p in strategy.results)
            if strategy.has_halo or partial_max or any(isinstance(p, Partial) for p in strategy.operands):
                continue
            if any(isinstance(p, Partial) for p in strategy.results) and case.call.result_dtypes[0] == "bfloat16":
                continue
            for got, want in zip(sharded(case.call, strategy, case.operands, devices), whole, strict=True):
                np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=1e-2, atol=1e-4)
            ran += 1
    assert ran


def tdl_evaluate(case: Any) -> Any:
    from shardplan.tdl.localize import evaluate

    return evaluate(case.call, case.operands)


def test_dropout_s_bits_do_not_change(devices: Any) -> None:
    key = jax.random.key(7)
    call = tdl.Call("random_bits", ((),), ((6, 4),), {"bit_width": 32, "shape": (6, 4)}, ("key<fry>",), ("uint32",))
    description = tdl.describe(call)
    assert description is not None
    for strategy in tdl.cuts(description, WAYS):
        (got,) = sharded(call, strategy, (key,), devices)
        assert jnp.array_equal(got, jax.random.bits(key, (6, 4)))


def test_the_halves_of_a_call_are_smaller_calls() -> None:
    case = CASES["dot_general"](Drawn(3))
    description = tdl.describe(case.call)
    assert description is not None
    for strategy in tdl.cuts(description, WAYS):
        local = localize(case.call, strategy).call
        assert local.operands == tdl.shrink(case.call, strategy).operands
        assert sum(map(np.prod, local.operands)) < sum(map(np.prod, case.call.operands))


def test_a_clipped_scatter_of_part_of_a_dim_keeps_its_place() -> None:
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(0, 1), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 2)
    )
    mode = jax.lax.GatherScatterMode.CLIP
    x, at, u = np.zeros((2, 2, 3), np.float32), np.array([1, 1], np.int32), np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    made = traced("scatter", lambda x, at, u: jax.lax.scatter(x, at, u, numbers, mode=mode), x, at, u)
    assert verify(made.call, made.operands).faults == ()
