"""The step that a plan runs.

`explicit` runs a schedule in one `jax.shard_map`: `blocks` are ops on a device's share, `transfers` move values between layouts.
`specs` leaves the step to XLA's partitioner, and `calls` runs on shares what the partitioner gets wrong. `backends` chooses.
"""
