"""When each task of a step runs (FlexFlow, section 5).

`step_tasks` makes the `tasks` of a schedule, and `engine` runs them on streams (its loop is `event_loop`). `folds` lets equal
iterations stand for others, `busy` finds the exposed seconds. `simulated_step` simulates a step, with `figures` as the result.
"""
