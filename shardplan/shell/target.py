"""Reads the words of a command line: a TARGET that makes a step and its arguments, and values written as text."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardplan.errors import DeviceError, PinError, ShardplanError, TargetError, nearest
from shardplan.ir import spec_text
from shardplan.user_code import text_of, users_code

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def use_cpu(count: int = 1) -> None:
    """Gives JAX ``count`` simulated CPU devices, unless it is already running. Starts no backend."""
    # JAX refuses these settings once a backend runs; its devices are then kept
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_platforms", "cpu")
        if count > 1:
            jax.config.update("jax_num_cpu_devices", count)


def simulate(count: int) -> list[Any]:
    """``count`` simulated CPU devices; if JAX is already running, the first ``count`` of its CPU devices.

    Raises:
        DeviceError: if there are fewer.
    """
    use_cpu(count)
    result = jax.devices("cpu")
    if len(result) < count:
        raise DeviceError(
            f"{count} simulated devices are needed, but JAX is already running with {len(result)}: start a new process"
        )
    return result[:count]


def load_target(target: str, options: dict[str, Any], *, concrete: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, args) of ``package.module:factory`` or ``file.py:factory``; the factory is called with ``options``.

    With ``concrete``, a factory that has a parameter ``concrete`` is called with ``concrete=True``, for real arguments.

    Raises:
        TargetError: if the factory cannot be imported, does not exist, fails, or returns something else.
    """
    factory = load_factory(target)
    if concrete and "concrete" in parameters_of(factory):
        options = {"concrete": True, **options}
    return call_factory(factory, target, options)


def call_factory(
    factory: Callable[..., Any], target: str, options: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, args) of a factory; messages call it ``target``.

    Raises:
        TargetError: if the factory fails, or returns something else.
    """
    with users_code(lambda error: TargetError(f"{target} failed{_options_text(options)}: {_error_text(error)}")):
        returned = factory(**options)
    if not (
        isinstance(returned, tuple) and len(returned) == 2 and callable(returned[0]) and isinstance(returned[1], tuple | list)
    ):
        hint = "; return the tuple (step, args) in place of the list" if isinstance(returned, list) and len(returned) == 2 else ""
        raise TargetError(
            f"{target} returned {_type_text(returned)}: "
            f"a factory returns (step, args), a function and the tuple of its arguments{hint}"
        )
    if hasattr(returned[0], "prepare") and hasattr(returned[0], "__wrapped__"):
        raise TargetError(f"the step of {target} is already decorated with @shardplan.parallelize: give the bare step (no @)")
    return returned[0], tuple(returned[1])


def load_factory(target: str) -> Callable[..., Any]:
    """The factory that ``package.module:factory`` or ``file.py:factory`` names.

    Raises:
        TargetError: if it cannot be imported, or does not exist.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name.isidentifier():
        raise TargetError(f"TARGET {target!r} names no factory: write it as package.module:factory or file.py:factory")
    module = _load_module(place)
    if not hasattr(module, name):
        own = (n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__)
        known = [n for n in own if not n.startswith("_")]
        raise TargetError(f"{place} has no {name!r}{nearest(name, known)}")
    factory = getattr(module, name)
    if not callable(factory):
        raise TargetError(f"{target} is {_type_text(factory)}: a factory must be a function that returns (step, args)")
    return factory


def _load_module(place: str) -> Any:
    _put_on_path(str(Path.cwd()))
    with users_code(lambda error: TargetError(f"{place} cannot be imported: {_import_error_text(place, error)}")):
        return _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)


def _import_error_text(place: str, error: BaseException) -> str:
    if not isinstance(error, ModuleNotFoundError):
        return _error_text(error)
    own = error.name is not None and error.name.split(".")[0] == place.split(".")[0]
    return f"{error}{' (is it installed, or under the current directory?)' if own else ''}"


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise TargetError(f"no file {path}")
    name = f"_shardplan_target_{path.stem}"  # a distinct name, so that json.py does not replace the module json
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module there
    _put_on_path(str(path.resolve().parent))
    spec.loader.exec_module(module)
    return module


def _put_on_path(folder: str) -> None:
    """Puts ``folder`` first on the import path. It stays there, because a factory may import from it too."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def parameters_of(factory: Callable[..., Any]) -> Sequence[str]:
    """The names of a factory's parameters; none where Python does not know them."""
    try:
        return list(inspect.signature(factory).parameters)
    except (TypeError, ValueError):
        return ()


def keywords_of(factory: Callable[..., Any]) -> Sequence[str]:
    """The parameters that a factory takes by name; none where it takes any, or Python does not know them."""
    try:
        own = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return ()
    if any(p.kind is p.VAR_KEYWORD for p in own):
        return ()
    return [p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _options_text(options: Mapping[str, Any]) -> str:
    return " with " + ", ".join(f"{k}={v!r}" for k, v in options.items()) if options else ""


def _error_text(error: BaseException) -> str:
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})"
    text = _ADDRESS.sub("", text_of(error))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _type_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)} ({', '.join(type(v).__name__ for v in value[:4])})"
    return f"a value of type {type(value).__name__}"


# -- values ------------------------------------------------------------------------------------------------------------


def read_options(pairs: Sequence[str]) -> dict[str, Any]:
    """``["layers=24", "scan=true", "dtype=bfloat16"]`` -> ``{"layers": 24, "scan": True, "dtype": "bfloat16"}``: `literal`."""
    result: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.strip().isidentifier():
            raise ShardplanError(f"--set {pair}: write it as NAME=VALUE")
        result[name.strip()] = literal(text)
    return result


def literal(text: str) -> Any:
    """The value of a Python literal, or of TOML's ``true`` or ``false``, else the text itself (``"'true'"`` is the word)."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def read_pins(pairs: Sequence[str]) -> dict[str, PartitionSpec]:
    """``["*kernel=P(None, 'gpu')"]`` -> the `PartitionSpec` of each path glob."""
    result: dict[str, PartitionSpec] = {}
    for pair in pairs:
        pattern, equals, text = pair.partition("=")
        if not equals or not pattern or not text.strip():
            raise PinError(f"--pin {pair}: write it as 'GLOB=SPEC', for example '*kernel=P(None, \"gpu\")'")
        spec = read_spec(text)
        if result.get(pattern, spec) != spec:
            raise PinError(f"--pin gives {pattern} twice: {spec_text(result[pattern])} and {spec_text(spec)}")
        result[pattern] = spec
    return result


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
        value = tuple(_spec_entry(part.strip()) for part in inner.split(","))
    for entry in value:
        names = entry if isinstance(entry, tuple) else (entry,)
        if entry is not None and not all(isinstance(n, str) and n for n in names):
            raise PinError(
                f"{text!r} is not a PartitionSpec: {entry!r} is not None, an axis name or a tuple of them; write P('node', None)"
            )
    return PartitionSpec(*value)


def _spec_entry(text: str) -> Any:
    if text in ("None", "-", ""):
        return None
    names = tuple(n.strip().strip("'\"") for n in text.split("+"))
    if not all(n.isidentifier() for n in names):
        raise PinError(f"{text!r} is not an axis name: write a PartitionSpec as P('node', None) or node, None")
    return names[0] if len(names) == 1 else names
