"""Prices of ops: the cost of the cheapest strategy for every choice of layouts of an op's variables."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardplan.collectives.reshard import Resharder
from shardplan.collectives.single_moves import SingleMoves, Singles
from shardplan.collectives.step import Step
from shardplan.cost import TIME, Objective, compute
from shardplan.cost.overlap import NO_WINDOW, Window
from shardplan.graph.nodes import Signature
from shardplan.ir import Collective, Layout, Split
from shardplan.mesh import Device
from shardplan.search.problem.composite_strategies import (
    Cuts,
    Groups,
    Late,
    Memo,
    Options,
    halo_bytes,
    limited,
    options,
    pair_bytes,
    treated_alike,
)
from shardplan.search.problem.compute_prices import nbytes
from shardplan.search.problem.cost_tables import BIG, Costs, picoseconds
from shardplan.search.problem.windows import WHOLE, Read
from shardplan.tdl import Call, Strategy

Domain = tuple[int, ...]
"""The states that a variable may take, as numbers in its `LayoutSpace`."""

_CHUNK = 100_000
"""The number of entries added up at once: they stay in the cache."""


_MANY = 1_000_000
"""If an op's table takes more sums than this, strategies that are never the cheapest are left out first, state by state."""

_GOOD = 4
"""The number of reference strategies that all others are compared with for that: those with the smallest worst costs."""

_NEVER = BIG << 8
"""More than an infeasible strategy costs in all tables of its op together."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The strategies that an op may take: those that best obey ``cuts`` and treat the factors of each group alike."""

    cuts: Cuts | None = None
    groups: Groups = ()


@dataclass(frozen=True, slots=True)
class Limits:
    """The strategies that may be taken: by node, the loops that each factor may cut; the factors that all nodes treat alike."""

    cuts: Mapping[int, Cuts] = field(default_factory=dict[int, Cuts])
    groups: Groups = ()

    def of(self, node: int) -> Allowed | None:
        """The strategies that one node may take (None: all)."""
        cuts = self.cuts.get(node)
        return Allowed(cuts, self.groups) if cuts is not None or self.groups else None


@dataclass(frozen=True, slots=True)
class Slot:
    """The ``index``-th operand or result of an op; ``variable`` is a position among the op's variables, -1 if it has none.

    ``window`` is the compute that moving it can hide behind; ``read`` says how it is read after that.
    """

    variable: int
    index: int
    result: bool
    window: Window = NO_WINDOW
    read: Read = WHOLE

    def tensor(self, call: Call) -> tuple[tuple[int, ...], int]:
        """(shape, bytes) of the whole operand or result."""
        shapes, dtypes = (call.results, call.result_dtypes) if self.result else (call.operands, call.dtypes)
        return shapes[self.index], nbytes(shapes[self.index], dtypes[self.index])


