"""The pipeline schedules of the literature as orders of tasks, each for any number of devices and microbatches that it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .pipelines import PassKind, Pipeline, PipelineTask, folded, looped


def gpipe(devices: int, microbatches: int) -> Pipeline:
    """All forward passes, then all backward passes (Huang et al. 2019, section 2.3)."""
    passes = range(microbatches)
    orders = [
        [*(PipelineTask("forward", d, k) for k in passes), *(PipelineTask("both", d, k) for k in passes)] for d in range(devices)
    ]
    return Pipeline("GPipe", looped(devices, 1), _frozen(orders))


def one_f_one_b(devices: int, microbatches: int) -> Pipeline:
    """1F1B: a device begins as many microbatches as devices follow it, itself included, then one for each that it ends
    (PipeDream-Flush; Narayanan et al. 2021, section 2.2).
    """
    orders: list[list[PipelineTask]] = []
    for d in range(devices):
        ahead = min(devices - d, microbatches)
        order = [PipelineTask("forward", d, k) for k in range(ahead)]
        for k in range(microbatches):
            order.append(PipelineTask("both", d, k))
            if k + ahead < microbatches:
                order.append(PipelineTask("forward", d, k + ahead))
        orders.append(order)
    return Pipeline("1F1B", looped(devices, 1), _frozen(orders))


def interleaved(devices: int, microbatches: int, each: int = 2) -> Pipeline:
    """Interleaved 1F1B with ``each`` chunks a device: microbatches go round in groups of ``devices``, which must divide them
    (Narayanan et al. 2021, section 2.2).
    """
    assert microbatches % devices == 0, "interleaved 1F1B takes microbatches in groups of as many as there are devices"
    total, round_ = microbatches * each, devices * each
    orders: list[list[PipelineTask]] = []
    for d in range(devices):

        def at(n: int, d: int = d, *, kind: PassKind) -> PipelineTask:
            turn = n % round_ // devices
            chunk = turn if kind == "forward" else each - 1 - turn
            return PipelineTask(kind, chunk * devices + d, n // round_ * devices + n % devices)

        ahead = min(2 * (devices - d - 1) + (each - 1) * devices + 1, total)
        order = [at(n, kind="forward") for n in range(ahead)]
        for n in range(total):
            order.append(at(n, kind="both"))
            if n + ahead < total:
                order.append(at(n + ahead, kind="forward"))
        orders.append(order)
    return Pipeline("interleaved 1F1B", looped(devices, each), _frozen(orders))


def zb_h1(devices: int, microbatches: int) -> Pipeline:
    """ZB-H1: 1F1B with the gradients of weights put off, on device d by d microbatches, so that every device has as many
    microbatches in flight as the first (Qi et al. 2023, section 2.3).
    """
    orders: list[list[PipelineTask]] = []
    for d in range(devices):
        ahead = min(devices - d, microbatches)
        order = [PipelineTask("forward", d, k) for k in range(ahead)]
        for k in range(microbatches):
            order.append(PipelineTask("backward", d, k))
            if k >= d:
                order.append(PipelineTask("weight", d, k - d))
            if k + ahead < microbatches:
                order.append(PipelineTask("forward", d, k + ahead))
        order += [PipelineTask("weight", d, k) for k in range(max(microbatches - d, 0), microbatches)]
        orders.append(order)
    return Pipeline("ZB-H1", looped(devices, 1), _frozen(orders))


def zb_v(devices: int, microbatches: int) -> Pipeline:
    """ZB-V: two chunks a device, folded like a V (Qi et al. 2023, section 6). Fewer microbatches than fill the devices run as
    part of a longer schedule.
    """
    count = max(2 * devices - 1, microbatches)
    orders: list[list[PipelineTask]] = []
    for d in range(devices):
        w = _Writer((d, 2 * devices - 1 - d))
        w.add("forward", 0, 2 * (devices - d) - 1)
        for _ in range(d):
            w.add("forward", 1)
            w.add("forward", 0)
        for _ in range(devices - d):
            w.add("forward", 1)
            w.split(1)
        while w.done["forward", 1] < w.done["forward", 0] or w.done["forward", 0] < count:
            if w.done["forward", 0] < count:
                w.add("forward", 0)
            w.split(0)
            w.add("forward", 1)
            w.split(1)
        for _ in range(d):
            w.add("backward", 0)
            w.add("backward", 1)
        for _ in range(devices - d):
            w.add("backward", 0)
            w.add("weight", 0)
        w.rest()
        orders.append([work for work in w.order if work.microbatch < microbatches])
    return Pipeline("ZB-V", folded(devices), _frozen(orders))


def dualpipe_v(devices: int, microbatches: int) -> Pipeline:
    """DualPipe-V: both halves of a folded pipeline run a forward and a backward pass in turn, from two microbatches a device on
    (DeepSeek-AI, https://github.com/deepseek-ai/DualPipe). Passes that it runs at once take as long here as one after the other.
    """
    assert microbatches >= 2 * devices, "DualPipe-V is for at least two microbatches a device"
    orders: list[list[PipelineTask]] = []
    paired: set[PipelineTask] = set()
    for d in range(devices):
        w, behind = _Writer((d, 2 * devices - 1 - d)), devices - d - 1
        w.add("forward", 0, 2 * behind)
        for _ in range(d + 1):
            w.add("forward", 0)
            w.add("forward", 1)
        for _ in range(behind):
            w.split(1)
            w.add("forward", 1)
        for n in range(microbatches - 2 * devices + d + 1):
            w.add("forward", 0)
            if n or behind:
                paired.add(w.order[-1])
            w.add("both", 1)
            w.add("forward", 1)
            paired.add(w.order[-1])
            w.add("both", 0)
        for _ in range(behind):
            w.add("both", 1)
            w.add("forward", 1)
            paired.add(w.order[-1])
            w.add("both", 0)
        half = (d + 1) // 2
        for n in range(d + 1):
            w.add("backward" if n > half or (n == half and d % 2) else "both", 1)
            w.add("backward" if n >= half else "both", 0)
        for _ in range(behind):
            w.oldest()
            w.add("backward", 0)
        w.rest()
        orders.append(w.order)
    return Pipeline("DualPipe-V", folded(devices), _frozen(orders), frozenset(paired))


def _one(make: Callable[[int, int], Pipeline]) -> Callable[[int, int, int], Pipeline | None]:
    return lambda devices, microbatches, each: make(devices, microbatches) if each == 1 else None


KNOWN: tuple[Callable[[int, int, int], Pipeline | None], ...] = (
    _one(gpipe),
    _one(one_f_one_b),
    _one(zb_h1),
    lambda devices, microbatches, each: (
        interleaved(devices, microbatches, each) if each > 1 and microbatches % devices == 0 else None
    ),
    lambda devices, microbatches, each: zb_v(devices, microbatches) if each == 2 else None,
    lambda devices, microbatches, each: dualpipe_v(devices, microbatches) if each == 2 and microbatches >= 2 * devices else None,
)
"""Each schedule of so many devices, microbatches and chunks a device; None where it is for others."""


def known_on(device: tuple[int, ...], microbatches: int) -> Iterator[Pipeline]:
    """The schedules of the literature that run each chunk on the given device."""
    devices = max(device) + 1
    for make in KNOWN:
        own = make(devices, microbatches, len(device) // devices)
        if own is not None and own.device == device:
            yield own


class _Writer:
    """Writes the order of a device with two chunks: each kind of task takes the next microbatch of its chunk."""

    def __init__(self, chunks: tuple[int, int]) -> None:
        self.order: list[PipelineTask] = []
        self.done: dict[tuple[PassKind, int], int] = dict.fromkeys(
            ((kind, half) for kind in ("forward", "backward", "weight") for half in (0, 1)), 0
        )
        self._chunks = chunks
        self._late: list[PipelineTask] = []  # gradients of weights that are put off

    def add(self, kind: PassKind, half: int, count: int = 1) -> None:
        """Adds tasks of one chunk; ``half`` 0 is the one on the way down."""
        passes: PassKind = "backward" if kind == "both" else kind
        for _ in range(count):
            k = self.done[passes, half]
            self.order.append(PipelineTask(kind, self._chunks[half], k))
            self.done[passes, half] += 1
            if kind == "backward":
                self._late.append(PipelineTask("weight", self._chunks[half], k))
            if kind == "weight":
                self._late.remove(PipelineTask("weight", self._chunks[half], k))

    def split(self, half: int) -> None:
        """Adds both halves of a backward pass, one after the other."""
        self.add("backward", half)
        self.order.append(self._late.pop())
        self.done["weight", half] += 1

    def oldest(self) -> None:
        """Adds the gradients of weights that were put off first."""
        self.order.append(self._late.pop(0))

    def rest(self) -> None:
        """Adds all gradients of weights that were put off."""
        self.order += self._late
        self._late = []


def _frozen(orders: list[list[PipelineTask]]) -> tuple[tuple[PipelineTask, ...], ...]:
    return tuple(map(tuple, orders))
