"""Scheduling a DAG of tasks on devices: FD-DPS, HEFT and the proven optimum, and a schedule made anew while it runs.

A task is a number with seconds for each device, an edge the seconds of a transfer; nothing here knows tensors. `schedule_dag`
takes plain tables. `checked` makes a `Dag` of them, `planned` a `TaskSchedule` of a `Dag`, and `reschedule` continues one when a
device slows down, leaves or joins. The rules are FD-DPS's (section 4), see `shardplan.dag.fd_dps` and `planned`. `pipelines` are
schedules on given devices under a limit on what these hold.
"""

from .graph import Dag
from .methods import Method, planned, schedule_dag
from .rescheduling import reschedule
from .schedules import TaskSchedule
from .validation import checked

__all__ = ["Dag", "Method", "TaskSchedule", "checked", "planned", "reschedule", "schedule_dag"]
