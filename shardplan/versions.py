"""The releases of JAX that shardplan is tested with, and what to say of any other.

No JAX is imported: a version is read from the metadata of the installed package.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

TESTED: Mapping[str, str] = {"0.10.2": "3.11", "0.11.2": "3.12", "0.12.0.1": "3.13"}
"""Each release of JAX (and of jaxlib) on which the whole test suite passes, with the Python that it was run on, oldest first.

`make test-matrix` runs the suite on all of them; the ranges in pyproject.toml admit these minor releases and no others.
"""

OLDEST, NEWEST = next(iter(TESTED)), next(reversed(TESTED))


@cache
def jax_version() -> str:
    """The version of the installed JAX; ``none`` if there is none."""
    try:
        return version("jax")
    except PackageNotFoundError:
        return "none"


def minor(release: str) -> tuple[int, ...]:
    """The first two numbers of a version.

    >>> minor("0.12.0.1"), minor("0.13.0.dev20261101")
    ((0, 12), (0, 13))
    """
    return tuple(int(n) for n in re.findall(r"\d+", release)[:2])


@cache
def nearest_tested(release: str) -> str:
    """The tested release with the same first two numbers, else the newest.

    >>> nearest_tested("0.11.0"), nearest_tested("0.99.1") == NEWEST
    ('0.11.2', True)
    """
    return next((tested for tested in TESTED if minor(tested) == minor(release)), NEWEST)


@cache
def is_tested(release: str) -> bool:
    """Whether the suite was run on this minor release of JAX."""
    return minor(release) in {minor(tested) for tested in TESTED}


def is_within(since: str | None, until: str | None) -> bool:
    """Whether the installed JAX is at least the minor release ``since``, and older than ``until``; None is no bound."""
    installed = minor(jax_version())
    return (since is None or installed >= minor(since)) and (until is None or installed < minor(until))


def may_have(releases: Collection[str], installed: str | None = None) -> bool:
    """Whether the installed JAX may have a fault that was found in these tested releases: an untested one may have any."""
    installed = installed or jax_version()
    return not is_tested(installed) or nearest_tested(installed) in releases


def remedy() -> str:
    """What to do where the installed JAX differs from what shardplan knows."""
    if is_tested(jax_version()):
        return "this release is tested, so shardplan is at fault: please report it"
    return f"install a release of JAX that shardplan is tested with ({', '.join(TESTED)}), or a newer shardplan"


def warn_of_untested(release: str) -> None:
    """Warns once if this minor release of JAX is not among the tested ones."""
    if release != "none" and not is_tested(release):
        warnings.warn(
            f"JAX {release} is untested with this shardplan, whose tests run on JAX {', '.join(TESTED)}: primitives may be "
            "missing or have changed, and cuts that its compiler gets wrong are not known",
            stacklevel=3,
        )
