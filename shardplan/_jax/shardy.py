"""What XLA's partitioner infers for the values of a lowered program: Shardy's propagation, which needs no devices."""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax

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
    """JAX has moved what `inferred` needs, or refuses the program."""


@contextlib.contextmanager
def on_no_device() -> Iterator[None]:
    """While this lasts, JAX lowers programs without a look at the machine's devices, which it would initialise.

    It asks for a default device even where the mesh is abstract, and gets one of a client that no other code knows. Where JAX
    has moved what makes the client, its own devices are initialised.
    """
    with contextlib.nullcontext() if (device := _device()) is None else jax.default_device(device):
        yield


@cache
def _device() -> Any:
    """A CPU device outside of JAX's backends; None where JAX has moved what makes it."""
    try:
        make = importlib.import_module("jax._src.lib").xla_client.make_cpu_client
    except (ImportError, AttributeError):
        return None
    return make().local_devices()[0]


def inferred(lowered: Any, names: Sequence[str], sizes: Sequence[int]) -> list[InferredOp]:
    """The shardings of all values of a ``jax.jit(...).lower(...)`` over the mesh of these axes, as XLA would infer them.

    The program goes through XLA's own form and back, since the propagation resolves conflicts by the ops that it meets: a
    broadcast of HLO is one op, and `jax.numpy.square` a product.

    Raises:
        UnknownShardyError: if JAX has moved its MLIR passes, or they refuse the program.
    """
    mlir = _Mlir.found()
    try:
        with mlir.context(), mlir.ir.Location.unknown():
            module = mlir.ir.Module.parse(mlir.convert(lowered.compiler_ir("hlo")))
            _with_shardings(mlir.ir, mlir.sdy, module, names, sizes)
            _inline(mlir.ir, module)
            mlir.manager("symbol-dce,canonicalize").run(module.operation)
            _open_loops(mlir.ir, mlir.sdy, module)
            mlir.manager(_PASSES).run(module.operation)
            return list(_results(mlir.ir, module))
    except mlir.ir.MLIRError as error:
        raise UnknownShardyError(_first_line(error)) from error


@dataclass(frozen=True, slots=True)
class _Mlir:
    """What `inferred` takes from JAX: MLIR's Python modules, and functions that read HLO and make a context.

    A name that JAX has moved is missed here, so an error of this module's own is not taken for one of JAX's.
    """

    ir: Any
    sdy: Any
    passes: Any
    convert: Callable[[Any], Any]
    context: Callable[[], Any]

    @classmethod
    def found(cls) -> _Mlir:
        """From the installed JAX.

        Raises:
            UnknownShardyError: if it has moved a name that is needed.
        """
        try:
            ir, passes, sdy = (importlib.import_module(f"jaxlib.mlir.{name}") for name in ("ir", "passmanager", "dialects.sdy"))
            convert = importlib.import_module("jax._src.lib")._jax.mlir.xla_computation_to_mlir_module
            context = importlib.import_module("jax._src.interpreters.mlir").make_ir_context
            _ = [getattr(ir, name) for name in _OF_MLIR], passes.PassManager.parse, sdy.ShardingConstraintOp
        except (ImportError, AttributeError) as error:
            raise UnknownShardyError(_first_line(error)) from error
        return cls(ir, sdy, passes, convert, context)

    def manager(self, passes: str) -> Any:
        """A manager of passes over a module.

        Raises:
            UnknownShardyError: if one of the passes does not exist.
        """
        try:
            return self.passes.PassManager.parse(f"builtin.module({passes})")
        except ValueError as error:
            raise UnknownShardyError(_first_line(error)) from error


_OF_MLIR = (
    "ArrayAttr", "Attribute", "DictAttr", "FlatSymbolRefAttr", "InsertionPoint", "Location", "MLIRError", "Module", "Operation",
    "RankedTensorType", "StringAttr", "WalkResult",
)  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
        if op.name == "stablehlo.custom_call":
            one = _ONE.fullmatch(_sharding(ir, op.attributes) or "")
            match ir.StringAttr(op.attributes["call_target_name"]).value:
                case "Sharding" if one is not None:
                    _replace(op, _constrained(ir, sdy, op, op.operands[0], one[1]))
                case "xla.sdy.FuncResultSharding" if one is not None:
                    _give_back(ir, op, ir.Attribute.parse(f"#sdy.sharding{one[1]}"))
                    _replace(op, op.operands[0])
                case _:
                    pass


def _inline(ir: Any, module: Any) -> None:
    """Puts the bodies of called functions in place of the calls, as XLA does; MLIR's own pass knows no ops of StableHLO."""
    functions = {str(f.attributes["sym_name"]): f for f in module.body.operations if f.operation.name == "func.func"}

    def inline(block: Any) -> None:
        for op in list(block.operations):
            for region in op.operation.regions:
                for inner in region.blocks:
                    inline(inner)
            if op.operation.name == "func.call":
                callee = functions[f'"{ir.FlatSymbolRefAttr(op.attributes["callee"]).value}"'].regions[0].blocks[0]
                inline(callee)
                _spell_out(ir, op, callee)

    inline(functions['"main"'].regions[0].blocks[0])


