"""What a person or a program reads of a plan: numbers with units, plain-text tables, progress."""

from shardplan.report.progress import Progress
from shardplan.report.tables import rate, seconds, size, table

__all__ = ["Progress", "rate", "seconds", "size", "table"]
