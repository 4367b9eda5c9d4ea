"""Checks a machine for shardplan: packages, the release of JAX, devices, XLA flags."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from shardplan.errors import ShardplanError
from shardplan.mesh import Cluster
from shardplan.plans.xla_flags import xla_flags
from shardplan.shell.compiler_options import XLA_FLAGS, flags_set
from shardplan.shell.memory_default import memory_limit
from shardplan.versions import NEWEST, TESTED, is_tested, minor, nearest_tested

NEEDED: Mapping[str, str] = {
    "jax": "traces steps and runs plans",
    "jaxlib": "JAX's compiler and devices",
    "flax": "steps on nnx objects",
    "numpy": "tables and layouts",
    "networkx": "graphs of operators and of links",
    "scipy": "integer programs, fits",
    "pyyaml": "rules of other programs, as MaxText's",
}
"""The packages that shardplan needs, each with its use."""

_DEV = (
    *(
        "equinox",
        "flatbuffers",
        "hypothesis",
        "matplotlib",
        "numba",
        "orbax-checkpoint",
        "ml_dtypes",
        "optax",
        "pyright",
        "pytest",
        "pytest-xdist",
        "rich",
        "ruff",
    ),
    *("scikit-learn", "scipy-stubs", "types-networkx"),
)

EXTRAS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "draw": (("matplotlib",), "pictures: --draw"),
    "terminal": (("rich",), "colours and progress bars on a terminal"),
    "fast": (("numba",), "the simulator, compiled"),
    "gpu-aot": (("jax-cuda13-pjrt", "jax-cuda13-plugin"), "compiling for GPUs that are not there"),
    "export": (("flatbuffers",), "the planned step as StableHLO: export -o step.stablehlo"),
    "attention": (("tokamax",), "tokamax's attention kernels in models/"),
    "checkpoint": (("orbax-checkpoint",), "checkpoints of planned state"),
    "docs": (("myst-parser", "sphinx", "sphinx-book-theme"), "the site: make docs"),
    "dev": (_DEV, "the tests, and the optimizers of models/ (optax)"),
}
"""The extras of pyproject.toml, with their packages and their use."""

_LIMIT_S = 120.0
"""Devices that take longer to answer count as out of order."""
_PLATFORMS = "JAX_PLATFORMS"
_CHILD = "from shardplan.shell.doctor import print_devices; print_devices()"

Installed = Callable[[str], str | None]
"""The version of a package; None if it is missing."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that is missing or untested, and the command that mends it. ``necessary``: shardplan counts on it."""

    what: str
    remedy: str
    necessary: bool