def _spell_out(ir: Any, call: Any, callee: Any) -> None:
    """Puts copies of a function's ops in place of one call of it."""
    *body, end = list(callee.operations)
    known = dict(zip(callee.arguments, call.operands, strict=True))
    for op in body:
        with ir.InsertionPoint(call):
            copy = op.operation.clone()
        for inner in (copy.operation, *(i for region in copy.operation.regions for b in region.blocks for i in _inside(b))):
            for n, value in enumerate(inner.operands):
                if value in known:
                    inner.operands[n] = known[value]
        known.update(zip(op.operation.results, copy.operation.results, strict=True))
    for result, value in zip(call.operation.results, end.operation.operands, strict=True):
        result.replace_all_uses_with(known.get(value, value))
    call.operation.erase()


def _constrained(ir: Any, sdy: Any, before: Any, value: Any, sharding: str) -> Any:
    """The value under a sharding constraint, which stands before an op."""
    with ir.InsertionPoint(before):
        constraint = sdy.ShardingConstraintOp(value, ir.Attribute.parse(f"#sdy.sharding{sharding}"), loc=before.location)
    return constraint.operation.results[0]


def _replace(op: Any, value: Any) -> None:
    op.results[0].replace_all_uses_with(value)
    op.erase()


def _give_back(ir: Any, op: Any, sharding: Any) -> None:
    """Gives the function whose result an op is that result's sharding."""
    for use in op.results[0].uses:
        if use.owner.name == "func.return":
            function = use.owner.parent
            kept = [ir.DictAttr.get({}) for _ in use.owner.operands]
            if "res_attrs" in function.attributes:
                kept = [ir.DictAttr(own) for own in ir.ArrayAttr(function.attributes["res_attrs"])]
            kept[use.operand_number] = ir.DictAttr.get({"sdy.sharding": sharding})
            function.attributes["res_attrs"] = ir.ArrayAttr.get(kept)


def _open_loops(ir: Any, sdy: Any, module: Any) -> None:
    """Lets loops read from outside what they hand on unchanged, arguments of the step under an open constraint, as XLA does: what
    a loop infers for its own reading does not bind the argument.
    """
    main = next(
        f for f in module.body.operations if f.operation.name == "func.func" and str(f.attributes["sym_name"]) == '"main"'
    )
    arguments = main.regions[0].blocks[0].arguments
    for loop in [op for op in _ops(ir, module) if op.name == "stablehlo.while"]:
        _hand_in(loop)
        opened: dict[int, Any] = {}
        for op in [op for region in loop.regions for block in region.blocks for op in _inside(block)]:
            for n, value in enumerate(op.operands):
                at = next((i for i, argument in enumerate(arguments) if value == argument), None)
                if at is not None:
                    if at not in opened:
                        rank = len(ir.RankedTensorType(value.type).shape)
                        opened[at] = _constrained(ir, sdy, loop, value, f"<@mesh, [{', '.join(['{?}'] * rank)}]>")
                    op.operands[n] = opened[at]


def _hand_in(loop: Any) -> None:
    """Replaces what a loop hands on unchanged by its value outside."""
    blocks = [region.blocks[0] for region in loop.regions]
    back = list(blocks[1].operations)[-1].operation.operands
    for i, start in enumerate(list(loop.operands)):
        if back[i] == blocks[1].arguments[i]:
            for block in blocks:
                block.arguments[i].replace_all_uses_with(start)
            loop.results[i].replace_all_uses_with(start)


def _inside(block: Any) -> Iterator[Any]:
    """The ops of a block and of the regions in it."""
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from _inside(inner)


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
        key = next((key for key in ("sdy.sharding", "sharding") if key in op.attributes), "")  # a constraint has the second
        text = str(op.attributes[key]) if key else ""
        own = [_axes(m[1]) for m in _SHARDING.finditer(text)] or [((),) * len(shape) for shape in shapes]
        if len(own) == len(shapes):
            yield InferredOp(str(op.location), tuple(zip(shapes, own, strict=True)))


_SHARDING = re.compile(r"<@mesh, \[([^\]]*)\]")
_DIM = re.compile(r"\{([^}]*)\}")


def _axes(dims: str) -> Axes | None:
    """``{"node", ?}, {}`` -> (("node",), ()); None for parts of axes, which are written ``"node":(1)2``."""
    return None if ":(" in dims else tuple(tuple(re.findall(r'"([^"]+)"', dim)) for dim in _DIM.findall(dims))
