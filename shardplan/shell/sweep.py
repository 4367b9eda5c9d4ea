"""`shardplan.sweep`: a plan for each of many settings of a factory, a cluster and the options of planning."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardplan.emit.backends import chosen
from shardplan.errors import ClusterError, MemoryLimitError, ShardplanError, TargetError, nearest, size_text, sufficient_limit
from shardplan.frontend.argnums import positions
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.graph import flatten
from shardplan.mesh import Cluster
from shardplan.report.sweep import Point, Sweep, setting_text
from shardplan.report.tables import seconds
from shardplan.search.baselines.samples import Samples, samples_of
from shardplan.search.inference.anytime import Observer, Part, best_of, silent
from shardplan.shell.api import checked_observer, checked_options, plan
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.memory_default import memory_limit
from shardplan.shell.offload_option import hosted
from shardplan.shell.sweep_workers import in_processes
from shardplan.shell.target import call_factory, keywords_of, use_cpu

PLANNING: Mapping[str, str] = {
    "cluster": "cluster",
    "memory": "memory_limit",
    "microbatches": "microbatches",
    "axes": "axes",
    "placement": "placement",
    "remat": "remat",
    "offload": "offload",
    "objective": "objective",
    "backend": "backend",
    "one_choice": "one_choice",
    "time_model": "time_model",
}
"""The settings that are options of planning, as the command line spells them, with their names in `shardplan.plan`."""

_FIXED = tuple(n for n in inspect.signature(plan).parameters if n not in ("step", "args", "kwargs", "observer", "traced"))
"""The options of `shardplan.plan` that may stay the same for all points."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A factory's step for some settings, traced once for all of their points."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    traced: Traced
    samples: Samples | None


@dataclass(frozen=True, slots=True)
class _Recomputed:
    """A step with ``remat="auto"`` under one memory limit: the seconds and peak bytes of its plan; or, where nothing fits
    (``step_time_s`` is None), the bytes that the smallest plan needs; or why it is ``refused``.
    """

    step_time_s: float | None
    peak_bytes: int
    refused: str = ""

    def advice(self, limit_bytes: int, *, exact: bool) -> str:
        """What that means for a point with this limit; ``exact`` if it is the limit of the plan, else it is a larger one."""
        if self.refused:
            return f"it cannot have remat=auto: {self.refused}"
        if self.step_time_s is not None:
            step = f"{'' if exact else 'at most '}{seconds(self.step_time_s)}"
            return f"with remat=auto it fits (step {step}, {size_text(self.peak_bytes)})"
        fits = limit_bytes >= self.peak_bytes
        return "with remat=auto it fits" if fits else f"with remat=auto it needs {sufficient_limit(self.peak_bytes)}"


@dataclass(frozen=True, slots=True)
class _Row:
    """A point to plan: its place in the order, its settings, the factory's arguments (``own``), the options of `plan`, the
    memory limit that they give, and the price of a device. Points with the same factory settings (``step``, by number) share a
    trace. Points that differ only in the memory limit (same ``plan``) may share a plan.
    """

    place: int
    settings: Mapping[str, Any]
    own: Mapping[str, Any]
    planning: Mapping[str, Any]
    cluster: Cluster
    limit_bytes: int
    price: float | None
    step: tuple[int, ...]
    plan: tuple[int, ...]


def sweep(
    factory: Callable[..., Any],
    *,
    vary: Mapping[str, Iterable[Any]],
    options: Mapping[str, Any] | None = None,
    price: Mapping[str, float] | None = None,
    name: str | None = None,
    observer: Observer | None = None,
    workers: int = 1,
    **planning: Any,
) -> Sweep:
    """Plans the step that ``factory`` makes for each combination of settings.

    Points that differ only in options of planning share one trace. A point whose cluster, factory, trace or plan fails has the
    reason in ``error``, and the others go on. An interrupt (Ctrl-C) ends the sweep with the points so far; before the first it
    is raised.

    Args:
        factory: A function that returns (step, args).
        vary: The values of each setting. "cluster", "memory", "microbatches", "axes", "placement", "remat", "offload",
            "objective", "backend", "one_choice" and "time_model" are options of planning; every other name is a parameter of the
            factory.
        options: Parameters of the factory that stay the same.
        price: Dollars for an hour of one device, by the cluster as it is given ("dgx-h100:4"), its name ("dgx-h100") or its
            device's name; the first of these that has a price counts.
        name: The name of the factory in reports.
        observer: Called with the current activity and the fraction done.
        workers: The processes that plan points. With several, the factory has to be a function of a module, and a script that
            calls this needs ``if __name__ == "__main__":``, as for `multiprocessing`.
        planning: Options of `shardplan.plan` that stay the same, such as ``cluster``.

    Raises:
        ShardplanError: for an unknown setting or option, one given twice or without values, or a cluster without a price.
        TargetError: for a factory that is not a function.
        ClusterError: for a cluster that does not exist, if it is that of all points.
    """
    name = name or f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', factory)}"
    observer, fixed, values = checked_observer(observer), dict(options or {}), _values(vary)
    _check_names(factory, name, values, fixed, planning)
    rows, refused = _rows(values, fixed, planning, price)
    done, samples = _planned(factory, name, rows, observer, checked_workers(workers))
    done |= refused
    points = tuple(done[place] for place in sorted(done))
    points = tuple(replace(p, remedy=p.remedy + _neighbours(p, points)) if p.remedy else p for p in points)
    return Sweep(name, tuple(vary), points, len(rows) + len(refused), samples)


