"""The descriptions, one file for each family of primitives. Importing this package registers them all."""

from shardplan.tdl.rules import (
    attention,
    contraction,
    cudnn_attention,
    elementwise,
    indexing,
    linalg,
    movement,
    placement,
    random,
    reduction,
    sorting,
)

__all__ = [
    "attention",
    "contraction",
    "cudnn_attention",
    "elementwise",
    "indexing",
    "linalg",
    "movement",
    "placement",
    "random",
    "reduction",
    "sorting",
]
