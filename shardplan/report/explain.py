"""Explains a plan: for each argument its layout, the cost of the runner-up, the binding constraint, and its readers.

The cost of another layout is the cost of the same plan with this layout changed and all others held. It says how much the
choice matters, not what a new search would find: a search would change other layouts too.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardplan.collectives.dsl import shortened
from shardplan.errors import ShardplanError, nearest
from shardplan.graph import Node
from shardplan.ir import Collective, Entry, Layout, spec_text
from shardplan.plans.data import PlanData
from shardplan.report.padding import uneven
from shardplan.report.parallelism import matrix_text
from shardplan.report.paths import PathGroup, grouped
from shardplan.report.peak_text import peak_lines
from shardplan.report.plan_text import (
    argument_shapes,
    best_baseline,
    bound_text,
    collective_rows,
    collectives_text,
    constants_text,
    host_text,
)
from shardplan.report.tables import NEAR, seconds, size
from shardplan.search.coarsening.variables import FREE
from shardplan.search.session import Session
from shardplan.sizes import axes_text

_LINES = 3
"""At most this many source lines, uses and collectives are named."""
_NEAR = 1e-9
"""Two choices cost the same if they differ by fewer seconds than this."""


def explain(plan: PlanData, session: Session, path: str | None = None) -> str:
    """The whole plan in words, or the arguments whose path equals ``path`` or matches it as a glob.

    Raises:
        ShardplanError: if no argument matches.
    """
    if path is None:
        return "\n\n".join([_why(plan, session).whole(), *remarks(plan)])
    paths = tuple(plan.entries)
    hits = [p for p in paths if p == path] or [p for p in paths if fnmatch.fnmatchcase(p, path)]
    if not hits:
        raise ShardplanError(unknown(path, paths))
    shapes = argument_shapes(plan)
    groups = grouped({p: (spec_text(plan.entries[p]), shapes[p]) for p in hits})
    return "\n\n".join([*explain_groups(plan, session, groups), *remarks(plan)])


def explain_groups(plan: PlanData, session: Session, groups: Sequence[PathGroup]) -> list[str]:
    """The explanation of the first argument of each group, under the group's pattern."""
    why = _why(plan, session)
    return [why.argument(g.paths[0], g.pattern, len(g.paths)) for g in groups]


def remarks(plan: PlanData) -> list[str]:
    """A remark for readers of explanations if the plan was made with other constants than today's."""
    return [_sentence(text) for text in constants_text(plan)]


def explain_all(plan: PlanData, session: Session) -> dict[str, str]:
    """Every explanation by path, ``""`` for the whole plan."""
    return {"": _why(plan, session).whole()} | explain_arguments(plan, session, tuple(plan.entries))


def explain_arguments(plan: PlanData, session: Session, paths: Sequence[str]) -> dict[str, str]:
    """The explanation of each of these arguments, by path."""
    why = _why(plan, session)
    return {path: why.argument(path) for path in paths}


def unknown(path: str, paths: Sequence[str]) -> str:
    """The error message for a path that matches no argument."""
    return f"no argument {path!r}{nearest(path, paths)}; a glob such as '*kernel' names several"


def _why(plan: PlanData, session: Session) -> _Why:
    graph, of = session.graph, session.problem.coarse.of
    tensors = dict(zip(graph.input_paths, graph.inputs, strict=True))
    readers: dict[int, list[Node]] = {t: [] for t in graph.inputs}
    for node in graph.nodes:
        for t in dict.fromkeys(node.inputs):
            if t in readers:
                readers[t].append(node)
    sharing: dict[int, list[str]] = {}
    for path, t in tensors.items():
        if of[t] != FREE:
            sharing.setdefault(of[t], []).append(path)
    return _Why(plan, session, plan.entries, argument_shapes(plan), tensors, readers, sharing)


