"""Triton kernels and their PyTorch references, one folder per operation."""
