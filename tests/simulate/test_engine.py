"""The simulator against FlexFlow's own figures, against exact fractions, and against itself, compiled and plain."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import example, given, settings

from shardplan.errors import ShardplanError
from shardplan.simulate import busy, event_loop
from shardplan.simulate.compile_loops import compiled, forget_unreadable
from shardplan.simulate.engine import NO_CONTENTION, Contention, SimulatedRun, Stream, TaskGraph, simulate
from tests.oracles import simulation
from tests.oracles.simulation import Line, Task

TICK = 1e-15
ONE = (Stream("compute", "compute"), Stream("node", "link"), Stream("gpu", "link"))
TWO = (*ONE, Stream("compute", "compute", 1), Stream("node", "link", 1), Stream("host", "host", 1, fifo=True))
FIFO = tuple(Stream(s.name, s.kind, s.device, fifo=True) for s in ONE)


def graph(tasks: Sequence[Task], streams: Sequence[Stream]) -> TaskGraph:
    return TaskGraph(
        tuple(streams),
        np.array([t.work * TICK for t in tasks]),
        np.array([-1 if t.stream is None else t.stream for t in tasks], np.int32),
        np.cumsum([0, *(len(t.after) for t in tasks)]),
        np.array([a for t in tasks for a in t.after], np.int64),
        np.array([t.priority for t in tasks], np.int64),
    )


def times(run: SimulatedRun) -> list[tuple[int, int]]:
    return list(zip(run.start.tolist(), run.end.tolist(), strict=True))


def drawn(seed: int, streams: Sequence[Stream], *, works: int, count: int = 40) -> list[Task]:
    """Random tasks; with few ``works`` many end at the same time."""
    rng = np.random.default_rng(seed)
    tasks: list[Task] = []
    for i in range(count):
        after = rng.choice(i, min(i, int(rng.integers(0, 4))), replace=False).tolist() if i else []
        stream = int(rng.integers(-1, len(streams)))
        tasks.append(Task(int(rng.integers(0, works)), None if stream < 0 else stream, after, int(rng.integers(0, 6))))
    return tasks


def lines(streams: Sequence[Stream]) -> list[Line]:
    return [Line(s.kind, s.device, s.fifo) for s in streams]


def test_flexflows_own_example_runs_as_in_its_figure() -> None:
    """FlexFlow, Figure 4c: two steps of an RNN of three layers on three GPUs and links between them, first come, first served.

    Rows are (duration, stream, after, when it is ready and starts in the figure).
    """
    streams = [Stream(name, "compute" if "GPU" in name else "link", fifo=True) for name in ("GPU1", "1-2", "GPU2", "2-3", "GPU3")]
    rows = [
        (2, 0, [], 0), (2, 0, [], 2), (2, 0, [], 4), (2, 0, [], 6),  # the embeddings of both batches, in both steps
        (1, 1, [0], 2), (1, 1, [1], 4), (1, 1, [2], 6), (1, 1, [3], 8),
        (1, 2, [4], 3), (1, 2, [5], 5), (1, 2, [6, 8], 7), (1, 2, [7, 9], 9),  # the recurrent layer
        (1, 3, [8], 4), (1, 3, [9], 6), (1, 3, [10], 8), (1, 3, [11], 10),
        (3, 4, [12, 13], 7), (3, 4, [14, 15], 11),  # the linear layer
    ]  # fmt: skip
    run = simulate(graph([Task(work, stream, after, 0) for work, stream, after, _ in rows], streams))
    assert run.start.tolist() == [start for *_, start in rows]
    assert run.seconds == pytest.approx(14 * TICK)


@pytest.mark.parametrize("streams", [ONE, TWO, FIFO], ids=["one device", "two devices", "fifo"])
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([3, 10**6]))
def test_without_contention_the_loop_is_exact(streams: Sequence[Stream], seed: int, works: int) -> None:
    tasks = drawn(seed, streams, works=works)
    assert times(simulate(graph(tasks, streams))) == simulation.simulate(tasks, lines(streams))


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(0, 40), st.integers(0, 40))
@example(0, 3, 3)
def test_rates_are_exact_but_for_one_tick_a_change(seed: int, compute: int, link: int) -> None:
    """Works are long and random, so no two tasks end together: then rounding decides nothing."""
    tasks = drawn(seed, TWO, works=10**12)
    factors = 1 + Fraction(compute, 10), 1 + Fraction(link, 10)
    run = simulate(graph(tasks, TWO), Contention(*map(float, factors)))
    most = 2 * len(tasks)  # a task starts or ends at each change of rates
    for (start, end), (exact_start, exact_end) in zip(times(run), simulation.simulate(tasks, lines(TWO), *factors), strict=True):
        assert abs(start - exact_start) <= most
        assert abs(end - exact_end) <= most


@pytest.mark.skipif(compiled(event_loop.FUNCTIONS) is None, reason="Numba is not installed")
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from([3, 10**9]), st.sampled_from([1.0, 1.3, 2.7]))
@pytest.mark.slow
def test_the_compiled_loop_gives_the_same_bits(seed: int, works: int, factor: float) -> None:
    tasks = graph(drawn(seed, TWO, works=works, count=150), TWO)
    plain, fast = (simulate(tasks, Contention(factor, 1.3), engine) for engine in ("python", "numba"))
    for name in ("start", "end", "cause"):
        assert np.array_equal(getattr(plain, name), getattr(fast, name)), name


def test_overlapping_tasks_slow_each_other_while_both_run() -> None:
    """4 of communication beside 10 of compute take 5.2; until then 4 of the compute is done, then 6 more follow."""
    tasks = [Task(10_000, 0, [], 0), Task(4_000, 1, [], 1)]
    assert times(simulate(graph(tasks, ONE), Contention())) == [(0, 11_200), (0, 5_200)]
    assert times(simulate(graph(tasks, ONE), NO_CONTENTION)) == [(0, 10_000), (0, 4_000)]
    assert times(simulate(graph(tasks, ONE), Contention(1.0, 2.0))) == [(0, 10_000), (0, 8_000)]


def test_links_do_not_slow_links_nor_other_devices() -> None:
    tasks = [Task(10, 1, [], 0), Task(10, 2, [], 1), Task(10, 3, [], 2)]
    assert times(simulate(graph(tasks, TWO), Contention())) == [(0, 10)] * 3


def test_a_gather_that_is_read_soon_goes_before_a_reduction_that_was_ready_first() -> None:
    tasks = [Task(5, 1, [], 0), Task(2, 0, [], 1), Task(9, 1, [1], 9), Task(3, 0, [1], 3), Task(4, 1, [3], 4)]
    assert simulate(graph(tasks, ONE)).start.tolist() == [0, 0, 9, 2, 5]
    assert simulate(graph(tasks, FIFO)).start.tolist() == [0, 0, 5, 2, 14]


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_the_critical_path_reaches_from_the_start_to_the_end_without_a_gap(seed: int) -> None:
    run = simulate(graph(drawn(seed, TWO, works=1000), TWO), Contention())
    path = run.critical_path
    assert len(path)
    assert run.start[path[0]] == 0
    assert run.end[path[-1]] == run.end.max()
    assert np.array_equal(run.start[path[1:]], run.end[path[:-1]])


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_busy_covered_and_hidden_time_are_those_of_the_intervals(seed: int) -> None:
    """Counted tick by tick."""
    run = simulate(graph(drawn(seed, ONE, works=9), ONE), Contention(2.0, 1.0))
    ticks = np.zeros((len(ONE), int(run.end.max())), bool)
    for s, a, b in zip(run.graph.stream, run.start, run.end, strict=True):
        if s >= 0:
            ticks[s, a:b] = True
    assert busy.busy_s(run) / TICK == pytest.approx(ticks.sum(axis=1))
    assert busy.covered_s(run, np.array([1, 2])) / TICK == pytest.approx(ticks[1:].any(axis=0).sum())
    beside = [ticks[0, a:b].sum() for a, b in zip(run.start, run.end, strict=True)]
    assert busy.beside_s(run, 0) / TICK == pytest.approx(beside)


def test_memory_is_what_lives_at_each_instant() -> None:
    """An argument of 7 until the end, one of 5 until the first task ends, and what that makes until the second has."""
    run = simulate(graph([Task(2, 0, [], 0), Task(3, 0, [0], 1), Task(4, 0, [1], 2)], ONE))
    held = (np.array([7.0, 5.0, 11.0]), np.array([-1, -1, 0]), np.array([0, 1, 2]), np.array([3, 0, 1]))
    at, nbytes = busy.memory(run, *held)
    assert np.rint(at / TICK).tolist() == [0, 2, 5, 9]
    assert nbytes.tolist() == [23, 18, 7, 0]


def test_a_factor_below_one_and_an_unknown_engine_are_refused() -> None:
    for factor in (0.9, float("nan"), float("inf")):
        with pytest.raises(ShardplanError, match="contention of compute"):
            Contention(factor)
    with pytest.raises(ShardplanError, match="no engine 'jit'"):
        simulate(graph([], ONE), engine="jit")  # type: ignore[arg-type]


def test_tasks_that_wait_in_a_circle_are_noticed() -> None:
    with pytest.raises(AssertionError, match="circle"):
        simulate(graph([Task(1, 0, [1], 0), Task(1, 0, [0], 0)], ONE))


def test_a_step_of_days_still_fits_into_ticks() -> None:
    run = simulate(graph([Task(10**21, 0, [], 0), Task(10**21, 0, [0], 1)], ONE), Contention())
    assert run.seconds == pytest.approx(2e6)


def test_what_was_compiled_before_a_class_was_renamed_is_forgotten(tmp_path: Path) -> None:
    gone, there = (b"cshardplan.simulate.event_loop\n%s\n." % name for name in (b"Renamed", b"State"))
    files = {"loop.a-1": ("1.0", gone), "loop.b-2": ("1.0", there), "loop.c-3": ("0.9", gone), "other.a-1": ("1.0", gone)}
    files["loop.d-4"] = "1.0", b""  # cut off
    for name, (version, classes) in files.items():
        (tmp_path / f"{name}.py313.nbi").write_bytes(pickle.dumps(version) + classes)
    forget_unreadable(tmp_path, "loop.*.nbi", "1.0")
    assert {file.name.removesuffix(".py313.nbi") for file in tmp_path.iterdir()} == files.keys() - {"loop.a-1", "loop.d-4"}


def test_an_index_that_another_process_deletes_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: [tmp_path / "loop.a-1.py313.nbi"])
    forget_unreadable(tmp_path, "loop.*.nbi", "1.0")
    assert list(tmp_path.iterdir()) == []


_COMPILED_TWICE = """
from pathlib import Path
import pickle, numba
from shardplan.placement import task_loop
from shardplan.simulate.compile_loops import compiled
loops = compiled(task_loop.FUNCTIONS)
if not {jit}:
    assert all(not hasattr(loop, "stats") for loop in loops.values())
else:
    directory = Path(loops["tails"].stats.cache_path)
    index = directory / "task_loop.tails-0.py0.nbi"
    index.write_bytes(pickle.dumps(numba.__version__) + b"cshardplan.placement.task_loop\\nRenamed\\n.")
    compiled.cache_clear()
    compiled(task_loop.FUNCTIONS)
    assert not index.exists()
"""


@pytest.mark.parametrize("jit", [True, False])
def test_functions_are_compiled_anew_after_an_upgrade_and_not_where_numba_is_told_not_to(jit: bool, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    settings = {"NUMBA_CACHE_DIR": str(tmp_path)} if jit else {"NUMBA_DISABLE_JIT": "1"}
    code = _COMPILED_TWICE.format(jit=jit)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **settings})
