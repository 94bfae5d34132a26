"""Sweeps: many trials, each in a process of its own, here or on a cluster; resumed where they stopped."""