def installed(name: str) -> str | None:
    """The version of an installed package; None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine(environment: Mapping[str, str], package: Installed = installed) -> dict[str, Any]:
    """The findings as JSON values; ``ok`` is false if something necessary is missing or untested.

    A child process looks for devices, because an unknown flag in XLA_FLAGS ends the process that reads it.
    """
    from shardplan import __version__

    versions = {name: package(name) for name in NEEDED}
    lacks = _packages(versions)
    devices = look(environment) if versions["jax"] and versions["jaxlib"] else {"error": "JAX is not installed"}
    flags = _flags(devices, environment)
    lacks += [*_devices(devices, environment), *([Lack(flags["error"], f"correct {XLA_FLAGS}", True)] if flags["error"] else [])]
    return {
        "ok": not any(lack.necessary for lack in lacks),
        "python": platform.python_version(),
        "shardplan": __version__,
        "packages": [{"name": name, "version": own, "needed_for": NEEDED[name]} for name, own in versions.items()],
        "optax": package("optax"),
        "jax": {
            "version": versions["jax"],
            "tested": versions["jax"] is not None and is_tested(versions["jax"]),
            "nearest": nearest_tested(versions["jax"]) if versions["jax"] else None,
            "releases": dict(TESTED),
        },
        "extras": [_extra(name, package) for name in EXTRAS],
        "devices": devices,
        "xla_flags": flags,
        "missing": [{"what": lack.what, "remedy": lack.remedy, "necessary": lack.necessary} for lack in lacks],
    }


def _packages(versions: Mapping[str, str | None]) -> list[Lack]:
    """The packages that are missing or untested."""
    gone = [name for name, own in versions.items() if own is None]
    lacks = [Lack(f"{', '.join(gone)}: not installed", "pip install shardplan", True)] if gone else []
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    if jax is not None and not is_tested(jax):
        lacks.append(Lack(f"JAX {jax} is untested with this shardplan (tested: {', '.join(TESTED)})", _install_jax(), True))
    if jax is not None and jaxlib is not None and minor(jax) != minor(jaxlib):
        lacks.append(Lack(f"jax {jax} and jaxlib {jaxlib} do not belong together", f"pip install -U jaxlib=={jax}", True))
    return lacks


def _install_jax() -> str:
    """The command that installs the newest tested release that this Python takes."""
    tested = [release for release, python in TESTED.items() if sys.version_info[:2] >= minor(python)]
    return f"pip install jax=={tested[-1] if tested else NEWEST}"


def _extra(name: str, package: Installed) -> dict[str, Any]:
    """An extra: the versions of its packages, and whether it has them all."""
    names, purpose = EXTRAS[name]
    versions = {one: package(one) for one in names}
    return {
        "name": name,
        "present": all(versions.values()),
        "packages": versions,
        "needed_for": purpose,
        "install": f"pip install 'shardplan[{name}]'",
    }


def look(environment: Mapping[str, str]) -> dict[str, Any]:
    """The devices that JAX finds in this environment and the cluster detected from them, or an ``error``."""
    path = os.pathsep.join(folder for folder in sys.path if folder)
    environment = {**environment, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2"}
    command = [sys.executable, "-c", _CHILD]
    try:
        child = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"JAX did not answer in {_LIMIT_S:.0f} s"}
    try:
        return json.loads(child.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return {"error": (child.stderr.strip().splitlines() or [f"JAX ended with code {child.returncode}"])[-1]}


def print_devices() -> None:
    """Prints the devices of this process as one line of JSON; `look` runs it in a child process."""
    import jax

    from shardplan.mesh.devices import detected

    devices = list(jax.devices())
    found: dict[str, Any] = {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)}
    try:
        guess = detected(devices)
    except ShardplanError as error:
        found["error"] = str(error)
    else:
        found |= {"cluster": guess.cluster.to_toml(), "assumed": guess.assumed}
    sys.stdout.write(json.dumps(found) + "\n")


def _devices(found: dict[str, Any], environment: Mapping[str, str]) -> list[Lack]:
    """What is wrong with the devices. ``found`` gets the name, the shape and the default memory limit of its cluster."""
    lacks: list[Lack] = []
    if "platform" not in found:
        given = ", ".join(f"{name}={environment[name]}" for name in (_PLATFORMS, XLA_FLAGS) if environment.get(name))
        what = f"JAX has no devices{f' with {given}' if given else ''}: {found['error']}"
        lacks.append(Lack(what, f"correct {_PLATFORMS} and {XLA_FLAGS}, or reinstall jax", True))
    elif found["platform"] == "cpu" and shutil.which("nvidia-smi") and not environment.get(_PLATFORMS):
        lacks.append(Lack("this machine has NVIDIA GPUs that JAX does not see", "pip install 'jax[cuda13]'", False))
    if "cluster" in found:
        cluster = Cluster.from_toml(found["cluster"])
        limit = memory_limit(None, cluster.device, environment)
        found |= {"name": cluster.name, "shape": list(cluster.shape), "device": cluster.device.name}
        found["links"] = [
            {"level": own.name, "size": own.size, "kind": own.kind, "bytes_per_s": own.bandwidth_bytes_per_s}
            for own in cluster.levels
            if own.size > 1
        ]
        found |= {"memory_limit": limit.nbytes, "memory_limit_origin": limit.origin}
    return lacks


def _flags(found: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The XLA flags that the user sets, that a plan for this machine's GPUs adds, and that the user overrides."""
    try:
        own = flags_set(environment)
    except ShardplanError as error:
        return {"set": {}, "added": {}, "overridden": {}, "error": str(error)}
    planned: Mapping[str, Any] = {}
    if "cluster" in found and found["platform"] != "cpu":
        planned = xla_flags(Cluster.from_toml(found["cluster"]))
    added = {name: value for name, value in planned.items() if name not in own}
    return {"set": own, "added": added, "overridden": {n: own[n] for n in planned if n in own}, "error": None}
