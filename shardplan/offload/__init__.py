"""Offload: values in the host's memory: arguments between steps, and activations between the forward and the backward pass.

`on_device` says which arguments cannot: those that the forward or the backward pass reads. `offloaded` is the program with others
in host memory, whose update runs one array after the other, so that few of them are on the device at once (ZeRO-Offload, Ren et
al. 2021, keeps the same values in host memory). `activations` are the values that may leave the device between the passes,
`in_host_memory` is the program in which some do.
"""

from shardplan.offload.activations import HostedValue, activations, hosted_tensor, in_host_memory
from shardplan.offload.arguments import matching, on_device
from shardplan.offload.update_order import offloaded

__all__ = ["HostedValue", "activations", "hosted_tensor", "in_host_memory", "matching", "offloaded", "on_device"]