def _values(vary: object) -> dict[str, list[Any]]:
    """The values of each setting.

    Raises:
        ShardplanError: if ``vary`` is not a mapping of lists, or a setting has no values or has one twice.
    """
    if not isinstance(vary, Mapping) or not vary:
        raise ShardplanError(f'vary={vary!r}: give at least one setting with its values, for example {{"batch": [32, 64]}}')
    found: dict[str, list[Any]] = {}
    for setting, values in vary.items():
        own = [] if isinstance(values, str | Mapping) or not isinstance(values, Iterable) else list(values)
        if not own:
            raise ShardplanError(f"{setting}={values!r}: give a list of at least one value")
        for n, value in enumerate(own):
            if any(_equal(value, other) for other in own[:n]):
                raise ShardplanError(f"{setting} has the value {value!r} twice: once is enough")
        found[setting] = own
    return found


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are equal; arrays, also in lists and mappings, are only equal to themselves."""
    if hasattr(one, "shape") or hasattr(other, "shape"):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(_equal, one, other))
    return one == other


def _check_names(
    factory: Callable[..., Any],
    name: str,
    vary: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
    planning: Mapping[str, Any],
) -> None:
    """Refuses settings and options that are unknown or given twice."""
    if not callable(factory):
        raise TargetError(f"{factory!r} is no factory: give a function that returns (step, args)")
    own = keywords_of(factory)
    for option in fixed:
        if own and option not in own:
            raise ShardplanError(f"options: {name} has no parameter {option!r}{nearest(option, own)}; it has {', '.join(own)}")
    for option in planning:
        if option not in _FIXED:
            raise ShardplanError(f"sweep has no option {option!r}{nearest(option, _FIXED)}; it takes {', '.join(_FIXED)}")
    for setting in vary:
        known = PLANNING.get(setting)
        if known is None and own and setting not in own:
            raise ShardplanError(
                f"{setting!r} cannot vary: {name} has no such parameter{nearest(setting, [*own, *PLANNING])}; its own are "
                f"{', '.join(own)}, the options of planning {', '.join(PLANNING)}"
            )
        if setting in fixed if known is None else planning.get(known) is not None:
            raise ShardplanError(f"{setting!r} varies and is fixed too: give it once")
    if "cluster" not in vary and planning.get("cluster") is None:
        raise ClusterError("no cluster is given: fix one, or vary it (cluster=dgx-h100:1,dgx-h100:2)")


def _rows(
    vary: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any], planning: Mapping[str, Any], price: Mapping[str, float] | None
) -> tuple[list[_Row], dict[int, Point]]:
    """The points, checked as far as possible without planning, and by their places those whose cluster is wrong. Points with the
    same factory settings are adjacent, the largest memory limit first.
    """
    rows: list[_Row] = []
    refused: dict[int, Point] = {}
    clusters: dict[int, Cluster | str] = {}
    for place, numbers in enumerate(itertools.product(*(range(len(values)) for values in vary.values()))):
        settings = {n: vary[n][number] for n, number in zip(vary, numbers, strict=True)}
        at = dict(zip(vary, numbers, strict=True))
        own = {**fixed, **{n: v for n, v in settings.items() if n not in PLANNING}}
        plans = {**planning, **{PLANNING[n]: v for n, v in settings.items() if n in PLANNING}}
        given: ClusterLike = plans["cluster"]
        if id(given) not in clusters:
            clusters[id(given)] = _resolved(given, varies="cluster" in vary)
        cluster = clusters[id(given)]
        _check_options(plans)
        if isinstance(cluster, str):
            refused[place] = Point(settings, 0, error=cluster)
            continue
        rate = None if price is None else _price(price, given, cluster)
        limit = memory_limit(plans.get("memory_limit"), cluster.device, os.environ)
        step = tuple(number for n, number in at.items() if n not in PLANNING)
        same = tuple(number for n, number in at.items() if n != "memory")
        rows.append(_Row(place, settings, own, plans, cluster, limit.nbytes, rate, step, same))
    order = {row.step: row.place for row in reversed(rows)}
    return sorted(rows, key=lambda row: (order[row.step], -row.limit_bytes, row.place)), refused


def _resolved(given: ClusterLike, *, varies: bool) -> Cluster | str:
    """A cluster; if clusters vary and this one is wrong, the text of its error, as the points of the others go on."""
    try:
        return resolve_cluster(given)[0]
    except ClusterError as error:
        if not varies:
            raise
        return _line(error)


def _check_options(plans: Mapping[str, Any]) -> None:
    """Refuses values of options before anything is planned."""
    defaults = {"objective": "time", "time_model": "overlap", "time_budget_s": None, "one_choice": "auto", "remat": "none"}
    checked_options(**{name: plans.get(name, default) for name, default in defaults.items()})
    chosen(plans.get("backend", "auto"))
    hosted(plans.get("offload", "none"))


def _price(price: Mapping[str, float], given: ClusterLike, cluster: Cluster) -> float:
    """Dollars for an hour of one device."""
    names = dict.fromkeys([str(given), cluster.name, cluster.device.name])
    for name in names:
        if name in price:
            return price[name]
    raise ShardplanError(
        f"no price for {' or '.join(repr(n) for n in names)}: add a line such as {cluster.device.name!r} = 2.5 (dollars for an "
        f"hour of one device); the prices given are for {', '.join(price) or 'nothing'}"
    )


def checked_workers(workers: object) -> int:
    """The number of processes, checked.

    Raises:
        ShardplanError: if it is no positive whole number.
    """
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ShardplanError(f"workers={workers!r} is not a positive whole number: give the number of processes that plan points")
    return workers


def _planned(
    factory: Callable[..., Any], name: str, rows: Sequence[_Row], observer: Observer, workers: int
) -> tuple[dict[int, Point], str]:
    """(the points by their places, the argument that counts their samples). An interrupt ends it early."""
    done, samples = dict[int, Point](), ""
    try:
        for points, own in _groups(factory, name, rows, observer, workers, done):
            done |= points
            samples = samples or own
    except KeyboardInterrupt:
        if not done:
            raise
    return done, samples


def _groups(
    factory: Callable[..., Any], name: str, rows: Sequence[_Row], observer: Observer, workers: int, done: dict[int, Point]
) -> Iterator[tuple[dict[int, Point], str]]:
    """Plans rows that share a trace or a plan together. One worker adds each point to ``done`` as soon as it is there."""
    groups = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.step)]
    if workers == 1 or not rows:
        parts = iter([_part(observer, n, len(rows)) for n in range(len(rows))])
        for group in groups:
            yield done, _plan_group(partial(_step_of, factory, name), [(row, next(parts)) for row in group], done)
        return
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[_Row]] = {}
    for row in rows:
        alike.setdefault((row.step, row.plan), []).append(row)
    count = 0
    for points, samples in in_processes(_Elsewhere(factory, name), list(alike.values()), workers):
        count += len(points)
        observer(f"{count} of {len(rows)} points", count / len(rows))
        yield points, samples


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Plans rows in a process of its own, which keeps the last step that it has traced."""

    factory: Callable[..., Any]
    name: str

    def __call__(self, rows: Sequence[_Row]) -> tuple[dict[int, Point], str]:
        def step(row: _Row) -> _Step | str:
            return _kept(pickle.dumps((self.factory, self.name, row.own, _tracing(row))))

        done = dict[int, Point]()
        return done, _plan_group(step, [(row, silent) for row in rows], done)


