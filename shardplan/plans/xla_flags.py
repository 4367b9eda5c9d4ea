"""The XLA flags for GPUs that a plan assumes: which collectives may be merged, and how many may run at once."""

from __future__ import annotations

from ..mesh.machine import Machine

WHOLE = ("all_gather", "all_reduce", "collective_permute")
"""The collectives whose result has about as many bytes as pass over the link; the result of a reduce-scatter is smaller."""


def xla_flags(cluster: Machine) -> dict[str, int]:
    """Flags by name, without dashes, as `compiler_options` of `jax.jit` or ``--NAME=VALUE`` in the environment's XLA_FLAGS.

    - A plan reduces each gradient as soon as it is ready. XLA's GPU compiler merges collectives of one kind and the same groups,
      up to 30 MiB; the merged collective waits for the last operand. The flags merge only those too small to fill a link of the
      level that is filled last. A reduce-scatter's threshold is for groups of that level's size: XLA adds up results, so
      reduce-scatters over larger groups are merged up to as many times more.
    - A plan uses the links of all levels at once. XLA runs one collective at a time; the flag allows two for each level: one that
      runs, and one that is queued for the same link.
    """
    levels = [level for level in range(len(cluster.levels)) if cluster.levels[level].size > 1]
    largest = [bytes_in_latency(cluster, level) for level in levels]
    parts = [nbytes // cluster.levels[level].size for level, nbytes in zip(levels, largest, strict=True)]
    return {
        **{f"xla_gpu_{kind}_combine_threshold_bytes": max(largest, default=0) for kind in WHOLE},
        "xla_gpu_reduce_scatter_combine_threshold_bytes": max(parts, default=0),
        "xla_gpu_experimental_parallel_collective_overlap_limit": 2 * max(len(levels), 1),
    }


def bytes_in_latency(cluster: Machine, level: int) -> int:
    """Bytes that a device sends over a level in the time of a collective's launch and one message per child."""
    link = cluster.levels[level]
    bandwidth = link.bandwidth_bytes_per_s * link.ring_efficiency / link.rails
    return round(bandwidth * (cluster.device.instruction_s + link.size * link.latency_s))
