"""Timelines of scheduled HLO text, counted by hand: each kernel takes a second, each collective what its operand has in bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.hlo_kernels import kernels
from benchmarks.hlo_streams import Spent
from benchmarks.hlo_timeline import network_price, timeline
from shardplan.cost import Network
from shardplan.errors import HloError
from shardplan.hlo.meter import HloCollective
from shardplan.ir import Collective
from shardplan.mesh import Cluster, factors

FIXTURES = Path(__file__).parent / "hlo" / "fixtures"
DEVICE = replace(Cluster.load("8").device, launch_s=1.0, memory_bytes_per_s=1e300)

KERNEL = "  %k{} = s8[1]{{0}} negate(%x)"
"""A kernel of a second; a number tells several apart."""


def by_bytes(collective: HloCollective) -> tuple[float, frozenset[int]]:
    """A second a byte, on the link that the size of the groups names."""
    return float(collective.operand_bytes), frozenset([collective.group_size])


def start(name: str, seconds: int, group: int = 2) -> str:
    """A buffer and the start of its collective."""
    members = ",".join(map(str, range(group)))
    return (
        f"  %{name}.b = s8[{seconds}]{{0}} bitcast(%x)\n"
        f"  %{name} = s8[{seconds}]{{0}} all-reduce-start(%{name}.b), replica_groups={{{{{members}}}}}, to_apply=%add"
    )


def done(name: str) -> str:
    return f"  %{name}.done = s8[1]{{0}} all-reduce-done(%{name})"


def kernels_(*numbers: int) -> str:
    return "\n".join(KERNEL.format(n) for n in numbers)


def module(*lines: str, computations: str = "") -> str:
    """A scheduled module of these lines of the entry."""
    body = "\n".join(lines)
    return (
        f"HloModule m, is_scheduled=true, num_partitions=4\n\n{computations}\nENTRY %main (x: s8[1]) -> s8[1] {{\n"
        f"  %x = s8[1]{{0}} parameter(0)\n{body}\n  ROOT %end = s8[1]{{0}} bitcast(%x)\n}}\n"
    )


def spent(text: str, contention: float = 1.0) -> Spent:
    return timeline(text, DEVICE, by_bytes, contention=contention)


def test_a_collective_hides_under_the_kernels_between_its_halves() -> None:
    hidden = module(start("c", 2), kernels_(1, 2, 3), done("c"))
    assert spent(hidden).values == (3, 3, 2, 0, 2)
    shown = module(start("c", 5), kernels_(1, 2, 3), done("c"), kernels_(4))
    assert spent(shown).values == (6, 4, 5, 2, 3)
    assert spent(shown).hidden_s == 3


def test_both_streams_slow_each_other_only_while_both_are_busy() -> None:
    """Two seconds of either take 2.5 together; then a kernel runs alone, or the collective does."""
    assert spent(module(start("c", 2), kernels_(1, 2, 3), done("c")), 1.25).values == (3.5, 3, 2, 0, 2.5)
    assert spent(module(start("c", 5), kernels_(1, 2, 3), done("c")), 1.25).values == (5.75, 3, 5, 2, 3.75)


def test_a_collective_of_one_instruction_holds_the_kernels() -> None:
    alone = "  %r.b = s8[4]{0} bitcast(%x)\n  %r = s8[4]{0} all-reduce(%r.b), replica_groups={{0,1}}, to_apply=%add"
    assert spent(module(kernels_(1), alone, kernels_(2)), 1.25).values == (6, 2, 4, 4, 0)
    said = start("c", 4) + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert spent(module(said, kernels_(1, 2), done("c"))).values == (6, 2, 4, 4, 0)


def test_collectives_of_one_link_follow_one_another_and_of_two_run_at_once() -> None:
    ends = (kernels_(1, 2), done("a"), done("b"))
    assert spent(module(start("a", 3), start("b", 4), *ends)).values == (7, 2, 7, 5, 2)
    assert spent(module(start("a", 3), start("b", 4, group=4), *ends)).values == (4, 2, 7, 2, 2)


def test_what_is_never_waited_for_ends_with_the_step() -> None:
    assert spent(module(start("a", 3), kernels_(1))).values == (3, 1, 3, 2, 1)


LOOP = """\
%test (s: (s8[1], s8[3])) -> pred[] {
  %s = (s8[1]{0}, s8[3]{0}) parameter(0)
  ROOT %t = pred[] constant(true)
}

