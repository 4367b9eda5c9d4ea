"""Which call of a library each op of a step belongs to, where the library runs calls one by one (PyTorch without compilation)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable

from shardplan.graph.nodes import Node

LIBRARIES = ("flax/nnx/nn/", "flax/linen/", "jax/_src/nn/")
"""Files of functions that PyTorch has kernels of its own for: norms, softmax, activations, products with their bias."""
OPTIMIZERS = ("optax/", "flax/nnx/training/optimizer")
ATTENTION = "(Attention.__call__)"
"""Scale, mask and softmax of the scores are one call: Megatron's fused softmax. (FlashAttention is one op.)"""
_PASS = re.compile(r"transpose|jvp|[()]")
"""In a name stack: the marks of the passes."""


def call_of(node: Node) -> Hashable:
    """The line of the model that makes an op, and the library function that it calls there; the optimizer is one call.

    An op of the backward pass belongs to the call of which it is the gradient: what a call needs there it computes again from its
    operands, as PyTorch's own gradients do.
    """
    found = node.op.handle.source_info.traceback
    frames = [(frame.file_name.rsplit("site-packages/", 1)[-1], frame.function_name) for frame in found.frames] if found else []
    if any(file.startswith(OPTIMIZERS) for file, _ in frames):
        return "optimizer"
    scope, line = _PASS.sub("", node.op.scope), str(node.op.source)
    inner = itertools.takewhile(lambda frame: "/models/" not in frame[0], frames)
    called = [name for file, name in inner if file.startswith(LIBRARIES)]
    if line.endswith(ATTENTION) and not any(name.startswith("Linear") for name in called):
        return node.where, scope.split("/attention")[0], ATTENTION
    return node.where, scope, line, called[-1] if called else ""
