"""The language: Table 2, the programs of Figure 3, the wrong ones of Figure 4, and complaints about others."""

from __future__ import annotations

import pytest

from shardplan.collectives import ReductionError, groups, parse, replay, synthesize
from shardplan.collectives.dsl import InsideGroup, Instruction, Master, Parallel, instructions
from shardplan.ir import Collective

SYSTEM = (1, 2, 2, 4)  # rack, server, CPU, GPU of Figure 2a; A0 to D3 are devices 0 to 15
NAMES = ("rack", "server", "CPU", "GPU")
PAIR = ("server", "gpu")


def names(device: int) -> str:
    return "ABCD"[device // 4] + str(device % 4)


def row(text: str) -> str:
    """The groups of an instruction as Table 2 writes them."""
    (step,) = parse(text, NAMES).steps
    return " ".join("{" + " ".join(names(d) for d in g) + "}" for g in groups(SYSTEM, step))


def test_table_2():
    assert row("(CPU, InsideGroup, AllReduce)") == "{A0 A1 A2 A3} {B0 B1 B2 B3} {C0 C1 C2 C3} {D0 D1 D2 D3}"
    assert row("(CPU, Parallel(server), AllReduce)") == "{A0 B0} {A1 B1} {A2 B2} {A3 B3} {C0 D0} {C1 D1} {C2 D2} {C3 D3}"
    assert row("(CPU, Parallel(rack), AllReduce)") == "{A0 B0 C0 D0} {A1 B1 C1 D1} {A2 B2 C2 D2} {A3 B3 C3 D3}"
    assert row("(CPU, Master(rack), AllReduce)") == "{A0 B0 C0 D0}"
    assert row("(server, InsideGroup, AllReduce)") == "{A0 A1 A2 A3 B0 B1 B2 B3} {C0 C1 C2 C3 D0 D1 D2 D3}"
    table = row("(server, Parallel(rack), AllReduce)")
    assert table == "{A0 C0} {A1 C1} {A2 C2} {A3 C3} {B0 D0} {B1 D1} {B2 D2} {B3 D3}"
    whole = row("(rack, InsideGroup, AllReduce)")
    assert whole == "{" + " ".join(names(d) for d in range(16)) + "}"


def test_figure_3_is_among_the_programs():
    found = {p.text(PAIR) for p in synthesize(2)}
    assert "(root, InsideGroup, AllReduce)" in found
    assert "(server, InsideGroup, AllReduce) (server, Parallel(root), AllReduce)" in found
    assert "(server, InsideGroup, Reduce) (server, Master(root), AllReduce) (server, InsideGroup, Broadcast)" in found


def test_figure_10_is_among_the_programs():
    found = {p.text(PAIR) for p in synthesize(2)}
    assert "(server, InsideGroup, ReduceScatter) (server, Parallel(root), AllReduce) (server, InsideGroup, AllGather)" in found


def test_figure_4a_reduces_what_should_not_be():
    wrong = parse("(server, InsideGroup, ReduceScatter) (root, InsideGroup, AllReduce)", PAIR)
    with pytest.raises(ReductionError) as caught:
        replay(wrong, (2, 2), names=PAIR)
    assert caught.value.step == 1
    assert caught.value.devices == (0, 1, 2, 3)
    assert caught.value.states[:2] == ("1100/1100/0000/0000", "0000/0000/1100/1100")
    text = "step 2, (root, InsideGroup, AllReduce): among devices [0, 1, 2, 3], AllReduce: members 0 and 1 hold different chunks"
    assert text in str(caught.value)


def test_figure_4b_reduces_the_same_data_twice():
    wrong = parse("(server, Parallel(root), AllReduce) (root, InsideGroup, AllReduce)", PAIR)
    with pytest.raises(ReductionError) as caught:
        replay(wrong, (2, 2), names=PAIR)
    assert caught.value.step == 1
    assert "members 0 and 2 both hold the contribution of device 0 to chunk 0, which would be reduced twice" in str(caught.value)
    assert "device 0 has 4 x 1010" in str(caught.value)


def test_a_program_that_stops_early_is_refused():
    with pytest.raises(ReductionError, match=r"ends short of its goal, all-reduce: device 0 has 4 x 1100"):
        replay(parse("(server, InsideGroup, AllReduce)", PAIR), (2, 2))
    with pytest.raises(ReductionError, match="does not fit the 3 levels"):
        replay(parse("(server, InsideGroup, AllReduce)", PAIR), (2, 2, 2))
    with pytest.raises(ReductionError, match="its groups are single devices"):
        replay(parse("(gpu, InsideGroup, AllReduce)", PAIR), (2, 2))


def test_every_program_is_right_on_other_sizes_too():
    for shape in ((2, 2), (3, 2), (2, 5), (4, 3)):
        for program in synthesize(2):
            contexts = replay(program, shape)
            assert len(contexts) == len(program.steps) + 1


def test_text_can_be_read_back():
    for program in synthesize(3, 3):
        assert parse(program.text(("a", "b", "c")), ("a", "b", "c")) == program


def test_instructions_are_distinct_patterns():
    for depth, patterns in ((1, 1), (2, 4), (3, 9), (4, 16)):
        shape = (2,) * depth
        seen = {(groups(shape, step), step.collective) for step in instructions(depth)}
        assert len(seen) == len(instructions(depth)) == 5 * patterns
        # nothing else can be said: every slice and form gives one of these
        forms = [(s, f) for s in range(depth + 1) for f in (InsideGroup(), *(k(a) for a in range(s) for k in (Parallel, Master)))]
        said = {(groups(shape, Instruction(s, f, Collective.ALL_REDUCE)), Collective.ALL_REDUCE) for s, f in forms}
        assert {g for g, _ in said if g} == {g for g, c in seen if c == Collective.ALL_REDUCE}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(rack, InsideGroup, AllReduce)", "no level 'rack' in the hierarchy root, server, gpu"),
        ("(servr, InsideGroup, AllReduce)", "nearest: server"),
        ("(server, InsideGroup, AllReduc)", "no collective 'AllReduc' .nearest: AllReduce"),
        ("(server, Parallel(gpu), AllReduce)", "'gpu' is not above 'server'"),
        ("(server, InsideGroup, AllReduce) and more", "not a reduction program: 'and more'"),
        ("", "not a reduction program: ''"),
    ],
)
def test_texts_that_are_no_program_are_refused(text: str, words: str):
    with pytest.raises(ReductionError, match=words.replace("(", r"\(")):
        parse(text, PAIR)
