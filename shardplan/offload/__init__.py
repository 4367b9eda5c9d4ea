"""Offload: arguments that stay in the host's memory between steps, for a program to fetch where its update reads them.

`on_device` says which arguments cannot: those that the forward or the backward pass reads. `offloaded` is the program with others
in host memory, whose update runs one array after the other, so that few of them are on the device at once (ZeRO-Offload, Ren et
al. 2021, keeps the same values in host memory).
"""

from shardplan.offload.arguments import matching, on_device
from shardplan.offload.update_order import offloaded

__all__ = ["matching", "offloaded", "on_device"]
