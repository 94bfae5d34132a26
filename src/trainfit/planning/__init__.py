"""Find the fastest recipe that fits: the search of `plan`, memory budgets, attention kernels and advice."""
