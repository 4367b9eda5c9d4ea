"""One plan for all processes of a run: all check that they run the same step, then the first process makes the plan.

Under `jax.distributed`, the processes exchange texts through the coordinator's key-value store in process 0:

1. the first process publishes its terms: versions, cluster, options, arguments, and a mark for each op of the step;
2. every other process compares them with its own terms and answers with the first difference. The first process gathers the
   answers and publishes a summary, so that all raise the same error or none does;
3. the first process makes the plan and publishes the text of its file, with a hash;
4. every other process checks the hash, reads the plan, and answers as before.

Each wait for answers has a time limit. The wait for the plan has none: it lasts as long as the first process plans.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal, overload

import jax
from jax.sharding import Mesh

import shardplan
from shardplan import _jax
from shardplan.errors import AgreementError, PlanFileError, ShardplanError, size_text
from shardplan.frontend.argnums import positions
from shardplan.frontend.keywords import as_positional
from shardplan.frontend.nnx_state import trace_step
from shardplan.frontend.trace import Traced
from shardplan.ir import spec_text
from shardplan.mesh import Cluster
from shardplan.plans import files
from shardplan.plans.fingerprint import arguments, different_arguments, fingerprint, first_difference, marks
from shardplan.plans.placed_data import conditions
from shardplan.shell.api import plan as make_plan
from shardplan.shell.clusters import ClusterLike, resolve_cluster
from shardplan.shell.loading import for_step
from shardplan.shell.memory_default import memory_limit
from shardplan.shell.placed_plan import PlacedPlan
from shardplan.shell.placements import PlacementLike, placement_text
from shardplan.shell.plan_of_step import Plan
from shardplan.shell.watching import join, serve
from shardplan.versions import jax_version

TIMEOUT_S = 300.0
"""How long a process waits for the answers of others; `jax.distributed.initialize` waits as long for them to connect."""

_GRACE_S = 10.0
"""How much longer the others wait than the first process, which then names the processes that did not answer."""

_REMEDY = "start the same program, with the same versions, cluster and options, in every process"

_rounds: Counter[tuple[int, ...]] = Counter()
"""The number of agreements of each group of processes. Its members count alike, as they run the same program."""


@overload
def agree(step: Callable[..., Any], *args: Any, placement: Literal["one"] = "one", **options: Any) -> Plan: ...


@overload
def agree(step: Callable[..., Any], *args: Any, placement: Literal["auto"], **options: Any) -> Plan | PlacedPlan: ...


@overload
def agree(step: Callable[..., Any], *args: Any, placement: PlacementLike, **options: Any) -> PlacedPlan: ...


def agree(
    step: Callable[..., Any],
    *args: Any,
    cluster: ClusterLike,
    donate_argnums: Sequence[int] | int = (),
    kwargs: Mapping[str, Any] | None = None,
    file: str | PathLike[str] | None = None,
    timeout_s: float = TIMEOUT_S,
    **options: Any,
) -> Plan | PlacedPlan:
    """One plan for all processes of `jax.distributed`, which all make this call: process 0 plans or loads, the others receive it.

    Before that, all compare their program, versions, cluster and options with those of process 0. In one process, or on a
    `jax.sharding.Mesh` of this process alone, this is `shardplan.plan`, which takes the same ``options``.

    Args:
        step: As for `shardplan.plan`, like ``args``, ``cluster``, ``donate_argnums``, ``kwargs`` and ``options``.
        file: A saved plan, for process 0 to load instead of planning. Other processes need no file.
        timeout_s: Seconds to wait for other processes. Planning itself takes as long as it takes.

    Raises:
        AgreementError: in all processes, if one differs from process 0 or is silent; in the others, if process 0 has no plan.
        PlanFileError: if the file is not a plan, or was made for another model, other shapes, another cluster or other donations.
    """
    positional, leaves = as_positional(step, args, kwargs)
    donated = positions(donate_argnums, len(leaves), "donate_argnums")

    group = group_of(cluster, None, timeout_s)
    traced = trace_step(positional, leaves, donated)

    def make() -> Any:
        if file is not None:
            return _loaded(file, positional, traced, donated, cluster)
        named = {"kwargs": kwargs, "traced": traced, **options}
        return make_plan(step, *args, cluster=cluster, donate_argnums=donate_argnums, **named)

    if file is not None and options:
        raise ShardplanError(f"{', '.join(options)} beside file=: a saved plan has its own options; leave them out, or the file")
    if group is None:
        return make()
    return agreed(group, positional, traced, cluster, {"donate_argnums": donated, **options}, make)


def _loaded(
    file: str | PathLike[str], step: Callable[..., Any], traced: Traced, donated: Sequence[int], cluster: ClusterLike
) -> Plan | PlacedPlan:
    """The plan of a file, if it is for this step, cluster and donation."""
    name, data, (resolved, mesh) = fspath(file), files.read_any(file), resolve_cluster(cluster)
    planned = tuple(conditions(data).donate_argnums)
    if data.cluster.fingerprint() != resolved.fingerprint():
        raise PlanFileError(
            f"{name}: the plan is for the cluster {data.cluster.name}, not for {resolved.name}; plan for this one"
        )
    if planned != tuple(donated):
        raise PlanFileError(f"{name}: the plan is for donate_argnums={planned}, not for {tuple(donated)}; give the same")
    return for_step(name, data, step, traced, mesh)


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The processes that share a plan, by number; the first one makes it. ``own`` is this process."""

    members: tuple[int, ...]
    own: int
    timeout_s: float

    @property
    def leads(self) -> bool:
        """Whether this process makes the plan."""
        return self.own == self.members[0]


