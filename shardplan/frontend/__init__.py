"""The front end: a step and its arguments become a `Program`.

`trace` reads the jaxpr, `nnx_state` splits nnx objects among the arguments into arrays, `argnums` resolves argument numbers.
"""
