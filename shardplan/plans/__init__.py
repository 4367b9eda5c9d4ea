"""The plan, its file, and the step that it runs.

`plan` is the plan itself, `files` reads and writes it, `fingerprint` and `canonical` say when two steps are the same, `runner`
calls the jitted step.
"""

from shardplan.plans.plan import Baseline, Collective, Plan

__all__ = ["Baseline", "Collective", "Plan"]
