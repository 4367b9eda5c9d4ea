"""What a device holds: `liveness` says when each tensor is alive, `buffers` what an op holds while it runs."""
