"""The outer ends, which know files, clocks, terminals and devices.

`api` is `shardplan.plan`, `parallel` the decorator, `cli` the command line with `target` and `interrupts`, `clusters` what a
``cluster=`` argument may be, `pytest_plugin` a fixture for other projects' tests.
"""
