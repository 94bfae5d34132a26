"""Seconds of a step: operations on the GPU, the host that issues them, and both on one timeline."""
