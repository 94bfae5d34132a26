"""Verbs that compute in closed form: ``mfu``, ``communication`` and ``ultrascale``."""
