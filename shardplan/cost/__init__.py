"""Prices of collectives on links (`network`, the source of every price of communication) and of ops on one device (`compute`, a
roofline).

`network` follows P2, section 5: bandwidths, link sharing, ring and tree algorithms. `wire` counts bytes instead, as Tofu does;
`objective` says which of the two a search minimizes, `overlap` how compute and communication add up to a step.
"""

from .network import Network
from .objective import BYTES, OVERLAP, TIME, Objective, objective_of
from .wire import WireBytes, priced_bytes, wire_bytes

__all__ = ["BYTES", "OVERLAP", "TIME", "Network", "Objective", "WireBytes", "objective_of", "priced_bytes", "wire_bytes"]
