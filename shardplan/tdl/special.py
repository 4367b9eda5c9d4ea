"""What is known of ops beside their index maps: which run Python on the host, and which take no further batch dim."""

HOST = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
"""Kept whole without being asked: XLA gathers what they read, and what they return is on every device."""

PLATFORM = "platform_index"
"""Which branch of `jax.lax.platform_dependent` is for the platform: made of nothing, and the same on all devices of one kind."""

KERNELS = frozenset({"mosaic"})
"""Platforms that JAX lowers the insides of kernels for, and never a step: a branch for these alone does not run."""

MISCUT = frozenset({"reduce_window", "select_and_scatter_add"})
"""Where a window reaches beyond a block, XLA's partitioner gives wrong numbers: it fills with zeros what max pooling's gradient
compares, and counts a start that is no identity once more at the edges. Each device makes these calls on its own share."""

UNBATCHED = frozenset({"conv_general_dilated"})
"""Under `vmap` these become a grouped form, whose operands XLA's partitioner gathers: their terms are added up at once."""
