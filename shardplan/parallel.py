"""The decorator: a train step that plans itself at its first call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from shardplan.api import ClusterLike, load
from shardplan.api import plan as make_plan
from shardplan.errors import PlanFileError, ShardplanError
from shardplan.plans import Plan

_log = logging.getLogger("shardplan")


def parallelize(
    cluster: ClusterLike,
    *,
    donate_argnums: Sequence[int] | int = (),
    static_argnums: Sequence[int] | int = (),
    static_argnames: Sequence[str] | str = (),
    devices: Sequence[Any] | None = None,
    cache_dir: str | PathLike[str] | None = None,
    backend: str = "specs",
    **options: Any,
) -> Callable[[Callable[..., Any]], Parallel]:
    """A decorator: the first call traces, plans, places and compiles; later ones run. ``options`` are those of `shardplan.plan`.

    nnx modules and optimizers among the arguments are updated in place, as under `nnx.jit`. ``cache_dir`` keeps plans by
    fingerprint.
    """

    def decorate(step: Callable[..., Any]) -> Parallel:
        numbers = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
        names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
        donated = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
        return Parallel(step, cluster, donated, numbers, names, devices, cache_dir, backend, options)

    return decorate


class Parallel:
    """A step that runs sharded. ``plan`` is there after the first call (or after `prepare`)."""

    def __init__(
        self,
        step: Callable[..., Any],
        cluster: ClusterLike,
        donated: tuple[int, ...],
        static_numbers: tuple[int, ...],
        static_names: tuple[str, ...],
        devices: Sequence[Any] | None,
        cache_dir: str | PathLike[str] | None,
        backend: str,
        options: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, step)
        self._step, self._cluster, self._donated = step, cluster, donated
        self._static_numbers, self._static_names = static_numbers, static_names
        self._devices, self._cache_dir, self._backend, self._options = devices, cache_dir, backend, options
        self._ready: dict[Any, tuple[Plan, Callable[..., Any], _Split]] = {}
        self._last: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the latest call.

        Raises:
            ShardplanError: before the first call.
        """
        if self._last is None:
            raise ShardplanError(f"{self._name} is planned at its first call: call it, or .prepare(*args), before reading .plan")
        return self._last

    @property
    def _name(self) -> str:
        return getattr(self._step, "__name__", "the step")

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans for these arguments (arrays or shapes) without running."""
        split = _Split.of(self, args, kwargs)
        return self._plan(split)[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; nnx arguments are updated in place."""
        split = _Split.of(self, args, kwargs)
        made, run, _ = self._plan(split)
        return split.finish(run(*made.put(split.leaves, mesh=made.mesh(self._devices))))

    def init(self, init_fn: Callable[..., Any], *args: Any, argument: int = 0) -> Any:
        """``init_fn(*args)`` made sharded as argument ``argument`` of the step, never whole on one device.

        Call `prepare` first (or the step), so that there is a plan.
        """
        shardings = self.plan.in_shardings(self.plan.mesh(self._devices))[argument]
        return jax.jit(init_fn, out_shardings=shardings)(*args)

    def _plan(self, split: _Split) -> tuple[Plan, Callable[..., Any], _Split]:
        found = self._ready.get(split.key)
        if found is None:
            pure = split.pure(self._step)
            made = self._cached(pure, split)
            found = self._ready[split.key] = (made, made.jit(pure, devices=self._devices, backend=self._backend), split)
            best = min((b for b in made.baselines if b.fits), key=lambda b: b.step_time_s, default=None)
            mesh = " x ".join(f"{n}={k}" for n, k in made.axes.items())
            _log.info(
                "%s: mesh %s, %.3g s a step, %.3g GiB a device; best baseline %s",
                self._name, mesh, made.step_time_s, made.peak_bytes / 2**30,
                f"{best.name} {best.step_time_s:.3g} s" if best else "none fits",
            )  # fmt: skip
        self._last = found[0]
        return found

    def _cached(self, pure: Callable[..., Any], split: _Split) -> Plan:
        shapes = jax.tree.map(_shape, split.leaves)
        if self._cache_dir is None:
            return make_plan(pure, *shapes, cluster=self._cluster, donate_argnums=self._donated, **self._options)
        import hashlib

        from shardplan.api import resolve_cluster

        key = (
            resolve_cluster(self._cluster)[0].fingerprint(),
            self._name,
            str(split.key),
            sorted((k, str(v)) for k, v in self._options.items()),
        )
        file = Path(self._cache_dir) / (hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest() + ".plan.json")
        if file.exists():
            try:
                return load(file, pure, *shapes)
            except PlanFileError as error:
                _log.warning("%s is planned anew: %s", self._name, error)
        made = make_plan(pure, *shapes, cluster=self._cluster, donate_argnums=self._donated, **self._options)
        file.parent.mkdir(parents=True, exist_ok=True)
        made.save(file)
        return made


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x


