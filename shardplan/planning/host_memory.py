"""Plans with as little in host memory as the memory limit asks for (``offload="auto"``)."""

from __future__ import annotations

from dataclasses import replace

from shardplan.errors import MemoryLimitError
from shardplan.ir import Program
from shardplan.offload import offloaded, on_device
from shardplan.planning.fallback import Fallback
from shardplan.planning.planner import Made, planned
from shardplan.planning.searcher import Searcher
from shardplan.search.memory import liveness as memory


def planned_in_host_memory(program: Program, searcher: Searcher, origin: str, *, recompute: bool) -> Made:
    """The plan of a program on devices alone or, where nothing fits so, with arguments in host memory.

    First all arguments that may lie there do. Then as many as fit beside the layouts found come back to the device, those that
    save the most seconds first. The step is planned with the rest in host memory. The arguments are the same as in `planned`.

    Raises:
        MemoryLimitError: if no plan fits, whatever lies in host memory.
    """
    able = frozenset(range(len(program.inputs))) - on_device(program).keys()
    try:
        made = planned(program, _part(searcher, 0), origin, recompute=recompute)
    except MemoryLimitError:
        if not able:
            raise
        made = _with_fewest(program, able, searcher, origin, recompute=recompute)
    if not made.stopped:
        searcher.wanted.observer("done", 1.0)
    return made


def _with_fewest(program: Program, able: frozenset[int], searcher: Searcher, origin: str, *, recompute: bool) -> Made:
    every = planned(offloaded(program, able), _part(searcher, 1), origin, recompute=recompute)
    left = _needed(every)
    if left == able or every.stopped:
        return every
    try:
        fewer = planned(offloaded(program, left), _part(searcher, 2), origin, recompute=recompute)
    except MemoryLimitError:  # the search finds no layouts as good as those of the first one
        return every
    except KeyboardInterrupt:
        return replace(every, stopped="interrupted")
    return min((fewer, every), key=lambda own: own.session.decisions.step_time_s)


_SEARCHES = 3


def _part(searcher: Searcher, n: int) -> Searcher:
    """The searcher of search number ``n``, which tells its part of the progress."""
    wanted = searcher.wanted

    def tell(what: str, part: float) -> None:
        wanted.observer("scheduling" if what == "done" else what, (n + part) / _SEARCHES)

    return replace(searcher, wanted=replace(wanted, observer=tell), fallback=Fallback())


def _needed(made: Made) -> frozenset[int]:
    """The arguments in host memory that a plan's layouts need there: without those that are largest on a device, so that each
    copy takes longest, as many as fit.
    """
    session = made.session
    problem, solution, graph = session.problem, session.solution, session.graph

    def nbytes(i: int) -> float:
        v = problem.coarse.of[graph.inputs[i]]
        return graph.tensors[graph.inputs[i]].nbytes * memory.local_part(problem, v, solution.states[v])

    order = sorted(graph.offloaded, key=lambda i: (-nbytes(i), i))

    def fits(back: int) -> bool:
        live = memory.liveness(problem, session.donated, frozenset(order[back:]))
        return memory.peak(problem, live, solution.states, solution.keep, solution.limits)[0] <= session.memory_limit

    low, high = 0, len(order)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return frozenset(order[low:])
