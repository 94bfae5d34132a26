"""Search for the fastest recipe within a memory limit."""
