"""The kernels of a compiled program: how often each runs, the bytes that it reads and writes, and the flops of its products.

A kernel is an instruction that a device executes by itself: a fusion, a library call, a copy, a scatter. Its bytes are those of
its operands and results. Only the slices count of an operand that is sliced, and only the update of a buffer that is updated in
place. Collectives, and what only renames a buffer, are no kernels.
"""

# pyright: strict
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.cost import compute
from shardplan.cost.tiles import Extents, tile_factor
from shardplan.hlo.text import Computation, HloInstruction, Module, Shape, parse_module
from shardplan.mesh import Device

_FREE = frozenset(
    (
        "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "while",
        "conditional", "call", "opt-barrier", "async-start", "async-update", "async-done", "copy-done", "fusion-done",
        "add-dependency",
    )
)  # fmt: skip
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast|ragged-all-to-all)(-start|-done)?$"
)
_FUSIONS = ("fusion", "fusion-start")
"""A fusion, and one that runs beside others: its bytes are counted where it starts."""
_DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64", "": "float32", "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2", "s8": "int8", "u8": "uint8", "s32": "int32",
}  # fmt: skip
_SEEN_THROUGH = ("bitcast", "reshape", "copy", "transpose", "convert")


@dataclass(frozen=True, slots=True)
class Product:
    """A product: its flops (a multiply-add is two), the dtype of its operands, its extents (None: it is not priced by tiles)."""

    flops: float
    dtype: str
    extents: Extents | None

    def tile_factor(self, units: int | None) -> float:
        """The factor of `shardplan.cost.tiles` by which it misses the rate of large products."""
        return 1.0 if units is None or self.extents is None else float(tile_factor(units, *self.extents)[0])


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel and its matrix products."""

    name: str
    kind: str
    op_name: str
    times: int
    read_bytes: int
    written_bytes: int
    products: tuple[Product, ...]

    @property
    def flops(self) -> float:
        """Flops of its products."""
        return sum((product.flops for product in self.products), start=0.0)

    @property
    def dtype(self) -> str:
        """The dtype of its first product, empty where it has none."""
        return next((product.dtype for product in self.products if product.flops), "")

    @property
    def nbytes(self) -> int:
        """Bytes that one run moves."""
        return self.read_bytes + self.written_bytes

    def seconds(self, device: Device) -> float:
        """Seconds of one run and its launch, by the roofline of `shardplan.cost.compute`."""
        dtype = _DTYPES.get(self.dtype, self.dtype)
        flops = sum(product.flops * product.tile_factor(device.compute_units) for product in self.products)
        return compute.seconds(device, flops, self.nbytes, dtype, matrix=bool(flops), launches=1.0)


def kernels(hlo_text: str) -> tuple[Kernel, ...]:
    """The kernels of the text of a compiled program, in its order. Raises `HloError` on text that is not HLO."""
    return tuple(kernels_of(parse_module(hlo_text)).values())


def kernels_of(module: Module) -> dict[tuple[str, str], Kernel]:
    """The kernels of a module by the names of their computation and instruction, in its order."""
    inside = {
        name
        for computation in module.computations.values()
        for i in computation.instructions.values()
        for _, name in i.called
        if i.opcode not in ("while", "conditional", "call", "async-start")
    }
    result: dict[tuple[str, str], Kernel] = {}
    for computation in module.computations.values():
        times = module.runs[computation.name].times
        if computation.name in inside or not times:
            continue
        for i in computation.instructions.values():
            if i.opcode not in _FREE and not _COLLECTIVE.match(i.opcode):
                result[computation.name, i.name] = _kernel(module, computation, i, times)
    return result


def _kernel(module: Module, computation: Computation, i: HloInstruction, times: int) -> Kernel:
    fused = _fused(module, i)
    kind = i.attribute(r'"kind":"([^"]+)"') or i.attribute(r'custom_call_target="([^"]+)"') or i.attribute(r"kind=(\w+)")
    if fused is None:
        read, written = _alone(computation, i)
    else:
        read = sum(_read(fused, fused.parameters[n], module) for n in range(len(i.operands)) if n in fused.parameters)
        written = sum(_written(fused, root) for root in _roots(fused))
    products = tuple(_products(module, computation, i))
    return Kernel(i.name, kind or i.opcode, i.op_name, times, read, written, products)


def _fused(module: Module, i: HloInstruction) -> Computation | None:
    name = next((name for role, name in i.called if role == "calls"), None) if i.opcode in _FUSIONS else None
    return None if name is None else module.computations[name]


def _nbytes(shapes: tuple[Shape, ...]) -> int:
    return sum(s.nbytes for s in shapes)


def _alone(computation: Computation, i: HloInstruction) -> tuple[int, int]:
    """What an instruction outside of fusions reads and writes."""
    operands = [computation.instructions[name] for name in i.operands if name in computation.instructions]
    read, written = sum(_nbytes(o.leaves) for o in operands), _nbytes(i.leaves)
    match i.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return _nbytes(i.leaves), written
        case "dynamic-update-slice":
            return _nbytes(operands[1].leaves), _nbytes(operands[1].leaves)
        case "scatter":
            moved = read - _nbytes(operands[0].leaves)
            return 2 * moved, moved
        case "copy-start":
            return _nbytes(operands[0].leaves), _nbytes(operands[0].leaves)
        case "custom-call" if _is_product(_target(i)):
            return read, _nbytes(i.leaves[:1])  # what follows is workspace
        case _:
            return read, written


def _read(fused: Computation, value: HloInstruction, module: Module) -> int:
    """Bytes of a parameter that a fusion reads: all, or those of its slices."""
    whole, total = _nbytes(value.leaves), 0
    for user in fused.users.get(value.name, ()):
        if user.opcode in ("slice", "dynamic-slice", "gather") and user.operands[0] == value.name:
            total += _nbytes(user.leaves)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue
        elif user.opcode == "scatter" and user.operands[0] == value.name:
            total += _nbytes(fused.instructions[user.operands[2]].leaves)
        elif user.opcode in ("bitcast", "reshape"):
            total += _read(fused, user, module)
        else:
            return whole
    return min(whole, total)


def _roots(fused: Computation) -> Iterator[HloInstruction]:
    if fused.root.opcode == "tuple":
        yield from (fused.instructions[name] for name in fused.root.operands)
    else:
        yield fused.root


def _written(fused: Computation, root: HloInstruction) -> int:
    """Bytes that a fusion writes for one result: of one that is updated in place, those of the update."""
    at = root
    while at.opcode in _SEEN_THROUGH and len(at.operands) == 1 and at.operands[0] in fused.instructions:
        at = fused.instructions[at.operands[0]]
    if at.opcode == "dynamic-update-slice":
        return _nbytes(fused.instructions[list(at.operands)[1]].leaves)
    if at.opcode == "scatter":
        return _nbytes(fused.instructions[list(at.operands)[2]].leaves)
    return _nbytes(root.leaves)


def _products(module: Module, computation: Computation, i: HloInstruction) -> Iterator[Product]:
    """The products of a kernel."""
    target = _target(i) if i.opcode == "custom-call" else ""
    if i.opcode in _FUSIONS:
        fused = _fused(module, i)
        if fused is not None:
            for one in fused.instructions.values():
                yield from _products(module, fused, one)
    elif i.opcode == "dot" or "matmul" in target or "gemm" in target:
        yield _dot(computation, i)
    elif i.opcode == "convolution" or "conv" in target:
        yield _convolution(computation, i, target)


def _target(i: HloInstruction) -> str:
    """The library function that a custom call runs."""
    return i.attribute(r'custom_call_target="([^"]+)"') or ""


def _is_product(target: str) -> bool:
    return any(word in target for word in ("matmul", "gemm", "conv"))


def _dot(computation: Computation, i: HloInstruction) -> Product:
    left, out = computation.instructions[i.operands[0]].leaves[0], i.leaves[0]
    depth, batch = (math.prod(left.dims[int(d)] for d in re.findall(r"\d+", _dims(i, kind))) for kind in ("contracting", "batch"))
    rows = left.size // max(1, depth * batch)
    return Product(2.0 * out.size * depth, left.dtype, Extents(batch, rows, out.size // max(1, batch * rows), depth))


def _dims(i: HloInstruction, kind: str) -> str:
    """The text of the left operand's dims of a kind: from an instruction's attribute, or from a library call's configuration."""
    return i.attribute(rf"lhs_{kind}_dims=\{{([\d,]*)\}}") or i.attribute(rf'"lhs_{kind}_dimensions":\[([\d",]*)\]') or ""


