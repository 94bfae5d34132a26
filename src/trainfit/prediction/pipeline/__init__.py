"""Recipes with a pipeline: the ledgers of stages, their schedule, the estimate."""
