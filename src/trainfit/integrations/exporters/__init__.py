"""Ledgers as files of other tools: a memory snapshot of PyTorch, a trace for Perfetto."""
