"""The descriptions, one file a family of primitives. Importing this package registers them all."""

from shardplan.tdl.rules import elementwise

__all__ = ["elementwise"]
