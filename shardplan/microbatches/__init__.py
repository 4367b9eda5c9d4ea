"""An unmodified step cut into microbatches: the batch is cut over *time*, as it is cut over devices (Tofu, section 4).

`time_cut` finds how every op is cut over the microbatches with weights and state whole; `phases` sorts what then runs once, what
runs for each microbatch, and what runs once all are done; `accumulating`+ makes the step that does so.
"""
