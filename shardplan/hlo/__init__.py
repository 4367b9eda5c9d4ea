"""The collectives of a compiled program, read from its HLO text, with their bytes on the wire. No JAX here.

`text` parses a module, `groups` reads which devices belong together, `flow` follows values, `undo` finds what XLA's CPU compiler
changed, and `meter` counts.
"""

from shardplan.hlo.meter import HloCollective, KindTotal, Measured, measure, operands, parse

__all__ = ["HloCollective", "KindTotal", "Measured", "measure", "operands", "parse"]
