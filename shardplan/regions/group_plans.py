"""A plan for the ops of each group of a placed step, together, on the group's devices."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardplan.errors import MemoryLimitError
from shardplan.ir import Factor, Layout
from shardplan.mesh import Cluster
from shardplan.mesh.groups import group_cluster
from shardplan.planning.fallback import Fallback
from shardplan.planning.likewise import planned_likewise
from shardplan.planning.planner import Made, planned
from shardplan.planning.searcher import Searcher
from shardplan.planning.splits import work_of
from shardplan.planning.wanted import Wanted
from shardplan.regions.assignment import Group
from shardplan.regions.group_programs import GroupProgram
from shardplan.search.inference import anytime


@dataclass(frozen=True, slots=True)
class GroupPlanner:
    """Plans the programs of groups. ``donated`` are the tensors of arguments whose buffers the step may reuse. ``arrays`` maps
    a tensor to the array that it is a part of: all parts of an array have one layout, in all groups. ``before`` are the plans
    of the same groups under other conditions, if there are any. Unless ``names_least``, the first group that does not fit ends
    planning: the error names the bytes that this group needs, although another may need more.
    """

    groups: Sequence[Group]
    parts: Sequence[GroupProgram]
    cluster: Cluster
    searcher: Searcher
    donated: frozenset[int]
    origin: str
    arrays: Mapping[int, int]
    before: Sequence[Made] = ()
    names_least: bool = True

    def made(self) -> tuple[Made, ...]:
        """The plan of each group's program. After an interrupt, the groups that are left get their first plans.

        If parts of one array lie in several groups, the others take the layouts of the group with the most flops, or of the
        next group if these do not fit.

        Raises:
            MemoryLimitError: if the ops of a group fit its devices in no layout.
        """
        return self._as_one() if self.arrays else self._each()

    def _each(self) -> tuple[Made, ...]:
        """The plan of each group by itself."""
        found: list[Made] = []
        refused: list[MemoryLimitError] = []
        for n in range(len(self.groups)):
            try:
                found.append(self._plan(n, self.searcher.wanted, found, cut_short=_interrupted(found)))
            except MemoryLimitError as error:
                if not self.names_least:
                    raise
                refused.append(error)
        if refused:
            raise self._refusal(refused, max(refused, key=lambda error: error.smallest_bytes))
        return tuple(found)

    def _as_one(self) -> tuple[Made, ...]:
        """The plan of each group in the layouts of one group's arrays."""
        refused: list[MemoryLimitError] = []
        tried: list[Made] = []
        order = sorted(range(len(self.groups)), key=lambda n: -self._flops(n))
        for n in order:
            try:
                lead = self._lead(n, cut_short=_interrupted(tried))
            except MemoryLimitError:
                if self.names_least:
                    self._each()  # the group that needs the most memory decides the error
                raise
            tried.append(lead)
            pinned, made = self._pinned(n, lead), {n: lead}
            try:
                for g in order:
                    if g != n:
                        made[g] = self._plan(g, pinned[g], tuple(made.values()), cut_short=_interrupted(tried))
                        tried.append(made[g])
            except MemoryLimitError as error:
                refused.append(error)
                continue
            if _interrupted(tried) and not _interrupted(made.values()):  # the interrupted plan was refused
                made[0] = replace(made[0], stopped="interrupted")
            return tuple(made[g] for g in range(len(self.groups)))
        raise self._refusal(refused, min(refused, key=lambda error: error.smallest_bytes))

    def _flops(self, group: int) -> float:
        """The floating-point operations of a group's products."""
        return sum(flop for flop, _ in work_of(self.searcher.flat(self.parts[group].program)))

    def _refusal(self, refused: Sequence[MemoryLimitError], most: MemoryLimitError) -> MemoryLimitError:
        """The error for all groups; ``most`` is the error of the group that decides."""
        unfinished = any(error.unfinished for error in refused)
        return MemoryLimitError(
            most.limit_bytes, most.smallest_bytes, detail=most.detail, unfinished=unfinished, grouped=True, origin=self.origin
        )

    def _pinned(self, group: int, lead: Made) -> list[Wanted]:
        """The conditions of each group's search: over the factors of ``group``, in the layouts of its arrays."""
        factors, rows = self._array_layouts(group, lead)
        names, layouts = [f.name for f in factors], dict(rows)
        pins = (
            {
                glob.escape(path): layouts[self.arrays[t]].entries(names)
                for t, path in zip(part.inputs, part.program.input_paths, strict=True)
                if self.arrays.get(t) in layouts
            }
            for part in self.parts
        )
        return [replace(self.searcher.wanted, pins=own, factors=factors) for own in pins]

    def _array_layouts(self, group: int, made: Made) -> tuple[tuple[Factor, ...], tuple[tuple[int, Layout], ...]]:
        """A group's factors, and the layout of each of its arrays that is searched."""
        session, numbers = made.session, self.parts[group].inputs
        layouts = session.decisions.layouts
        found = sorted(
            ((self.arrays[t], at) for t, own in zip(numbers, session.graph.inputs, strict=True)
             if t in self.arrays and (at := layouts[own]) is not None),
            key=lambda row: row[0],
        )  # fmt: skip
        return session.problem.factors, tuple(found)

    def _lead(self, group: int, *, cut_short: bool) -> Made:
        """The plan of the group that decides the layouts of arrays: over the factors that it had under other conditions, or
        over others if no plan fits over these.
        """
        if self.before and not cut_short:
            factors = self.before[group].session.problem.factors
            with contextlib.suppress(MemoryLimitError):
                return self._plan(group, replace(self.searcher.wanted, factors=factors), (), cut_short=False)
        return self._plan(group, self.searcher.wanted, (), cut_short=cut_short)

    def _plan(self, group: int, wanted: Wanted, others: Sequence[Made], *, cut_short: bool) -> Made:
        """The plan of a group: that of another group whose program is equal, if it fits, or the best that a search finds."""
        searcher, program = self._searcher(group, wanted, others, cut_short=cut_short), self.parts[group].program
        for other in others:
            if (made := planned_likewise(program, searcher, other)) is not None:
                return made
        made = planned(program, searcher, self.origin, recompute=False)
        made.session.problem.tidy(0)  # explanations need the problem, once for each group
        return made

    def _searcher(self, group: int, wanted: Wanted, others: Sequence[Made], *, cut_short: bool) -> Searcher:
        """The searcher of a group's program: it starts from the plan under other conditions, and shares prices of others."""
        donated = frozenset(n for n, t in enumerate(self.parts[group].inputs) if t in self.donated)
        wanted = replace(wanted, best=anytime.unheard, donated=donated)
        if cut_short:
            wanted = replace(wanted, deadline=anytime.now_s())
        known = [self.before[group], *others] if self.before else others
        if self.before and (found := self.before[group].planned.found)[0].factors == wanted.factors:
            wanted = replace(wanted, again={wanted.factors: found})
        cluster = group_cluster(self.cluster, self.groups[group])
        problems = (own.session.problem for own in known)
        like = next((p for p in problems if p.shares_prices(cluster, wanted.objective)), None)
        return replace(self.searcher, cluster=cluster, wanted=wanted, fallback=Fallback(), like=like)


def _interrupted(found: Iterable[Made]) -> bool:
    return any(own.stopped == "interrupted" for own in found)
