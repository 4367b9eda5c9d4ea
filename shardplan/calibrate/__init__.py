"""Measures a machine: seconds of kernels and collectives, and the rates and latencies that fit them best.

`measured_kernels` and `measured_transfers` list the measurements, `timing` makes them on all devices at once (so that simulated
devices share their host's cores as they do in a step), `cache` keeps the results (FlexFlow, section 5: the time of an op depends
on its kind, its shapes, its dtypes and the device alone), `fitting` fits the cost model's own figures, and `profiling` makes a
profile from all results. `steps` times whole plans.
"""
