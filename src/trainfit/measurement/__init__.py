"""A recipe's step on the real device, in a process of its own: memory by phase, times, losses."""
