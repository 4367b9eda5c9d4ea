"""The collectives that XLA's partitioner adds to a user's sharding, in the user's names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shardplan.hlo.reshards import Sent
from shardplan.ir import Collective
from shardplan.plans.score import Added, Replicated
from shardplan.verify.compiler_log import LastResort
from shardplan.verify.given import Compiled

_CALLED = re.compile(
    r"jit\([^()]*\)|\b(?:jvp|transpose|vmap|checkpoint|rematted_computation|remat|while|body|cond|closed_call)\b"
)


def added(unforeseen: Sequence[tuple[Sent, float]], paths: Sequence[str]) -> tuple[Added, ...]:
    """The collectives that were not predicted, by kind and line, most bytes first; ``paths`` are those of the arguments."""
    rows: dict[tuple[Collective, str, str], float] = {}
    for sent, times in unforeseen:
        key = sent.collective.kind, sent.line or "?", _tensor(sent, paths)
        rows[key] = rows.get(key, 0.0) + sent.collective.wire_bytes * times
    found = [Added(kind, nbytes, line, tensor) for (kind, line, tensor), nbytes in rows.items()]
    return tuple(sorted(found, key=lambda row: (-row.bytes, row.kind, row.source, row.tensor)))


def replicated(made: Compiled, paths: Sequence[str]) -> tuple[Replicated, ...]:
    """The values that are gathered whole only to be cut again: first those of XLA's last resort, then most bytes first.

    Where no collective is known for a value of the last resort, its bytes are those that a device lacks of it, once.
    """
    sent: dict[tuple[str, str], tuple[str, float]] = {}
    for one in made.each:
        if one.cut_again:
            key = op_text(one.op_name), one.line or "?"
            sent[key] = _tensor(one, paths), sent.get(key, ("", 0.0))[1] + one.collective.wire_bytes * one.collective.trips
    resorts: dict[tuple[str, str], list[LastResort]] = {}
    for resort, line in made.last_resorts:
        resorts.setdefault((op_text(resort.op_name), line or "?"), []).append(resort)
    rows = [
        Replicated(tensor, key[1], nbytes, "", "", involuntary=False)
        for key, (tensor, nbytes) in sent.items()
        if key not in resorts
    ]
    for key, own in resorts.items():
        estimate = sum(resort.gathered_bytes for resort in own)
        tensor, nbytes = sent.get(key, (key[0], estimate))
        for resort in own:
            share = resort.gathered_bytes / estimate if estimate else 1 / len(own)
            rows.append(Replicated(tensor, key[1], nbytes * share, resort.before, resort.after, involuntary=True))
    return tuple(sorted(rows, key=lambda row: (not row.involuntary, -row.bytes, row.source, row.tensor)))


def _tensor(sent: Sent, paths: Sequence[str]) -> str:
    return paths[sent.argument] if sent.argument >= 0 else op_text(sent.op_name)


def op_text(op_name: str) -> str:
    """JAX's name of an op as a user reads it.

    >>> op_text("jit(run)/transpose(jvp(block_0))/attention/dot_general")
    'dot_general in block_0/attention (backward)'
    """
    words = [w for w in re.split(r"[/()]+", _CALLED.sub("", op_name.split(":")[0])) if w]
    if not words:
        return "a value"
    inside = f" in {'/'.join(words[:-1])}" if words[:-1] else ""
    return words[-1] + inside + (" (backward)" if "transpose(" in op_name else "")
