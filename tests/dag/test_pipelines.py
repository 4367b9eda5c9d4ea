"""Pipeline schedules: those of the literature meet their papers' formulas, and ours is never slower at equal memory."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.dag.pipeline_orders import KNOWN, dualpipe_v, gpipe, interleaved, one_f_one_b, zb_h1, zb_v
from shardplan.dag.pipeline_search import PipelineProblem, best_order, best_pipeline
from shardplan.dag.pipelines import Pipeline, PipelineTask, Seconds, folded, looped, needs, run

SIZES = [(2, 4), (3, 6), (4, 8), (4, 20), (6, 12)]


def parts(seconds: Seconds, each: int, chunks: int) -> list[Seconds]:
    return [Seconds(*(s / each for s in seconds))] * chunks


def bubble(pipeline: Pipeline, seconds: Seconds) -> float:
    each = pipeline.chunks // len(pipeline.orders)
    return run(pipeline, parts(seconds, each, pipeline.chunks)).bubble_s


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
@pytest.mark.parametrize("seconds", [Seconds(1, 1, 1), Seconds(1, 1.5, 0.5), Seconds(2, 1, 3)], ids=str)
def test_schedules_with_whole_backward_passes_have_the_bubbles_of_narayanan(
    devices: int, microbatches: int, seconds: Seconds
) -> None:
    """(p - 1)(t_f + t_b), and a v-th of it with v chunks a device (Narayanan et al. 2021, sections 2.2.1 and 2.2.2)."""
    formula = (devices - 1) * sum(seconds)
    assert bubble(gpipe(devices, microbatches), seconds) == pytest.approx(formula)
    assert bubble(one_f_one_b(devices, microbatches), seconds) == pytest.approx(formula)
    for each in (2, 3):
        assert bubble(interleaved(devices, microbatches, each), seconds) == pytest.approx(formula / each)


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
@pytest.mark.parametrize("seconds", [Seconds(1, 1, 1), Seconds(1, 1.5, 0.5), Seconds(2, 1.5, 1)], ids=str)
def test_zb_h1_has_the_bubble_of_its_paper(devices: int, microbatches: int, seconds: Seconds) -> None:
    """(p - 1)(T_F + T_B - T_W) (Qi et al. 2023, table 1)."""
    f, b, w = seconds
    assert bubble(zb_h1(devices, microbatches), seconds) == pytest.approx((devices - 1) * (f + b - w))


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_zb_v_has_no_bubble_where_all_tasks_take_equally_long(devices: int, microbatches: int) -> None:
    """Qi et al. 2023, section 6."""
    assert bubble(zb_v(devices, microbatches), Seconds(1, 1, 1)) == pytest.approx(0)


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
@pytest.mark.parametrize("seconds", [Seconds(1, 1, 1), Seconds(1, 1, 0.3)], ids=str)
def test_dualpipe_v_has_the_bubble_that_its_authors_state(devices: int, microbatches: int, seconds: Seconds) -> None:
    """(PP/2 - 1)(F&B + B - 3W) with PP chunks, of half a device each, and F&B = F + B."""
    f, b, w = (s / 2 for s in seconds)
    assert bubble(dualpipe_v(devices, microbatches), seconds) == pytest.approx((devices - 1) * (f + 2 * (b + w) - 3 * w))


@pytest.mark.parametrize(("devices", "microbatches"), SIZES)
def test_schedules_hold_as_many_microbatches_as_their_papers_say(devices: int, microbatches: int) -> None:
    assert gpipe(devices, microbatches).most_held == (microbatches,) * devices
    assert one_f_one_b(devices, microbatches).most_held == tuple(devices - d for d in range(devices))
    assert zb_h1(devices, microbatches).most_held == (devices,) * devices
    # S (1 + (S - 1) / (S v)) microbatches of v chunks (Narayanan et al. 2021, section 2.2.2)
    assert interleaved(devices, microbatches).most_held[0] == 3 * devices - 1
    assert zb_v(devices, microbatches).most_held == (2 * devices,) * devices
    assert dualpipe_v(devices, microbatches).most_held == (2 * devices + 1,) * devices


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 16), st.integers(1, 3))
def test_every_schedule_runs_each_task_once_and_in_a_legal_order(devices: int, microbatches: int, each: int) -> None:
    for make in KNOWN:
        own = make(devices, microbatches, each)
        if own is not None:
            check(own, microbatches)


def check(pipeline: Pipeline, microbatches: int) -> None:
    tasks = [work for order in pipeline.orders for work in order]
    assert len(tasks) == len(set(tasks))
    for chunk in range(pipeline.chunks):
        for k in range(microbatches):
            own = {work.kind for work in tasks if (work.chunk, work.microbatch) == (chunk, k)}
            assert own in ({"forward", "both"}, {"forward", "backward", "weight"})
    assert all(pipeline.device[work.chunk] == d for d, order in enumerate(pipeline.orders) for work in order)
    found, everything = run(pipeline, [Seconds(1, 2, 3)] * pipeline.chunks, 0.5), set(tasks)
    span = {
        work: (start, end)
        for order, starts, ends in zip(pipeline.orders, found.start_s, found.end_s, strict=True)
        for work, start, end in zip(order, starts, ends, strict=True)
    }
    for work, (start, _) in span.items():
        for p in needs(work, pipeline.chunks, everything):
            sent = 0.0 if pipeline.device[p.chunk] == pipeline.device[work.chunk] else 0.5
            assert span[p][1] + sent <= start


def duration() -> st.SearchStrategy[Seconds]:
    return st.builds(Seconds, *[st.floats(0.1, 3)] * 3)


@st.composite
def questions(draw: st.DrawFn) -> tuple[list[Seconds], int, float]:
    devices, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 16))
    halves = [draw(duration())] * 2 * devices if draw(st.booleans()) else [draw(duration()) for _ in range(2 * devices)]
    return halves, microbatches, draw(st.sampled_from([0.0, 0.2]))


@settings(max_examples=12, deadline=None)
@given(questions(), st.integers(0, 5))
def test_ours_is_never_slower_than_a_schedule_of_the_literature_at_equal_memory(
    question: tuple[list[Seconds], int, float], pick: int
) -> None:
    halves, microbatches, send_s = question
    devices = len(halves) // 2
    known = [own for make in KNOWN for each in (1, 2) if (own := make(devices, microbatches, each)) is not None]
    own = known[pick % len(known)]
    each = own.chunks // devices
    most = max(own.most_held) * (2 // each)
    whole = [Seconds(*map(sum, zip(a, b, strict=True))) for a, b in zip(halves[::2], halves[1::2], strict=True)]
    theirs = run(own, halves if each == 2 else whole, send_s)
    ours, found = best_pipeline(halves, microbatches, most, send_s)
    check(ours, microbatches)
    assert max(ours.most_held) * 2 * devices // ours.chunks <= most
    assert found.makespan_s <= theirs.makespan_s * (1 + 1e-9)


@pytest.mark.parametrize("most", [2, 3, 4, 7, 16])
@pytest.mark.parametrize("device", [looped(4, 1), looped(4, 2), folded(4)], ids=str)
def test_ours_keeps_any_limit(device: tuple[int, ...], most: int) -> None:
    seconds = tuple(Seconds(1 + c / 5, 1.5, 0.5 + c / 3) for c in range(len(device)))
    ours, found = best_order(PipelineProblem(device, seconds, 6, most))
    assert max(ours.most_held) <= most
    assert found.makespan_s >= PipelineProblem(device, seconds, 6, most).least_s * (1 - 1e-9)
    check(ours, 6)


def test_ours_has_the_bubble_of_zb_v_in_the_memory_of_1f1b() -> None:
    """Schedules are found: nothing says that ZB-V is best there."""
    ours, found = best_pipeline([Seconds(0.5, 0.5, 0.5)] * 8, 8, 8)
    assert found.bubble_s == pytest.approx(0)
    assert max(ours.most_held) == 8
    assert PipelineTask("weight", 0, 7) in ours.orders[0]
