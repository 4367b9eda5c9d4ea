"""The flat graph: every op of a program and of its bodies, with its description and how often it runs.

`nodes` has its types. `flatten` inlines the bodies of loops and branches, `kernel_traffic` says what each op moves once XLA
has fused it, `loops` finds the nodes that repeat, and `partials` finds the values that may stay partial sums.
"""

from shardplan.graph.flattening import flatten
from shardplan.graph.nodes import Graph, Link, Node, Signature

__all__ = ["Graph", "Link", "Node", "Signature", "flatten"]
