"""What is known of ops beside their index maps: which run Python on the host, and which take no further batch dim."""

HOST = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
"""Kept whole without being asked: XLA gathers what they read, and what they return is on every device."""

UNBATCHED = frozenset({"conv_general_dilated"})
"""Under `vmap` these become a grouped form, whose operands XLA's partitioner gathers: their terms are added up at once."""
