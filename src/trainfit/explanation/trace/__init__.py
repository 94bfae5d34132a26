"""A trace of torch.profiler explained: how busy the GPU was, with what, and what it waited for."""