%body (s: (s8[1], s8[3])) -> (s8[1], s8[3]) {
  %s = (s8[1]{0}, s8[3]{0}) parameter(0)
  %x = s8[1]{0} get-tuple-element(%s), index=0
LINES
}
"""


def loop(trips: int, lines: str, first: str = "  %c = s8[3]{0} bitcast(%x)", last: str = "") -> str:
    """A module with a loop that carries a value, which is a collective where ``first`` starts one."""
    config = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    entry = [
        first,
        "  %t = (s8[1]{0}, s8[3]{0}) tuple(%x, %c)",
        f"  %w = (s8[1]{{0}}, s8[3]{{0}}) while(%t), condition=%test, body=%body, {config}",
        "  %f = s8[3]{0} get-tuple-element(%w), index=1",
        last,
    ]
    return module(*entry, computations=LOOP.replace("LINES", lines))


END = "  %c.carried = s8[3]{0} bitcast(%NAME)\n  ROOT %r = (s8[1]{0}, s8[3]{0}) tuple(%x, %c.carried)"


@pytest.mark.parametrize("trips", [1, 2, 3, 10, 1001])
def test_a_loop_takes_its_iterations(trips: int) -> None:
    """Each: three seconds of a collective beside two kernels, one of which waits."""
    lines = "\n".join([start("i", 3), kernels_(1), done("i"), kernels_(2), END.replace("NAME", "x")])
    assert spent(loop(trips, lines)).values == pytest.approx([n * trips for n in (4, 2, 3, 2, 1)], rel=1e-12)


@pytest.mark.parametrize("trips", [1, 2, 3, 10, 1001])
@pytest.mark.parametrize("contention", [1.0, 1.3])
def test_a_collective_may_end_an_iteration_after_its_start(trips: int, contention: float) -> None:
    """The loop, as long as it may be, is the same as its iterations written one after another."""
    wait = "  %old = s8[3]{0} get-tuple-element(%s), index=1\n" + done("old")
    lines = "\n".join([kernels_(1), wait, start("i", 3), kernels_(2, 3), END.replace("NAME", "i")])
    rolled = loop(trips, lines, first=start("c", 5), last="  %f.done = s8[1]{0} all-reduce-done(%f)")
    unrolled, before = [start("c", 5)], "c"
    for n in range(trips):
        unrolled += [kernels_(10 * n), done(before), start(f"i{n}", 3), kernels_(10 * n + 1, 10 * n + 2)]
        before = f"i{n}"
    straight = spent(module(*unrolled, done(before)), contention)
    assert spent(rolled, contention).values == pytest.approx(straight.values, rel=1e-12)
    if contention == 1.0:  # 5 s beside a kernel, then 3 s beside three, the last beside two: all but the first wait for nothing
        assert straight.values == (5 + 3 * (trips - 1) + 3, 3 * trips, 5 + 3 * trips, 5, 3 * trips)


def test_what_is_under_way_before_a_loop_runs_on_in_it() -> None:
    lines = "\n".join([kernels_(1), END.replace("NAME", "x")])
    first = start("long", 1000) + "\n  %c = s8[3]{0} bitcast(%x)"
    assert spent(loop(600, lines, first=first, last=done("long"))).values == (1000, 600, 1000, 400, 600)
    assert spent(loop(1500, lines, first=first, last=done("long"))).values == (1500, 1500, 1000, 0, 1000)


@pytest.mark.parametrize(("trips", "seconds"), [(1, 9), (2, 7), (1000, 7), (1001, 9)])
def test_a_loop_may_be_as_it_was_only_every_other_iteration(trips: int, seconds: int) -> None:
    """It swaps two collectives of different links, without a kernel; the one that comes out first is waited for."""
    swap = "  %p = s8[3]{0} get-tuple-element(%s), index=1\n  %q = s8[3]{0} get-tuple-element(%s), index=2"
    lines = swap + "\n  ROOT %r = (s8[1]{0}, s8[3]{0}, s8[3]{0}) tuple(%x, %q, %p)"
    both = start("c", 7) + "\n" + start("d", 9, group=4)
    text = loop(trips, lines, first=both, last=done("f") + "\n" + kernels_(*range(20))).replace(
        "tuple(%x, %c)", "tuple(%x, %c, %d)"
    )
    assert spent(text).exposed_s == seconds


BRANCHES = f"""\
%dear (x: s8[1]) -> s8[1] {{
  %x = s8[1]{{0}} parameter(0)
{start("i", 9)}
{kernels_(1)}
{done("i")}
  ROOT %r = s8[1]{{0}} bitcast(%x)
}}

%cheap (x: s8[1]) -> s8[1] {{
  %x = s8[1]{{0}} parameter(0)
{kernels_(1, 2, 3)}
  ROOT %r = s8[1]{{0}} bitcast(%x)
}}
"""


@pytest.mark.parametrize("order", ["%dear, %cheap", "%cheap, %dear"])
def test_a_conditional_takes_its_dearest_branch_and_what_was_under_way_goes_on(order: str) -> None:
    """Of ten seconds one passes under a kernel; the branch's own nine follow on the link."""
    chosen = f"  %q = s8[1]{{0}} conditional(%x, %x, %x), branch_computations={{{order}}}"
    text = module(start("c", 10), chosen, done("c"), kernels_(1), computations=BRANCHES)
    assert spent(text).values == (20, 2, 19, 18, 1)