@functools.lru_cache(maxsize=1)
def _kept(pickled: bytes) -> _Step | str:
    """`_step` of pickled arguments, for the last ones again without work."""
    use_cpu()
    return _step(*pickle.loads(pickled))


def _step_of(factory: Callable[..., Any], name: str, row: _Row) -> _Step | str:
    """The step of a row."""
    return _step(factory, name, row.own, _tracing(row))


def _tracing(row: _Row) -> dict[str, Any]:
    """The options of planning on which the trace depends."""
    return {name: row.planning[name] for name in ("donate_argnums", "replicate") if name in row.planning}


def _plan_group(step: Callable[[_Row], _Step | str], rows: Sequence[tuple[_Row, Observer]], done: dict[int, Point]) -> str:
    """Adds the points of one step to those that are done. Returns the argument that counts their samples."""
    first, part = rows[0]
    part("tracing", 0.0)
    made = step(first)
    if isinstance(made, _Step):
        _plan_points(made, rows, done)
        return made.samples.path if made.samples else ""
    done.update({row.place: Point(row.settings, row.cluster.size, error=made) for row, _ in rows})
    return ""


def _plan_points(made: _Step, rows: Sequence[tuple[_Row, Observer]], done: dict[int, Point]) -> None:
    """Adds the points of one step, each with its observer, to those that are done; the largest memory limits come first.

    A plan under a larger limit also serves a smaller one that it fits. Where nothing fits, nothing fits a smaller limit.

    Raises:
        KeyboardInterrupt: if the search of a point was interrupted.
    """
    looser = dict[tuple[int, ...], Point]()
    for row, part in rows:
        known = looser.get(row.plan)
        if known is not None and not (known.fits and (known.peak_bytes or 0) > row.limit_bytes):
            done[row.place] = replace(known, settings=row.settings, limit_bytes=row.limit_bytes)
            continue
        best_of(part)(math.inf, 0.0)
        point = done[row.place] = _point(made, row, part)
        if point.stopped == "interrupted":
            raise KeyboardInterrupt
        searched = not point.stopped if point.fits else bool(point.remedy) and row.planning.get("time_budget_s") is None
        if searched:
            looser[row.plan] = point
    unfit = [(row, part) for row, part in rows if done[row.place].remedy and _may_recompute(row)]
    for _, group in itertools.groupby(sorted(unfit, key=lambda own: own[0].plan), key=lambda own: own[0].plan):
        _advise(made, list(group), done)


