"""What things cost: collectives on links (`network`), from which every price of communication comes.

The network follows P2, section 5: bandwidths, link sharing, ring and tree algorithms.
"""

from .network import Network, wire_bytes

__all__ = ["Network", "wire_bytes"]
