"""Tofu's Swapping (section 7.1): a model on one GPU whose blocks of memory are swapped over the link to the host.

A block that a kernel needs is swapped in before, in the order of the kernels. It waits for the link and for the memory, not for
the kernels before (the prefetching of vDNN). Memory is that of dead blocks, or of blocks that are swapped out. Which: the one
that is needed last (``policy="farthest"``, Belady's choice), or of those that none of the next `SOON` kernels needs the least
recently used (``"lru"``: the paper's, with its dataflow analysis). A block that has not changed since it was copied is dropped.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.tofu_blocks import Trace

Policy = Literal["farthest", "lru"]
HOST_BYTES_PER_S = 10e9
"""The CPU-GPU bandwidth of a p2.8xlarge (Tofu, section 7.1), which all 8 GPUs share (section 7.2). Taken for each direction."""
SOON = 16
"""Blocks of this many next kernels stay under "lru": two cells of an LSTM. The paper states no number."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """A step in the steady state: its seconds, and the bytes that one GPU swaps in and out."""

    seconds: float
    in_bytes: float
    out_bytes: float


def swapped(trace: Trace, memory_bytes: float, bytes_per_s: float, policy: Policy = "farthest") -> Swapped | None:
    """The second of two steps; None where a kernel needs more than the memory."""
    if trace.largest_kernel_bytes > memory_bytes:
        return None
    swapper = _Swapper(trace, memory_bytes, bytes_per_s, policy)
    first = swapper.step(0)
    second = swapper.step(1)
    return Swapped(*(b - a for a, b in zip(first, second, strict=True)))


class _Swapper:
    """The memory and the clocks of one GPU. Positions count the kernels of both steps."""

    def __init__(self, trace: Trace, memory_bytes: float, bytes_per_s: float, policy: Policy) -> None:
        self.trace, self.bytes_per_s, self.policy = trace, bytes_per_s, policy
        self.free: deque[tuple[float, float]] = deque([(0.0, memory_bytes)])  # (since when, bytes)
        self.resident: dict[int, float] = {}  # by block: the end of the last kernel or copy that used it
        self.on_host = set(range(trace.arguments))
        self.used: dict[int, int] = {}  # by block: the last position that needs it
        self.positions = _positions(trace)
        self.computed_s = self.in_s = self.out_s = self.in_bytes = self.out_bytes = 0.0

    def step(self, number: int) -> tuple[float, float, float]:
        """(seconds so far, bytes in so far, bytes out so far) after this step."""
        for i, _ in enumerate(self.trace.kernels):
            self.kernel(i, number * len(self.trace.kernels) + i)
        return self.computed_s, self.in_bytes, self.out_bytes

    def kernel(self, i: int, position: int) -> None:
        """Brings in what a kernel needs, and runs it."""
        kernel = self.trace.kernels[i]
        needed = kernel.touches
        ready = max((self.bring(b, position, needed) for b in needed), default=0.0)
        self.computed_s = max(self.computed_s, ready) + kernel.seconds
        for b in needed:
            self.resident[b] = self.computed_s
            self.used[b] = position
            if b >= self.trace.arguments and self.positions[b][-1] == i:
                self.free.append((self.resident.pop(b), self.trace.nbytes[b]))
                self.on_host.discard(b)
        self.on_host.difference_update(kernel.writes)

    def bring(self, block: int, position: int, needed: Sequence[int]) -> float:
        """Makes a block resident, and returns since when it is."""
        if block in self.resident:
            return self.resident[block]
        since = self.allocate(self.trace.nbytes[block], position, needed)
        if block in self.on_host:
            self.in_s = since = max(since, self.in_s) + self.trace.nbytes[block] / self.bytes_per_s
            self.in_bytes += self.trace.nbytes[block]
        self.resident[block] = since
        return since

    def allocate(self, nbytes: float, position: int, needed: Sequence[int]) -> float:
        """Takes free memory, of that which has been free for longest first, and returns since when all of it is free."""
        while sum(n for _, n in self.free) < nbytes:
            self.evict(self.victim(position, needed))
        since = 0.0
        while nbytes > 0:
            at, size = self.free.popleft()
            since, taken = max(since, at), min(size, nbytes)
            if size > taken:
                self.free.appendleft((at, size - taken))
            nbytes -= taken
        return since

    def evict(self, block: int) -> None:
        """Frees the memory of a block, after a copy to the host if there is none."""
        since, nbytes = self.resident.pop(block), self.trace.nbytes[block]
        if block not in self.on_host:
            self.out_s = since = max(since, self.out_s) + nbytes / self.bytes_per_s
            self.out_bytes += nbytes
            self.on_host.add(block)
        self.free.append((since, nbytes))

    def victim(self, position: int, needed: Sequence[int]) -> int:
        """The block to swap out."""
        held = [b for b in self.resident if b not in needed]
        if self.policy == "farthest":
            return max(held, key=lambda b: (self.next_use(b, position), b))
        late = [b for b in held if self.next_use(b, position) > position + SOON]
        return min(late or held, key=lambda b: (self.used.get(b, -1), b))

    def next_use(self, block: int, position: int) -> int:
        """The next position that needs a block; arguments are needed again in the next step."""
        at, steps, i = self.positions[block], position // len(self.trace.kernels), position % len(self.trace.kernels)
        n = bisect_right(at, i)
        return (at[n] if n < len(at) else at[0] + len(self.trace.kernels)) + steps * len(self.trace.kernels)


def _positions(trace: Trace) -> list[list[int]]:
    """For each block the kernels that touch it, in order."""
    found: list[list[int]] = [[] for _ in trace.nbytes]
    for i, kernel in enumerate(trace.kernels):
        for b in kernel.touches:
            found[b].append(i)
    return found