def _may_recompute(row: _Row) -> bool:
    """Whether the sweep leaves recomputation off by default."""
    return "remat" not in row.settings and row.planning.get("remat", "none") == "none"


def _advise(made: _Step, rows: Sequence[tuple[_Row, Observer]], done: dict[int, Point]) -> None:
    """Adds advice on ``remat="auto"`` to points that do not fit and differ only in the memory limit. It plans once, under the
    smallest limit: what fits there fits the others.
    """
    least, part = min(rows, key=lambda own: own[0].limit_bytes)
    found = _recomputed(made, least, part)
    for row, _ in rows:
        advice = found.advice(row.limit_bytes, exact=row is least)
        done[row.place] = replace(done[row.place], remedy=f"{done[row.place].remedy}; {advice}")


def _step(factory: Callable[..., Any], name: str, own: Mapping[str, Any], planning: Mapping[str, Any]) -> _Step | str:
    """The step of a factory's settings, traced, with its samples; or the text of the error that its factory or trace raises."""
    try:
        step, args = call_factory(factory, name, own)
        donated = positions(planning.get("donate_argnums", ()), len(args), "donate_argnums")
        traced = trace_step(step, args, donated)
        return _Step(step, args, traced, samples_of(flatten(traced.program, replicate=planning.get("replicate", ()))))
    except ShardplanError as error:
        return _line(error)


def _part(observer: Observer, place: int, total: int) -> Observer:
    """An observer of one of ``total`` points."""
    return Part(observer, place / total, (place + 1) / total, f"point {place + 1} of {total}")


def _point(made: _Step, row: _Row, observer: Observer) -> Point:
    """The plan of one point, or why there is none."""
    point = Point(
        row.settings,
        row.cluster.size,
        samples=made.samples.count if made.samples else None,
        tokens=made.samples.tokens if made.samples else None,
        limit_bytes=row.limit_bytes,
        price=row.price,
    )
    try:
        planned = plan(made.step, *made.args, observer=observer, traced=made.traced, **row.planning)
    except MemoryLimitError as error:
        has = row.cluster.device.memory_bytes
        fits = "which the device has" if error.smallest_bytes <= has else f"more than the device's {size_text(has)}"
        needed = f"needs a memory limit of {sufficient_limit(error.smallest_bytes)}, {fits}, or more devices"
        return replace(point, peak_bytes=error.smallest_bytes, remedy=needed)
    except ShardplanError as error:
        return replace(point, error=_line(error))
    return replace(point, step_time_s=planned.step_time_s, peak_bytes=planned.peak_bytes, stopped=planned.stopped)


def _recomputed(made: _Step, row: _Row, observer: Observer) -> _Recomputed:
    """What ``remat="auto"`` does for a point that does not fit."""
    try:
        planned = plan(made.step, *made.args, observer=observer, traced=made.traced, **{**row.planning, "remat": "auto"})
    except MemoryLimitError as error:
        return _Recomputed(None, error.smallest_bytes)
    except ShardplanError as error:
        return _Recomputed(None, 0, refused=_line(error))
    if planned.stopped == "interrupted":
        raise KeyboardInterrupt
    return _Recomputed(planned.step_time_s, planned.peak_bytes)


def _neighbours(point: Point, points: Sequence[Point]) -> str:
    """The other points of the sweep that differ in one setting and fit, as text."""
    found = [
        f"{name}={setting_text(other.settings[name])}"
        for other in points
        if other.fits
        for name in point.settings
        if all(n == name or _equal(other.settings[n], value) for n, value in point.settings.items())
    ]
    return f"; in this sweep it fits with {', '.join(found)}" if found else ""


def _line(error: ShardplanError) -> str:
    return " ".join(str(error).split())
