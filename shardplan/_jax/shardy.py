"""What XLA's partitioner infers for the values of a lowered program: Shardy's propagation, which needs no devices."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Axes = tuple[tuple[str, ...], ...]
"""For each dim the mesh axes that split it, major first."""


@dataclass(frozen=True, slots=True)
class InferredOp:
    """An op of the module that XLA partitions: the text of its location, and for each result its shape and axes.

    The axes are None where the propagation splits a dim over a part of an axis, which no PartitionSpec says.
    """

    location: str
    results: tuple[tuple[tuple[int, ...], Axes | None], ...]


class UnknownShardyError(Exception):
    """JAX has moved what `inferred` needs."""


def inferred(lowered: Any, names: Sequence[str], sizes: Sequence[int]) -> list[InferredOp]:
    """The shardings of all values of a ``jax.jit(...).lower(...)`` over the mesh of these axes, as XLA would infer them.

    The program goes through XLA's own form and back, since the propagation resolves conflicts by the ops that it meets: a
    broadcast of HLO is one op, and `jax.numpy.square` a product.

    Raises:
        UnknownShardyError: if JAX has moved its MLIR passes.
    """
    try:
        convert = importlib.import_module("jax._src.lib")._jax.mlir.xla_computation_to_mlir_module
        mlir = importlib.import_module("jax._src.interpreters.mlir")
        ir, passes = (importlib.import_module(f"jaxlib.mlir.{name}") for name in ("ir", "passmanager"))
        sdy = importlib.import_module("jaxlib.mlir.dialects.sdy")
        text = convert(lowered.compiler_ir("hlo"))
        with mlir.make_ir_context(), ir.Location.unknown():
            module = ir.Module.parse(text)
            _with_shardings(ir, sdy, module, names, sizes)
            passes.PassManager.parse(f"builtin.module({_PASSES})").run(module.operation)
            return list(_results(ir, module))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise UnknownShardyError(str(error).partition("\n")[0]) from error


_PASSES = "sdy-import-pipeline,sdy-user-priority-propagate"
_KEPT = "mhlo.frontend_attributes"
"""Where a module that went through HLO keeps the shardings of arguments, results and constraints, as text."""


def _with_shardings(ir: Any, sdy: Any, module: Any, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Gives a module that came from HLO its mesh, the shardings of its arguments and results, and its constraints again."""
    axes = ", ".join(f'"{name}"={size}' for name, size in zip(names, sizes, strict=True))
    mesh = {"sym_name": ir.StringAttr.get("mesh"), "mesh": ir.Attribute.parse(f"#sdy.mesh<[{axes}]>")}
    with ir.InsertionPoint.at_block_begin(module.body):
        ir.Operation.create("sdy.mesh", attributes=mesh)
    for function in module.body.operations:
        for key in ("arg_attrs", "res_attrs"):
            if key in function.attributes:
                kept = [_sharding(ir, ir.DictAttr(own)) for own in ir.ArrayAttr(function.attributes[key])]
                found = [ir.DictAttr.get({"sdy.sharding": ir.Attribute.parse(s)} if s else {}) for s in kept]
                function.attributes[key] = ir.ArrayAttr.get(found)
    for op in list(_ops(ir, module)):
        if op.name == "stablehlo.custom_call" and ir.StringAttr(op.attributes["call_target_name"]).value == "Sharding":
            one = _ONE.fullmatch(_sharding(ir, op.attributes) or "")
            if one is not None:
                with ir.InsertionPoint(op):
                    constraint = sdy.ShardingConstraintOp(
                        op.operands[0], ir.Attribute.parse(f"#sdy.sharding{one[1]}"), loc=op.location
                    )
                op.results[0].replace_all_uses_with(constraint.operation.results[0])
                op.erase()


_ONE = re.compile(r"#sdy\.sharding_per_value<\[(<.*>)\]>")


def _sharding(ir: Any, attributes: Any) -> str | None:
    """The text of the sharding that HLO's frontend attributes keep."""
    kept = ir.DictAttr(attributes[_KEPT]) if _KEPT in attributes else {}
    return ir.StringAttr(kept["xla.sdy.sharding"]).value if "xla.sdy.sharding" in kept else None


def _ops(ir: Any, module: Any) -> Iterator[Any]:
    """All ops of a module and of its regions, in the order of the program."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return iter(found)


def _results(ir: Any, module: Any) -> Iterator[InferredOp]:
    for op in _ops(ir, module):
        if not len(op.results) or not all(isinstance(r.type, ir.RankedTensorType) for r in op.results):
            continue
        shapes = [tuple(ir.RankedTensorType(r.type).shape) for r in op.results]
        text = str(op.attributes["sdy.sharding"]) if "sdy.sharding" in op.attributes else ""
        own = [_axes(m[1]) for m in _SHARDING.finditer(text)] or [((),) * len(shape) for shape in shapes]
        if len(own) == len(shapes):
            yield InferredOp(str(op.location), tuple(zip(shapes, own, strict=True)))


_SHARDING = re.compile(r"<@mesh, \[([^\]]*)\]")
_DIM = re.compile(r"\{([^}]*)\}")


def _axes(dims: str) -> Axes | None:
    """``{"node", ?}, {}`` -> (("node",), ()); None for parts of axes, which are written ``"node":(1)2``."""
    return None if ":(" in dims else tuple(tuple(re.findall(r'"([^"]+)"', dim)) for dim in _DIM.findall(dims))
