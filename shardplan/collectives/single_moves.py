"""Moves that one collective makes: what they cost in a bundle, and the copies beside them.

A schedule lets moves that take the same collective travel together (`shardplan.schedule.passes.bundles`), and copies blocks where
a collective wants them in another order (`shardplan.schedule.copies`). The search prices both for moves of one collective; for
longer programs, it prices the collectives alone. It ignores some differences that keep moves out of one bundle (dtypes, padded
blocks), so a bundle may hold less than the search assumes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.reshard import Resharder, split_dims
from shardplan.collectives.step import block_parts
from shardplan.ir import Collective

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Singles:
    """The moves that one collective makes [M], at ``rows`` and ``columns`` of `Resharder.prices`.

    ``bundled_s`` are the seconds as a part of a bundle (infinite for one that travels alone), ``before`` and ``after`` the bytes
    of a device's block before the collective and after it. Alone, ``kernels`` copy ``copied`` bytes into another order; where a
    convolution reads what is gathered, it is copied once more, ``image`` bytes.
    """

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    bundled_s: Floats
    before: Floats
    after: Floats
    kernels: Floats
    copied: Floats
    image: Floats


@dataclass(frozen=True, slots=True, eq=False)
class _Kinds:
    """The fields of `Singles` by kind of edge [K], for the whole tensor, and which collective an edge is."""

    bundled_s: Floats
    before: Floats
    after: Floats
    moved: Floats
    gathers: NDArray[np.bool_]
    scatters: NDArray[np.bool_]
    exchanges: NDArray[np.bool_]


class SingleMoves:
    """The single collectives between the layouts of tensors on one network."""

    def __init__(self, resharder: Resharder) -> None:
        self._resharder = resharder
        self._kinds: dict[tuple[int, float, float], _Kinds] = {}
        self._behind: dict[tuple[int, ...], NDArray[np.bool_]] = {}

    def between(
        self, shape: tuple[int, ...], nbytes: float, company: float, states: Sequence[int], *, into: bool = False
    ) -> Singles:
        """The moves of a tensor of ``nbytes`` bytes between ``states`` and all others, in the company of so many bytes."""
        rows, columns, at = self._resharder.direct(shape, nbytes, states, into=into)
        kinds, behind, splits = self._of(shape, nbytes, company), self._lies_behind(shape), self._resharder.space(shape).splits
        of = np.array(states, np.int64)[rows]
        first, last = (columns, of) if into else (of, columns)
        joined = behind[last, np.argmax(splits[first] > splits[last], axis=1)]
        split = behind[first, np.argmax(splits[first] < splits[last], axis=1)]
        gathered, scattered = kinds.gathers[at] & joined, kinds.scatters[at] & split
        exchanged = kinds.exchanges[at] * (joined.astype(int) + split)
        before, after, moved = kinds.before[at], kinds.after[at], kinds.moved[at]
        return Singles(
            rows,
            columns,
            kinds.bundled_s[at],
            before,
            after,
            np.asarray((gathered | scattered) + exchanged, np.float64),
            gathered * before + scattered * after + exchanged * moved,
            np.where(gathered, moved, 0.0),
        )

    def _of(self, shape: tuple[int, ...], nbytes: float, company: float) -> _Kinds:
        key = len(split_dims(shape)), nbytes, company
        if key not in self._kinds:
            resharder, known = self._resharder, self._resharder.edge_kinds(shape)
            ways = [math.prod(resharder.sizes[f] for f in over) for (_, over), _ in known]
            bundled = [
                resharder.bundled_s(name, over, part * nbytes, company / nbytes) if company > nbytes > 0 else math.inf
                for (name, over), part in known
            ]
            parts = np.array([block_parts(name, n) for ((name, _), _), n in zip(known, ways, strict=True)]).reshape(-1, 2)
            moved = nbytes * np.array([part for _, part in known], np.float64)
            self._kinds[key] = _Kinds(
                np.array(bundled, np.float64),
                moved * parts[:, 0],
                moved * parts[:, 1],
                moved,
                *(
                    np.array([n == kind for (n, _), _ in known], bool)
                    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL)
                ),
            )
        return self._kinds[key]

    def _lies_behind(self, shape: tuple[int, ...]) -> NDArray[np.bool_]:
        """[S, rank + 1]: whether a device's block has several elements in the dims before each dim; never for the buffer."""
        if shape not in self._behind:
            splits = self._resharder.space(shape).splits
            several = -(-np.array([shape[d] for d in split_dims(shape)], np.int64) // splits[:, :-1]) > 1
            result = self._behind[shape] = np.zeros(splits.shape, bool)
            result[:, 1:-1] = np.logical_or.accumulate(several, axis=1)[:, :-1]
        return self._behind[shape]
