"""Triton kernels, each beside a plain reference."""
