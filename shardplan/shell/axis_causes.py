"""Names microbatches as the cause where they leave an axis too few samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardplan.errors import AxisError
from shardplan.ir import Microbatches, Program
from shardplan.microbatches.counts import batch_rows, nearest_divisors


@contextmanager
def naming_microbatches(program: Program, parts: Microbatches) -> Iterator[None]:
    """Explains an axis over the batch that divides the whole batch and not a microbatch of it. ``program`` is the whole step.

    Raises:
        AxisError: with the numbers of microbatches that leave enough samples, or as it was where these are not the cause.
    """
    try:
        yield
    except AxisError as error:
        if parts.count == 1 or error.loops != "batch":
            raise
        rows, size = batch_rows(program, parts.batch), error.size
        each = rows // parts.count
        if rows % size or each % size == 0:
            raise
        raise AxisError(
            f"axes: {error.purpose}={size} does not divide the batch of a microbatch, {each} of {rows} samples: instead of "
            f"microbatches={parts.count}, give {nearest_divisors(rows // size, parts.count)}, or a smaller {error.purpose!r}",
            purpose=error.purpose,
            size=size,
            loops=error.loops,
        ) from error
