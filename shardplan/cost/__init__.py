"""What things cost: collectives on links (`network`), from which every price of communication comes, and ops on one device
(`compute`, a roofline).

The network follows P2, section 5: bandwidths, link sharing, ring and tree algorithms. `wire` counts bytes in its place, as Tofu
does; `objective` says which of the two a search makes least.
"""

from .network import Network, wire_bytes
from .objective import BYTES, TIME, Objective, objective_of
from .wire import WireBytes

__all__ = ["BYTES", "TIME", "Network", "Objective", "WireBytes", "objective_of", "wire_bytes"]
