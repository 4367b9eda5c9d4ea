"""An unmodified step cut into microbatches: the batch is cut over *time*, as it is cut over devices (Tofu, section 4).

`time_cut` finds how every op is cut over the microbatches with weights and state whole; `phases` tells which instructions run
once before the microbatches, in each of them, or once after all; `accumulating`+ makes the step that does so.
"""
