"""Compilation with torch.compile."""
