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
from types import MethodType
from typing import Any

import jax
from jax.sharding import Mesh

from shardplan.errors import ArgumentError, PlanFileError, ShardplanError, nearest
from shardplan.frontend.argnums import leaves_of, positions, tuple_of
from shardplan.frontend.nnx_state import (
    abstract,
    apart,
    has_objects,
    through,
    together,
    trace_step,
)
from shardplan.ir import spec_text
from shardplan.plans import files
from shardplan.plans.fingerprint import fingerprint
from shardplan.plans.runner import Runner, check_tree
from shardplan.report.text import best_baseline
from shardplan.shell.api import plan as make_plan
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.load import for_step
from shardplan.shell.planned import Plan
from shardplan.sizes import parse_bytes

_log = logging.getLogger("shardplan")


_PLANNED = tuple(
    name
    for name, p in inspect.signature(make_plan).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("cluster", "donate_argnums")
)
"""The options of `shardplan.plan` that the decorator hands on."""


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

    Raises:
        ShardplanError: for an option that does not exist.
    """
    for option in options:
        if option not in _PLANNED:
            known = sorted({*_PLANNED, *inspect.signature(parallelize).parameters} - {"options"})
            raise ShardplanError(
                f"parallelize has no option {option!r}{nearest(option, known) or ' (known: ' + ', '.join(known) + ')'}"
            )
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    given = _Settings(cluster, donate_argnums, static_argnums, names, devices, cache_dir, backend, options)
    return lambda step: Parallel(step, given)


class Parallel:
    """A step that runs sharded. ``plan`` is there after the first call (or after `prepare`)."""

    def __init__(self, step: Callable[..., Any], given: _Settings) -> None:
        functools.update_wrapper(self, step)
        self._step, self._given = step, given
        self._parameters = _parameters(step)
        self._ready: dict[Any, _Ready] = {}
        self._plain: set[Any] = set()  # structures of arguments without nnx objects
        self._latest: _Ready | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """A decorated method: its object is the first argument."""
        return self if instance is None else MethodType(self, instance)

    @property
    def plan(self) -> Plan:
        """The plan of the latest call.

        Raises:
            ShardplanError: before the first call.
        """
        return self._planned().plan

    def _planned(self) -> _Ready:
        if self._latest is None:
            raise ShardplanError(f"{self._name} is planned at its first call: call it, or .prepare(*args), before reading .plan")
        return self._latest

    @property
    def _name(self) -> str:
        return getattr(self._step, "__name__", "the step")

    def prepare(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans for these arguments (arrays or shapes) without running."""
        call = self._call(args, kwargs)
        leaves, tree = jax.tree.flatten(apart(call.dynamic))
        return self._found(call, leaves, tree).plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; nnx arguments are updated in place."""
        call = self._call(args, kwargs)

        def run(leaves: list[Any], tree: Any) -> tuple[Any, Sequence[Any]]:
            latest = self._latest
            if latest is not None and latest.tree == tree and latest.call.key == call.key:
                try:
                    return latest.run.run(leaves, tree)
                except ArgumentError:  # other shapes than in the call before: they have a plan of their own
                    pass
            return self._found(call, leaves, tree).run.run(leaves, tree)

        leaves, tree = jax.tree.flatten(call.dynamic)
        if not self._without_objects(tree, call.dynamic):
            return through(call.dynamic, run)
        return run(leaves, tree)[0]

    def cache_size(self) -> int:
        """How many entries the call caches hold, over all plans: one for each combination of shapes, dtypes and shardings."""
        return sum(ready.run.cache_size() for ready in self._ready.values())

    def init(self, init_fn: Callable[..., Any], *args: Any, argument: int = 0) -> Any:
        """``init_fn(*args)`` made sharded as argument ``argument`` of the step, never whole on one device.

        Call `prepare` first (or the step), so that there is a plan.

        Raises:
            ArgumentError: where ``init_fn`` makes an array of another shape or dtype than was planned.
            ShardplanError: before there is a plan, for an argument that is not there, for a static one, or where ``init_fn``
                makes another structure.
        """
        ready = self._planned()
        (at,) = positions(argument, ready.call.count, "argument")
        if at in ready.call.static:
            raise ShardplanError(f"argument={argument} of {self._name} is static: it lies on no device")
        made, place = ready.plan, at - sum(s < at for s in ready.call.static)
        trees = list(ready.tree.children())
        trees[place] = jax.tree.structure(jax.eval_shape(lambda *a: apart(init_fn(*a)), *args))
        check_tree(tuple_of(trees), made.traced, made.step)
        shardings = made.leaves(made.mesh(self._given.devices)).part(leaves_of(made.traced.in_tree, (place,)))
        shardings.fit(jax.tree.leaves(jax.eval_shape(lambda *a: apart(init_fn(*a)), *args)))
        flat = jax.jit(lambda *a: jax.tree.leaves(apart(init_fn(*a))), out_shardings=shardings.shardings)
        return together(jax.tree.unflatten(trees[place], flat(*args)))

    # -- plans -------------------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        return _bound(self._step, self._parameters, self._given, args, kwargs)

    def _without_objects(self, tree: Any, args: Any) -> bool:
        try:
            if tree in self._plain:
                return True
            if has_objects(args):
                return False
            self._plain.add(tree)
        except TypeError:  # something static in it has no hash: the plan says so where it can say where
            return not has_objects(args)
        return True

    def _found(self, call: _Call, leaves: Sequence[Any], tree: Any) -> _Ready:
        """The plan for these arguments, made where there is none yet."""
        kinds: list[Any] = []
        for x in leaves:
            found = abstract(x)
            kinds.append(type(x) if found is None else (found.shape, found.dtype, found.weak_type))
        try:
            key = (call.key, tree, tuple(kinds))
            ready = self._ready.get(key)
        except TypeError as error:
            raise ShardplanError(f"something static in the arguments of {self._name} has no hash: {error}") from error
        if ready is None:
            ready = self._ready[key] = self._made(call, leaves, tree)
        self._latest = ready
        return ready

    def _made(self, call: _Call, leaves: Sequence[Any], tree: Any) -> _Ready:
        pure = call.pure(self._step)
        shapes = [x if (found := abstract(x)) is None else found for x in leaves]
        made = self._cached(pure, call, jax.tree.unflatten(tree, shapes))
        run = made.jit(pure, devices=self._given.devices, backend=self._given.backend, weak=True)
        if _log.isEnabledFor(logging.INFO):  # the baselines are solved for it
            best = best_baseline(made.data) if made.baselines else None
            mesh = " x ".join(f"{n}={k}" for n, k in made.axes.items())
            _log.info(
                "%s: mesh %s, %.3g s a step, %.3g GiB a device; best baseline %s",
                self._name, mesh, made.step_time_s, made.peak_bytes / 2**30,
                f"{best.name} {best.step_time_s:.3g} s" if best else "none fits",
            )  # fmt: skip
        return _Ready(made, run, call, tree)

    def _cached(self, pure: Callable[..., Any], call: _Call, args: tuple[Any, ...]) -> Plan:
        given = self._given

        def planned() -> Plan:
            made = make_plan(pure, *args, cluster=given.cluster, donate_argnums=call.donated, **given.options)
            if made.stopped == "interrupted":  # who interrupts a call wants it to end, not to run by half a search
                raise KeyboardInterrupt
            return made

        if given.cache_dir is None:
            return planned()
        traced = trace_step(pure, args, call.donated)
        key = (
            fingerprint(traced),
            resolve_cluster(given.cluster)[0].fingerprint(),
            call.donated,
            sorted((k, _option(k, v)) for k, v in given.options.items() if k != "observer"),
        )
        file = Path(given.cache_dir) / (hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest() + ".plan.json")
        if file.exists():
            try:
                mesh = given.cluster if isinstance(given.cluster, Mesh) else None
                return for_step(str(file), files.read(file), pure, traced, mesh)
            except PlanFileError as error:
                _log.warning("%s is planned anew: %s", self._name, error)
        made = planned()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanFileError(f"cache_dir={str(given.cache_dir)!r} cannot be made: {error.strerror or error}") from error
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


# -- a call's arguments ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A call's arguments: ``static`` ones by position, ``named`` ones (static too), and the ``dynamic`` others, in their order.

    ``count`` is the number of all positional ones; ``donated`` counts among the dynamic ones. Calls with equal ``key`` have
    equal static parts.
    """

    count: int
    static: Mapping[int, Any]
    named: Mapping[str, Any]
    dynamic: tuple[Any, ...]
    donated: tuple[int, ...]
    key: Any

    def pure(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as a function of its dynamic arguments."""
        count, static, named = self.count, self.static, self.named

        def run(*dynamic: Any) -> Any:
            rest = iter(dynamic)
            return step(*(static[i] if i in static else next(rest) for i in range(count)), **named)

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


@dataclass(frozen=True, slots=True)
class _Ready:
    """A plan, the program that it runs as, and the call that it was made for, with the structure of its arguments."""

    plan: Plan
    run: Runner
    call: _Call
    tree: Any


def _bound(
    step: Callable[..., Any], parameters: Parameters | None, given: _Settings, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Call:
    name = getattr(step, "__name__", "the step")
    args, named = _by_position(name, parameters, args, kwargs)
    count = max(_positional(parameters), len(args))
    fixed = {*positions(given.static_argnums, count, "static_argnums"), *_places(parameters, given.static_argnames)}
    known = {*given.static_argnames, *(p.name for i, p in enumerate(parameters or ()) if i in fixed)}
    odd = [k for k in named if k not in known]
    if odd:
        raise ShardplanError(
            f"{name} takes {', '.join(odd)} by keyword only: name them in static_argnames or pass them by position"
        )
    donated = positions(given.donate_argnums, count, "donate_argnums")
    both = sorted(fixed & set(donated))
    if both:
        raise ShardplanError(f"argument {both[0]} of {name} is in static_argnums and in donate_argnums: only arrays are donated")
    static = {i: args[i] for i in sorted(fixed) if i < len(args)}
    key = (tuple(_keyed(name, i, v) for i, v in static.items()), tuple(_keyed(name, k, v) for k, v in sorted(named.items())))
    among = tuple(d - sum(s < d for s in static) for d in donated if d < len(args))
    return _Call(len(args), static, named, tuple(a for i, a in enumerate(args) if i not in static), among, key)


def _by_position(
    name: str, parameters: Parameters | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A call's arguments, by position as far as the step allows it, and the others by name."""
    if parameters is None or not kwargs:
        return args, kwargs
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise ShardplanError(f"{name} cannot be called so: {error}") from error
    return bound.args, bound.kwargs


def _places(parameters: Parameters | None, names: Sequence[str]) -> list[int]:
    """The positions of parameters that have these names."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [i for i, p in enumerate(parameters or ()) if p.kind is kind and p.name in names]


def _keyed(name: str, argument: int | str, value: Any) -> tuple[Any, ...]:
    """A static argument as part of a key: by hash, equality (as for `jax.jit`) and type, so that 1 is not 1.0."""
    try:
        hash(value)
    except TypeError as error:
        raise ShardplanError(
            f"the static argument {argument!r} of {name} has no hash ({error}): give it a value that compares by what it holds, "
            "such as a tuple or a frozen dataclass"
        ) from error
    return argument, type(value), value


Parameters = Sequence[inspect.Parameter]


def _parameters(step: Callable[..., Any]) -> Parameters | None:
    """The parameters of a step; None where nobody knows."""
    try:
        return tuple(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return None


def _positional(parameters: Parameters | None) -> int:
    """How many positional arguments a step names; 0 where nobody knows, or where it takes any number."""
    kinds = [p.kind for p in parameters or ()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 0
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
