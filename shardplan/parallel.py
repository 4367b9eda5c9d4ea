"""The decorator: a train step that plans itself at its first call."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from shardplan.api import parse_bytes
from shardplan.api import plan as make_plan
from shardplan.clusters import ClusterLike, resolve_cluster
from shardplan.errors import PlanFileError, ShardplanError
from shardplan.files import read_plan_file
from shardplan.fingerprint import fingerprint
from shardplan.ir import spec_text
from shardplan.plans import Plan
from shardplan.positions import positions
from shardplan.report.text import best_baseline
from shardplan.trace import trace

_log = logging.getLogger("shardplan")


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the decorator was given; numbers are of the step's own arguments, as the user wrote them."""

    cluster: ClusterLike
    donate_argnums: Sequence[int] | int
    static_argnums: Sequence[int] | int
    static_argnames: tuple[str, ...]
    devices: Sequence[Any] | None
    cache_dir: str | PathLike[str] | None
    backend: str
    options: Mapping[str, Any]


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

    nnx modules and optimizers among the arguments are updated in place, as under `nnx.jit`. Numbers of arguments count as the
    step has them, static ones included, and may be negative. ``cache_dir`` keeps plans by what the step traces to, the cluster
    and the options: another process with the same step finds them.
    """
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    given = _Settings(cluster, donate_argnums, static_argnums, names, devices, cache_dir, backend, options)
    return lambda step: Parallel(step, given)


class Parallel:
    """A step that runs sharded. ``plan`` is there after the first call (or after `prepare`)."""

    def __init__(self, step: Callable[..., Any], given: _Settings) -> None:
        functools.update_wrapper(self, step)
        self._step, self._given = step, given
        self._ready: dict[Any, tuple[Plan, Callable[..., Any]]] = {}
        self._last: tuple[Plan, _Split] | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the latest call.

        Raises:
            ShardplanError: before the first call.
        """
        return self._latest()[0]

    def _latest(self) -> tuple[Plan, _Split]:
        if self._last is None:
            raise ShardplanError(f"{self._name} is planned at its first call: call it, or .prepare(*args), before reading .plan")
        return self._last

    @property
    def _name(self) -> str:
        return getattr(self._step, "__name__", "the step")

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans for these arguments (arrays or shapes) without running."""
        return self._plan(_split(self._step, self._given, args, kwargs))[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; nnx arguments are updated in place."""
        split = _split(self._step, self._given, args, kwargs)
        made, run = self._plan(split)
        return split.finish(run(*made.put(split.leaves, mesh=made.mesh(self._given.devices))))

    def cache_size(self) -> int:
        """How many entries the call caches hold, over all plans: one for each combination of shapes, dtypes and shardings."""
        return sum(run.cache_size() for _, run in self._ready.values())  # type: ignore[attr-defined]

    def init(self, init_fn: Callable[..., Any], *args: Any, argument: int = 0) -> Any:
        """``init_fn(*args)`` made sharded as argument ``argument`` of the step, never whole on one device.

        Call `prepare` first (or the step), so that there is a plan.

        Raises:
            ShardplanError: before there is a plan, for an argument that is not there, or for a static one.
        """
        made, split = self._latest()
        (at,) = positions(argument, len(split.args), "argument")
        if at in split.static:
            raise ShardplanError(f"argument={argument} of {self._name} is static: it lies on no device")
        shardings = made.in_shardings(made.mesh(self._given.devices))[split.shifted(at)]
        return jax.jit(init_fn, out_shardings=shardings)(*args)

    def _plan(self, split: _Split) -> tuple[Plan, Callable[..., Any]]:
        found = self._ready.get(split.key)
        if found is None:
            pure = split.pure(self._step)
            made = self._cached(pure, split)
            found = self._ready[split.key] = (made, made.jit(pure, devices=self._given.devices, backend=self._given.backend))
            best = best_baseline(made)
            mesh = " x ".join(f"{n}={k}" for n, k in made.axes.items())
            _log.info(
                "%s: mesh %s, %.3g s a step, %.3g GiB a device; best baseline %s",
                self._name, mesh, made.step_time_s, made.peak_bytes / 2**30,
                f"{best.name} {best.step_time_s:.3g} s" if best else "none fits",
            )  # fmt: skip
        self._last = found[0], split
        return found

    def _cached(self, pure: Callable[..., Any], split: _Split) -> Plan:
        given = self._given
        shapes = jax.tree.map(_shape, split.leaves)

        def planned() -> Plan:
            return make_plan(pure, *shapes, cluster=given.cluster, donate_argnums=split.donated, **given.options)

        if given.cache_dir is None:
            return planned()
        traced = trace(pure, *shapes, donate_argnums=split.donated)
        key = (
            fingerprint(traced),
            resolve_cluster(given.cluster)[0].fingerprint(),
            split.donated,
            sorted((k, _option(k, v)) for k, v in given.options.items() if k not in ("observer", "seed")),
        )
        file = Path(given.cache_dir) / (hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest() + ".plan.json")
        if file.exists():
            try:
                return read_plan_file(file).plan(pure, traced, given.cluster if isinstance(given.cluster, Mesh) else None)
            except PlanFileError as error:
                _log.warning("%s is planned anew: %s", self._name, error)
        made = planned()
        file.parent.mkdir(parents=True, exist_ok=True)
        made.save(file)
        return made


