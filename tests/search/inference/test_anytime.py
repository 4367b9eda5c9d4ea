"""A search that is stopped, by its budget or by an interrupt, gives the best so far, says so, and leaves nothing wrong behind."""

from __future__ import annotations

import itertools
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import shardplan
from models import gpt, mlp
from shardplan.mesh import Cluster
from shardplan.search.inference import anytime
from shardplan.search.inference.solver import Solver
from shardplan.search.memory import liveness as memory
from shardplan.shell.cli import main
from tests.search import steps

GPT = gpt.train_step(layers=1, width=64, batch=16)
MLP = mlp.train_step(layers=2, width=256)
FOREVER = 1e9
WRITERS = tuple(f"{name}.py" for name in ("tables", "eliminate", "problem", "pricing", "options", "reshard", "layouts", "ops"))


def planned(factory: Any = MLP, **options: Any) -> shardplan.Plan:
    return shardplan.plan(factory[0], *factory[1], **{"cluster": "2x2x2", "donate_argnums": 0, "time_model": "sum", **options})


class Stop:
    """An observer that interrupts at its n-th call, or where a stage begins, and notes what it was told."""

    def __init__(self, at: int | str, how: Callable[[], None]) -> None:
        self.at, self.how = at, how
        self.told: list[tuple[str, float]] = []

    def __call__(self, what: str, part: float) -> None:
        self.told.append((what, part))
        if self.at in (len(self.told), what):
            self.how()


def raised() -> None:
    raise KeyboardInterrupt


def signalled() -> None:
    signal.raise_signal(signal.SIGINT)


def never() -> None:
    raise AssertionError("not asked to stop")


def interrupted(nth: int, files: tuple[str, ...], work: Callable[[], object]) -> bool:
    """Does some work with an interrupt at the nth line of these files that it comes to: whether it came that far."""
    count = itertools.count(1)

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line" and next(count) == nth:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def tight(factory: Any = MLP) -> int:
    """A limit that the fastest plan does not keep to."""
    return int(planned(factory).peak_bytes * 0.8)


# -- what is told ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", ["2x4", "2x2x2", "6"])
def test_the_observer_hears_of_every_stage_and_of_progress_alone(cluster: str) -> None:
    stop = Stop(-1, never)
    planned(cluster=cluster, observer=stop)
    stages = [what for what, _ in stop.told]
    assert stages[:3] == ["tracing", "describing", "coarsening"]
    assert stop.told[-1] == ("done", 1.0)
    parts = [part for _, part in stop.told]
    assert parts == sorted(parts)