class _Split:
    """A call's arguments taken apart: static ones, nnx objects as their states, everything else as it is."""

    def __init__(self, args: tuple[Any, ...], static: dict[int, Any], named: dict[str, Any], graphs: dict[int, Any]) -> None:
        self.args, self.static, self.named, self.graphs = args, static, named, graphs
        self.leaves: tuple[Any, ...] = tuple(nnx.state(a) if i in graphs else a for i, a in enumerate(args) if i not in static)
        flat, tree = jax.tree.flatten(self.leaves)
        kinds = tuple((tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__))) for x in flat)
        self.key = (
            tree,
            kinds,
            tuple(sorted((i, repr(v)) for i, v in static.items())),
            tuple(sorted((k, repr(v)) for k, v in named.items())),
        )

    @staticmethod
    def of(owner: Parallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Split:
        import inspect

        named = {k: v for k, v in kwargs.items() if k in owner._static_names}
        rest = {k: v for k, v in kwargs.items() if k not in owner._static_names}
        if rest:
            bound = inspect.signature(owner._step).bind(*args, **rest)
            args = bound.args
            if bound.kwargs:
                raise ShardplanError(
                    f"{owner._name} takes {', '.join(bound.kwargs)} by keyword only: "
                    "name them in static_argnames or pass them by position"
                )
        static = {i: args[i] for i in owner._static_numbers if i < len(args)}
        graphs = {i: nnx.graphdef(a) for i, a in enumerate(args) if i not in static and _is_node(a)}
        return _Split(args, static, named, graphs)

    def pure(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as a function of states; it returns (result, states of the nnx arguments)."""
        import inspect

        count, static, graphs, named = len(self.args), self.static, self.graphs, self.named

        def run(*leaves: Any) -> Any:
            rest = iter(leaves)
            full: list[Any] = []
            for i in range(count):
                if i in static:
                    full.append(static[i])
                else:
                    leaf = next(rest)
                    full.append(nnx.merge(graphs[i], leaf) if i in graphs else leaf)
            result = step(*full, **named)
            return (result, tuple(nnx.state(full[i]) for i in sorted(graphs))) if graphs else result

        try:
            own = [p for i, p in enumerate(inspect.signature(step).parameters.values()) if i not in static]
            run.__signature__ = inspect.Signature(
                [p.replace(default=inspect.Parameter.empty) for p in own if p.name not in named]
            )  # type: ignore[attr-defined]
        except (TypeError, ValueError):
            pass
        functools.update_wrapper(run, step, assigned=("__name__", "__qualname__", "__doc__"), updated=())
        run.__dict__.pop("__wrapped__", None)
        return run

    def finish(self, result: Any) -> Any:
        """Writes new states back into the nnx arguments of this call."""
        if not self.graphs:
            return result
        result, states = result
        for i, state in zip(sorted(self.graphs), states, strict=True):
            nnx.update(self.args[i], state)
        return result


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Module | nnx.Optimizer | nnx.Metric)
