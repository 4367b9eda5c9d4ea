"""The program that XLA makes of a step with given shardings of its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.errors import DeviceError
from shardplan.frontend.nnx_state import Pure
from shardplan.frontend.trace import Traced
from shardplan.hlo.lines import frame_lines
from shardplan.hlo.meter import Measured, measure
from shardplan.hlo.reshards import Sent, sent_by
from shardplan.user_code import NOT_THE_USERS, shown_path
from shardplan.verify.compiler_log import LastResort, caught
from shardplan.verify.runs import peak_bytes
from shardplan.verify.stand_ins import stand_ins

_OPTIONS = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}
"""Each collective stays one instruction, with the line of its own op."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled step: its collectives, in total (``sent``) and one by one (``each``), its peak bytes on a device, and the
    arrays that XLA replicates as a last resort, each with its source line.
    """

    sent: Measured
    each: tuple[Sent, ...]
    peak_bytes: int
    last_resorts: tuple[tuple[LastResort, str], ...]


def flat_step(step: Any, traced: Traced, donate_argnums: Sequence[int]) -> Callable[..., list[Any]]:
    """The step on flat leaves, with flat results."""
    pure = Pure(step, donate_argnums)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(pure(*jax.tree.unflatten(traced.in_tree, leaves)))

    return flat


def compiled_as_given(
    flat: Callable[..., list[Any]], traced: Traced, specs: Sequence[PartitionSpec], mesh: Mesh, donated: Sequence[int]
) -> Compiled:
    """The program of ``jax.jit(flat, in_shardings=...)``; nothing is run.

    ``specs`` are those of the leaves, ``donated`` the leaves that are donated. State comes back in the sharding of the argument
    that it replaces. XLA's partitioner chooses the rest.

    Raises:
        DeviceError: if XLA does not compile the step with these shardings.
    """
    shardings = [NamedSharding(mesh, spec) for spec in specs]

    def run(*leaves: Any) -> list[Any]:
        return flat(*leaves)

    out = [None if i is None else shardings[i] for i in traced.program.feedback]
    jitted = jax.jit(run, in_shardings=shardings, out_shardings=out, donate_argnums=tuple(donated), keep_unused=True)
    with stand_ins(traced.program, mesh.devices.ravel().tolist()):
        lowered = jitted.lower(*traced.in_shapes)
        with caught() as log:
            compiled = _compiled(lowered, _OPTIONS if mesh.devices.flat[0].platform == "cpu" else None)
    text = compiled.as_text() or ""
    lines = frame_lines(text)
    resorts = tuple((one, lines.get(one.frame, "")) for one in log)
    return Compiled(measure(text), tuple(sent_by(text)), peak_bytes(compiled), resorts)


_FRAME = re.compile(r"^ +(/?\S[^:\n]*):(\d+):\d+ \[([^]\n]*)\]$", re.MULTILINE)
"""A line of Python, innermost first, that JAX names where XLA refuses a program."""


def _compiled(lowered: jax.stages.Lowered, options: Any) -> jax.stages.Compiled:
    """The compiled program; an error of our own if XLA refuses it."""
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0]
        frames = (frame for frame in _FRAME.findall(str(error)) if not frame[0].startswith(NOT_THE_USERS))
        place = next((f", for the op at {shown_path(file)}:{line} ({function})" for file, line, function in frames), "")
        raise DeviceError(
            f"XLA does not compile the step with this sharding{place}: {reason}; leave the split dims of that op's arrays whole, "
            "or leave out measure (--measure): the price needs no compilation"
        ) from error
