"""The memory of a device: `liveness` says when each value is alive (`lifetimes`), `buffers` what an op holds while it runs."""
