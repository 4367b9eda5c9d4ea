"""The decorator: a train step that plans itself at its first call."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import jax
from jax.core import Tracer
from jax.sharding import Mesh

from shardplan.constants import CONSTANTS
from shardplan.errors import ArgumentError, PlanFileError, ShardplanError, UncheckedError, nearest
from shardplan.frontend.argnums import positions
from shardplan.frontend.nnx_state import abstract, apart, has_objects, through, trace_step
from shardplan.frontend.trace import Traced
from shardplan.plans import files
from shardplan.plans.fingerprint import fingerprint
from shardplan.plans.jit_stages import TracedStep
from shardplan.plans.runner import Runner
from shardplan.report.plan_text import best_baseline
from shardplan.shell.agreement import TIMEOUT_S, agreed, group_of, option_text
from shardplan.shell.api import plan as make_plan
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.loading import for_step
from shardplan.shell.memory_default import memory_limit
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placements import placement_text
from shardplan.shell.plan_of_step import Plan
from shardplan.shell.shrunken import checked
from shardplan.sizes import axes_text

_log = logging.getLogger("shardplan")


_PLAN_OPTIONS = {
    name: p.default
    for name, p in inspect.signature(make_plan).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY and name not in ("cluster", "donate_argnums", "kwargs", "traced")
}
"""The options of `shardplan.plan` that the decorator passes on, with their defaults. It traces its own calls."""


@dataclass(frozen=True, slots=True)
class _Settings:
    """The decorator's arguments. Argument numbers count the step's own arguments, as the user wrote them."""

    cluster: ClusterLike
    donate_argnums: Sequence[int] | int
    static_argnums: Sequence[int] | int
    static_argnames: tuple[str, ...]
    devices: Sequence[Any] | None
    cache_dir: str | PathLike[str] | None
    xla_flags: Mapping[str, Any] | bool | None
    check: str | None
    timeout_s: float
    options: Mapping[str, Any]


def parallelize(
    cluster: ClusterLike,
    *,
    donate_argnums: Sequence[int] | int = (),
    static_argnums: Sequence[int] | int = (),
    static_argnames: Sequence[str] | str = (),
    devices: Sequence[Any] | None = None,
    cache_dir: str | PathLike[str] | None = None,
    xla_flags: Mapping[str, Any] | bool | None = None,
    check: Literal["first"] | None = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Callable[[Callable[..., Any]], Parallel]:
    """A decorator that shards a step: the first call traces, plans, places and compiles; later calls only run.

    ``options`` are those of `shardplan.plan`, and ``xla_flags`` that of `Plan.jit`. nnx modules and optimizers among the
    arguments are updated in place, as under `nnx.jit`. With stages or a placement, a call runs several programs, so it cannot
    be made inside another `jax.jit`. Argument numbers count all arguments of the step, static ones included; negative ones
    count from the end. ``cache_dir`` keeps plans under a key of the traced step, the cluster and the options: another process
    with the same step reuses them.

    With ``check="first"``, the first call under each plan begins with `Plan.check`: it runs the step once more on one device
    and under the plan, with copies of the arguments, and raises a `CheckError` where the results differ. Where one device lacks
    the memory, a shrunken copy of the step runs instead, and a warning says what was checked. Where that cannot run either, a
    warning says that nothing was checked.

    Under `jax.distributed`, process 0 plans (or uses ``cache_dir``) and the others receive its plan, as with `shardplan.agree`,
    which explains ``timeout_s``. A process that owns all ``devices``, or the whole mesh, plans for itself.

    Raises:
        ShardplanError: for an unknown option.
    """
    if check not in (None, "first"):
        raise ShardplanError(f"unsupported check={check!r}: use 'first', or None for no check")
    for option in options:
        if option not in _PLAN_OPTIONS:
            known = sorted({*_PLAN_OPTIONS, *inspect.signature(parallelize).parameters} - {"options"})
            raise ShardplanError(
                f"parallelize has no option {option!r}{nearest(option, known) or ' (known: ' + ', '.join(known) + ')'}"
            )
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    settings = _Settings(cluster, donate_argnums, static_argnums, names, devices, cache_dir, xla_flags, check, timeout_s, options)
    return lambda step: Parallel(step, settings)


class Parallel:
    """A step that runs sharded. Its ``plan`` exists after the first call, or after `prepare`."""

    def __init__(self, step: Callable[..., Any], settings: _Settings) -> None:
        functools.update_wrapper(self, step)
        self._step, self._settings = step, settings
        self._parameters = _parameters(step)
        self._ready: dict[Any, _Ready] = {}
        self._unchecked: set[int] = set()  # ids of plans in `_ready`
        self._plain: set[Any] = set()  # structures of arguments without nnx objects
        self._latest: _Ready | None = None

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds a decorated method: the object becomes the first argument."""
        return self if instance is None else MethodType(self, instance)

    @property
    def plan(self) -> Any:
        """The plan of the latest call: a `Plan`, or a `PlacedPlan` where it runs on groups of devices.

        Raises:
            ShardplanError: before the first call.
        """
        return self._require_plan().plan

    def _require_plan(self) -> _Ready:
        if self._latest is None:
            raise ShardplanError(f"{self._name} is planned at its first call: call it or .prepare(*args) first")
        return self._latest

    @property
    def _name(self) -> str:
        return getattr(self._step, "__name__", "the step")

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """The `plan` for these arguments (arrays or shapes), made without running."""
        return self._prepared(args, kwargs)[0].plan

    def trace(self, *args: Any, **kwargs: Any) -> TracedStep:
        """The step traced for these arguments (arrays or shapes), to lower or inspect it. As in JAX, the program compiled from
        it takes no static arguments.

        Raises:
            ShardplanError: if the plan has several programs, which no single trace holds.
        """
        ready, positional, named = self._prepared(args, kwargs)
        return ready.run.trace(*positional, **named)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step lowered for these arguments (arrays or shapes), to compile or inspect it.

        The result is a `LoweredStep`, or `LoweredPrograms` where the step runs on groups of devices.
        """
        ready, positional, named = self._prepared(args, kwargs)
        return ready.run.lower(*positional, **named)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The shapes and dtypes of the step's result for these arguments (arrays or shapes)."""
        ready, positional, named = self._prepared(args, kwargs)
        return ready.run.eval_shape(*positional, **named)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; nnx arguments are updated in place."""
        call = self._call(args, kwargs)

        def run(leaves: list[Any], tree: Any) -> tuple[Any, Sequence[Any]]:
            """Runs these leaves under their plan, the latest one if it fits."""
            latest = self._latest
            if latest is not None and not self._unchecked and latest.tree == tree and latest.call.key == call.key:
                try:
                    return latest.run.run(leaves, tree)
                except ArgumentError:  # other shapes than in the last call: they have their own plan
                    pass
            ready = self._ready_for(call, leaves, tree)
            if id(ready) in self._unchecked:
                self._check(ready, leaves, tree)
            return ready.run.run(leaves, tree)

        leaves, tree = jax.tree.flatten(call.dynamic)
        if not self._without_objects(tree, call.dynamic):
            return through(call.dynamic, run)
        return run(leaves, tree)[0]

    def cache_size(self) -> int:
        """The number of entries in all plans' call caches: one for each combination of shapes, dtypes and shardings."""
        return sum(ready.run.cache_size() for ready in self._ready.values())

    def init(self, init_fn: Callable[..., Any], *args: Any, argument: int = 0) -> Any:
        """The result of ``init_fn(*args)``, sharded like argument ``argument`` of the step and never whole on one device.

        The step must have a plan: call it or `prepare` first.

        Raises:
            ArgumentError: if ``init_fn`` makes an array of another shape or dtype than was planned.
            ShardplanError: if there is no plan yet, if the argument does not exist or is static, or if ``init_fn`` makes another
                structure.
        """
        ready = self._require_plan()
        (at,) = positions(argument, ready.call.count, "argument")
        if at in ready.call.static:
            raise ShardplanError(f"argument={argument} of {self._name} is static: only arrays are placed on devices")
        place = at - sum(s < at for s in ready.call.static)
        return ready.plan.init(init_fn, *args, argument=place, devices=self._settings.devices)

    def _check(self, ready: _Ready, leaves: Sequence[Any], tree: Any) -> None:
        """Checks a plan on the arguments of its first call; warns where the check cannot run, or runs only in part."""

        def jit(plan: Plan | PlacedPlan) -> Any:
            return plan.jit(plan.step, self._settings.devices, xla_flags=self._settings.xla_flags)

        try:
            judged = checked(ready.plan, ready.run, jit, leaves, tree, self._settings.devices)
            if judged.fewer:
                _log.warning("%s: the step does not fit on one device; what was checked is %s", self._name, judged.ran)
            if judged.reference:
                _log.warning("%s: %s", self._name, judged.reference)
        except UncheckedError as error:
            _log.warning("%s: %s", self._name, error)
            if any(isinstance(x, Tracer) for x in leaves):
                return  # a later call may have values
        self._unchecked.discard(id(ready))

    # -- plans -------------------------------------------------------------------------------------------------------

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Call:
        return _bind_call(self._step, self._parameters, self._settings, args, kwargs)

    def _prepared(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[_Ready, tuple[Any, ...], dict[str, Any]]:
        """The plan for these arguments, and the arguments that the planned step takes by position and by name."""
        call = self._call(args, kwargs)
        leaves, tree = jax.tree.flatten(apart(call.dynamic))
        first = len(call.dynamic) - len(call.keywords)
        named = dict(zip(call.keywords, call.dynamic[first:], strict=True))
        return self._ready_for(call, leaves, tree), call.dynamic[:first], named

    def _without_objects(self, tree: Any, args: Any) -> bool:
        try:
            if tree in self._plain:
                return True
            if has_objects(args):
                return False
            self._plain.add(tree)
        except TypeError:  # a static part has no hash: `_ready_for` refuses it with the name of the step
            return not has_objects(args)
        return True

    def _ready_for(self, call: _Call, leaves: Sequence[Any], tree: Any) -> _Ready:
        """The plan and the program for these arguments, made if there are none yet."""
        kinds: list[Any] = []
        for x in leaves:
            shape_dtype = abstract(x)
            kinds.append(type(x) if shape_dtype is None else (shape_dtype.shape, shape_dtype.dtype, shape_dtype.weak_type))
        try:
            key = (call.key, tree, tuple(kinds))
            ready = self._ready.get(key)
        except TypeError as error:
            raise ShardplanError(
                f"a static part of the arguments of {self._name} has no hash: {error}; use hashable values"
            ) from error
        if ready is None:
            ready = self._ready[key] = self._make_ready(call, leaves, tree)
            if self._settings.check is not None:
                self._unchecked.add(id(ready))
        self._latest = ready
        return ready

    def _make_ready(self, call: _Call, leaves: Sequence[Any], tree: Any) -> _Ready:
        pure = call.pure(self._step)
        shapes = [x if (shape_dtype := abstract(x)) is None else shape_dtype for x in leaves]
        step_plan = self._load_or_plan(pure, call, jax.tree.unflatten(tree, shapes))
        run = step_plan.jit(pure, self._settings.devices, xla_flags=self._settings.xla_flags, weak=True)
        if _log.isEnabledFor(logging.INFO):  # the message needs the baselines, which take time to solve
            figures = f"{step_plan.step_time_s:.3g} s a step, {step_plan.peak_bytes / 2**30:.3g} GiB a device"
            _log.info("%s: %s", self._name, _where(step_plan, figures))
        return _Ready(step_plan, run.taking(len(call.dynamic) - len(call.keywords), call.keywords), call, tree)

    def _load_or_plan(self, pure: Callable[..., Any], call: _Call, args: tuple[Any, ...]) -> Plan | PlacedPlan:
        settings = self._settings

        def plan_now(traced: Traced | None) -> Plan | PlacedPlan:
            options = settings.options if traced is None else {**settings.options, "traced": traced}
            step_plan = make_plan(pure, *args, cluster=settings.cluster, donate_argnums=call.donated, **options)
            if step_plan.stopped == "interrupted":  # an interrupted call must end, not run a half-searched plan
                raise KeyboardInterrupt
            return step_plan

        group = group_of(settings.cluster, settings.devices, settings.timeout_s)
        if settings.cache_dir is None and group is None:
            return plan_now(None)
        traced = trace_step(pure, args, call.donated)

        def make() -> Plan | PlacedPlan:
            return plan_now(traced) if settings.cache_dir is None else self._cached(pure, call, traced, plan_now)

        if group is None:
            return make()
        return agreed(group, pure, traced, settings.cluster, {**settings.options, "donate_argnums": call.donated}, make)

    def _cached(
        self, pure: Callable[..., Any], call: _Call, traced: Traced, plan_now: Callable[[Traced], Plan | PlacedPlan]
    ) -> Plan | PlacedPlan:
        """The plan in ``cache_dir``, or a new one that is kept there."""
        settings, cache_dir = self._settings, Path(str(self._settings.cache_dir))
        options = {**_PLAN_OPTIONS, **settings.options}
        cluster = resolve_cluster(settings.cluster)[0]
        key = (
            fingerprint(traced, numbers=False),
            cluster.fingerprint(),
            sorted(CONSTANTS.literals.items()),
            call.donated,
            memory_limit(options["memory_limit"], cluster.device, os.environ),
            placement_text(options["placement"], traced.program, cluster),
            sorted((k, option_text(k, v)) for k, v in options.items() if k not in _KEYED),
        )
        file = cache_dir / (hashlib.blake2b(repr(key).encode(), digest_size=12).hexdigest() + ".plan.json")
        if file.exists():
            try:
                mesh = settings.cluster if isinstance(settings.cluster, Mesh) else None
                return for_step(str(file), files.read_any(file), pure, traced, mesh)
            except PlanFileError as error:
                _log.warning("%s is planned again: %s", self._name, error)
        step_plan = plan_now(traced)
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise PlanFileError(f"cache_dir={str(settings.cache_dir)!r} cannot be created: {error.strerror or error}") from error
        step_plan.save(file)
        return step_plan


def _where(plan: Plan | PlacedPlan, figures: str) -> str:
    """Where a planned step runs, its figures, and those of the best baseline on all devices."""
    if isinstance(plan, PlacedPlan):
        return f"{plan.origin} on {len(plan.groups)} groups of devices, {figures}"
    best = best_baseline(plan.data) if plan.baselines else None
    mesh = axes_text(plan.axes)
    return f"mesh {mesh}, {figures}; best baseline {f'{best.name} {best.step_time_s:.3g} s' if best else 'none fits'}"


_KEYED = ("observer", "memory_limit", "placement")
"""The options that have their own item, or none, in the key of a cached plan."""


# -- a call's arguments ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments of a call. ``static`` ones are kept by position, ``named`` ones (static too) by name. All others are
    ``dynamic``: first those by position, then those by name, whose names are ``keywords``.

    ``count`` is the number of positional arguments. ``donated`` are positions among the dynamic ones. Calls with equal ``key``
    have equal static arguments.
    """

    count: int
    static: Mapping[int, Any]
    named: Mapping[str, Any]
    dynamic: tuple[Any, ...]
    donated: tuple[int, ...]
    keywords: tuple[str, ...]
    key: Any

    def pure(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """The step as a function of its dynamic arguments."""
        count, static, named, keywords = self.count, self.static, self.named, self.keywords

        def run(*dynamic: Any) -> Any:
            remaining = iter(dynamic)
            args = [static[i] if i in static else next(remaining) for i in range(count)]
            return step(*args, **named, **dict(zip(keywords, remaining, strict=True)))

        try:
            given = [p for i, p in enumerate(inspect.signature(step).parameters.values()) if i not in static and i < count]
            by_name = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in keywords]
            run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
                [*(p.replace(default=inspect.Parameter.empty) for p in given if p.name not in named), *by_name]
            )
        except (TypeError, ValueError):
            pass
        functools.update_wrapper(run, step, assigned=("__name__", "__qualname__", "__doc__"), updated=())
        run.__dict__.pop("__wrapped__", None)
        return run


@dataclass(frozen=True, slots=True)
class _Ready:
    """A plan, the jitted step that runs it, the call that it was made for, and the tree of that call's dynamic arguments."""

    plan: Plan | PlacedPlan
    run: Runner
    call: _Call
    tree: Any


def _bind_call(
    step: Callable[..., Any], parameters: Parameters | None, settings: _Settings, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> _Call:
    """The arguments of a call, split by the settings into static and dynamic ones.

    Raises:
        ShardplanError: for a call that the step would refuse, numbers that name no argument, an argument that is static and
            donated, or a static one without a hash.
    """
    name = getattr(step, "__name__", "the step")
    args, named = _by_position(name, parameters, args, kwargs)
    count = max(_positional(parameters), len(args))
    static_positions = {
        *positions(settings.static_argnums, count, "static_argnums"),
        *_positions_of(parameters, settings.static_argnames),
    }
    if parameters is not None and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        for unknown in sorted({*settings.static_argnames} - {p.name for p in parameters}):
            raise ShardplanError(f"static_argnames names {unknown!r}, which is no argument of {name}")
    known = {*settings.static_argnames, *(p.name for i, p in enumerate(parameters or ()) if i in static_positions)}
    by_name = {k: named[k] for k in sorted(named) if k not in known}
    named = {k: v for k, v in named.items() if k in known}
    donated = positions(settings.donate_argnums, count, "donate_argnums")
    overlap = sorted(static_positions & set(donated))
    if overlap:
        raise ShardplanError(
            f"argument {overlap[0]} of {name} is in static_argnums and in donate_argnums: only arrays can be donated"
        )
    static = {i: args[i] for i in sorted(static_positions) if i < len(args)}
    key = (
        tuple(_static_key(name, i, v) for i, v in static.items()),
        tuple(_static_key(name, k, v) for k, v in sorted(named.items())),
        tuple(by_name),
    )
    donated_dynamic = tuple(d - sum(s < d for s in static) for d in donated if d < len(args))
    dynamic = *(a for i, a in enumerate(args) if i not in static), *by_name.values()
    return _Call(len(args), static, named, dynamic, donated_dynamic, tuple(by_name), key)


def _by_position(
    name: str, parameters: Parameters | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of a call: by position where the step allows it, the others by name."""
    if parameters is None or not kwargs:
        return args, kwargs
    try:
        bound = inspect.Signature(parameters).bind(*args, **kwargs)
    except TypeError as error:
        raise ShardplanError(f"{name} cannot be called with these arguments: {error}") from error
    return bound.args, bound.kwargs


def _positions_of(parameters: Parameters | None, names: Sequence[str]) -> list[int]:
    """The positions of parameters that have these names."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [i for i, p in enumerate(parameters or ()) if p.kind is kind and p.name in names]


def _static_key(name: str, argument: int | str, value: Any) -> tuple[Any, ...]:
    """The key of a static argument. It compares by hash and equality, as in `jax.jit`, and by type, so that 1 is not 1.0."""
    try:
        hash(value)
    except TypeError as error:
        raise ShardplanError(
            f"the static argument {argument!r} of {name} has no hash ({error}): use a value that compares by content, "
            "such as a tuple or a frozen dataclass"
        ) from error
    return argument, type(value), value


Parameters = Sequence[inspect.Parameter]


def _parameters(step: Callable[..., Any]) -> Parameters | None:
    """The parameters of a step; None if they are unknown."""
    try:
        return tuple(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return None


def _positional(parameters: Parameters | None) -> int:
    """The number of positional parameters of a step; 0 if it is unknown, or if the step takes any number."""
    kinds = [p.kind for p in parameters or ()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return 0
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)