class Pricer:
    """Prices of resharding and of ops on one network, memoised. Without a device, compute costs nothing."""

    def __init__(self, resharder: Resharder, device: Device | None, objective: Objective = TIME) -> None:
        self.resharder, self.device = resharder, device
        self.weights, self.overlaps = objective.weights, objective.overlaps
        self._combined: Memo = {}
        self._options: dict[tuple[int, Allowed | None, Late | None], Options] = {}
        self._halos: dict[tuple[int, tuple[int, ...]], tuple[Step, ...]] = {}
        self._prices: dict[tuple[tuple[int, ...], int, Domain, bool], NDArray[np.float64]] = {}
        self._costs: dict[tuple[tuple[int, ...], int, Window, Read, bool], dict[int, NDArray[np.float64]]] = {}
        self._cost_bytes = 0
        self._singles = SingleMoves(resharder)
        self._issued: dict[tuple[tuple[int, ...], int, Step, Window, Read], tuple[float, float]] = {}

    def at(self, objective: Objective) -> Pricer:
        """The prices at other weights. Results that do not depend on weights are shared."""
        result = copy.copy(self)
        result.weights, result.overlaps = objective.weights, objective.overlaps
        result._costs, result._cost_bytes, result._issued = {}, 0, {}
        return result

    def options(self, signature: Signature, allowed: Allowed | None = None, *, late: Late | None = None) -> Options:
        """The composite strategies of a signature, or only those ``allowed``. With ``late``, some pass partial sums on."""
        found = self._options.get((signature.id, allowed, late))
        if found is None:
            if allowed is None:
                found = options(signature, self.resharder, self.device, late=late, memo=self._combined)
            elif allowed.cuts is not None:
                # groups first: the strategies that best obey the cuts may treat no group alike
                alike = Allowed(groups=allowed.groups) if allowed.groups else None
                found = limited(self.options(signature, alike, late=late), allowed.cuts)
            else:
                found = treated_alike(self.options(signature, late=late), allowed.groups)
            self._options[signature.id, allowed, late] = found
        return found

    def prices(self, shape: tuple[int, ...], size: int, states: Domain, *, into: bool = False) -> NDArray[np.float64]:
        """[len(states), S]: `Resharder.prices` of a tensor of ``size`` bytes."""
        key = (shape, size, states, into)
        found = self._prices.get(key)
        if found is None:
            found = self._prices[key] = self.resharder.prices(shape, size, states, into=into)
        return found

    def costs(
        self, shape: tuple[int, ...], size: int, states: Domain, window: Window, read: Read, *, into: bool = False
    ) -> NDArray[np.float64]:
        """[len(states), S]: the weighted seconds of moves, as `prices` are, that can hide behind a window.

        One collective that is the whole move has the copies beside it that a schedule makes, or it travels in a bundle.
        """
        if self.device is None or not self.overlaps:
            return self.prices(shape, size, states, into=into)
        rows = self._costs.setdefault((shape, size, window, read, into), {})
        missing = tuple(s for s in dict.fromkeys(states) if s not in rows)
        if missing:
            found = np.array(self.weights.of(self.resharder.prices(shape, size, missing, into=into), window.seconds))
            own = self._singles.between(shape, size, window.company, missing, into=into)
            at, (alone_s, bundled_s) = (own.rows, own.columns), self.copies_s(own, read)
            found[at] = np.minimum(found[at] + alone_s, self.weights.of(own.bundled_s, window.seconds) + bundled_s)
            found.setflags(write=False)
            rows.update(zip(missing, found, strict=True))
            self._cost_bytes += found.nbytes
            if missing == states:
                return found
        return np.stack([rows[s] for s in states])

    def tidy(self, most_bytes: int) -> None:
        """Frees the prices of moves if they take more than this: they are computed again where they are asked for."""
        if self._cost_bytes > most_bytes:
            self._costs, self._cost_bytes = {}, 0

    def copies_s(self, own: Singles, read: Read) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The seconds of the copies beside moves that travel alone, and of those into a bundle's buffer and out of it."""
        device = self.device
        assert device is not None
        kernels, copied = own.kernels, own.copied
        if read.image:
            kernels, copied = kernels + (own.image > 0), copied + own.image
        packed = own.before + (0.0 if read.sliced else own.after)
        alone_s = kernels * device.launch_s + compute.moving_s(device, 2.0 * copied)
        return alone_s, compute.moving_s(device, 2.0 * packed) + (0.0 if read.sliced else device.launch_s)

    def issued(self, shape: tuple[int, ...], size: int, step: Step, window: Window, read: Read) -> tuple[float, float]:
        """(seconds, the part that can hide) of the one collective that moves a tensor of ``size`` bytes, as `costs` prices it."""
        if self.device is None or not self.overlaps:
            return step.seconds, min(step.seconds, window.seconds)
        key = (shape, size, step, window, read)
        if key not in self._issued:
            before, after = (self.resharder.state(shape, layout) for layout in (step.before, step.after))
            own = self._singles.between(shape, size, window.company, (before,))
            at, (alone_s, bundled_s) = own.columns == after, self.copies_s(own, read)
            rows = [(step.seconds, 0.0)]
            if at.any():
                rows = [(step.seconds, float(alone_s[at][0])), (float(own.bundled_s[at][0]), float(bundled_s[at][0]))]
            seconds, copied_s = min(rows, key=lambda row: float(self.weights.of(np.array(row[0]), window.seconds)) + row[1])
            self._issued[key] = seconds + copied_s, min(seconds, window.seconds)
        return self._issued[key]

    def strategy_costs(
        self,
        signature: Signature,
        slots: tuple[Slot, ...],
        free: tuple[Slot, ...],
        domains: tuple[Domain, ...],
        allowed: Allowed | None = None,
        *,
        late: Late | None = None,
    ) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
        """(compute and halo seconds of each strategy, for each variable the resharding seconds [strategies, domain]), weighted.

        ``free`` are the results without a variable, such as scalars. They too are reduced where they are partial.
        """
        rows = self.options(signature, allowed, late=late)
        call = signature.call
        base = self.weights.compute * rows.compute_s + rows.halo_s
        columns: list[NDArray[np.float64] | None] = [None] * len(domains)
        for slot in slots:
            shape, size = slot.tensor(call)
            prices = self.costs(shape, size, domains[slot.variable], slot.window, slot.read, into=slot.result)
            states = (rows.gives if slot.result else rows.needs)[:, slot.index]
            costs = prices[:, states].T
            if late is not None and slot.result and not rows.terms.all():
                # terms that cannot stay apart are added up at once: the result is not stored partial
                partial = self.resharder.space(shape).partial[list(domains[slot.variable])]
                costs = np.where(~rows.terms[:, None] & partial, np.inf, costs)
            before = columns[slot.variable]
            columns[slot.variable] = costs if before is None else before + costs
        for slot in free:
            (shape, size), given = slot.tensor(call), rows.gives[:, slot.index]
            if self.resharder.space(shape).partial[given].any():
                whole = self.resharder.state(shape, Layout.whole(len(shape)))
                base = base + self.costs(shape, size, (whole,), slot.window, slot.read, into=True)[0][given]
        return base, [c for c in columns if c is not None]

    def strategy_tables(
        self,
        signature: Signature,
        slots: tuple[Slot, ...],
        free: tuple[Slot, ...],
        domains: tuple[Domain, ...],
        weight: float,
        allowed: Allowed | None = None,
        *,
        late: Late | None = None,
    ) -> list[Costs]:
        """`strategy_costs` times ``weight``, in picoseconds: for each variable [strategies, domain].

        The first includes compute and halos.
        """
        base, columns = self.strategy_costs(signature, slots, free, domains, allowed, late=late)
        costs = picoseconds(np.concatenate([base[:, None], *columns], axis=1) * weight)
        ends = list(itertools.accumulate(map(len, domains), initial=1))
        first, *others = (costs[:, a:b] for a, b in itertools.pairwise(ends))
        return [np.minimum(first + costs[:, :1], BIG), *others]

    def halo_steps(self, signature: Signature, loops: Sequence[int]) -> tuple[Step, ...]:
        """The exchanges inside an op under a composite strategy: halos, and the extremes of pair reductions (argmax, argmin)."""
        key = (signature.id, tuple(loops))
        if key not in self._halos:
            self._halos[key] = self._halo_steps(signature, loops)
        return self._halos[key]

    def _halo_steps(self, signature: Signature, loops: Sequence[int]) -> tuple[Step, ...]:
        steps: list[Step] = []
        if signature.description is None:
            return ()
        loop_cuts: list[tuple[tuple[int, ...], Strategy]] = []
        for v in sorted({v for v in loops if v >= 0}):
            over = tuple(f for f, at in enumerate(loops) if at == v)
            found = signature.cut(v, math.prod(self.resharder.sizes[f] for f in over))
            assert found is not None
            loop_cuts.append((over, found))
            for i, place in enumerate(found.operands):
                if isinstance(place, Split) and place.halo != (0, 0):
                    empty = Layout.whole(len(signature.call.operands[i]))
                    for side in halo_bytes(signature.call, i, place):
                        steps.append(
                            Step(Collective.SHIFT, over, side, empty, empty, self.resharder.seconds(Collective.SHIFT, over, side))
                        )
        for over, extra in pair_bytes(signature.call, loop_cuts):
            empty = Layout.whole(len(signature.call.results[0]))
            steps.append(
                Step(Collective.ALL_REDUCE, over, extra, empty, empty, self.resharder.seconds(Collective.ALL_REDUCE, over, extra))
            )
        return tuple(steps)