CALLED = f"""\
%wrapped (p: s8[4]) -> s8[2] {{
  %p = s8[4]{{0}} parameter(0)
  ROOT %rs = s8[2]{{0}} reduce-scatter(%p), replica_groups={{{{0,1}}}}, dimensions={{0}}, to_apply=%add
}}

%called (x: s8[1]) -> s8[1] {{
  %x = s8[1]{{0}} parameter(0)
{kernels_(1, 2)}
  ROOT %r = s8[1]{{0}} bitcast(%x)
}}
"""


def test_calls_run_where_they_start() -> None:
    wrapped = "\n".join(
        [
            "  %b = s8[4]{0} bitcast(%x)",
            "  %a = ((s8[4]{0}), s8[2]{0}) async-start(%b), calls=%wrapped",
            kernels_(1),
            "  %u = ((s8[4]{0}), s8[2]{0}) async-update(%a)",
            "  %d = s8[2]{0} async-done(%u)",
        ]
    )
    assert spent(module(wrapped, computations=CALLED)).values == (4, 1, 4, 3, 1)
    assert spent(module("  %a = s8[1]{0} call(%x), to_apply=%called", computations=CALLED)).values == (2, 2, 0, 0, 0)
    beside = "  %a = ((s8[1]{0}), s8[1]{0}) async-start(%x), calls=%called\n  %d = s8[1]{0} async-done(%a)"
    assert spent(module(beside, computations=CALLED)).values == (2, 2, 0, 0, 0)


def test_text_that_is_not_scheduled_and_halves_without_a_start_are_refused() -> None:
    with pytest.raises(HloError, match="not scheduled"):
        spent(module(kernels_(1)).replace("is_scheduled=true", "is_scheduled=false"))
    with pytest.raises(HloError, match="whose start is not known"):
        spent(module("  %c = s8[1]{0} bitcast(%x)", done("c")))
    with pytest.raises(HloError, match="no single sends"):
        spent(
            module("  %c = (s8[1]{0}, u32[]) send(%x), channel_id=1, frontend_attributes={_xla_send_recv_source_target_pairs={}}")
        )


@pytest.mark.parametrize("name", ["async_forms", "gpu_scan", "gpu_chain", "gpu_permute", "gpu_all_to_all", "gpu_ragged"])
@pytest.mark.parametrize("contention", [1.0, 1.3])
def test_the_seconds_of_compiled_programs_add_up(name: str, contention: float) -> None:
    """Kernels cost what the meter of kernels says; all time is that of a kernel, slowed or not, or of a collective alone."""
    text = (FIXTURES / f"{name}.hlo").read_text()
    cluster = Cluster.load("2x4")
    found = timeline(text, cluster.device, network_price(Network(cluster, factors(cluster))), contention=contention)
    assert found.compute_s == pytest.approx(sum(k.times * k.seconds(cluster.device) for k in kernels(text)), rel=1e-12)
    assert found.communication_s > 0
    together = found.compute_s + found.exposed_s + found.overlapped_s * (1 - 1 / contention)
    assert found.seconds == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("over", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("kind", [Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.ALL_REDUCE])
def test_groups_of_a_program_are_priced_as_the_factors_that_they_run_over(kind: Collective, over: tuple[int, ...]) -> None:
    """On a ring of eight, with the factor that varies fastest first in the program's order."""
    cluster = Cluster.load("8")
    cluster = replace(cluster, levels=(replace(cluster.levels[0], kind="ring"),))
    slow, fast = factors(cluster, {"gpu": (4, 2)})
    network = Network(cluster, (fast, slow))
    grid = np.arange(8).reshape(2, 4)  # the program's numbers, by place along (fast, slow)
    groups = (grid.T if over == (0,) else grid if over == (1,) else grid.reshape(1, 8)).tolist()
    ways, part, whole = len(groups[0]), 1 << 16, len(groups[0]) << 16
    before = part if kind == Collective.ALL_GATHER else whole
    collective = HloCollective(kind, before, ways, tuple(map(tuple, groups)), 1, "c", "", "f32", 1)
    seconds, links = network_price(network)(collective)
    assert seconds == pytest.approx(float(network.seconds(kind, over, whole)), rel=1e-12)
    assert links == {0}


def test_a_loops_collective_is_priced_by_its_groups_and_runs_its_trips() -> None:
    """Five reduce-scatters of [32, 128] float32 among the four devices of a node."""
    cluster = Cluster.load("2x4")
    network = Network(cluster, factors(cluster))
    found = timeline((FIXTURES / "gpu_scan.hlo").read_text(), cluster.device, network_price(network))
    assert found.communication_s == pytest.approx(
        5 * float(network.seconds(Collective.REDUCE_SCATTER, [1], 4 * 32 * 128)), rel=1e-12
    )