# -- interrupts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [raised, signalled])
@pytest.mark.parametrize("limited", [pytest.param(False, marks=pytest.mark.slow), True], ids=["free", "tight"])
@pytest.mark.parametrize("factory", [MLP, pytest.param(GPT, marks=pytest.mark.slow)], ids=["mlp", "gpt"])
def test_an_interrupt_at_any_stage_gives_the_best_so_far(how: Callable[[], None], limited: bool, factory: Any) -> None:
    limit = tight(factory) if limited else None
    whole = Stop(-1, never)
    best = planned(factory, memory_limit=limit, observer=whole)
    seen: dict[str, set[bool]] = {}
    last = float("inf")
    calls = range(1, len(whole.told) + 1)
    for at in calls if len(calls) < 20 else (1, 2, 3, 5, *calls[5 : -2 : max(9, len(calls) // 6)], *calls[-2:]):
        stop = Stop(at, how)
        try:
            plan = planned(factory, memory_limit=limit, observer=stop)
        except KeyboardInterrupt:
            seen.setdefault(stop.told[-1][0], set()).add(False)
            continue
        seen.setdefault(stop.told[-1][0], set()).add(True)
        assert plan.stopped == "interrupted"
        assert not plan.exact
        assert plan.peak_bytes <= plan.memory_limit
        assert best.searched_s <= plan.searched_s <= last
        assert plan.lower_bound_s <= plan.searched_s
        last = plan.searched_s
    assert all(seen[stage] == {False} for stage in ("tracing", "describing", "coarsening")), "nothing is found by then"
    assert seen["done"] == {True}
    assert len(calls) >= 20 or seen.keys() == {what for what, _ in whole.told}
    assert last == best.searched_s


def test_what_was_not_solved_is_said_and_what_was_is_right() -> None:
    limit = tight()
    watched = Stop(-1, never)
    planned(memory_limit=limit, observer=watched)
    last = [n for n, (what, _) in enumerate(watched.told, start=1) if what == "baselines"][-1]
    plan = planned(memory_limit=limit, observer=Stop(last, raised))
    unsolved = [r.name for r in plan.session.rivals.left_out if "stopped" in r.reason]
    assert unsolved
    whole = {b.name: b for b in planned(memory_limit=limit).baselines}
    solved = {b.name: b for b in plan.baselines}
    assert solved
    assert not set(solved) & set(unsolved)
    assert solved == {name: whole[name] for name in solved}


def test_an_interrupted_plan_can_be_saved_and_read(tmp_path: Any) -> None:
    plan = planned(observer=Stop("polish", raised))
    plan.save(tmp_path / "plan.json")
    again = shardplan.load(tmp_path / "plan.json", MLP[0], *MLP[1])
    assert again.stopped == "interrupted"
    assert again.flat_in_specs == plan.flat_in_specs


@pytest.mark.parametrize("nth", [1, 50, 400, 900, 2000, 4000, 7000, 10000])
def test_an_interrupt_between_any_two_lines_leaves_the_tables_right(nth: int) -> None:
    """What a search remembers is used again afterwards, for its baselines and its report."""
    problem = steps.problem(*MLP[:1], *MLP[1], on=Cluster.load("2x2"))
    solver = Solver(problem, memory.liveness(problem))
    wanted = Solver(steps.problem(*MLP[:1], *MLP[1], on=Cluster.load("2x2")), memory.liveness(problem)).minimum(
        "x", problem.domains
    )
    assert interrupted(nth, WRITERS, lambda: solver.minimum("x", problem.domains)), "the search has that many lines"
    again, cost = solver.minimum("x", problem.domains)
    assert (again.states, cost) == (wanted[0].states, wanted[1])


def test_reduction_programs_that_were_interrupted_are_found_again_in_whole() -> None:
    """What groups of devices can do is remembered as long as the process lives."""
    from shardplan.collectives.states import StateSpace

    wanted = dict(StateSpace(2).outcomes(StateSpace(2).initial()))
    assert len(wanted) > 1
    for nth in range(1, 40):
        space = StateSpace(2)
        context = space.initial()
        interrupted(nth, ("states.py",), lambda space=space, context=context: space.outcomes(context))
        assert space.outcomes(context) == wanted


def test_a_store_that_was_interrupted_gives_no_table_another_ones_number() -> None:
    """Between any two of its lines."""
    import numpy as np

    from shardplan.search.problem.cost_tables import TableStore

    for nth in range(1, 40):
        store = TableStore()
        interrupted(nth, ("tables.py",), lambda store=store: [store.intern(np.arange(4, dtype=np.int64) * n) for n in range(3)])
        for n in range(3):
            found, _ = store.intern(np.arange(4, dtype=np.int64) * n)
            assert store.tables[found].tolist() == [0, n, 2 * n, 3 * n]


# -- budgets -----------------------------------------------------------------------------------------------------------


class Clock:
    """Time that goes on by one second whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def within(looks: float, monkeypatch: pytest.MonkeyPatch, **options: Any) -> shardplan.Plan:
    """A plan whose budget is over after so many looks at the clock."""
    monkeypatch.setattr(anytime, "now_s", Clock())
    return planned(time_budget_s=looks, **options)


@pytest.mark.parametrize("cluster", ["2x2x2", "2x4", "8"])
def test_a_longer_budget_never_gives_a_worse_plan(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = planned(cluster=cluster)
    looks = [1, 20, 100, 300, 1000, 3000, 10000]
    plans = [within(n, monkeypatch, cluster=cluster) for n in looks]
    seconds = [plan.searched_s for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    assert plans[0].stopped == "time budget"
    assert not plans[0].exact
    assert plans[0].searched_s >= whole.searched_s
    unhurried = within(FOREVER, monkeypatch, cluster=cluster)
    assert unhurried.stopped == ""
    assert (unhurried.step_time_s, unhurried.flat_in_specs, unhurried.exact) == (
        whole.step_time_s,
        whole.flat_in_specs,
        whole.exact,
    )


def test_a_budget_under_a_limit_gives_a_plan_within_it_or_says_that_there_was_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(shardplan.MemoryLimitError, match="no plan found in the time budget") as caught:
        within(1, monkeypatch, memory_limit=tight())
    assert caught.value.unfinished
    assert "give it more time" in str(caught.value)
    with pytest.raises(shardplan.MemoryLimitError) as caught:
        planned(memory_limit=1000, time_budget_s=FOREVER)
    assert not caught.value.unfinished
    seconds = [within(n, monkeypatch, memory_limit=tight()).searched_s for n in (3000, 30000)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_single_joint_solve_is_left_between_two_eliminations() -> None:
    problem = steps.problem(*MLP[:1], *MLP[1], on=Cluster.load("2x2"))
    watch = anytime.Watch(anytime.Incumbent(2**60), problem.domains)
    solver = Solver(problem, memory.liveness(problem), watch=watch)
    solver.minimum("first", [(s,) for s in problem.narrowest(problem.domains)])
    watch.deadline = anytime.now_s()
    with pytest.raises(anytime.OutOfTimeError):
        solver.minimum("x", problem.domains)
    watch.close()
    assert solver.minimum("x", problem.domains)[1] > 0, "what is solved for a report later has no deadline"


def test_the_second_factoring_is_left_out_when_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = within(3, monkeypatch, cluster="6")
    assert plan.stopped == "time budget"
    assert plan.axes == {"gpu": 6}


def test_a_plan_for_bytes_can_be_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert within(1, monkeypatch, objective="bytes").stopped == "time budget"
    assert planned(objective="bytes", time_budget_s=FOREVER).stopped == ""


# -- the command line and the decorator --------------------------------------------------------------------------------


def test_the_first_interrupt_prints_the_plan_so_far(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stop = Stop("polish", raised)
    monkeypatch.setattr("shardplan.report.Progress.__call__", lambda _self, what, part=None: stop(what, part or 0.0))
    line = ["plan", "models.mlp:train_step", "--cluster", "2x2x2", "--set", "width=256"]
    assert main(line) == 0
    said = capsys.readouterr()
    assert "the search was interrupted: this is the best plan until then" in said.out
    assert said.err.startswith("shardplan: interrupted")
    early = Stop(2, raised)
    monkeypatch.setattr("shardplan.report.Progress.__call__", lambda _self, what, part=None: early(what, part or 0.0))
    assert main(line) == 130


def test_verify_does_not_go_on_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop("polish", raised)
    monkeypatch.setattr("shardplan.report.Progress.__call__", lambda _self, what, part=None: stop(what, part or 0.0))
    line = ["compare", "models.mlp:train_step", "--cluster", "2x2x2", "--set", "width=256"]
    assert main(line) == 130


def test_a_decorated_step_does_not_run_by_half_a_search() -> None:
    run = shardplan.parallelize("2x2x2", observer=Stop("polish", raised))(MLP[0])
    with pytest.raises(KeyboardInterrupt):
        run.prepare(*MLP[1])
