"""The outer layer: files, clocks, terminals and devices.

`api` holds `shardplan.plan`, `parallel` the decorator, `plan_of_step` the `Plan`, and `loading` reads a saved one. `cli` is the
command line, with `target` and `interrupts`. `clusters` resolves ``cluster=`` arguments. `pytest_plugin` is a fixture for other
projects.
"""
