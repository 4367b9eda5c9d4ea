"""Numbers of positional arguments, as a user gives them: negative ones count from the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from shardplan.errors import ShardplanError


def positions(numbers: Sequence[int] | int, count: int, what: str) -> tuple[int, ...]:
    """Resolves ``numbers`` of ``count`` arguments: counted from 0, sorted, each once; ``what`` names the option in errors.

    >>> positions((-1, 0), 3, "donate_argnums")
    (0, 2)

    Raises:
        ShardplanError: for a number that names no argument, or that is not an integer.
    """
    result: set[int] = set()
    given = (numbers,) if isinstance(numbers, int) else numbers
    if not isinstance(given, Iterable) or not all(isinstance(n, int) for n in given):
        raise ShardplanError(f"{what}={numbers!r}: give whole numbers, the positions of arguments, or () for none")
    for n in given:
        if not -count <= n < count:
            valid = f"they are numbered 0 to {count - 1}, or -1 to -{count} from the end" if count else "it takes none"
            raise ShardplanError(f"{what}={n} names no argument: the step takes {count}; {valid}")
        result.add(n % count)
    return tuple(sorted(result))


def tuple_of(trees: Sequence[Any]) -> Any:
    """The tree of a tuple, from the trees of its items."""
    return jax.tree.structure(tuple(jax.tree.unflatten(tree, range(tree.num_leaves)) for tree in trees))


def leaves_of(tree: Any, numbers: Sequence[int]) -> tuple[int, ...]:
    """The positions of the leaves of the arguments ``numbers`` among all leaves of ``tree``, a `jax.tree.structure`."""
    sizes = [child.num_leaves for child in tree.children()]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(k for i in sorted(numbers) for k in range(starts[i], starts[i] + sizes[i]))
