"""The flat graph: every op of a program and of its bodies, with its description and how often it runs.

`flatten` inlines the bodies of loops and branches, `loops` finds the nodes that repeat, and `partials` finds the values that may
stay partial sums.
"""

from shardplan.graph.flattening import Graph, Link, Node, Signature, flatten

__all__ = ["Graph", "Link", "Node", "Signature", "flatten"]
