"""The findings of `shardplan doctor` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardplan.report.tables import rate, size, table


def doctor_text(found: Mapping[str, Any]) -> str:
    """The whole report; ``found`` is the result of `shardplan.shell.doctor.examine`."""
    lines = [_versions(found), "", _jax(found["jax"]), "", _extras(found), "", *_devices(found["devices"])]
    lines += ["", *_flags(found["xla_flags"]), ""]
    for lack in found["missing"]:
        lines.append(f"{'MISSING' if lack['necessary'] else 'note'}: {lack['what']}; {lack['remedy']}")
    lines.append("All that is necessary is here." if found["ok"] else "Something necessary is missing or untested.")
    return "\n".join(lines)


def _versions(found: Mapping[str, Any]) -> str:
    rows = [("shardplan", found["shardplan"], ""), ("python", found["python"], "")]
    rows += [(p["name"], p["version"] or "missing", p["needed_for"]) for p in found["packages"]]
    rows.append(("optax", found["optax"] or "missing", "optimizers; shardplan itself needs none"))
    return table(("package", "version", "for"), rows, align="lll")


def _jax(jax: Mapping[str, Any]) -> str:
    releases = ", ".join(f"{release} (Python {python})" for release, python in jax["releases"].items())
    state = f"like the tested {jax['nearest']}" if jax["tested"] else "untested"
    return f"JAX {jax['version'] or 'is missing'}: {state}. Tested releases: {releases}."


def _extras(found: Mapping[str, Any]) -> str:
    def state(extra: Mapping[str, Any]) -> str:
        missing = [name for name, own in extra["packages"].items() if own is None]
        return f"lacks {', '.join(missing)}: {extra['install']}" if missing else "present"

    rows = [(extra["name"], extra["needed_for"], state(extra)) for extra in found["extras"]]
    return table(("extra", "for", "state"), rows, align="lll")


def _devices(devices: Mapping[str, Any]) -> list[str]:
    if "platform" not in devices:
        return [f"devices: none ({devices['error']})"]
    lines = [f"devices: {devices['count']} x {devices['kind']} ({devices['platform']})"]
    if "name" not in devices:
        return [*lines, f"cluster: unknown ({devices['error']})"]
    shape = "x".join(map(str, devices["shape"]))
    limit = f"{size(devices['memory_limit'])}, {devices['memory_limit_origin']}"
    lines += [f"cluster: {devices['name']}, {shape} of {devices['device']}; shardplan mesh detect -o cluster.toml writes it"]
    links = [f"{one['level']} {one['size']} x {rate(one['bytes_per_s'])} {one['kind']}" for one in devices["links"]]
    lines.append(f"links: {', '.join(links) or 'none, as there is one device'}")
    lines += [f"   assumed: {one}" for one in devices["assumed"]]
    return [*lines, f"memory limit of a plan: {limit}"]


def _flags(flags: Mapping[str, Any]) -> list[str]:
    def text(own: Mapping[str, Any]) -> str:
        return " ".join(f"--{name}={value}" for name, value in own.items())

    lines = [f"XLA_FLAGS: {text(flags['set']) or 'none'}"]
    if flags["added"]:
        lines.append(f"plans add: {text(flags['added'])}")
    else:
        lines.append("plans add: none on these devices; on GPUs those that shardplan plan prints")
    if flags["overridden"]:
        lines.append(f"plans count on other values, but yours win: {text(flags['overridden'])}")
    return lines
