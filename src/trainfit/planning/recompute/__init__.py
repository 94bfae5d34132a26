"""Plan what each decoder block recomputes and offloads: ``recompute: {budget_gib: x}`` and ``fit``."""

from trainfit.planning.recompute.solver import resolve

__all__ = ["resolve"]
