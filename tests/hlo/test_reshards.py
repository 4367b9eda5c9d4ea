"""What XLA's partitioner adds, read from compiled text, and its own warnings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardplan.hlo.lines import frame_lines
from shardplan.hlo.reshards import sent_by, unforeseen
from shardplan.ir import Collective
from shardplan.verify.compiler_log import LastResort, caught

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

FileNames
1 "/home/me/train.py"
2 "SITE/flax/linear.py"

FunctionNames
1 "<module>"
2 "step"
3 "Dense.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=11 end_line=11 column=2 end_column=2}
2 {file_name_id=1 function_name_id=2 line=7 end_line=7 column=6 end_column=6}
3 {file_name_id=2 function_name_id=3 line=30 end_line=30 column=6 end_column=6}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}


ENTRY %main (p0: f32[4,8], p1: f32[2,8]) -> (f32[16,8], f32[8,2]) {
  %p0 = f32[4,8]{1,0} parameter(0), metadata={op_name="leaves[3]"}
  %p1 = f32[2,8]{1,0} parameter(1), metadata={op_name="leaves[0]"}
  %g = f32[16,8]{1,0} all-gather(%p0), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %n = f32[16,8]{1,0} negate(%g), metadata={op_name="jit(run)/neg" stack_frame_id=3}
  %t = f32[2,8]{1,0} tanh(%p1), metadata={op_name="jit(run)/tanh" stack_frame_id=2}
  %h = f32[8,8]{1,0} all-gather(%t), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, metadata={op_name="jit(run)/x"}
  %id = u32[] partition-id()
  %two = u32[] constant(2)
  %at = u32[] multiply(%id, %two)
  %zero = u32[] constant(0)
  %s = f32[8,2]{1,0} dynamic-slice(%h, %zero, %at), dynamic_slice_sizes={8,2}
  ROOT %r = (f32[16,8]{1,0}, f32[8,2]{1,0}) tuple(%n, %s)
}
"""


def text() -> str:
    """The module, with the folder of installed libraries in place."""
    import sysconfig

    return TEXT.replace("SITE", sysconfig.get_path("purelib"))


def test_a_frame_is_the_innermost_line_outside_libraries() -> None:
    lines = frame_lines(text())
    assert lines == {
        1: "/home/me/train.py:11 (<module>)",
        2: "/home/me/train.py:7 (step)",
        3: "/home/me/train.py:7 (step)",
    }
    assert frame_lines("HloModule m\n") == {}


def test_each_collective_has_its_argument_its_line_and_whether_it_is_cut_again() -> None:
    """A gather of an argument has no line of its own: its reader's is taken."""
    first, second = sent_by(text())
    assert (first.argument, first.line, first.cut_again) == (3, "/home/me/train.py:7 (step)", False)
    assert (second.argument, second.line, second.cut_again) == (-1, "", True)
    assert first.collective.wire_bytes == 3 * 4 * 8 * 4


def test_what_was_planned_is_not_unforeseen() -> None:
    first, second = sent_by(text())
    planned = [(Collective.ALL_GATHER, first.collective.wire_bytes, 1.0)]
    assert unforeseen([first, second], planned) == [(second, 1.0)]
    assert unforeseen([first, second], []) == [(first, 1.0), (second, 1.0)]
    assert unforeseen([first], [(Collective.ALL_REDUCE, first.collective.wire_bytes, 1.0)]) == [(first, 1.0)]


WARNING = (
    "W1128 07:18:23.699146    8849 spmd_partitioner.cc:666] [SPMD] Involuntary full rematerialization. The compiler cannot go "
    "from sharding {mesh['node'=2,'gpu'=4], [{'node', 'gpu'}, {}]} to {mesh['node'=2,'gpu'=4], [{}, {'gpu'}]} efficiently for "
    'HLO operation %c.0 = f32[8,64]{1,0} copy(%tanh.0), sharding={x}, metadata={op_name="jit(step)/tanh" stack_frame_id=3}. As '
    "the last resort, SPMD will replicate the tensor\n"
)


def test_warnings_of_native_code_are_caught_and_all_else_is_written(capfd: object) -> None:
    with caught() as log:
        os.write(2, WARNING.encode())
        os.write(2, b"something else\n")
        os.write(2, WARNING.encode())
    assert log == [LastResort("f32", (8, 64), 8, "P(('node', 'gpu'), None)", "P(None, 'gpu')", "jit(step)/tanh", 3)]
    assert capfd.readouterr().err == "something else\n"  # pyright: ignore[reportAttributeAccessIssue]


def test_a_line_is_written_at_once_and_a_part_of_one_at_the_end(tmp_path: Path) -> None:
    """The warning comes in two parts."""
    with open(tmp_path / "stderr", "w") as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with caught() as log:
                os.write(2, b"a line\n" + WARNING[:50].encode())
                for _ in range(500):
                    if (tmp_path / "stderr").read_text() == "a line\n":
                        break
                    time.sleep(0.02)
                assert (tmp_path / "stderr").read_text() == "a line\n"
                os.write(2, WARNING[50:].encode() + b"no line")
        finally:
            os.dup2(before, 2)
            os.close(before)
    assert (tmp_path / "stderr").read_text() == "a line\nno line"
    assert len(log) == 1


def test_the_last_words_of_a_process_that_dies_are_written(environment: dict[str, str]) -> None:
    program = "import os; from shardplan.verify.compiler_log import caught\nwith caught(): os.write(2, b'F0000 last'); os.abort()"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, "F0000 last")


def test_a_process_that_outlives_the_compiler_keeps_its_stderr(environment: dict[str, str]) -> None:
    program = (
        "import subprocess, sys; from shardplan.verify.compiler_log import caught\n"
        "with caught(): later = subprocess.Popen(['sh', '-c', 'read line; echo $line >&2'], stdin=subprocess.PIPE)\n"
        "later.communicate(b'late'); sys.exit(later.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "late\n")
