# pyright: basic
"""A placed step, jitted: several programs that are called as one function, lowered and compiled one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from shardplan.emit.regions import RegionsEmitter
from shardplan.frontend.nnx_state import abstract, apart, bare
from shardplan.plans.jit_stages import compiled
from shardplan.plans.runner import Runner


@dataclass(frozen=True, slots=True)
class LoweredProgram:
    """One program of a placed step: the devices that run it, and the stage of `jax.stages` for its flat arguments."""

    name: str
    devices: tuple[int, ...]
    stage: Any


@dataclass(frozen=True, slots=True)
class LoweredPrograms:
    """The programs of a placed step, lowered, in the order in which they are first issued."""

    programs: tuple[LoweredProgram, ...]
    run: Callable[..., Any]

    def as_text(self) -> str:
        """The text of all programs."""
        return "\n".join(f"// {p.name} on devices {', '.join(map(str, p.devices))}\n{p.stage.as_text()}" for p in self.programs)

    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> CompiledPrograms:
        """The programs compiled with the options of `PlacedPlan.jit` and these; these take precedence."""
        stages = [compiled(p.stage.compile, compiler_options=compiler_options) for p in self.programs]
        done = (replace(p, stage=stage) for p, stage in zip(self.programs, stages, strict=True))
        return CompiledPrograms(tuple(done), self.run)


@dataclass(frozen=True, slots=True)
class CompiledPrograms(LoweredPrograms):
    """The programs of a placed step, compiled: called with the step's arguments, it returns the step's result."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Runs the step."""
        return self.run([p.stage for p in self.programs], *args, **named)


class PlacedRunner(Runner):
    """A placed step: called like the function that `jax.jit` returns; `lower` gives its programs."""

    _flat: RegionsEmitter  # type: ignore[assignment]

    def traced_programs(self, *args: Any, **named: Any) -> list[Any]:
        """Each program as `jax.stages.Traced`, for these arguments (arrays or shapes)."""
        leaves, tree = jax.tree.flatten(apart(self._ordered(args, named)))
        self._checked(leaves, tree)
        return self._flat.traced()

    def lower(self, *args: Any, **named: Any) -> Any:
        """The programs lowered for these arguments (arrays or shapes)."""
        stages = [traced.lower() for traced in self.traced_programs(*args, **named)]
        programs = map(LoweredProgram, self._flat.names, self._flat.devices, stages)
        return LoweredPrograms(tuple(programs), lambda own, *a, **k: self._call(self._flat.using(own), *a, **k))

    def eval_shape(self, *args: Any, **named: Any) -> Any:
        """The shapes and dtypes of the step's result."""
        leaves, tree = jax.tree.flatten(apart(self._ordered(args, named)))
        results = self._checked(leaves, tree)
        shapes = [x if (shape := abstract(x)) is None else shape for x in leaves]
        plain = [jax.ShapeDtypeStruct(s.shape, s.dtype) for s in self._traced.out_shapes]
        return bare(results.unflatten(plain), shapes)
