"""Reports for people and programs: numbers with units, text, tables, JSON, drawings, progress."""

from shardplan.report.progress import Progress
from shardplan.report.tables import rate, seconds, size, table

__all__ = ["Progress", "rate", "seconds", "size", "table"]
