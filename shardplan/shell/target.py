"""What the command line is given: a TARGET that makes a step and its arguments, and values written as text."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardplan.errors import DeviceError, PinError, ShardplanError, TargetError, nearest
from shardplan.ir import spec_text
from shardplan.user_code import users_code

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def use_cpu(count: int = 1) -> None:
    """From now on JAX has ``count`` simulated CPU devices, unless it is running already. Starts no backend."""
    # JAX refuses these settings once a backend runs; then what is there has to do
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)


def simulate(count: int) -> list[Any]:
    """``count`` simulated CPU devices. Where JAX is already running, the first of those that are there.

    Raises:
        DeviceError: if there are fewer.
    """
    use_cpu(count)
    found = jax.devices("cpu")
    if len(found) < count:
        raise DeviceError(f"{count} simulated devices are needed and JAX already runs with {len(found)}: start a new process")
    return found[:count]


def load_target(target: str, options: dict[str, Any], *, concrete: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, args) of ``package.module:factory`` or ``file.py:factory``, the factory called with ``options``.

    With ``concrete`` the factory is asked for real arguments where it has such a parameter.

    Raises:
        TargetError: if it does not import, is not there, fails, or returns something else.
    """
    factory = _factory(target)
    if concrete and "concrete" in _parameters(factory):
        options = {"concrete": True, **options}
    with users_code(lambda error: TargetError(f"{target} failed{_with(options)}: {_said(error)}")):
        made = factory(**options)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
        hint = "; return the tuple (step, args) in place of the list" if isinstance(made, list) and len(made) == 2 else ""
        raise TargetError(
            f"{target} returned {_kind(made)}: a factory returns (step, args), a function and the tuple of its arguments{hint}"
        )
    if hasattr(made[0], "prepare") and hasattr(made[0], "__wrapped__"):
        raise TargetError(f"the step of {target} is decorated with @shardplan.parallelize already: give the bare step (no @)")
    return made[0], tuple(made[1])


def _factory(target: str) -> Callable[..., Any]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise TargetError(f"TARGET {target!r} is not written as package.module:factory or file.py:factory")
    module = _module(place)
    if not hasattr(module, name):
        own = (n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
        known = [n for n in own if not n.startswith("_")]
        raise TargetError(f"{place} has no {name!r}{nearest(name, known)}")
    factory = getattr(module, name)
    if not callable(factory):
        raise TargetError(f"{target} is {_kind(factory)}: a factory is a function that returns (step, args)")
    return factory


def _module(place: str) -> Any:
    _put_on_path(str(Path.cwd()))
    with users_code(lambda error: TargetError(f"{place} does not import: {_not_imported(place, error)}")):
        return _file(Path(place)) if place.endswith(".py") else importlib.import_module(place)


def _not_imported(place: str, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return _said(error)
    own = error.name is not None and error.name.split(".")[0] == place.split(".")[0]
    return f"{error}{' (is it installed, or under the current directory?)' if own else ''}"


def _file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"no file {path}")
    name = f"_shardplan_target_{path.stem}"  # a name of its own: json.py must not take the place of json
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    _put_on_path(str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _put_on_path(folder: str) -> None:
    """``folder`` comes first for imports; it stays on the path, because a factory may import too."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _parameters(factory: Callable[..., Any]) -> Sequence[str]:
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return ()


def _with(options: dict[str, Any]) -> str:
    return " with " + ", ".join(f"{k}={v!r}" for k, v in options.items()) if options else ""


def _said(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    text = _ADDRESS.sub("", str(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(v).__name__ for v in value[:4])})"
    return f"a value of type {type(value).__name__}"


# -- values ------------------------------------------------------------------------------------------------------------


def read_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``["layers=24", "dtype=bfloat16"]`` -> ``{"layers": 24, "dtype": "bfloat16"}``: Python literals, else strings."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ShardplanError(f"--set {pair}: write it as NAME=VALUE")
        found[name.strip()] = _literal(text)
    return found


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_pins(pairs: Sequence[str]) -> dict[str, PartitionSpec]:
    """``["*kernel=P(None, 'gpu')"]`` -> path glob to `PartitionSpec`."""
    found: dict[str, PartitionSpec] = {}
    for pair in pairs:
        pattern, equals, text = pair.partition("=")
        if not equals or not pattern or not text.strip():
            raise PinError(f"--pin {pair}: write it as 'GLOB=SPEC', for example '*kernel=P(None, \"gpu\")'")
        spec = read_spec(text)
        if found.get(pattern, spec) != spec:
            raise PinError(f"--pin gives {pattern} twice: {spec_text(found[pattern])} and {spec_text(spec)}")
        found[pattern] = spec
    return found


def read_spec(text: str) -> PartitionSpec:
    """``P('node', None, ('a', 'b'))``, or without quotes ``node, None, a+b``.

    >>> read_spec("P(None, 'gpu')") == read_spec("None, gpu")
    True
    """
    inner = text.strip()
    for opening in ("PartitionSpec(", "P("):
        if inner.startswith(opening) and inner.endswith(")"):
            inner = inner[len(opening) : -1]
            break
    try:
        value = ast.literal_eval(f"({inner},)") if inner.strip() else ()
    except (ValueError, SyntaxError):
        value = tuple(_entry(part.strip()) for part in inner.split(","))
    for entry in value:
        names = entry if isinstance(entry, tuple) else (entry,)
        if entry is not None and not all(isinstance(n, str) and n for n in names):
            raise PinError(
                f"{text!r} is no PartitionSpec: {entry!r} is neither None, an axis name nor a tuple of them; say P('node', None)"
            )
    return PartitionSpec(*value)


def _entry(text: str) -> Any:
    if text in ("None", "-", ""):
        return None
    names = tuple(n.strip().strip("'\"") for n in text.split("+"))
    if not all(n.isidentifier() for n in names):
        raise PinError(f"{text!r} is no axis name in a PartitionSpec; write P('node', None) or node, None")
    return names[0] if len(names) == 1 else names