@dataclass(frozen=True, slots=True)
class _Why:
    """The data that all explanations of one plan share: arguments by path, the ops that read each, and the arguments that share
    a layout.

    The last two fields are caches.
    """

    plan: PlanData
    session: Session
    entries: Mapping[str, tuple[Entry, ...]]
    shapes: Mapping[str, tuple[tuple[int, ...], str, int]]
    tensors: Mapping[str, int]
    readers: Mapping[int, Sequence[Node]]
    sharing: Mapping[int, Sequence[str]]
    sources: dict[int, str] = field(default_factory=dict[int, str])
    dearest: dict[int, list[str]] = field(default_factory=dict[int, list[str]])

    # -- the whole plan ------------------------------------------------------------------------------------------------

    def whole(self) -> str:
        """Time, memory and its contents, best baseline, binding constraints, dearest collectives and indivisible dims."""
        plan = self.plan
        mesh = axes_text(plan.axes)
        spent = f"compute {seconds(plan.compute_s)}, communication {seconds(plan.communication_s)}"
        lines = [f"{seconds(plan.step_time_s)} a step on {mesh}: {spent};"]
        limit = size(plan.memory_limit) + (f" ({plan.memory_limit_origin})" if plan.memory_limit_origin else "")
        lines.append(f"{size(plan.peak_bytes)} a device at its peak, of {limit}. {_sentence(bound_text(plan))}")
        lines += [f"In host memory: {host_text(plan)}."] if plan.host_s else []
        lines += peak_lines(self.session)
        lines += matrix_text(plan).splitlines()
        best = best_baseline(plan)
        if best is not None:
            change = _more(best.step_time_s - plan.step_time_s)
            lines.append(f"The best baseline that fits is {best.name}: {seconds(best.step_time_s)}, {change}.")
        lines += [f"{text}." for text in self._binding(None)]
        for row in collective_rows(plan)[:_LINES]:
            share = row["seconds"] / plan.communication_s if plan.communication_s else 0.0
            over = " x ".join(row["axes"])
            where = f", most of it at {row['source']}" if row["source"] else ""
            lines.append(f"{row['kind']} over {over}: {seconds(row['seconds'])} ({share:.0%} of the communication){where}.")
        if not plan.collectives:
            lines.append("Nothing is communicated: " + collectives_text(plan) + ".")
        seen: set[int] = set()
        for path, (shape, _, _) in self.shapes.items():
            for odd in uneven(shape, plan.axes):
                if odd.size not in seen:
                    seen.add(odd.size)
                    lines.append(f"{path}: {self._uneven(odd.size, odd.axes, odd.padded)}.")
        return "\n".join(lines)

    def _binding(self, path: str | None) -> list[str]:
        plan = self.plan
        pins = plan.pins
        hits = [p for p in pins if path is None or fnmatch.fnmatchcase(path, p)]
        texts = [f"the pin {p!r} = {spec_text(pins[p])} fixes {'it' if path else 'what it matches'}" for p in hits]
        unlimited_s = plan.unlimited_s
        if path is None and unlimited_s is not None and plan.searched_s > unlimited_s * (1 + NEAR):
            texts.append(
                f"the memory limit of {size(plan.memory_limit)} binds: without it a step takes {seconds(unlimited_s)}, "
                f"{_more(unlimited_s - plan.searched_s)}"
            )
        return texts

    # -- one argument --------------------------------------------------------------------------------------------------

    def argument(self, path: str, pattern: str | None = None, alike: int = 1) -> str:
        """The explanation of one argument, or of all that ``pattern`` stands for: its layout and the reasons."""
        plan = self.plan
        shape, dtype, nbytes = self.shapes[path]
        t = self.tensors[path]
        problem = self.session.problem
        v = problem.coarse.of[t]
        part = 1.0 if v == FREE else problem.resharder.space(shape).local[self.session.solution.states[v]]
        lines = [f"{pattern or path}  {dtype}{list(shape)}  {spec_text(self.entries[path])}"]
        if alike > 1:
            lines.append(f"{alike} arrays alike; what follows is for {path}")
        lines.append(f"{size(nbytes * part)} of {size(nbytes)} on each device")
        if v == FREE:
            lines.append(
                "every device keeps it whole: "
                + ("nothing reads it" if not self.readers[t] else "a scalar, or nothing is gained by cutting it")
            )
        else:
            lines += self._shared(v, path)
            lines += self._uses(t)
            lines += self._others(v, path)
        lines += [
            f"dim {odd.dim} is not cut everywhere: {self._uneven(odd.size, odd.axes, odd.padded)}"
            for odd in uneven(shape, plan.axes)
        ]
        lines += self._read_at(t)
        return "\n  ".join(lines)

    def _shared(self, v: int, path: str) -> list[str]:
        others = [p for p in self.sharing[v] if p != path]
        if not others:
            return []
        more = f" and {len(others) - 2} more" if len(others) > 2 else ""
        return [f"one layout with {', '.join(others[:2])}{more}"]

    def _uses(self, t: int) -> list[str]:
        """Lines on the layouts in which ops read the argument, where they differ from its stored layout."""
        plan = self.plan
        graph, decisions, programs = self.session.graph, self.session.decisions, self.session.extractor.programs
        stored, texts = decisions.layouts[t], dict[str, None]()
        assert stored is not None
        for node in self.readers[t]:
            use = decisions.uses.get(node.id)
            for i, need in enumerate(use.needs if use is not None else ()):
                if node.inputs[i] != t or need is None or need == stored:
                    continue
                steps = programs.between(graph.tensors[t].shape, graph.tensors[t].nbytes, stored, need)
                moves = [s for s in steps if s.kind != Collective.SLICE]
                cost = sum(s.seconds for s in moves)
                kinds = ", ".join(
                    f"{s.kind.hlo}{' as ' + shortened(s.program) if s.program else ''}"
                    f" over {' x '.join(plan.factors[f].name for f in s.factors)}"
                    for s in moves
                )
                how = f"by {kinds}, {seconds(cost)}" if moves else "by a local slice"
                texts[f"{'backward' if node.backward else 'forward'} it is read as {self._layout(need)}, {how}"] = None
        return list(texts)[:_LINES]

    def _others(self, v: int, path: str) -> list[str]:
        bound = self._binding(path)
        if bound:
            return bound
        if v not in self.dearest:
            self.dearest[v] = self._ranked(v)
        return self.dearest[v]

    def _ranked(self, v: int) -> list[str]:
        others = self.session.alternatives(v)
        if not others:
            return ["no other layout divides its dims"]
        best = others[0]
        if best.more_s < -_NEAR:
            if self.plan.name != "plan":
                why = f"would not be {self.plan.name}"
            elif self.plan.peak_bytes <= self.plan.memory_limit and self.plan.exact:
                why = "does not fit in memory with the rest"
            else:
                why = "was not found"
            return [f"{self._layout(best.layout)} alone would save {seconds(-best.more_s)}, all else held: it {why}"]
        lines = [f"runner-up {self._layout(best.layout)}: {_more(best.more_s)} a step, all else held"]
        whole = next((o for o in others if not o.layout.used), None)
        if whole is not None and whole is not best:
            lines.append(f"whole on every device: {_more(whole.more_s)}")
        return lines

    def _uneven(self, n: int, axes: Sequence[str], into: int) -> str:
        sizes = " and ".join(f"{a}={self.plan.axes[a]}" for a in axes)
        return f"{n} does not divide by {sizes}; padded to {into} it would"

    def _read_at(self, t: int) -> list[str]:
        """The source lines that read the argument; elementwise ops come last."""
        rank = sorted(self.readers[t], key=lambda n: (n.signature.elementwise, n.id))
        lines = dict.fromkeys(f"{self._source(n)} ({n.op.primitive})" for n in rank)
        if not lines:
            return []
        more = f", and {len(lines) - _LINES} more" if len(lines) > _LINES else ""
        return ["read at " + ", ".join(list(lines)[:_LINES]) + more]

    def _source(self, node: Node) -> str:
        if node.id not in self.sources:
            self.sources[node.id] = str(node.op.source)
        return self.sources[node.id]

    def _layout(self, layout: Layout) -> str:
        return spec_text(layout.entries(tuple(self.plan.axes)))


def _more(change_s: float) -> str:
    if abs(change_s) < _NEAR:
        return "as fast"
    return f"{seconds(abs(change_s))} {'more' if change_s > 0 else 'less'}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."
