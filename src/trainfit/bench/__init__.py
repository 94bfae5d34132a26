"""Benchmarks: one timing harness, and one file for each experiment."""
