"""Every error that a user can cause.

Each says what is wrong, with which values, where it comes from and what to do; the exception carries the data. A bug in shardplan
is an ``assert``, never one of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardplan.versions import is_tested, jax_version, remedy


class ShardplanError(Exception):
    """The base of all errors that a user can cause. The command line prints it as one line and exits with code 2."""


class ClusterError(ShardplanError):
    """A cluster that cannot be read or is invalid. ``where`` names the file and the key."""

    def __init__(self, message: str, *, where: str | None = None) -> None:
        super().__init__(f"{where}: {message}" if where else message)
        self.where = where


class AxisError(ClusterError):
    """An axis that the step cannot use for its ``purpose``. ``size`` is what was asked for, ``loops`` the kind of loops that it
    cuts.
    """

    def __init__(self, message: str, *, purpose: str, size: int, loops: str | None) -> None:
        super().__init__(message)
        self.purpose = purpose
        self.size = size
        self.loops = loops


class UnequalDevicesError(ClusterError):
    """A cluster of which single devices or links differ, where all must be equal. ``key`` is that of the cluster file."""

    def __init__(self, cluster: str, key: str, singles: Sequence[str]) -> None:
        these = ", ".join(singles[:4]) + (f" and {len(singles) - 4} more" if len(singles) > 4 else "")
        super().__init__(
            f"gives {these} other figures, but this needs equal devices: use `shardplan place`, or remove the key",
            where=f"{cluster}: {key}",
        )
        self.key = key
        self.singles = tuple(singles)


class GroupsError(ShardplanError, AttributeError):
    """What only a plan on all devices has, asked of one on groups of devices. ``attribute`` is its name."""

    def __init__(self, attribute: str, remedy: str) -> None:
        super().__init__(f"a plan with groups of devices has no {attribute}: {remedy}")
        self.attribute = attribute


class TraceError(ShardplanError):
    """A step that cannot be traced, or arguments that do not fit it."""


class ArgumentError(ShardplanError):
    """An argument of another shape or dtype than was planned. ``path`` names it; ``planned`` and ``found`` are types."""

    def __init__(
        self, path: str, planned: str, found: str, *, remedy: str = "plan for these arguments, or pass that shape and dtype"
    ) -> None:
        super().__init__(f"{path} is {found}, but the plan was made for {planned}: {remedy}")
        self.path = path
        self.planned = planned
        self.found = found


class JaxVersionError(ShardplanError):
    """A primitive that the installed JAX records otherwise than the tested releases do; ``primitive`` is its name."""

    def __init__(self, primitive: str, change: str) -> None:
        super().__init__(f"JAX {jax_version()} has changed the primitive {primitive!r}: {change}; {remedy()}")
        self.primitive = primitive


class CompilerDiedError(ShardplanError):
    """A program that crashes XLA's compiler, found by compiling it in a child process; ``signal`` says how the child ended."""

    def __init__(self, signal: str, reason: str) -> None:
        super().__init__(
            f"XLA's compiler of JAX {jax_version()} dies of this program ({signal}): {reason}; change that part of the step, "
            f"choose another backend, or {remedy()}"
        )
        self.signal = signal


class UndescribedPrimitiveError(ShardplanError):
    """A primitive that no description covers.

    ``primitive`` is its name (for a kernel, the name to register), ``source`` the user's source line.
    """

    def __init__(
        self,
        primitive: str,
        source: str,
        *,
        operands: Sequence[tuple[int, ...]] = (),
        results: Sequence[tuple[int, ...]] = (),
    ) -> None:
        super().__init__(
            f"no description of the primitive {primitive!r}, used at {source}: "
            + ("" if is_tested(jax_version()) else f"JAX {jax_version()} is untested: {remedy()}; otherwise, ")
            + (
                _registration_lines(primitive, operands, results)
                if ":" in primitive or results
                else f"describe it with @shardplan.tdl.rule({primitive!r}), "
            )
            + f"or allow it to run whole on every device with plan(..., replicate=({primitive!r},))"
        )
        self.primitive = primitive
        self.source = source


class UncompiledPrimitiveError(ShardplanError):
    """A primitive that XLA compiles for one device only. ``primitive`` is its name, ``source`` the user's source line."""

    def __init__(self, primitive: str, source: str, remedy: str) -> None:
        super().__init__(f"XLA cannot compile the primitive {primitive!r}, used at {source}, for several devices: {remedy}")
        self.primitive = primitive
        self.source = source


