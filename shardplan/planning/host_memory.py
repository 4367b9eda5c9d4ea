"""Plans with as little in host memory as the memory limit asks for (``offload="auto"``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from shardplan.errors import MemoryLimitError
from shardplan.ir import Program
from shardplan.offload import HostedValue, activations, hosted_tensor, in_host_memory, offloaded, on_device
from shardplan.planning.fallback import Fallback
from shardplan.planning.planner import Made, planned
from shardplan.planning.recomputation import all_parts
from shardplan.planning.searcher import Searcher
from shardplan.remat import Remat, rematerialised
from shardplan.search.memory import liveness as memory


@dataclass(frozen=True, slots=True)
class _Hosted:
    """What a plan keeps in host memory, beside what it computes again: arguments, by number, and activations."""

    arguments: frozenset[int]
    remat: Remat = field(default_factory=Remat)
    values: tuple[HostedValue, ...] = ()

    def program(self, step: Program) -> Program:
        """The program of a step with this in host memory."""
        return in_host_memory(rematerialised(offloaded(step, self.arguments), self.remat.parts), self.values)


def planned_in_host_memory(program: Program, searcher: Searcher, origin: str, *, recompute: bool) -> Made:
    """The plan of a program on devices alone or, where nothing fits so, with arguments in host memory, and where nothing fits so
    either, also with activations there.

    First, every array that may be in host memory is put there. Then the smallest arrays return to the devices, as many as fit
    beside the layouts found. The step is planned with the rest in host memory. The arguments are the same as in `planned`.

    Raises:
        MemoryLimitError: if no plan fits, whatever lies in host memory.
    """
    errors: list[MemoryLimitError] = []
    made: Made | None = None
    with _refusals(errors):
        made = planned(program, _part(searcher, 0), origin, recompute=recompute)
    if made is None:
        made = _with_fewest(program, searcher, origin, errors, recompute=recompute)
    if not made.stopped:
        searcher.wanted.observer("done", 1.0)
    return made


def _with_fewest(program: Program, searcher: Searcher, origin: str, errors: list[MemoryLimitError], *, recompute: bool) -> Made:
    """The plan with least in host memory. ``errors`` are those of the plans before."""
    able = _Hosted(frozenset(range(len(program.inputs))) - on_device(program).keys())
    every: Made | None = None
    if able.arguments:
        with _refusals(errors):
            every = planned(able.program(program), _part(searcher, 1), origin, recompute=recompute)
    if every is None:
        able, every = _with_activations(program, able, searcher, origin, errors, recompute=recompute)
    left = _needed(every, able)
    if left == able or every.stopped:
        return every
    again = recompute and not able.values
    try:
        fewer = planned(left.program(program), _part(searcher, _SEARCHES - 1), origin, recompute=again)
    except MemoryLimitError:  # the search finds no layouts as good as those of the first one
        return every
    except KeyboardInterrupt:
        return replace(every, stopped="interrupted")
    if able.values:
        fewer = _annotated(fewer, left)
    return min((fewer, every), key=_step_s)


def _with_activations(
    program: Program, able: _Hosted, searcher: Searcher, origin: str, errors: list[MemoryLimitError], *, recompute: bool
) -> tuple[_Hosted, Made]:
    """The fastest plan with all activations in host memory that may lie there, beside all arguments; with what lies there.

    Values that a step keeps between its passes are known where it computes others again from them. So elementwise ops may be
    computed again, and with ``recompute`` contractions too.

    Raises:
        MemoryLimitError: if no plan fits: the one of ``errors``, or of these plans, that needs least.
    """
    base = able.program(program)
    parts = all_parts(base, searcher.flat(base))
    ways = [Remat(), *(Remat(own, policy) for policy, own in parts.items() if recompute or policy == "light")]
    found: list[tuple[_Hosted, Made]] = []
    for n, remat in enumerate(ways):
        values = activations(rematerialised(base, remat.parts))
        if values:
            hosted = replace(able, remat=remat, values=values)
            with _refusals(errors):
                made = planned(hosted.program(program), _part(searcher, 2 + n), origin, recompute=False)
                found.append((hosted, _annotated(made, hosted)))
                if made.stopped:
                    break
    if not found:
        raise min(errors, key=lambda error: error.smallest_bytes)
    return min(found, key=lambda row: _step_s(row[1]))


@contextlib.contextmanager
def _refusals(errors: list[MemoryLimitError]) -> Iterator[None]:
    """Keeps the error of a plan that does not fit, without the frames that hold its problem."""
    try:
        yield
    except MemoryLimitError as error:
        errors.append(error.with_traceback(None))


def _annotated(made: Made, hosted: _Hosted) -> Made:
    return replace(made, planned=replace(made.planned, remat=hosted.remat, hosted=hosted.values))


def _step_s(made: Made) -> float:
    return made.session.decisions.step_time_s


_SEARCHES = 6
"""The most searches: on the device, with arguments, with activations three times, with the fewest of both."""


def _part(searcher: Searcher, n: int) -> Searcher:
    """The searcher of search number ``n``, which tells its part of the progress."""
    wanted = searcher.wanted

    def tell(what: str, part: float) -> None:
        wanted.observer("scheduling" if what == "done" else what, (n + part) / _SEARCHES)

    return replace(searcher, wanted=replace(wanted, observer=tell), fallback=Fallback())


def _needed(made: Made, able: _Hosted) -> _Hosted:
    """The part of ``able`` that a plan's layouts need in host memory.

    As many values as fit return to the device, the smallest first: a copy costs a launch beside the seconds of its bytes, so a
    byte of a small array saves the most. Of equal ones, those that the forward pass makes last return first.
    """
    session = made.session
    problem, solution, graph = session.problem, session.solution, session.graph
    of_value = {}
    for value in able.values:
        of_value[graph.bodies[value.where][hosted_tensor(session.program, value)]] = value
    of_argument = {graph.inputs[i]: i for i in able.arguments}

    def nbytes(t: int) -> float:
        v = problem.coarse.of[t]
        return graph.tensors[t].nbytes * memory.local_part(problem, v, solution.states[v])

    order = sorted((*of_argument, *of_value), key=lambda t: (nbytes(t), -t))

    def left(back: int) -> _Hosted:
        stays = frozenset(order[back:])
        arguments = frozenset(i for t, i in of_argument.items() if t in stays)
        return replace(able, arguments=arguments, values=tuple(v for t, v in of_value.items() if t in stays))

    def fits(back: int) -> bool:
        live = memory.liveness(problem, session.donated, left(back).arguments, frozenset(of_value).intersection(order[:back]))
        return memory.peak(problem, live, solution.states, solution.keep, solution.limits)[0] <= session.memory_limit

    low, high = 0, len(order) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return left(low)
