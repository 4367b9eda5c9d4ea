"""The boundary to the user's code: steps, factories and modules, which may raise anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardplan.errors import ShardplanError


@contextmanager
def users_code(told: Callable[[BaseException], ShardplanError]) -> Iterator[None]:
    """Whatever is raised inside becomes the error that ``told`` makes of it, which has it as its cause.

    Our own errors pass, and so does an interrupt from the keyboard. This is the one place that catches every exception: code that
    others wrote has exceptions of its own, and one that leaves by ``sys.exit()`` has failed too.
    """
    try:
        yield
    except ShardplanError:
        raise
    except (Exception, SystemExit) as error:
        raise told(error) from error
