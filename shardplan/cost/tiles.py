"""Tile quantisation: how far a matrix product falls behind the rate of large products.

A library cuts the result of a product into tiles and gives each compute unit one tile at a time, so a product takes whole waves
of whole tiles. Few or partly empty tiles leave units idle (NVIDIA, "Matrix Multiplication Background User's Guide", on tile and
wave quantization). Where there are too few tiles, the sum over the depth is split too (CUTLASS, "Efficient GEMM", on split-K).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardplan.constants import CONSTANTS


class Extents(NamedTuple):
    """The extents of a product: ``batch`` products of [rows, depth] by [depth, columns]."""

    batch: int
    rows: int
    columns: int
    depth: int


@dataclass(frozen=True, slots=True)
class ProductLoops:
    """The loops of a description by their role in its product."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]

    def tile_factor(self, units: int, extents: Mapping[int, NDArray[np.float64]]) -> NDArray[np.float64]:
        """[cases]: `tile_factor` of a product whose loops have these extents [cases].

        Most cuts of a product leave the same extents as others: each is worked out once.
        """
        sides = [
            math.prod([extents[v] for v in side], start=np.ones(1)) for side in (self.batch, self.rows, self.columns, self.depth)
        ]
        cases = np.stack(np.broadcast_arrays(*sides))
        codes = np.zeros(cases.shape[1], np.int64)
        for side in cases:
            values, at = np.unique(side, return_inverse=True)
            codes = codes * len(values) + at
        _, first, at = np.unique(codes, return_index=True, return_inverse=True)
        return tile_factor(units, *cases[:, first])[at]


def tile_factor(units: int, batch: ArrayLike, rows: ArrayLike, columns: ArrayLike, depth: ArrayLike) -> NDArray[np.float64]:
    """[cases]: the time of products on this many compute units over their ideal time, at least 1.

    Work falls into ``batch * ceil(rows / tile rows) * ceil(columns / tile columns) * split`` pieces of ``depth / split`` terms,
    and in a wave each unit takes a piece. The tile and the split are those of the least time. The ideal keeps all units busy at
    the rate of the largest tile. A product with a vector has no tiles: other kernels run it as fast as memory delivers, so its
    factor is 1.
    """
    sides = np.broadcast_arrays(*(np.atleast_1d(np.asarray(n, np.float64)) for n in (batch, rows, columns, depth)))
    batch_, rows_, columns_, depth_ = (np.maximum(n, 1.0) for n in sides)
    height, width, rate = (np.array(column)[:, None, None] for column in zip(*CONSTANTS.tiles, strict=True))
    split = np.array(CONSTANTS.depth_splits)[:, None]
    tiles = batch_ * np.ceil(rows_ / height) * np.ceil(columns_ / width)
    terms = np.where((split == 1) | (depth_ >= split * CONSTANTS.least_depth), depth_ / split, np.inf)
    spent = np.ceil(tiles * split / units) * (height * width) * terms / rate
    ideal = batch_ * rows_ * columns_ * depth_ / units
    return np.where(np.minimum(rows_, columns_) > 1, np.maximum(spent.min(axis=(0, 1)) / ideal, 1.0), 1.0)