def table_of(columns: Sequence[Costs], known: Sequence[Costs] = ()) -> Costs:
    """[*domain sizes]: the cost of the cheapest strategy for every choice of layouts, from `Pricer.strategy_tables`.

    ``known`` are columns with one state, which get no axis.
    """
    sizes = [c.shape[1] for c in columns]
    if known:
        fixed = sum((c[:, 0] for c in known), np.zeros(len(known[0]), np.int64))
        if not columns:
            return np.minimum(fixed.min(), BIG)
        columns = [np.minimum(columns[0] + fixed[:, None], BIG), *columns[1:]]
    if len(columns) == 1 or len(columns[0]) * math.prod(sizes) <= _MANY:
        return _cheapest(columns)
    axis, kept = useful(columns)
    own, (second, *others) = columns[axis], [c for i, c in enumerate(columns) if i != axis]
    rows = [np.flatnonzero(row) for row in kept.T]
    found = [_cheapest([second[k] + own[k, i, None], *[c[k] for c in others]]) for i, k in enumerate(rows)]
    return np.moveaxis(np.stack(found), 0, axis)


def _cheapest(columns: Sequence[Costs]) -> Costs:
    """[*domain sizes]: the minimum over strategies of the sum of their columns, at most `BIG`."""
    sizes = [c.shape[1] for c in columns]
    entries = math.prod(sizes)
    step = max(1, _CHUNK // entries)
    total: Costs | None = None
    for start in range(0, len(columns[0]), step):
        first, *others = [c[start : start + step] for c in columns]
        tail = others.pop() if others else np.zeros((len(first), 1), np.int64)
        for c in reversed(others):  # the last ones first, so that the rows are long
            tail = (c[:, :, None] + tail[:, None, :]).reshape(len(c), -1)
        least = (first[:, :, None] + tail[:, None, :]).min(axis=0)
        total = least if total is None else np.minimum(total, least, out=total)
    assert total is not None, "there is always a strategy: the op run whole"
    return np.minimum(total, BIG, out=total).reshape(sizes)


def useful(columns: Sequence[Costs]) -> tuple[int, NDArray[np.bool_]]:
    """(the index of a column, [strategies, its domain]: which strategies are needed in each state of its variable).

    A strategy that is left out is infeasible there, or costs no less than a reference strategy in any states of the other
    variables. The column is the one that leaves the fewest sums.
    """
    references = np.argsort(sum(c.max(axis=1) for c in columns), kind="stable")[:_GOOD]
    entries = math.prod(c.shape[1] for c in columns)
    excess: list[NDArray[np.int64]] = []  # extra cost of each reference in each state: [references, strategies, domain]
    for c in columns:
        excess.append(c[references][:, None] - c)
        excess[-1][:, c >= BIG] = -_NEVER  # nothing costs more than an infeasible strategy
    most = [m.max(axis=2) for m in excess]
    found: list[tuple[int, int, NDArray[np.bool_]]] = []
    for axis, (c, own) in enumerate(zip(columns, excess, strict=True)):
        beaten = own <= (most[axis] - sum(most))[:, :, None]
        for place, g in enumerate(references.tolist()):
            beaten[place:, g] = False  # a reference is only left out for an earlier one
        kept = ~beaten.any(axis=0)
        found.append((np.count_nonzero(kept) * (entries // c.shape[1]), axis, kept))
    _, axis, kept = min(found, key=lambda f: f[:2])
    return axis, kept
