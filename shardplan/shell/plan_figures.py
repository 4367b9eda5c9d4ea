"""The properties of a plan that read its data."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING

from shardplan.plans.data import PlanData

_Declared = PlanData if TYPE_CHECKING else object


class Figures(_Declared):
    """Has every field and property of `PlanData`, as a property that reads ``data``."""

    _data: PlanData

    @property
    def data(self) -> PlanData:
        """The plan as plain data; `completed` adds the bound and the baselines."""
        return self._data


for _name in [f.name for f in fields(PlanData)] + [name for name, own in vars(PlanData).items() if isinstance(own, property)]:
    _said = getattr(PlanData, _name).__doc__ or f"The field ``{_name}`` of `PlanData`, which says what it is."
    setattr(Figures, _name, property(attrgetter(f"_data.{_name}"), doc=_said))
