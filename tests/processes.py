"""Worker processes that answer tasks one after another, and may die or hang without harm to the others."""

from __future__ import annotations

import os
import pickle
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax

ROOT = Path(__file__).parents[1]
T = TypeVar("T")


@dataclass(frozen=True)
class Lost:
    """A task without an answer: its process ``hung``, or ended by itself; ``detail`` is the last that was heard of it."""

    hung: bool
    detail: str


UNOPTIMIZED = "--xla_backend_optimization_level=0"
"""Machine code as it comes: compiled in half the time, and partitioned alike."""


class Worker:
    """A process that runs ``module``, which calls `serve`; a new one is started after every ``life`` tasks."""

    def __init__(self, module: str, *, limit_s: float, life: int) -> None:
        self._module, self._limit_s, self._life = module, limit_s, life
        own = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT), "XLA_FLAGS": UNOPTIMIZED}
        self._environment = {**os.environ, **own}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `close`
        self._done = 0

    def ask(self, task: Any) -> Any:
        """The answer to a task, or `Lost`."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with _broken_pipes():  # it died idle: there is no answer to read
            pickle.dump(task, process.stdin)
            process.stdin.flush()
        if not select.select([process.stdout], [], [], self._limit_s)[0]:
            self.stop()
            return Lost(True, f"over {self._limit_s:.0f} s")
        try:
            return pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            code = process.wait()
            detail = self._last_words()
            self.stop()
            return Lost(False, f"exit {code}: {detail}")

    def stop(self) -> None:
        """Ends the process."""
        process, self._process, self._done = self._process, None, 0
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with _broken_pipes():
                pipe.close()

    def close(self) -> None:
        """Ends the process for good."""
        self.stop()
        self._errors.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._done == self._life:
            self.stop()
        if self._process is None:
            self._errors.seek(0)
            self._errors.truncate()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd=ROOT, env=self._environment,
            )  # fmt: skip
        self._done += 1
        return self._process

    def _last_words(self) -> str:
        """The fatal line of what a dead process wrote, or its last one."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 100_000))
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        fatal = [line for line in lines if line.startswith("F") or "Check failed" in line]
        return (fatal or lines or ["nothing written"])[-1][:300]


W = TypeVar("W", bound=Worker)


def run_all(tasks: Iterable[T], run: Callable[[W, T], None], start: Callable[[], W], jobs: int) -> None:
    """Runs each task with one of so many workers; ``run`` is called from several threads, but never at once for a worker."""
    pending = iter(tasks)
    lock = threading.Lock()

    def work() -> None:
        worker = start()
        try:
            while True:
                with lock:
                    task = next(pending, None)
                if task is None:
                    return
                run(worker, task)
        finally:
            worker.close()

    with ThreadPoolExecutor(jobs) as threads:
        for future in [threads.submit(work) for _ in range(jobs)]:
            future.result()


def outcome(run: Callable[[], T]) -> T | BaseException:
    """What ``run`` returns or raises: whatever a planner or a compiler raises is what is looked for here."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(run)
        return future.exception() or future.result()


def serve(answer: Callable[[Any], Any], *, kept: int) -> None:
    """Answers the tasks of a `Worker` on eight simulated devices; compiled code is thrown away after every ``kept`` of them.

    What is printed goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    done = 0
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(answer(task), answers)
        answers.flush()
        done += 1
        if done % kept == 0:
            jax.clear_caches()


@contextmanager
def _broken_pipes() -> Iterator[None]:
    """Bytes that nobody reads any more are dropped."""
    try:
        yield
    except BrokenPipeError:
        return
