# pyright: basic
"""Arrays that were donated and are deleted: refused where their values are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer

from shardplan.errors import ShardplanError


def is_deleted(x: Any) -> bool:
    """Whether this is an array whose memory was given away."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def deleted_error(path: str) -> ShardplanError:
    """The error for a deleted array, by its path in the arguments."""
    return ShardplanError(
        f"{path} was donated to an earlier call and is deleted, or it shares memory with an array that was (as results of "
        "plan.put may): pass what that call returned, donate a copy (jnp.copy), or do not donate it (donate_argnums)"
    )


def refuse_deleted(paths: Sequence[str], leaves: Sequence[Any]) -> None:
    """Checks that all leaves of the arguments have values.

    Raises:
        ShardplanError: for one that is deleted.
    """
    for path, x in zip(paths, leaves, strict=False):
        if is_deleted(x):
            raise deleted_error(path)
