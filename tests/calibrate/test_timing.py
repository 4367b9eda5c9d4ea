"""What is timed runs as often as it should, on every device; measurements are kept by what they depend on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from shardplan.calibrate import timing
from shardplan.calibrate.cache import FILE, Cache, default_folder, key_of
from shardplan.calibrate.measured_kernels import CPU, KernelArgument, kernels
from shardplan.calibrate.profiling import kernel_text
from shardplan.calibrate.timing import Timed, TimedFunction
from shardplan.errors import CalibrationError
from shardplan.hlo.meter import parse


def test_each_iteration_of_the_timed_loop_executes_the_task(devices: list[Any]) -> None:
    """XLA may not take the work, the same in every iteration, out of the loop."""
    mesh = Mesh(np.array(devices[:2]), ("d",))
    operand = KernelArgument((128, 128), "float32")
    exchange = TimedFunction(lambda a: jax.lax.psum(a, "d"), (operand,))
    text = timing.compiled(exchange, mesh, timing.placed(exchange, mesh), 5).as_text()
    assert [c.trips for c in parse(text)] == [5]
    product = TimedFunction(lambda a, b: a @ b, (operand, operand))
    text = timing.compiled(product, mesh, timing.placed(product, mesh), 5).as_text()
    assert " dot(" in text
    assert " dot(" not in text[text.index("ENTRY") :]


def test_a_task_runs_on_the_values_of_its_arguments(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices[:2]), ("d",))
    task = TimedFunction(
        lambda t, i: jnp.take(t, i, axis=0), (KernelArgument((16, 4), "float32"), KernelArgument((8,), "int32", 16))
    )
    placed = timing.placed(task, mesh)
    table, picks = (a.values(seed) for seed, a in enumerate(task.arguments))
    for times in (1, 3):
        made = timing.compiled(task, mesh, placed, times)(*placed)
        np.testing.assert_array_equal(np.asarray(made), np.stack([table[picks]] * 2))


def test_every_task_has_its_seconds_and_spread(devices: list[Any]) -> None:
    mesh = Mesh(np.array(devices[:2]), ("d",))
    tasks = [TimedFunction(lambda a: a @ a, (KernelArgument((64, 64), dtype),)) for dtype in ("float32", "float64")]
    told: list[float] = []
    rows = timing.timed(tasks, mesh, rounds=3, done=told.append)
    assert all(row.seconds > 0 and row.spread >= 0 for row in rows)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_kernels_are_told_apart_by_op_shapes_and_dtypes() -> None:
    listed = kernels(CPU)
    assert len({k.name for k in listed}) == len({kernel_text(k) for k in listed}) == len(listed)
    assert key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1}) != key_of({"a": 1, "b": 3})


def test_what_was_measured_is_read_back(tmp_path: Path) -> None:
    first, second = Cache.opened(tmp_path / "new"), Cache.opened(tmp_path / "new")
    first.add({"a": Timed(1e-3, 0.1)})
    second.add({"b": Timed(2e-3, 0.0)})
    assert Cache.opened(tmp_path / "new").entries == {"a": Timed(1e-3, 0.1), "b": Timed(2e-3, 0.0)}
    assert [p.name for p in (tmp_path / "new").iterdir()] == [FILE]  # nothing temporary stays


ROWS = ("3", "[1.0]", "[-1.0, 0.0]", "[NaN, 0.0]", "[1.0, Infinity]", '["1", 0.0]', "[true, 0.0]")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 0, "measurements": {}}', '{"version": 1}', '{"version": 1, "measurements": {"a": [0, 0]}}']
    + [f'{{"version": 1, "measurements": {{"a": {row}}}}}' for row in ROWS],
)
def test_a_file_that_is_no_cache_is_said_and_replaced(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FILE).write_text(text)
    cache = Cache.opened(tmp_path)
    assert not cache.entries
    assert f"{tmp_path / FILE} is not a cache of measurements" in caplog.text
    cache.add({"a": Timed(1e-3, 0.1)})
    assert json.loads((tmp_path / FILE).read_text())["measurements"] == {"a": [1e-3, 0.1]}


def test_a_cache_that_cannot_be_used_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"file/.* cannot be used: .*--cache DIR"):
        Cache.opened(tmp_path / "file" / "folder")


def test_the_cache_is_in_the_users_cache_folder() -> None:
    assert default_folder({"XDG_CACHE_HOME": "/somewhere"}) == Path("/somewhere/shardplan")
    assert default_folder({"XDG_CACHE_HOME": "relative"}) == default_folder({}) == Path.home() / ".cache" / "shardplan"
