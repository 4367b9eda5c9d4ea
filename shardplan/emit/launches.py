"""The order in which XLA's client for CPUs runs programs that wait for other processes.

The client has a thread for each device. It starts programs on several devices of a process one after the other, in the order of
their issue, but a program on one device whenever its arguments are there. One that is started ahead of an earlier program keeps a
thread that this needs, and where each waits for another process, none ends. So each kind waits here until the other has ended.
Other platforms run the programs of a device in the order of their issue.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax


@dataclass(frozen=True, slots=True)
class Launch:
    """How a program on these devices of this process is started: on "several", or on "one", of those of several processes."""

    kind: Literal["several", "one"]
    own: tuple[Any, ...]


_running: dict[str, dict[tuple[Any, ...], Any]] = {"several": {}, "one": {}}
"""For each kind, the results of the last program on devices of this process."""


def launch_of(devices: Sequence[Any]) -> Launch | None:
    """How programs on these devices are started; None if they keep no other program waiting."""
    own = tuple(d for d in devices if d.process_index == jax.process_index())
    if jax.process_count() == 1 or not own or own[0].platform != "cpu" or (len(own) == 1 and len(devices) == 1):
        return None
    return Launch("one" if len(own) == 1 else "several", own)


def in_turn(launch: Launch | None, run: Callable[..., Any], *arguments: Any) -> Any:
    """The results of a program, which begins when the programs of the other kind have ended."""
    if launch is None:
        return run(*arguments)
    others = _running["one" if launch.kind == "several" else "several"]
    jax.block_until_ready([x for x in jax.tree.leaves(list(others.values())) if not x.is_deleted()])
    others.clear()
    results = _running[launch.kind][launch.own] = run(*arguments)
    return results
