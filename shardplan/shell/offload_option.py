"""The option ``offload=``: the arguments that stay in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from shardplan.errors import ShardplanError
from shardplan.mesh import Cluster

Hosted = tuple[str, ...] | Literal["auto"]
"""The globs of the paths of arguments that stay in host memory, or "auto" where the memory limit decides."""


def read_hosted(given: str | Sequence[str], cluster: Cluster) -> Hosted:
    """The arguments that stay in host memory on this cluster; no globs for "none".

    Raises:
        ShardplanError: as `hosted`.
        ClusterError: if the device has no figure for its link to the host.
    """
    if wanted := hosted(given):
        cluster.host_link_bytes_per_s()
    return wanted


def hosted(given: str | Sequence[str]) -> Hosted:
    """The arguments that stay in host memory, on any cluster; no globs for "none" and for an empty list.

    Raises:
        ShardplanError: for a value that is neither one of the words nor globs.
    """
    globs = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if given == "none" or globs == ():
        return ()
    if given != "auto" and (globs is None or not all(isinstance(glob, str) for glob in globs)):
        raise ShardplanError(
            f"unsupported offload={given!r}: use 'none', 'auto', or a list of globs of argument paths, such as ['opt_state/*']"
        )
    return globs or "auto"


def read_offload(texts: Sequence[str]) -> str | tuple[str, ...] | None:
    """The value of ``--offload``: a word, or globs; None where it is not given.

    >>> read_offload(["*/mu/*", "*/nu/*"])
    ('*/mu/*', '*/nu/*')
    """
    if not texts:
        return None
    return texts[0] if len(texts) == 1 and texts[0] in _WORDS else tuple(texts)


_WORDS = ("none", "auto")