def group_of(cluster: ClusterLike, devices: Sequence[Any] | None, timeout_s: float) -> ProcessGroup | None:
    """The processes that own a plan's devices: those of ``devices`` or of a mesh, else all. None for one process, or if this
    one is not among them.

    Raises:
        ShardplanError: if ``timeout_s`` is not a positive number.
    """
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not timeout_s > 0:
        raise ShardplanError(f"unsupported timeout_s={timeout_s!r}: give the seconds to wait for other processes")
    given = devices if devices is not None else cluster.devices.flat if isinstance(cluster, Mesh) else None
    members = range(jax.process_count()) if given is None else sorted({d.process_index for d in given})
    if len(members) < 2 or jax.process_index() not in members:
        return None
    return ProcessGroup(tuple(members), jax.process_index(), timeout_s)


def agreed(
    group: ProcessGroup,
    step: Callable[..., Any],
    traced: Traced,
    cluster: ClusterLike,
    options: Mapping[str, Any],
    make: Callable[[], Any],
) -> Plan | PlacedPlan:
    """Returns, in every process of the group, the plan that the first one makes.

    Raises:
        AgreementError: in all processes, if one differs or does not answer; in the others, if the first one has no plan.
        ShardplanError: in the first process, what ``make`` raises.
    """
    resolved, mesh = resolve_cluster(cluster)
    talk = Exchange(group, _jax.SharedTexts(), _prefix(group))
    own = _Terms(traced, resolved, options)
    _watch(talk)
    if group.leads:
        talk.publish("terms", json.dumps(own.text()))
        talk.settle("same terms", "")
        return _published(talk, make)
    talk.settle("same terms", own.difference(json.loads(talk.heard("terms", group.timeout_s + _GRACE_S))))
    return _received(talk, lambda data: for_step(_SOURCE, data, step, traced, mesh))


_SOURCE = "the plan of process 0"


def _published(talk: Exchange, make: Callable[[], Plan | PlacedPlan]) -> Plan | PlacedPlan:
    """Makes the plan in the first process, and publishes it for the others."""
    sent = {"error": "it ended before it had one"}
    try:
        plan = make()
        text = json.dumps(plan.to_json(), allow_nan=False)
        sent = {"hash": _hash(text), "plan": text}
    except ShardplanError as error:
        sent = {"error": str(error)}
        raise
    finally:
        talk.publish("plan", json.dumps(sent))
    talk.settle("same plan", "")
    talk.forget("plan")
    return plan


def _received(talk: Exchange, load: Callable[[files.AnyData], Plan | PlacedPlan]) -> Plan | PlacedPlan:
    """The plan that the first process has published."""
    sent = json.loads(talk.heard("plan", None))
    if "error" in sent:
        raise AgreementError(f"process {talk.group.members[0]} has no plan: {sent['error']}", processes=talk.group.members[:1])
    try:
        if _hash(sent["plan"]) != sent["hash"]:
            raise AgreementError("the plan has another hash than it was sent with")
        plan = load(files.parse(_SOURCE, sent["plan"]))
    except ShardplanError as error:
        talk.settle("same plan", str(error))
        raise
    talk.settle("same plan", "")
    return plan


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _prefix(group: ProcessGroup) -> str:
    _rounds[group.members] += 1
    return f"shardplan/{_hash(repr(group.members))}/{_rounds[group.members]}"


def _watch(talk: Exchange) -> None:
    """Watches the group from its first agreement on, if it includes process 0 and JAX is not set to survive dead processes."""
    group = talk.group
    if _rounds[group.members] > 1 or group.members[0] != 0 or _jax.recoverable():
        return
    if group.leads:
        talk.publish("watch", serve(group.own))
    else:
        join(group.own, group.members[0], talk.store.host, talk.heard("watch", group.timeout_s + _GRACE_S))