def _convolution(computation: Computation, i: HloInstruction, target: str) -> Product:
    """By the kernel's elements that meet each output: the same product for a forward pass and both of its gradients.

    As an implicit product, the result has a row for each place and a column for each feature; where the result is a kernel, a row
    for each of its input features and places.
    """
    image, kernel = (computation.instructions[name].leaves[0] for name in i.operands[:2])
    out, dtype = i.leaves[0], image.dtype
    if "BackwardInput" in target:
        image, out = out, image
    elif "BackwardFilter" in target:
        kernel, out = out, kernel
    images, labels = (i.attribute(pattern) or "" for pattern in (r"dim_labels=(\w+?)_", r"dim_labels=\w+?_(\w+?)->"))
    features = kernel.dims[labels.index("o")] if "o" in labels else 1
    inputs = image.dims[images.index("f")] if "f" in images else 1
    meeting = kernel.size // max(1, features)
    if "BackwardInput" in target:
        extents = Extents(1, image.size // max(1, inputs), inputs, kernel.size // max(1, inputs))
    elif "BackwardFilter" in target:
        extents = Extents(1, meeting, features, out.size // max(1, features))
    else:
        extents = Extents(1, out.size // max(1, features), features, meeting)
    grouped = any(int(n) > 1 for n in re.findall(r"(?:feature|batch)_group_count=(\d+)", i.attributes))
    return Product(2.0 * out.size * kernel.size / max(1, features), dtype, None if grouped else extents)
