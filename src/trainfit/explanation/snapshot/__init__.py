"""Memory snapshots of PyTorch, explained."""
