"""Runs a function on many items in several processes."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from shardplan.errors import ShardplanError
from shardplan.user_code import users_code

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_processes(function: Callable[[_Item], _Result], items: Sequence[_Item], workers: int) -> Iterator[_Result]:
    """The results of a function on items, as they come, from at most ``workers`` new processes. Ending early ends these.

    Raises:
        ShardplanError: if the function or an item cannot be sent to another process, or a process ends early.
    """
    with users_code(lambda error: _unsent(workers, error)):
        pickle.dumps((function, items))
    # new processes, not forks: JAX has threads, and the lock that one of them holds would be held in a fork forever
    pool = ProcessPoolExecutor(min(workers, len(items)), multiprocessing.get_context("spawn"), _ignore_interrupts)
    processes = pool._processes  # pyright: ignore[reportPrivateUsage]  # terminate_workers comes with Python 3.14
    try:
        for future in as_completed([pool.submit(function, item) for item in items]):
            yield future.result()
    except BrokenProcessPool as error:
        raise ShardplanError("a process of the sweep ended early, perhaps for lack of memory: give fewer workers") from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((processes or {}).values()):
            process.terminate()


def _unsent(workers: int, error: BaseException) -> ShardplanError:
    return ShardplanError(
        f"workers={workers}: the factory or a setting cannot be sent to another process ({' '.join(str(error).split())}): give a "
        "function of a module, or workers=1"
    )


def _ignore_interrupts() -> None:
    """Leaves Ctrl-C to the first process, which ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
