"""A sweep: the plans of one factory's steps over settings, with their figures, prices and files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from shardplan.plans.files import write_whole
from shardplan.report.draw import new_figure, picture_format, rendered
from shardplan.report.tables import seconds
from shardplan.sizes import counted

Unit = Literal["token", "sample", "step"]
"""The unit by which plans are compared: the finest one that the data of every plan count."""


@dataclass(frozen=True, slots=True)
class Point:
    """One row of a sweep: the settings that vary, and the figures of the plan for them.

    ``devices`` is 0 where no cluster is known. ``samples`` and ``tokens`` are those of one step, None where the data do not
    say. ``peak_bytes`` is that of the plan; if none fits within ``limit_bytes``, it is that of the smallest one found, and
    ``remedy`` says what would fit. ``error`` says why the settings were refused. ``price`` is in dollars for one hour of one
    device. ``stopped`` says what ended the search early.
    """

    settings: Mapping[str, Any]
    devices: int
    step_time_s: float | None = None
    samples: int | None = None
    tokens: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    price: float | None = None
    error: str | None = None
    remedy: str | None = None
    stopped: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.step_time_s is not None

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all devices together in a second; None without a plan, or if its step takes no time."""
        return None if not self.step_time_s or self.samples is None else self.samples / self.step_time_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all devices together in a second; None without a plan, or if its step takes no time."""
        return None if not self.step_time_s or self.tokens is None else self.tokens / self.step_time_s

    def seconds_per(self, unit: Unit) -> float | None:
        """Seconds of one step, or of one of its samples or tokens; None where there is no plan or the data do not say."""
        count = {"token": self.tokens, "sample": self.samples, "step": 1}[unit]
        return None if self.step_time_s is None or not count else self.step_time_s / count

    def dollars_per_million(self, unit: Unit) -> float | None:
        """Dollars for a million tokens, samples or steps; None where no price is known."""
        each_s = self.seconds_per(unit)
        return None if self.price is None or each_s is None else self.price * self.devices / 3600 * each_s * 1e6

    def json(self, unit: Unit) -> dict[str, Any]:
        """The point as JSON values, with its cost in dollars for a million of a unit."""
        return {
            "settings": {name: _plain(value) for name, value in self.settings.items()},
            "devices": self.devices,
            "step_time_s": self.step_time_s,
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "peak_bytes": self.peak_bytes,
            "memory_limit": self.limit_bytes,
            "fits": self.fits,
            "cost": self.dollars_per_million(unit),
            "error": self.error,
            "remedy": self.remedy,
            "stopped": self.stopped,
        }


@dataclass(frozen=True, slots=True)
class Sweep:
    """The points of a sweep in the order of their settings, the last one varying fastest. Made by `shardplan.sweep`.

    ``varied`` are the names of the settings, ``total`` the number of points asked for: ``points`` has fewer if an interrupt
    ended the sweep. ``samples_from`` is the argument whose batch dim counts the samples (empty: none).
    """

    target: str
    varied: tuple[str, ...]
    points: tuple[Point, ...]
    total: int
    samples_from: str = ""

    def __repr__(self) -> str:
        return f"<Sweep of {self.target}: {sum(p.fits for p in self.points)} of {self.total} points with a plan>"

    @property
    def planned(self) -> tuple[Point, ...]:
        """The points that have a plan."""
        return tuple(p for p in self.points if p.fits)

    @property
    def unit(self) -> Unit:
        """The unit by which plans are compared: tokens if all have tokens, else samples if all have samples, else steps."""
        return next(u for u in get_args(Unit) if all(p.seconds_per(u) is not None for p in self.planned))

    @property
    def cost_unit(self) -> str:
        """The unit of costs."""
        return f"dollars per million {self.unit}s"

    def cost(self, point: Point) -> float | None:
        """The cost of a point, in `cost_unit`; None where no price is known or there is no plan."""
        return point.dollars_per_million(self.unit)

    @property
    def priced(self) -> bool:
        """Whether points are compared by cost, else by their number of devices."""
        return all(self.cost(p) is not None for p in self.planned) and bool(self.planned)

    def measures(self, point: Point) -> tuple[float, float]:
        """(seconds per `unit`, cost or devices) of a point with a plan: both are better if smaller."""
        each_s, cost = point.seconds_per(self.unit), self.cost(point)
        assert each_s is not None
        return each_s, cost if self.priced and cost is not None else point.devices

    @property
    def pareto(self) -> tuple[Point, ...]:
        """The points that no other beats in both measures, fastest first."""
        front: list[Point] = []
        for point in sorted(self.planned, key=self.measures):
            least = self.measures(front[-1]) if front else (0.0, float("inf"))
            if self.measures(point)[1] < least[1] or self.measures(point) == least:
                front.append(point)
        return tuple(front)

    @property
    def best(self) -> Point | None:
        """The fastest point, by seconds per `unit`; among equals, the one with the lower cost or fewer devices."""
        return min(self.planned, key=self.measures, default=None)

    @property
    def cheapest(self) -> Point | None:
        """The point with the lowest cost, among equals the fastest; None without prices."""
        return min(self.planned, key=lambda p: self.measures(p)[::-1]) if self.priced else None

    @property
    def json(self) -> dict[str, Any]:
        """The sweep as JSON values; ``best``, ``cheapest`` and ``pareto`` repeat points."""
        best, cheapest, unit = self.best, self.cheapest, self.unit
        return {
            "target": self.target,
            "varied": list(self.varied),
            "total": self.total,
            "samples_from": self.samples_from,
            "cost_unit": self.cost_unit,
            "points": [p.json(unit) for p in self.points],
            "best": best.json(unit) if best else None,
            "cheapest": cheapest.json(unit) if cheapest else None,
            "pareto": [p.json(unit) for p in self.pareto],
        }

    def save(self, file: str | os.PathLike[str]) -> None:
        """Writes `json`; the file is replaced once the new one is complete.

        Raises:
            ShardplanError: if the file cannot be written.
        """
        write_whole(Path(file), json.dumps(self.json, indent=1) + "\n")

    def draw(self, file: str | os.PathLike[str]) -> None:
        """Draws the points by both measures, with the Pareto front. The suffix of ``file`` sets the format: .png, .svg or .pdf.

        Raises:
            ShardplanError: for another suffix, if matplotlib is not installed, or if the file cannot be written.
        """
        suffix = picture_format(os.fspath(file))
        write_whole(Path(file), _picture(self, suffix))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings as a command line has them: ``cluster=2x4 batch=64``."""
    return " ".join(f"{name}={setting_text(value)}" for name, value in settings.items())


