"""Tensors that share a layout become one variable (Tofu, section 5.1).

`tensor_roles` finds the role of each tensor in the step, `gradient_pairing` joins gradients to their values, `layers` finds equal
layers, `views` finds the copies that ops read, and `coarsen` puts all of it together.
"""

from shardplan.search.coarsening.coarsen import Coarse, Variable, coarsen

__all__ = ["Coarse", "Variable", "coarsen"]
