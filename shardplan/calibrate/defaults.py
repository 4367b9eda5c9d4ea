"""How often a calibration repeats its measurements, and how far the repeats may spread.

The command line shows both in its help, before it imports JAX.
"""

ROUNDS = 7
"""Interleaved repeats of each measurement."""

BOUND = 0.5
"""The largest median spread that is accepted. The median of 7 rounds is then off by a sixth (1.25 / 1.35 / sqrt(7) of the
distance between the quartiles, for normal noise), about what the roofline itself is off by.
"""
