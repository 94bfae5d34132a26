"""Configurations of other tools become recipes: one module a tool in ``tools/``, found by the registry."""