def setting_text(value: Any) -> str:
    """The value of a setting as `shardplan sweep` reads it.

    >>> setting_text(("*/mu/*", "*/nu/*")), setting_text((2, 3)), setting_text({"data": 4, "tensor": 2})
    ('[*/mu/*,*/nu/*]', '(2, 3)', '[data=4,tensor=2]')
    """
    if isinstance(value, Mapping):
        return f"[{','.join(f'{name}={size}' for name, size in cast(Mapping[object, object], value).items())}]"
    globs = [one for one in cast(tuple[object, ...], value) if isinstance(one, str)] if isinstance(value, tuple) else []
    return f"[{','.join(globs)}]" if globs else str(cast(object, value))


def _picture(sweep: Sweep, suffix: str) -> bytes:
    """The bytes of a picture: a dot for each plan, with its number, and the Pareto front. Equal sweeps give equal bytes."""
    figure = new_figure(dpi=120)
    figure.set_size_inches(9.0, 6.0)
    axes = figure.subplots()
    front, best = sweep.pareto, sweep.best
    numbers: dict[tuple[float, float], list[int]] = {}
    for number, point in enumerate(sweep.points, 1):
        if point.fits:
            numbers.setdefault(sweep.measures(point), []).append(number)
    for (time_s, other), own in numbers.items():
        axes.plot(other, time_s, marker="o", ms=4, color="#999999", ls="none")
        axes.annotate(", ".join(map(str, own)), (other, time_s), xytext=(5, 4), textcoords="offset points", fontsize=7)
    for point in front:
        time_s, other = sweep.measures(point)
        label = f"{sweep.points.index(point) + 1}: {settings_text(point.settings)}"
        axes.plot(other, time_s, marker="o", ms=7, color="#c0262d" if point is best else "#1f5fa8", ls="none", label=label)
    places = [sweep.measures(point) for point in front]
    axes.step([other for _, other in places], [time_s for time_s, _ in places], where="pre", color="#1f5fa8", lw=0.8)
    if all(time_s for time_s, _ in numbers):
        axes.set_yscale("log")
    axes.margins(0.15)
    axes.grid(visible=True, which="both", lw=0.3, color="#dddddd")
    if front:
        axes.legend(fontsize=7, title="Pareto front", title_fontsize=7)
    axes.set_xlabel(sweep.cost_unit if sweep.priced else "devices", fontsize=8)
    axes.set_ylabel(f"seconds per {sweep.unit}", fontsize=8)
    fastest = f"\nfastest: {settings_text(best.settings)}, step {seconds(best.step_time_s or 0.0)}" if best else ""
    missing = sweep.total - len(sweep.planned)
    without = f"\n{counted(missing, 'point has', 'points have')} no plan" * bool(missing)
    axes.set_title(f"{sweep.target}{fastest}{without}", fontsize=9, loc="left")
    figure.tight_layout()
    return rendered(figure, suffix)


def _plain(value: Any) -> Any:
    """A setting as a JSON value; a value without a JSON form becomes text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(own) for name, own in cast(Mapping[object, object], value).items()}
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]  # pyright: ignore[reportUnknownVariableType]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