def _option(name: str, value: Any) -> str:
    """An option of `shardplan.plan` as text that is the same in every process."""
    match name:
        case "pins":
            return repr(sorted((glob, spec_text(spec)) for glob, spec in (value or {}).items()))
        case "memory_limit":
            return str(value if value is None else parse_bytes(value))
        case "replicate":
            return repr(sorted(value))
        case _:
            return repr(value)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "shape") and hasattr(x, "dtype") else x


# -- a call's arguments ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Split:
    """A call's arguments taken apart: static ones, nnx objects as their states, everything else as it is.

    ``leaves`` are the arguments that are not static; ``donated`` counts among these. ``graphs`` are the static parts of nnx
    objects, by argument. Calls with equal ``key`` run the same program.
    """

    args: tuple[Any, ...]
    static: Mapping[int, Any]
    named: Mapping[str, Any]
    graphs: Mapping[int, Any]
    leaves: tuple[Any, ...]
    donated: tuple[int, ...]
    key: Any

    def shifted(self, argument: int) -> int:
        """The place of an argument among those that are not static."""
        return argument - sum(s < argument for s in self.static)

    def pure(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as a function of states; it returns (result, states of the nnx arguments)."""
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


def _split(step: Callable[..., Any], given: _Settings, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Split:
    name = getattr(step, "__name__", "the step")
    named = {k: v for k, v in kwargs.items() if k in given.static_argnames}
    rest = {k: v for k, v in kwargs.items() if k not in given.static_argnames}
    if rest:
        bound = inspect.signature(step).bind(*args, **rest)
        args = bound.args
        if bound.kwargs:
            raise ShardplanError(
                f"{name} takes {', '.join(bound.kwargs)} by keyword only: name them in static_argnames or pass them by position"
            )
    count = max(_positional(step), len(args))
    fixed = positions(given.static_argnums, count, "static_argnums")
    donated = positions(given.donate_argnums, count, "donate_argnums")
    both = sorted(set(fixed) & set(donated))
    if both:
        raise ShardplanError(f"argument {both[0]} of {name} is in static_argnums and in donate_argnums: only arrays are donated")
    static = {i: args[i] for i in fixed if i < len(args)}
    graphs = {i: nnx.graphdef(a) for i, a in enumerate(args) if i not in static and _is_node(a)}
    leaves = tuple(nnx.state(a) if i in graphs else a for i, a in enumerate(args) if i not in static)
    flat, tree = jax.tree.flatten(leaves)
    kinds = tuple((tuple(getattr(x, "shape", ())), str(getattr(x, "dtype", type(x).__name__))) for x in flat)
    key = (
        tree,
        kinds,
        tuple(graphs.items()),
        tuple((i, repr(v)) for i, v in static.items()),
        tuple((k, repr(v)) for k, v in sorted(named.items())),
    )
    among = tuple(d - sum(s < d for s in static) for d in donated if d < len(args))
    return _Split(args, static, named, graphs, leaves, among, key)


def _positional(step: Callable[..., Any]) -> int:
    """How many positional arguments a step names; 0 where nobody knows, or where it takes any number."""
    try:
        kinds = [p.kind for p in inspect.signature(step).parameters.values()]
    except (TypeError, ValueError):
        return 0
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 0
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)


def _is_node(value: Any) -> bool:
    return isinstance(value, nnx.Module | nnx.Optimizer | nnx.Metric)