def _registration_lines(primitive: str, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> str:
    """The three lines that register a primitive of these shapes, cut along the leading dim of its results if they share one."""
    leading = {s[0] if s else 0 for s in results}
    shared = len(leading) == 1 and leading != {0} and any(s[:1] == results[0][:1] for s in operands)
    names = [f"x{i}" for i in range(len(operands))]
    firsts = ["i0" if shared and s[:1] == results[0][:1] else ":" for s in operands]
    slices = [
        f"{x}[{', '.join([first, *[':'] * len(s)][: len(s)]) or '()'}]"
        for x, first, s in zip(names, firsts, operands, strict=True)
    ]
    lambdas = [_opaque_lambda(slices, s, 1 if shared else 0) for s in results]
    body = lambdas[0] if len(lambdas) == 1 else f"({', '.join(lambdas)})"
    if primitive == "pallas_call:?":
        return "the kernel has no name to describe it by: name it with pallas_call(..., name=), "
    run = "" if primitive.startswith("ffi_call:") else ", run=function_that_calls_it"
    target, comment = (
        (repr(primitive), "") if ":" in primitive else ("the_primitive", "  # the Primitive; without parameters it needs no run=")
    )
    return (
        f"describe what it reads (here {'only the leading dim is cut' if shared else 'nothing is cut'}):\n"
        f"    @shardplan.register({target}{run}){comment}\n    def describe({', '.join(names)}):\n        return {body}\n"
    )


def _opaque_lambda(slices: Sequence[str], result: tuple[int, ...], shared: int) -> str:
    loops = [f"i{d}" for d in range(len(result))]
    hidden = f"[{', '.join(loops[shared:])}]" if loops[shared:] else ""
    return f"lambda {', '.join(loops)}: tdl.Opaque()({', '.join(slices)}){hidden}"


class DescriptionError(ShardplanError):
    """A TDL description that cannot be analysed. ``expression`` is the offending part."""

    def __init__(self, message: str, *, expression: str | None = None) -> None:
        super().__init__(f"{message}: {expression}" if expression else message)
        self.expression = expression


class MisfitError(DescriptionError):
    """A description whose rank, or whose number of operands or results, is not that of its call."""


class PinError(ShardplanError):
    """A pin that matches no argument, names no axis or does not divide; or pins that contradict each other.

    ``pins`` are the globs of a smallest set of pins that cannot hold together: lifting any one of them is enough. ``reason`` is
    the message without the words that name the pin.
    """

    def __init__(self, message: str, *, pins: Sequence[str] = (), reason: str = "") -> None:
        super().__init__(message)
        self.pins = tuple(pins)
        self.reason = reason or message


class OffloadError(ShardplanError):
    """An argument that cannot stay in host memory. ``path`` names it (or the glob), ``reason`` says why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"offload: {path} {reason}; host memory is for arrays that only the update reads and that the step gives back: name "
            "those (an optimizer's moments) with globs of argument paths, or give offload='auto'"
        )
        self.path = path
        self.reason = reason


class MemoryLimitError(ShardplanError):
    """No plan fits in the memory limit ``limit_bytes``; the smallest plan found needs ``smallest_bytes``.

    ``pins`` are the pins in the way, each with the bytes per device that it holds beyond its smallest layout. With ``together``
    they alone exceed the limit, and no fewer of them are known to. ``unfinished``: the time budget ended the search, so more time
    may find a smaller plan. ``rematerialised``: activations were recomputed where that helps. ``offloaded``: arguments or
    activations were in host memory. ``microbatched``: the batch is cut over time. ``grouped``: the step runs on groups of
    devices, with activations neither recomputed nor in host memory. ``origin`` says where the limit comes from, if not from the
    user.
    """

    def __init__(
        self,
        limit_bytes: int,
        smallest_bytes: int,
        *,
        detail: str = "",
        pins: Mapping[str, int] | None = None,
        together: bool = False,
        unfinished: bool = False,
        rematerialised: bool = False,
        offloaded: bool = False,
        microbatched: bool = False,
        grouped: bool = False,
        origin: str = "",
    ) -> None:
        limit, least = size_text(limit_bytes), size_text(smallest_bytes)
        if limit == least:  # equal as text: show every byte
            limit, least = f"{limit_bytes:,} bytes", f"{smallest_bytes:,} bytes"
        held = ", ".join(f"{pin} ({size_text(nbytes)} more than its smallest layout)" for pin, nbytes in (pins or {}).items())
        remedies = [f"raise the memory limit to {sufficient_limit(smallest_bytes)}", "use more devices"]
        remedies += ["set remat='auto'"] if not rematerialised and not grouped else []
        remedies += ["set microbatches="] if not microbatched and not grouped else []
        remedies += ["set offload='auto'"] if not offloaded and not grouped else []
        remedies += ["lift pins"] if held else []
        super().__init__(
            ("no plan found in the time budget" if unfinished else "no plan")
            + f" fits in {limit} per device{f' ({origin})' if origin else ''}: the smallest found"
            + (", with activations recomputed where that helps," if rematerialised else "")
            + (" with values in host memory" if offloaded else "")
            + f" needs {least}"
            + (f" ({detail})" if detail else "")
            + (f"; pins {'that alone exceed it' if together else 'in the way'}: {held}" if held else "")
            + ("; give it more time (time_budget_s)" if unfinished else "")
            + f"; {', '.join(remedies[:-1])} or {remedies[-1]}"
        )
        self.detail = detail
        self.limit_bytes = limit_bytes
        self.smallest_bytes = smallest_bytes
        self.pins = dict(pins or {})
        self.unfinished, self.grouped = unfinished, grouped
        self.rematerialised = rematerialised
        self.offloaded, self.microbatched = offloaded, microbatched


class CheckError(ShardplanError):
    """A step that computes something else under its plan than on one device.

    ``path`` names the leaf of the result that is furthest off, ``index`` the place in it, ``single`` and ``sharded`` its values
    there; ``unequal`` are all leaves that differ by more than their ``tolerance``. If the step compiled for one device is wrong
    too, ``reference`` says what it gets wrong, and ``single`` is the value of the step op by op.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str = "",
        index: Sequence[int] = (),
        single: Any = None,
        sharded: Any = None,
        tolerance: float = 0.0,
        unequal: Sequence[str] = (),
        reference: Any = None,
    ) -> None:
        super().__init__(message)
        self.reference = reference
        self.path = path
        self.index = tuple(index)
        self.single = single
        self.sharded = sharded
        self.tolerance = tolerance
        self.unequal = tuple(unequal)


