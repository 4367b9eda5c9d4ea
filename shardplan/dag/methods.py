"""One face for all methods: a DAG of tasks goes in, a schedule comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Literal, get_args

from numpy.typing import ArrayLike

from shardplan.constants import CONSTANTS
from shardplan.errors import ScheduleError

from .critical import shorten
from .exact import exact
from .fd_dps import fd_dps
from .graph import Dag
from .heft import heft
from .lookahead import lookahead
from .memory import Room, StuckError, packing
from .schedules import Orders, TaskSchedule
from .validation import checked

Method = Literal["fd-dps", "heft", "exact"]


def schedule_dag(
    times: ArrayLike,
    edges: Mapping[tuple[int, int], ArrayLike],
    method: Method = "fd-dps",
    memory: ArrayLike | None = None,
    sizes: Sequence[float] | None = None,
) -> TaskSchedule:
    """Where and when tasks run, so that the last one ends soon.

    ``times`` [tasks][devices] are seconds, ``edges`` {(i, j): seconds} what the result of i needs to reach j on another device:
    one number, or [from][to] for each pair of devices. Task i holds ``sizes[i]`` on its device from first to last, in the unit
    of ``memory``, a number or [devices]. ``method``: ``"fd-dps"`` (see `planned`), ``"heft"`` (Topcuoglu et al., 2002), or
    ``"exact"``, the shortest schedule of up to 12 tasks. Raises `ScheduleError`.

    >>> result = schedule_dag([[2, 3], [4, 4], [4, 4]], {(0, 1): 1, (0, 2): 1})
    >>> result.device, result.start_s, result.makespan_s
    ((0, 0, 1), (0.0, 2.0, 3.0), 7.0)
    """
    _refuse_unknown(method)
    return planned(checked(times, edges, memory=memory, sizes=sizes), method)


def planned(dag: Dag, method: Method = "fd-dps") -> TaskSchedule:
    """A schedule of a checked DAG.

    ``"fd-dps"`` differs from the paper, whose own rules give longer schedules than HEFT (benchmarks/fd_dps.py prints both). The
    slack that sorts tasks does not see that devices are busy, and a slot is chosen because it does not lengthen the path of
    mean seconds, not because it ends early. So:

    - Tasks in HEFT's order take devices by a look ahead (`lookahead`), on the graph and on the reversed graph.
    - The paper's step, an assignment that updates the dynamic critical path, goes on when all tasks have devices (`shorten`):
      critical tasks move to better slots of formula 11 until none has one.

    The best of these starts is returned. Up to ``CONSTANTS.paper_tasks`` tasks, the paper's rules are one start more, so that no
    schedule is longer than theirs. HEFT's schedule is not among the starts.
    """
    _refuse_unknown(method)
    if not isinstance(dag, Dag):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may have no types
        raise ScheduleError(f"planned takes a DAG, not {type(dag).__name__}: make it of tables with shardplan.dag.checked")
    match method:
        case "fd-dps":
            return _fd_dps(dag)
        case "heft":
            return built(dag, heft).schedule()
        case "exact":
            return exact(dag, _fd_dps(dag))


def built(dag: Dag, build: Callable[[Dag, Room], Orders], pack: Callable[[Dag], tuple[int, ...]] = packing) -> Orders:
    """The orders that ``build`` makes; where memory stops it, those that it makes of a packing."""
    try:
        return build(dag, Room(dag))
    except StuckError:
        return build(dag, Room(dag, pack(dag)))


def _fd_dps(dag: Dag) -> TaskSchedule:
    pack = cache(packing)
    turned = built(dag.reversed(), lookahead, lambda _: pack(dag))  # the same tasks have the same packing
    starts = [built(dag, lookahead, pack), _backwards(turned, dag)]
    starts += [built(dag, fd_dps, pack)] if dag.tasks <= CONSTANTS.paper_tasks else []
    for orders in starts:
        room = Room(dag)
        for i, d in enumerate(orders.device):
            room.take(i, d)
        shorten(orders, room)
    return min((orders.schedule() for orders in starts), key=lambda s: s.makespan_s)


def _backwards(orders: Orders, dag: Dag) -> Orders:
    """Orders of the reversed graph as orders of the graph."""
    turned = Orders(dag)
    turned.device = orders.device.copy()
    turned.sequences = [row[::-1] for row in orders.sequences]
    return turned


def _refuse_unknown(method: str) -> None:
    if method not in get_args(Method):
        raise ScheduleError(f"unknown method {method!r}: use 'fd-dps', 'heft' or 'exact'")
