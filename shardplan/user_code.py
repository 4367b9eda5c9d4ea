"""The boundary to the user's code: steps, factories and modules, which may raise anything, and the paths of its files."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardplan.errors import ShardplanError

_OTHERS = (str(Path(__file__).parent), *(sysconfig.get_path(p) for p in ("purelib", "platlib", "stdlib", "scripts")))

NOT_THE_USERS = ("<frozen ", *(path + os.sep for path in dict.fromkeys(_OTHERS)))
"""How the paths of files begin that are not the user's: those of shardplan, installed libraries and Python's own."""


@contextmanager
def users_code(told: Callable[[BaseException], ShardplanError]) -> Iterator[None]:
    """Turns an exception raised inside into the error that ``told`` makes of it; the exception is its cause.

    `ShardplanError` and `KeyboardInterrupt` pass unchanged. This is the one place that catches every exception: a user's code
    may raise its own, and code that calls ``sys.exit()`` has failed too.
    """
    try:
        yield
    except ShardplanError:
        raise
    except (Exception, SystemExit) as error:
        raise told(error) from error


def shown_path(file: str) -> str:
    """A path as people read it, relative if it lies below the current directory: a saved plan is the same on other machines."""
    return file.removeprefix(os.path.join(os.getcwd(), ""))


def text_of(error: BaseException) -> str:
    """What an exception says; a user's exception whose text cannot be made says so."""
    try:
        with users_code(lambda other: ShardplanError(f"(its text raises {type(other).__name__})")):
            return str(error)
    except ShardplanError as told:
        return str(told)
