"""Ops that run Python on the host: they have no index map, and see whole arrays wherever they stand."""

HOST = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})
"""Kept whole without being asked: XLA gathers what they read, and what they return is on every device."""
