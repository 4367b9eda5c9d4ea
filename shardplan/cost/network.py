"""Prices of collectives on the links that they use.

`Network` prices a collective over some factors. Each setting of the other factors gives one group of devices; all groups run at
once and share the links of their routes. Each algorithm gives a line, latency + slope * bytes; the time is the least of them. The
slope is the load of the busiest link over its bandwidth, so it is inversely proportional to the bandwidth of the limiting level.
The latency is that of the messages that wait for one another, and a launch for each instruction (`Device.instruction_s`).

Algorithms are NCCL's (P2, section 5): a ring in device order; a double binary tree over the nodes with a chain inside each;
pipelined chains for Reduce and Broadcast. Bytes are those of one device's operand, for an all-gather those of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..constants import CONSTANTS
from ..ir import Collective, Factor
from ..mesh.cluster import Cluster
from ..mesh.factoring import check_cover, coordinates, factors_of
from ..mesh.topology import Topology

Algorithm = Literal["auto", "ring", "tree", "emitted"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


_DENSE_COUNTERS = 1 << 14  # up to this many counters are all allocated; of more, only those in use


@dataclass(frozen=True, slots=True)
class _Round:
    """One instruction: source, target, group and bytes per byte of operand of each message, and the latency of them together.

    It runs ``times`` in a row. In a round of permutes (``direct``) each device is a group of its own and sends over one rail;
    NCCL's collectives drive a rail from each device of a group.
    """

    source: Ints
    target: Ints
    group: Ints
    weight: Floats
    latency_s: float
    times: int = 1
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Network:
    """Prices of collectives on ``cluster`` cut into ``factors``. ``memo`` caches prices, of this class and of its callers.

    ``shared`` caches the prices that do not depend on how the devices outside a collective are cut; `over` passes it on.
    """

    cluster: Cluster
    factors: tuple[Factor, ...]
    topology: Topology = field(init=False, repr=False, compare=False)
    _coordinates: Ints = field(init=False, repr=False, compare=False)
    memo: dict[Any, Any] = field(default_factory=dict[Any, Any], init=False, repr=False, compare=False)
    shared: dict[Any, Floats] = field(default_factory=dict[Any, Floats], repr=False, compare=False)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the factors."""
        return tuple(f.name for f in self.factors)

    def __post_init__(self) -> None:
        check_cover(self.cluster, self.factors)
        object.__setattr__(self, "topology", Topology(self.cluster))
        object.__setattr__(self, "_coordinates", coordinates(self.cluster, self.factors))

    def over(self, factors: Sequence[Factor]) -> Network:
        """The prices over other factors of the same cluster."""
        return Network(self.cluster, tuple(factors), self.shared)

    def lines(self, kind: Collective, over: Sequence[int], *, first: Sequence[int] = (), algorithm: Algorithm = "auto") -> Floats:
        """The alternatives for a collective over the factors ``over``: rows of (latency_s, seconds_per_byte).  # [A, 2]

        ``first`` names factors: only devices at their first coordinate take part (P2's Master). ``algorithm`` "ring" and "tree"
        force NCCL's choice; "auto" offers both; "emitted" prices what `shardplan.collectives.lower` emits: binomial trees of
        permutes for Reduce and Broadcast, a ring of permutes among masters. Each permute of those is an instruction.

        A permute names its factors twice: in the order that gives a block's place before it, then in the order that gives it
        afterwards. A shift sends to the next place in the order of ``over``; the last place sends nothing.
        """
        key = (kind, _named(kind, over), frozenset(first), algorithm)
        if key not in self.memo:
            cut = kind, self._cuts(key[1]), self._cuts(sorted(first)), algorithm
            if cut not in self.shared:
                members = self._members(over, first)
                shapes = _shapes(kind, bool(first), algorithm) if members.shape[1] > 1 else ()
                self.shared[cut] = np.array([self._line(kind, members, over, shape) for shape in shapes] or [(0.0, 0.0)])
            self.memo[key] = self.shared[cut]
        return self.memo[key]

    def _cuts(self, of: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
        """The key that tells factors apart on every network of this cluster."""
        return tuple((f.level, f.size, f.stride) for f in (self.factors[i] for i in of))

    def seconds(self, kind: Collective, over: Sequence[int], nbytes: ArrayLike, *, algorithm: Algorithm = "auto") -> Floats:
        """Seconds of the collective for these bytes (any shape; the result has the same)."""
        rows = self.lines(kind, over, algorithm=algorithm)
        return np.min(rows[:, 0] + np.asarray(nbytes, float)[..., None] * rows[:, 1], axis=-1)

    def among(self, kind: Collective, groups: Sequence[Sequence[int]], nbytes: float) -> tuple[float, frozenset[int]]:
        """(seconds, levels that are crossed) of one collective instruction among these groups of devices, all of one size.

        The groups of a permute are (source, target) pairs. If any factors have these groups, the seconds are those of
        `seconds`; otherwise an all-reduce is a ring.
        """
        if not groups:
            return 0.0, frozenset()
        key = ("among", kind, tuple(map(tuple, groups)))
        if key not in self.memo:
            self.memo[key] = self._among(kind, np.array(groups, np.int64))
        rows, levels = self.memo[key]
        return float(np.min(rows[:, 0] + rows[:, 1] * nbytes)), levels

    def _among(self, kind: Collective, members: Ints) -> tuple[Floats, frozenset[int]]:
        at = self._coordinates
        if kind in (Collective.PERMUTE, Collective.SHIFT):
            members = members[members[:, 0] != members[:, 1]]
        over = [i for i in range(len(self.factors)) if np.any(at[members, i] != at[members[:, :1], i])]
        levels = frozenset(self.factors[i].level for i in over)
        if not over:
            return np.zeros((1, 2)), levels
        if kind in (Collective.PERMUTE, Collective.SHIFT):
            pairs = _permutes(self, members[:, :1], members[:, 1:])
            return np.array([(pairs.latency_s + self.cluster.device.instruction_s, self._slope(pairs, over, tree=False))]), levels
        members = np.sort(members, axis=1)
        if found := factors_of(self.cluster, members[0].tolist()):
            network = self.over(found[0])
            if {*map(tuple, network.groups(found[1]).tolist())} == {*map(tuple, members.tolist())}:
                return network.lines(kind, found[1]), levels
        shapes = _shapes(kind, False, "ring" if kind == Collective.ALL_REDUCE else "auto")
        return np.array([self._line(kind, members, over, shape) for shape in shapes]), levels

    def busy(self, kind: Collective, over: Sequence[int], *, first: Sequence[int] = (), algorithm: Algorithm = "auto") -> Floats:
        """For each alternative of `lines`, the seconds per byte that it occupies each level's busiest link.  # [A, levels]"""
        key = ("busy", kind, _named(kind, over), frozenset(first), algorithm)
        if key not in self.memo:
            members = self._members(over, first)
            shapes = _shapes(kind, bool(first), algorithm) if members.shape[1] > 1 else ()
            result = np.zeros((max(1, len(shapes)), len(self.cluster.levels)))
            for row, shape in enumerate(shapes):
                for r in _ROUNDS[shape](self, kind, members, over):
                    result[row] += r.times * self._slopes(r, over, tree=shape == "tree")
            self.memo[key] = result
        return self.memo[key]

    def groups(self, over: Sequence[int], *, first: Sequence[int] = ()) -> Ints:
        """The devices of every group, each in device order.  # [groups, members]"""
        key = ("groups", frozenset(over), frozenset(first))
        if key not in self.memo:
            self.memo[key] = self._groups(over, first)
            self.memo[key].setflags(write=False)
        return self.memo[key]

    def _members(self, over: Sequence[int], first: Sequence[int]) -> Ints:
        """One group of each set of groups that are alike and share no link: it stands for all of them.  # [groups, members]

        Groups that differ in a factor of a level slower than all of ``over`` lie under different children of it. If each child
        of the slowest level of ``over`` has its own port, groups that differ in another factor of that level leave by different
        ports.
        """
        slowest = min((self.factors[i].level for i in over if self.factors[i].size > 1), default=0)
        own_ports = self.topology.tiers[slowest].ports_per == 1 and self.cluster.levels[slowest].kind != "ring"
        outside = [i for i in range(len(self.factors)) if i not in over and i not in first]
        alike = [i for i in outside if self.factors[i].level < slowest + own_ports]
        return self.groups(over, first=(*first, *alike))

    def _groups(self, over: Sequence[int], first: Sequence[int]) -> Ints:
        at = self._coordinates
        inside = sorted(set(over))
        outside = [i for i in range(len(self.factors)) if i not in inside]
        keep = np.all(at[:, np.array(first, np.int64)] == 0, axis=1)
        # devices are numbered in row-major order, so a stable sort by group keeps each group's members in device order
        group = np.zeros(len(at), np.int64)
        for i in outside:
            group = group * self.factors[i].size + at[:, i]
        devices = np.flatnonzero(keep)
        order = devices[np.argsort(group[devices], kind="stable")]
        return order.reshape(-1, math.prod(self.factors[i].size for i in inside if i not in first))

    def _line(self, kind: Collective, members: Ints, over: Sequence[int], shape: str) -> tuple[float, float]:
        """The line of a message pattern: the line of its messages, plus the launches of its instructions."""
        instructions = 1
        if shape == Collective.ALL_TO_ALL and all(level.kind != "ring" for level in self.cluster.levels):
            latency_s, slope = self._even_all_to_all(members)
        elif shape == "ring":
            latency_s, slope = self._ring_line(kind, members, over)
        else:
            rounds = _ROUNDS[shape](self, kind, members, over)
            instructions = sum(r.times for r in rounds)
            latency_s, slope = self._sum(rounds, over, tree=shape == "tree")
        return latency_s + instructions * self.cluster.device.instruction_s, slope

    def _ring_line(self, kind: Collective, members: Ints, over: Sequence[int]) -> tuple[float, float]:
        """The line of a collective's messages on a ring; an all-reduce goes around twice, all others once."""
        key = ("ring", members.tobytes(), frozenset(over))
        if key not in self.memo:
            self.memo[key] = self._sum(_ring(self, Collective.ALL_GATHER, members, over), over, tree=False)
        latency_s, slope = self.memo[key]
        return (2 * latency_s, 2 * slope) if kind == Collective.ALL_REDUCE else (latency_s, slope)

    def _sum(self, rounds: Sequence[_Round], over: Sequence[int], *, tree: bool) -> tuple[float, float]:
        """The line of the messages of rounds that run one after another."""
        return sum(r.times * r.latency_s for r in rounds), sum(r.times * self._slope(r, over, tree=tree) for r in rounds)

    def _slope(self, r: _Round, over: Sequence[int], *, tree: bool) -> float:
        """Seconds per byte of operand: those of the busiest level."""
        return float(self._slopes(r, over, tree=tree).max())

    def _slopes(self, r: _Round, over: Sequence[int], *, tree: bool) -> Floats:
        """Seconds per byte of each level: of its busiest link, of a group that drives too few rails of a link, or of a group's
        busiest connection. In a round of permutes, each device is such a group.  # [levels]
        """
        message, link = self._routes(r.source, r.target)
        weight = r.weight[message]
        level = self.topology.link_level
        tiers = self.topology.cluster.levels
        efficiency, speed = self._speeds(tree)
        worst = np.zeros(len(tiers))
        np.maximum.at(worst, level, np.bincount(link, weights=weight, minlength=len(speed)) / speed)
        for index, tier in enumerate(tiers):
            inside = math.prod(self.factors[i].size for i in set(over) if self.factors[i].level > index)
            drivers = 1 if r.direct else inside
            worst[index] = max(worst[index], self._connection(r, index, min(drivers, tier.rails), tree=tree))
            if drivers >= tier.rails:
                continue
            on_level = level[link] == index
            groups = int(r.group.max()) + 1
            slot = link[on_level] * groups + r.group[message[on_level]]
            if len(speed) * groups > _DENSE_COUNTERS:
                _, slot = np.unique(slot, return_inverse=True)
            load = float(np.bincount(slot, weights=weight[on_level]).max(initial=0.0))
            worst[index] = max(worst[index], load * tier.rails / (drivers * tier.bandwidth_bytes_per_s * efficiency[index]))
        return worst

    def _connection(self, r: _Round, index: int, rails: int, *, tree: bool) -> float:
        """Seconds per byte of the busiest connection of a group between two children of a level, over so many rails."""
        tier = self.cluster.levels[index]
        if tier.kind == "ring" or not (tree or tier.connection_bytes_per_s):
            return 0.0
        speed = tier.bandwidth_bytes_per_s * (tier.tree_efficiency if tree else tier.ring_efficiency) * rails / tier.rails
        if tier.connection_bytes_per_s is not None:
            speed = min(speed, tier.connection_bytes_per_s * rails)
        here = np.flatnonzero(self.topology.meeting_level(r.source, r.target) == index)
        if not here.size:
            return 0.0
        below = math.prod(self.cluster.shape[index + 1 :])
        count = len(self._coordinates) // below
        ends = (r.source[here] // below) * count + r.target[here] // below
        _, slot = np.unique(r.group[here] * count * count + ends, return_inverse=True)
        load = float(np.bincount(slot.ravel(), weights=r.weight[here]).max())
        return load / (speed * (CONSTANTS.tree_connection if tree else 1.0))

    def _speeds(self, tree: bool) -> tuple[Floats, Floats]:
        """The fraction of each level's bandwidth that an algorithm reaches, and the bytes per second of each link."""
        key = ("speeds", tree)
        if key not in self.memo:
            tiers = self.topology.cluster.levels
            efficiency = np.array([t.tree_efficiency if tree else t.ring_efficiency for t in tiers])
            reached = np.where(self.topology.second, 1.0, efficiency[self.topology.link_level])
            self.memo[key] = efficiency, self.topology.bandwidth * reached
        return self.memo[key]

    def _routes(self, source: Ints, target: Ints) -> tuple[Ints, Ints]:
        """`Topology.routes`, cached, as several collectives use the same routes."""
        key = ("routes", source.tobytes(), target.tobytes())
        if key not in self.memo:
            self.memo[key] = self.topology.routes(source, target)
        return self.memo[key]

    def _even_all_to_all(self, members: Ints) -> tuple[float, float]:
        """The line of `_all_to_all` without its n * n messages, for clusters without rings: all children of a level are alike."""
        (groups, n), shape, worst = members.shape, self.cluster.shape, 0.0
        for index, (level, tier) in enumerate(zip(self.cluster.levels, self.topology.tiers, strict=True)):
            below = math.prod(shape[index + 1 :])
            first = np.arange(groups, dtype=np.int64)[:, None] * (len(self._coordinates) // below)
            child: Ints = np.add(members // below, first)
            inside = int(np.unique(child, return_counts=True)[1].min())  # the devices of a group in one child
            leaving = (n - inside) / n  # the fraction of a device's bytes that leaves its child of the level
            speed = level.bandwidth_bytes_per_s * level.ring_efficiency
            driven = inside * leaving * level.rails / (min(inside, level.rails) * speed)
            worst = max(worst, below * tier.ports_per * leaving / speed, driven)
        far = float(_hops(self, members[:1, [0] * (n - 1)], members[:1, 1:]).max())
        return far + (n - 2) * self.cluster.levels[-1].latency_s, worst


def binary_tree(n: int) -> list[int]:
    """The parent of each rank in NCCL's binary tree (the odd ranks are leaves; the root, 0, has -1).

    >>> binary_tree(8)
    [-1, 2, 4, 2, 0, 6, 4, 6]
    """
    parents = [-1]
    for rank in range(1, n):
        bit = rank & -rank
        up = (rank ^ bit) | (bit << 1)
        parents.append(up if up < n else rank ^ bit)
    return parents


def _shapes(kind: Collective, masters: bool, algorithm: Algorithm) -> tuple[str, ...]:
    """The message patterns available for a collective."""
    match kind:
        case Collective.ALL_REDUCE:
            if algorithm in ("ring", "tree"):
                return (algorithm,)
            return ("relay",) if algorithm == "emitted" and masters else ("ring", "tree")
        case Collective.REDUCE | Collective.BROADCAST:
            return ("binomial",) if algorithm == "emitted" else ("chain",)
        case Collective.REDUCE_SCATTER | Collective.ALL_GATHER:
            return ("relay",) if algorithm == "emitted" and masters else ("ring",)
        case Collective.ALL_TO_ALL | Collective.RAGGED_ALL_TO_ALL:
            return (Collective.ALL_TO_ALL,)
        case Collective.PERMUTE | Collective.SHIFT:
            return (kind,)
        case Collective.SLICE:
            return ()


def _named(kind: Collective, over: Sequence[int]) -> tuple[int, ...]:
    """The key that tells collectives of one kind apart: their factors, and the order of these where it matters."""
    return tuple(over) if kind in (Collective.PERMUTE, Collective.SHIFT) else tuple(sorted(set(over)))


def _round(net: Network, source: Ints, target: Ints, weight: float, latency_s: float) -> _Round:
    """A round from [groups, messages] arrays."""
    group = np.broadcast_to(np.arange(len(source))[:, None], source.shape)
    return _Round(source.ravel(), target.ravel(), group.ravel(), np.full(source.size, weight), latency_s)


def _permutes(net: Network, source: Ints, target: Ints, weight: float = 1.0) -> _Round:
    """One instruction of permutes, from [groups, messages] arrays."""
    of, to = source.ravel(), target.ravel()
    return _Round(of, to, of, np.full(of.size, weight), float(_hops(net, source, target).max()), direct=True)


def _hops(net: Network, source: Ints, target: Ints) -> Floats:
    return net.topology.latencies(source.ravel(), target.ravel()).reshape(source.shape)


def _ring(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """Each device passes (n-1)/n of the bytes to the next, twice for an all-reduce; the latency is a chunk's way around."""
    n = members.shape[1]
    share = (2 if kind == Collective.ALL_REDUCE else 1) * (n - 1) / n
    following = np.roll(members, -1, axis=1)
    around = float(_hops(net, members, following).sum(axis=1).max())
    return [_round(net, members, following, share, share * around)]


def _relay(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """A ring of permutes: each passes 1/n of the bytes to the next device, n - 1 times, twice as often for an all-reduce."""
    n = members.shape[1]
    following = np.roll(members, -1, axis=1)
    return [replace(_permutes(net, members, following, 1 / n), times=(2 if kind == Collective.ALL_REDUCE else 1) * (n - 1))]


def _tree(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """NCCL's double binary tree: half of the bytes in each, up and down; inside a node both share a chain to its first device."""
    last = len(net.cluster.levels) - 1
    inside = math.prod(net.factors[i].size for i in over if net.factors[i].level == last)
    inside = min(inside, members.shape[1])
    nodes = members.reshape(len(members), -1, inside)  # [groups, nodes, inside]
    heads, count = nodes[:, :, 0], nodes.shape[1]
    parents = binary_tree(count)
    edges = [(c, p, 0.5) for c, p in enumerate(parents) if p >= 0]
    if count % 2:
        edges += [((c + 1) % count, (p + 1) % count, 0.5) for c, p in enumerate(parents) if p >= 0]
    else:
        edges += [(count - 1 - c, count - 1 - p, 0.5) for c, p in enumerate(parents) if p >= 0]
    low = [nodes[:, :, 1:].reshape(len(members), -1), heads[:, [c for c, _, _ in edges]]]
    high = [nodes[:, :, :-1].reshape(len(members), -1), heads[:, [p for _, p, _ in edges]]]
    chain = float(_hops(net, low[0], high[0]).reshape(len(members), count, -1).sum(axis=2).max(initial=0.0))
    across = float(_hops(net, low[1], high[1]).max(initial=0.0)) * math.ceil(math.log2(count))
    a, b = np.concatenate(low, axis=1), np.concatenate(high, axis=1)
    group = np.broadcast_to(np.arange(len(a))[:, None], a.shape).ravel()
    weight = np.broadcast_to(np.concatenate([np.ones(low[0].shape[1]), np.full(len(edges), 0.5)]), a.shape).ravel()
    both = (np.concatenate([a.ravel(), b.ravel()]), np.concatenate([b.ravel(), a.ravel()]))
    return [_Round(*both, np.tile(group, 2), np.tile(weight, 2), 2 * (chain + across))]


def _chain(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """A pipelined chain between the last device and the root, which is the first."""
    high, low = members[:, :-1], members[:, 1:]
    source, target = (low, high) if kind == Collective.REDUCE else (high, low)
    return [_round(net, source, target, 1.0, float(_hops(net, source, target).sum(axis=1).max()))]


def _binomial(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """A binomial tree of permutes, nearest devices first in a Reduce, last in a Broadcast."""
    rounds: list[_Round] = []
    for parents, children in binomial_rounds(members.shape[1]):
        high, low = members[:, parents], members[:, children]
        source, target = (low, high) if kind == Collective.REDUCE else (high, low)
        rounds.append(_permutes(net, source, target))
    return rounds


def binomial_rounds(n: int) -> list[tuple[list[int], list[int]]]:
    """(parents, children) of each round of a Reduce to rank 0; a Broadcast runs them in reverse.

    >>> binomial_rounds(5)
    [([0, 2], [1, 3]), ([0], [2]), ([0], [4])]
    """
    rounds: list[tuple[list[int], list[int]]] = []
    distance = 1
    while distance < n:
        parents = [r for r in range(0, n, 2 * distance) if r + distance < n]
        rounds.append((parents, [r + distance for r in parents]))
        distance *= 2
    return rounds


def _all_to_all(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """Every device sends 1/n to each other device; latency: the furthest peer's once, a local one for each other peer."""
    n = members.shape[1]
    others = np.add.outer(np.arange(n, dtype=np.int64), np.arange(1, n, dtype=np.int64)).ravel() % n
    source, target = np.repeat(members, n - 1, axis=1), members[:, others]
    near = net.cluster.levels[-1].latency_s
    return [_round(net, source, target, 1 / n, float(_hops(net, source, target).max()) + (n - 2) * near)]


def _permute(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """Every device sends all its bytes to the device that takes its place afterwards; some bytes stay where they are."""
    half = len(over) // 2
    source, target = (_in_places(net, members, order) for order in (over[:half], over[half:]))
    return [_permutes(net, source, target)]


def _shift(net: Network, kind: Collective, members: Ints, over: Sequence[int]) -> list[_Round]:
    """Every device but the last sends all its bytes to the next one."""
    placed = _in_places(net, members, over)
    source, target = placed[:, :-1], placed[:, 1:]
    return [_permutes(net, source, target)]


def _in_places(net: Network, members: Ints, order: Sequence[int]) -> Ints:
    """The devices of each group in the order of their places, which the factors give in this order.  # [groups, members]"""
    inside = sorted(order)
    grid = members.reshape(len(members), *(net.factors[i].size for i in inside))
    return grid.transpose(0, *(1 + inside.index(i) for i in order)).reshape(members.shape)


_ROUNDS: dict[str, Callable[[Network, Collective, Ints, Sequence[int]], list[_Round]]] = {
    "ring": _ring,
    "relay": _relay,
    "tree": _tree,
    "chain": _chain,
    "binomial": _binomial,
    Collective.ALL_TO_ALL: _all_to_all,
    Collective.PERMUTE: _permute,
    Collective.SHIFT: _shift,
}