class UncheckedError(ShardplanError):
    """A check of a plan that could not run, so that nothing is known, for this ``reason``. Where a device lacks the memory,
    ``needed_bytes`` are more than ``limit_bytes``.
    """

    def __init__(self, reason: str, *, needed_bytes: int | None = None, limit_bytes: int | None = None) -> None:
        super().__init__(f"the plan was not checked: {reason}")
        self.reason = reason
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class PlanFileError(ShardplanError):
    """A plan file that cannot be read, or that belongs to another model, other shapes or another cluster."""


class AgreementError(ShardplanError):
    """Processes of one run that cannot share a plan. ``processes`` are those that differ from process 0, with the first
    ``difference``, or those that did not answer.
    """

    def __init__(self, message: str, *, processes: Sequence[int] = (), difference: str = "") -> None:
        super().__init__(message)
        self.processes = tuple(processes)
        self.difference = difference


class ReshardError(ShardplanError):
    """A state that cannot be moved to another plan, or a plan that cannot be made again for another cluster."""


class PlacementError(ShardplanError):
    """A placement that cannot be searched, or a strategy file that cannot be read or belongs to another step or cluster."""


class PlacementMemoryError(PlacementError):
    """No strategy to begin from fits in memory. ``needs`` has the fullest device of each: its number, bytes held and memory."""

    def __init__(self, needs: Mapping[str, tuple[int, int, int]]) -> None:
        each = ", ".join(
            f"{name} holds {size_text(held)} of {size_text(has)} on device {d}" for name, (d, held, has) in needs.items()
        )
        super().__init__(
            f"no strategy to begin from fits in memory ({each}): take more or larger devices, a smaller batch, or the start that "
            "--method heft -o FILE.json writes, which places whole operators"
        )
        self.needs = dict(needs)


class MicrobatchError(ShardplanError):
    """A step that cannot be cut into microbatches."""


class ReductionError(ShardplanError):
    """An invalid reduction program. ``step`` counts from 0; ``devices`` are its group, ``states`` theirs before it, as text."""

    def __init__(self, message: str, *, step: int | None = None, devices: Sequence[int] = (), states: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.devices = tuple(devices)
        self.states = tuple(states)


class HloError(ShardplanError):
    """HLO text in an unknown form. ``line`` counts from 1."""

    def __init__(self, message: str, *, line: int, text: str) -> None:
        shown = text.strip()
        super().__init__(f"HLO line {line}: {message}: {shown if len(shown) <= 200 else shown[:200] + ' ...'}")
        self.line = line
        self.text = text


class DeviceError(ShardplanError):
    """The devices present cannot run the plan."""


class CalibrationError(ShardplanError):
    """A measurement that cannot be made or trusted: a busy machine, a cache that cannot be used."""


class ScheduleError(ShardplanError):
    """Tasks, edges, times or memory that no schedule can be made of. ``tasks`` are those that the message names."""

    def __init__(self, message: str, *, tasks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.tasks = tuple(tasks)


class TargetError(ShardplanError):
    """A command-line TARGET that cannot be imported, or whose factory returns the wrong thing."""


_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size_text(nbytes: float) -> str:
    """Bytes as text for errors: 1.50 GiB."""
    return next((f"{nbytes / unit:.2f} {name}" for unit, name in _UNITS if nbytes >= unit), f"{nbytes:.0f} bytes")


def sufficient_limit(nbytes: int) -> str:
    """A memory limit that admits so many bytes, as options take it: in the unit of `size_text`, rounded up."""
    unit, name = next((row for row in _UNITS if nbytes >= row[0]), (1, "B"))
    return f"{-(-100 * nbytes // unit) / 100:.2f}".removesuffix(".00") + name


def nearest(name: str, known: Sequence[str], *, count: int = 3) -> str:
    """The known names closest to ``name``, as a hint in a message."""
    import difflib

    hits = difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)
    return f" (nearest: {', '.join(hits)})" if hits else ""
