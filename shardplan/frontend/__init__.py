"""The front end: a step and its arguments become a `Program`.

`trace` reads the jaxpr, `nnx_state` takes nnx objects among the arguments apart, `argnums` resolves argument numbers.
"""
