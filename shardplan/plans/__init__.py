"""The plan as plain data, its file, and the step that it runs.

`data` is the value. `summary` makes it from the solution of a search, and rebuilds the search from it. `files` writes and reads
it, by its declared fields (`codec`). `fit` refuses choices that do not fit a step. `fingerprint` and `canonical` decide whether
two steps are the same. `runner` calls the jitted step; `jit_stages` shows it traced, lowered and compiled.
"""

from shardplan.plans.data import Argument, Baseline, PlanData

__all__ = ["Argument", "Baseline", "PlanData"]
