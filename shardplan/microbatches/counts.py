"""The numbers of microbatches into which a batch divides."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardplan.ir import Program


def batch_rows(program: Program, batch: Sequence[int]) -> int:
    """The rows of the batch, as far as its arguments share them: the greatest common divisor of their first dims."""
    return math.gcd(*(program.tensors[program.inputs[i]].shape[0] for i in batch))


def nearest_divisors(n: int, near: int) -> str:
    """The divisors of n on both sides of a number, as text.

    >>> nearest_divisors(48, 7), nearest_divisors(6, 4), nearest_divisors(8, 32)
    ('6 or 8', '3 or 6', '8')
    """
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below, above = [d for d in divisors if d <= near][-1:], [d for d in divisors if d > near][:1]
    return " or ".join(map(str, below + above))