# -- what must be the same ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Terms:
    """What must be the same in every process."""

    traced: Traced
    cluster: Cluster
    options: Mapping[str, Any]

    def text(self) -> dict[str, Any]:
        """The terms as JSON values."""
        return {
            "values": self._values(),
            "cluster": self.cluster.to_toml(),
            "arguments": arguments(self.traced),
            "marks": marks(self.traced, numbers=True),
            "fingerprint": fingerprint(self.traced),
        }

    def _values(self) -> dict[str, str]:
        limit = memory_limit(self.options.get("memory_limit"), self.cluster.device, os.environ)
        return {
            "shardplan's version": shardplan.__version__,
            "JAX's version": jax_version(),
            "cluster": f"{self.cluster.name} ({self.cluster.fingerprint()})",
            "memory_limit": size_text(limit.nbytes),
            "placement": self._placement(),
            **{name: option_text(name, self.options[name]) for name in sorted(self.options) if name not in _OWN_OR_SHOWN},
        }

    def _placement(self) -> str:
        text = placement_text(self.options.get("placement", "one"), self.traced.program, self.cluster)
        return text if len(text) < _SHORT else f"one with the hash {_hash(text)}"

    def difference(self, first: Mapping[str, Any]) -> str:
        """The first difference from the terms of the first process, as text; ``""`` if there is none."""
        there, here = first["values"], self._values()
        for name in dict.fromkeys([*there, *here]):
            if there.get(name) != here.get(name):
                values = f"{name} is {here.get(name, 'not given')} instead of {there.get(name, 'not given')}"
                return values + (self._cluster_line(first["cluster"]) if name == "cluster" else "")
        if fingerprint(self.traced) == first["fingerprint"]:
            return ""
        return (
            different_arguments(first["arguments"], arguments(self.traced))
            or first_difference(first["marks"], self.traced, numbers=True)
            or "an array that the step closes over, or its results, are others"
        )

    def _cluster_line(self, first: str) -> str:
        """The first line after the name in which this cluster's TOML differs from that of the first process."""
        pairs = zip(self.cluster.to_toml().splitlines()[1:], first.splitlines()[1:], strict=False)
        return next((f": {here} instead of {there}" for here, there in pairs if here != there), "")


_SHORT = 80
"""Longer texts of placements are shown as their hash."""

_OWN_OR_SHOWN = ("memory_limit", "observer", "placement", "traced")
"""The options that are compared in another form, or that may differ between processes."""


def option_text(name: str, value: Any) -> str:
    """An option of `shardplan.plan` as text that is the same in every process."""
    match name:
        case "pins":
            return repr(sorted((glob, spec_text(spec)) for glob, spec in (value or {}).items()))
        case "replicate":
            return repr(sorted(value))
        case _:
            return repr(value)


# -- the exchange ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exchange:
    """The messages of a group of processes in one agreement, under keys that begin with ``prefix``."""

    group: ProcessGroup
    store: _jax.SharedTexts
    prefix: str

    def publish(self, key: str, text: str) -> None:
        """Publishes a text to all processes."""
        self.store.set(f"{self.prefix}/{key}", text)

    def forget(self, key: str) -> None:
        """Removes a text that all processes have read."""
        self.store.delete(f"{self.prefix}/{key}")

    def heard(self, key: str, limit_s: float | None) -> str:
        """The text that the first process has published.

        Raises:
            AgreementError: if it has not published one in time.
        """
        text = self.store.get(f"{self.prefix}/{key}", limit_s)
        if text is None:
            raise _silent(self.group.members[:1], self.group.timeout_s)
        return text

    def settle(self, key: str, difference: str) -> None:
        """Waits until all processes have answered ``key``; each gives its ``difference`` from the first, ``""`` if there is none.

        Raises:
            AgreementError: in all processes, if one differs or has not answered in time.
        """
        if self.group.leads:
            summary = self._gathered(key)
            self.publish(key, json.dumps(summary))
        else:
            self.publish(f"{key}/{self.group.own}", difference)
            summary = json.loads(self.heard(key, self.group.timeout_s + _GRACE_S))
        if summary["differ"]:
            raise _different(summary["differ"], self.group.members[0])
        if summary["silent"]:
            raise _silent(summary["silent"], self.group.timeout_s)

    def _gathered(self, key: str) -> dict[str, Any]:
        """The answers of the others: (process, difference) for those that differ, and the silent processes."""
        end = time.monotonic() + self.group.timeout_s
        answers = {
            m: self.store.get(f"{self.prefix}/{key}/{m}", max(end - time.monotonic(), 0.0)) for m in self.group.members[1:]
        }
        return {"differ": [row for row in answers.items() if row[1]], "silent": [m for m, a in answers.items() if a is None]}


def _different(differ: Sequence[tuple[int, str]], first: int) -> AgreementError:
    processes, difference = [m for m, _ in differ], differ[0][1]
    others = f", and {_named(processes[1:])} too" if processes[1:] else ""
    message = f"process {processes[0]} differs from process {first}{others}: {difference}; {_REMEDY}"
    return AgreementError(message, processes=processes, difference=difference)


def _silent(processes: Sequence[int], timeout_s: float) -> AgreementError:
    return AgreementError(
        f"{_named(processes)} did not ask for this plan within {timeout_s:g} s: see the output there, {_REMEDY}, or raise "
        "timeout_s where tracing takes longer",
        processes=processes,
    )


def _named(processes: Sequence[int]) -> str:
    numbers = ", ".join(map(str, processes[:8])) + (f" and {len(processes) - 8} more" if len(processes) > 8 else "")
    return f"process{'es' if len(processes) > 1 else ''} {numbers}"
